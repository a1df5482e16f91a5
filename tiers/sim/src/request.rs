//! Operations that can be enqueued on a stream or captured, by address.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use glake_device::{Address, Compare, CopyDevices, CopyRequest, KernelMemory, Touch};
use glake_units::Bytes;

/// Body of a simulated kernel.
pub(super) type Body = Arc<dyn Fn(&mut dyn KernelMemory) + Send + Sync>;

/// Work before its addresses are resolved.
#[derive(Clone, Debug)]
pub(super) enum Request {
    Copy(Vec<CopyRequest>),
    CopyBetween(CopyRequest, CopyDevices),
    Fill { start: Address, size: Bytes, byte: u8 },
    WaitValue { address: Address, value: u32, compare: Compare },
    WriteValue { address: Address, value: u32 },
    Kernel(KernelRequest),
}

/// A kernel before its addresses are resolved.
#[derive(Clone)]
pub(super) struct KernelRequest {
    pub(super) reads: Vec<Touch>,
    pub(super) writes: Vec<Touch>,
    /// Run time; `None` means as long as its memory traffic takes.
    pub(super) duration: Option<Duration>,
    pub(super) body: Body,
}

impl fmt::Debug for KernelRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KernelRequest")
            .field("reads", &self.reads)
            .field("writes", &self.writes)
            .field("duration", &self.duration)
            .finish_non_exhaustive()
    }
}
