//! Observer of a pool's mappings.

use std::fmt;

use glake_device::{Address, DeviceId};
use glake_units::Bytes;

/// Observer of every address range that is mapped or unmapped, at home and in aliases: for registration with network cards and collective
/// libraries, and for traces.
///
/// An unmapped range may be a part of a mapped one, or several adjacent ones. A mapping that is rolled back because a later step failed is
/// reported as unmapped, and vice versa. Mappings that exist when a pool is dropped are not reported.
///
/// The methods are called with the pool's growth lock held and must not call the pool.
pub trait MappingObserver: fmt::Debug + Send + Sync {
    /// Reports that a range is mapped and usable.
    fn mapped(&self, device: DeviceId, address: Address, size: Bytes);
    /// Reports that a range is about to be unmapped; no enqueued work uses it any more.
    fn unmapping(&self, device: DeviceId, address: Address, size: Bytes);
}
