//! What a shrink and a refill have done.

use glake_device::Address;
use glake_units::Bytes;

/// What a shrink has done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shrunk {
    /// Memory of the GPU that went back to the driver.
    pub freed: Bytes,
    /// Bytes that were copied to the host.
    pub copied: Bytes,
    /// Bytes that had been copied while the region was idle, and were still the same.
    pub clean: Bytes,
    /// Bytes in blocks that were not copied, because its program says that they do not count: they have any value after a refill.
    pub undefined: Bytes,
    /// Memory of the region that is on the GPU still.
    pub resident: Bytes,
    /// What had to stay of it.
    pub skipped: Vec<Skipped>,
}

/// An extent that had to stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Skipped {
    /// Where it lies at home.
    pub address: Address,
    /// How large it is.
    pub size: Bytes,
    /// Why.
    pub reason: SkipReason,
}

/// Why an extent has to stay on its GPU.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SkipReason {
    /// A block in it is fixed.
    Fixed,
    /// Other processes may have it: they would not see new memory at the same addresses.
    Exported,
    /// Another process made it, and only that one can give it back. It lies in no region: whoever knows what was imported lists it.
    Imported,
    /// Other threads went on freeing blocks in it that more than one stream had used, however often they were waited for. The next
    /// shrink takes it.
    Withheld,
}

/// What a refill has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refilled {
    /// Memory of the GPU that was made and mapped.
    pub mapped: Bytes,
    /// Bytes that were copied to the GPU.
    pub copied: Bytes,
    /// Memory of the region that is evicted still.
    pub evicted: Bytes,
}
