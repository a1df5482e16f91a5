//! A use that runs asks for more memory.

use std::time::Duration;

use glake_units::Bytes;

use crate::{GangId, GpuId, WorkerId};

/// Answered from free bytes and idle victims only, so that no use that runs waits for another one; and soon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Growth {
    pub(crate) gang: GangId,
    pub(crate) worker: WorkerId,
    pub(crate) gpu: GpuId,
    pub(crate) bytes: Bytes,
    pub(crate) by: Duration,
}
