//! What a copy is asked for besides its bytes.

use glake_device::{DeviceId, Stream};
use glake_transfer::{CopyOptions, Priority};

/// What the copies of one call have to do with each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// It is one copy.
    One,
    /// They are many, in no order among themselves.
    List,
    /// They are of one range of host memory, to several GPUs.
    ToAll,
}

/// What a copy is asked for besides its bytes.
#[derive(Clone, Copy, Debug)]
pub struct CopyAsk {
    /// In whose order it runs.
    pub stream: Stream,
    /// Whose the default streams are, where it is said.
    pub device: Option<DeviceId>,
    /// Which copies it lets pass, and which let it pass.
    pub priority: Priority,
    /// Whether the call returns when the bytes are there.
    pub blocking: bool,
    /// Whether both sides are compared then.
    pub verify: bool,
    /// Whether it is the driver's own copy, whatever its size.
    pub direct: bool,
    /// Whether somebody will wait for it by its handle.
    pub waited: bool,
}

impl CopyAsk {
    pub(super) fn options(&self, waited: bool) -> CopyOptions {
        CopyOptions { priority: self.priority, verify: self.verify, waited, unordered: false }
    }
}
