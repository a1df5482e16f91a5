//! What a replay found out: the fields of `glake replay --json`.

use glake_units::Bytes;
use serde::Serialize;

/// What was replayed on, as the report names it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Setting {
    /// `glake`, or the name of a model.
    pub policy: String,
    /// The device; `model` where there is none.
    pub device: String,
    /// How far the GPU is behind the host; `None` for models, which go by the trace's completed frees.
    pub gpu_lag_ms: Option<u64>,
    /// How memory passes between streams; `None` for models, which never pass any.
    pub borrow: Option<String>,
}

/// One replay. Memory in bytes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The trace's name.
    pub trace: String,
    /// `glake`, or the name of a model.
    pub policy: String,
    /// The device; `model` where there is none.
    pub device: String,
    /// How far the GPU was behind the host.
    pub gpu_lag_ms: Option<u64>,
    /// How memory passed between streams.
    pub borrow: Option<String>,
    /// Events in the trace.
    pub events: u64,
    /// Allocations in the trace.
    pub allocations: u64,
    /// The peak of live memory as it was asked for.
    pub requested_peak: Bytes,
    /// The peak of live memory with each block rounded up to 512 bytes: the same for every policy.
    pub active_peak: Bytes,
    /// The peak of memory taken from the device.
    pub reserved_peak: Bytes,
    /// `active_peak / reserved_peak`; `None` where allocations failed, because then not all of it was live.
    pub utilization: Option<f64>,
    /// The smallest limit under which the trace completes, where it was looked for.
    pub fit_limit: Option<Bytes>,
    /// Allocations that failed.
    pub ooms: u64,
    /// Ranges made of pieces that were not neighbours.
    pub stitches: u64,
    /// Pieces of physical memory mapped, once for each address they are mapped at.
    pub extent_maps: u64,
    /// Times that a stream was made to wait for another.
    pub stream_waits: u64,
    /// Calls into the driver for memory.
    pub driver_calls: u64,
    /// What these calls cost, in microseconds.
    pub driver_us: f64,
    /// What those of them cost that were made after the first fifth of the events, in microseconds.
    pub driver_us_late: f64,
    /// Wall-clock nanoseconds an allocation or a completed free, over the whole replay.
    pub ns_per_op: f64,
}
