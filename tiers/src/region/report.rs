//! Results of a shrink and a refill.

use glake_device::Address;
use glake_units::Bytes;

/// Result of a shrink.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shrunk {
    /// GPU memory released to the driver.
    pub freed: Bytes,
    /// Bytes copied by this shrink.
    pub copied: Bytes,
    /// Bytes copied earlier, while the region was idle, and still identical.
    pub clean: Bytes,
    /// Bytes in blocks that were not copied, because the program declared them dead: undefined after a refill.
    pub undefined: Bytes,
    /// Bytes of the region still on the GPU.
    pub resident: Bytes,
    /// Extents that could not leave.
    pub skipped: Vec<Skipped>,
}

/// Extent that could not leave its GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Skipped {
    /// Home address of the extent.
    pub address: Address,
    /// Size of the extent.
    pub size: Bytes,
    /// Reason for the extent to stay.
    pub reason: SkipReason,
}

/// Reason for an extent to stay on its GPU.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SkipReason {
    /// A block in it is fixed.
    Fixed,
    /// Other processes may use it, and would not see new memory at the same addresses.
    Exported,
    /// Another process made it, and only that process can release it. Such memory is in no region; the owner of the import reports it.
    Imported,
    /// Other threads kept freeing blocks in it that several streams had used, despite repeated waits. The next shrink evicts it.
    Withheld,
}

/// Result of a refill.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refilled {
    /// GPU memory made and mapped.
    pub mapped: Bytes,
    /// Bytes copied to the GPU.
    pub copied: Bytes,
    /// Bytes of the region still evicted.
    pub evicted: Bytes,
}
