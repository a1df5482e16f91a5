//! Report of a copy measurement.

use serde::Serialize;

use super::{CopyDirection, CopyMemory};

/// Result of one measurement.
#[derive(Clone, Debug, Serialize)]
pub struct CopyReport {
    /// Backend of the GPUs.
    pub device: String,
    /// Whether the times are a model's, and nothing was measured.
    pub virtual_time: bool,
    /// GPU that was measured.
    pub target: u32,
    /// Direction of the copy.
    pub direction: CopyDirection,
    /// Memory kind of the copy.
    pub memory: CopyMemory,
    /// Bytes that arrived, on one GPU of a broadcast.
    pub bytes: u64,
    /// Number of links that the engine's copies used, the target's own included.
    pub paths: u32,
    /// Number of timed repetitions.
    pub runs: u32,
    /// 10^9 bytes a second, of the median, of one copy of the driver's.
    pub native_gbps: f64,
    /// Rate of all GPUs copying their own shares at once.
    pub limit_gbps: f64,
    /// Rate of the engine.
    pub engine_gbps: f64,
    /// Median time of the driver's copy in microseconds.
    pub native_us: f64,
    /// Median time of all GPUs copying their own shares, in microseconds.
    pub limit_us: f64,
    /// Median time of the engine's copy in microseconds.
    pub engine_us: f64,
    /// Until the engine's call had returned; 0 in virtual time, which stands still meanwhile.
    pub host_us: f64,
    /// Processor time of this process while the engine's copies ran, in cores; 0 in virtual time.
    pub cpu_cores: f64,
    /// Whether the paths were calibrated, and not assumed.
    pub calibrated: bool,
    /// Whether the bytes were compared after the engine's copies: always where copies were measured; in virtual time up to 64 MiB.
    pub verified: bool,
}

/// The cost of a copy below the break-even.
#[derive(Clone, Debug, Serialize)]
pub struct OverheadReport {
    /// Backend of the GPUs.
    pub device: String,
    /// GPU that was measured.
    pub target: u32,
    /// Direction of the copy.
    pub direction: CopyDirection,
    /// Size of the copy.
    pub bytes: u64,
    /// Number of timed repetitions, in turns.
    pub runs: u32,
    /// Median microseconds from the call until the stream is done, by the driver.
    pub native_us: f64,
    /// The same through the library.
    pub engine_us: f64,
    /// The median of the differences of neighbours.
    pub overhead_us: f64,
    /// Median microseconds until the driver's call had returned.
    pub native_call_us: f64,
    /// The same for the library's call.
    pub engine_call_us: f64,
}

/// Time of a critical copy next to background copies.
#[derive(Clone, Debug, Serialize)]
pub struct CriticalReport {
    /// Backend of the GPUs.
    pub device: String,
    /// GPU that was measured.
    pub target: u32,
    /// Direction of the copy.
    pub direction: CopyDirection,
    /// Size of the copy.
    pub bytes: u64,
    /// Number of timed repetitions.
    pub runs: u32,
    /// Microseconds of one copy of the driver's with nothing beside it, from the call until the stream is done: the median.
    pub native_us: f64,
    /// The same at the 99th percentile.
    pub native_p99_us: f64,
    /// The median of a critical copy with nothing beside it.
    pub alone_us: f64,
    /// The same at the 99th percentile.
    pub alone_p99_us: f64,
    /// The median beside background copies.
    pub beside_us: f64,
    /// The same at the 99th percentile.
    pub beside_p99_us: f64,
    /// Time until the call returned, alone, at the 99th percentile.
    pub alone_call_p99_us: f64,
    /// Time until the call returned, next to background copies, at the 99th percentile.
    pub beside_call_p99_us: f64,
    /// Size of the background copies.
    pub background_bytes: u64,
    /// 10^9 bytes of theirs a second meanwhile.
    pub background_gbps: f64,
    /// Whether the bytes were compared: always, or there is no report.
    pub verified: bool,
}
