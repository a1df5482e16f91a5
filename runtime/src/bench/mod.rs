//! Measurements: `glake bench`.

use std::path::PathBuf;

use serde::Serialize;

use crate::backend::Backend;
use crate::config::Config;

/// What `glake bench alloc` measures.
#[derive(Clone, Debug)]
pub struct AllocOptions {
    /// The trace that sizes are drawn from.
    pub trace: PathBuf,
    /// Blocks alive while it measures.
    pub live_blocks: u32,
    /// Free ranges between them.
    pub free_ranges: u32,
    /// With how many streams, one measurement each.
    pub streams: Vec<u32>,
}

/// One measurement of the hot path.
#[derive(Clone, Debug, Serialize)]
pub struct AllocReport {
    /// Blocks alive while it measured.
    pub live_blocks: u32,
    /// Free ranges between them.
    pub free_ranges: u32,
    /// Streams that allocated in turn.
    pub streams: u32,
    /// Nanoseconds a malloc and a free together.
    pub pair_ns: f64,
    /// The same for a best fit on an ordered set, in the same run.
    pub ordered_set_pair_ns: f64,
    /// Driver calls in the measured pairs.
    pub driver_calls: u64,
    /// Allocations on the heap in the measured pairs.
    pub heap_allocations: u64,
}

/// Why nothing was measured.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// There is no such measurement in this build.
    #[error("bench alloc is not part of this build")]
    Absent,
}

/// Measures a malloc and free pair, once for each number of streams.
///
/// # Errors
/// [`BenchError`]: the trace or the device cannot be had.
pub fn alloc(
    backend: Backend,
    config: &Config,
    options: &AllocOptions,
) -> Result<Vec<AllocReport>, BenchError> {
    let _ = (backend, config, options);
    Err(BenchError::Absent)
}
