//! What can be enqueued on a stream, by address: also what a capture records.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use glake_device::{Address, Compare, CopyDevices, CopyRequest, KernelMemory, Touch};
use glake_units::Bytes;

/// What a simulated kernel does.
pub(super) type Body = Arc<dyn Fn(&mut dyn KernelMemory) + Send + Sync>;

/// Work before it is resolved.
#[derive(Clone, Debug)]
pub(super) enum Request {
    Copy(Vec<CopyRequest>),
    CopyBetween(CopyRequest, CopyDevices),
    Fill { start: Address, size: Bytes, byte: u8 },
    WaitValue { address: Address, value: u32, compare: Compare },
    WriteValue { address: Address, value: u32 },
    Kernel(KernelRequest),
}

/// A kernel before it is resolved.
#[derive(Clone)]
pub(super) struct KernelRequest {
    pub(super) reads: Vec<Touch>,
    pub(super) writes: Vec<Touch>,
    /// How long it runs; as long as its memory takes if not said.
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
