//! Report of a replay: the fields of `glake replay --json`.

use glake_units::Bytes;
use serde::Serialize;

/// Names of the policy and device for the report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Setting {
    /// Name of the policy: `glake`, or that of a model.
    pub policy: String,
    /// Name of the device; `model` if there is none.
    pub device: String,
    /// Delay of the GPU behind the host; `None` for models, which use the trace's completed frees.
    pub gpu_lag_ms: Option<u64>,
    /// Rule for passing memory between streams; `None` for models, which never pass any.
    pub borrow: Option<String>,
}

/// Result of one replay. Memory in bytes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Name of the trace.
    pub trace: String,
    /// Name of the policy: `glake`, or that of a model.
    pub policy: String,
    /// Name of the device; `model` if there is none.
    pub device: String,
    /// Delay of the GPU behind the host, in milliseconds.
    pub gpu_lag_ms: Option<u64>,
    /// Rule for passing memory between streams.
    pub borrow: Option<String>,
    /// Number of events in the trace.
    pub events: u64,
    /// Number of allocations in the trace.
    pub allocations: u64,
    /// Peak of live memory, in requested bytes.
    pub requested_peak: Bytes,
    /// Peak of live memory with each block rounded up to 512 bytes: the same for every policy.
    pub active_peak: Bytes,
    /// Peak of memory taken from the device.
    pub reserved_peak: Bytes,
    /// Ratio `active_peak / reserved_peak`; `None` if allocations failed, because the live memory is then incomplete.
    pub utilization: Option<f64>,
    /// Smallest limit under which the trace completes; `None` unless requested.
    pub fit_limit: Option<Bytes>,
    /// Number of failed allocations.
    pub ooms: u64,
    /// Number of ranges made of pieces that were not neighbours.
    pub stitches: u64,
    /// Number of mappings of physical pieces; a piece mapped at two addresses counts twice.
    pub extent_maps: u64,
    /// Number of waits of one stream for another.
    pub stream_waits: u64,
    /// Number of driver calls for memory.
    pub driver_calls: u64,
    /// Cost of these calls in microseconds.
    pub driver_us: f64,
    /// Cost of the driver calls after the first fifth of the events, in microseconds.
    pub driver_us_late: f64,
    /// Wall-clock nanoseconds per allocation or completed free, averaged over the replay.
    pub ns_per_op: f64,
}
