//! Options of a copy besides its ranges.

use glake_device::{DeviceId, Stream};
use glake_transfer::{CopyOptions, Priority};

/// Relation between the copies of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A single copy.
    One,
    /// Several copies without an order among themselves.
    List,
    /// Several copies of one host range to different GPUs.
    ToAll,
}

/// Options of a copy besides its ranges.
#[derive(Clone, Copy, Debug)]
pub struct CopyAsk {
    /// Stream in whose order the copy runs.
    pub stream: Stream,
    /// Device whose default streams are meant, if the caller names one.
    pub device: Option<DeviceId>,
    /// Scheduling priority of the copy.
    pub priority: Priority,
    /// Whether the call returns only after the bytes have arrived.
    pub blocking: bool,
    /// Whether both sides are compared afterwards.
    pub verify: bool,
    /// Whether the driver makes the copy, whatever its size.
    pub direct: bool,
    /// Whether the caller will wait for the copy by its handle.
    pub waited: bool,
}

impl CopyAsk {
    pub(super) fn options(&self, waited: bool) -> CopyOptions {
        CopyOptions { priority: self.priority, verify: self.verify, waited, unordered: false }
    }
}
