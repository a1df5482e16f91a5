//! Who wants to know where memory is mapped.

use std::fmt;

use glake_device::{Address, DeviceId};
use glake_units::Bytes;

/// Told of every range of addresses that gets memory or loses it, at home and in aliases: for registrations with network
/// cards and collective libraries, for traces.
///
/// An unmapped range may be a part of a mapped one, or several side by side. What was undone, because a later step failed,
/// is told as the opposite. What a pool still has mapped when it is dropped is not told.
///
/// The calls come with the lock of the pool's growth held: they must not call the pool.
pub trait MappingObserver: fmt::Debug + Send + Sync {
    /// A range can be used from now on.
    fn mapped(&self, device: DeviceId, address: Address, size: Bytes);
    /// A range is about to lose its memory; nothing enqueued uses it any more.
    fn unmapping(&self, device: DeviceId, address: Address, size: Bytes);
}
