//! What is told of a measurement.

use serde::Serialize;

use super::{CopyDirection, CopyMemory};

/// One measurement.
#[derive(Clone, Debug, Serialize)]
pub struct CopyReport {
    /// The backend.
    pub device: String,
    /// Whether the times are a model's, and nothing was measured.
    pub virtual_time: bool,
    /// Whose memory.
    pub target: u32,
    /// Which way.
    pub direction: CopyDirection,
    /// What memory.
    pub memory: CopyMemory,
    /// How many bytes arrive somewhere, those of one GPU.
    pub bytes: u64,
    /// How many links took part in the engine's copies, the target's own too.
    pub paths: u32,
    /// How often each was timed.
    pub runs: u32,
    /// 10^9 bytes a second, of the median, of one copy of the driver's.
    pub native_gbps: f64,
    /// Of each GPU copying its own share.
    pub limit_gbps: f64,
    /// Of the engine.
    pub engine_gbps: f64,
    /// Medians, in microseconds.
    pub native_us: f64,
    /// As above.
    pub limit_us: f64,
    /// As above.
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
    /// The backend.
    pub device: String,
    /// Whose memory.
    pub target: u32,
    /// Which way.
    pub direction: CopyDirection,
    /// How many bytes.
    pub bytes: u64,
    /// How often each was timed, in turns.
    pub runs: u32,
    /// Median microseconds from the call until the stream is done, by the driver.
    pub native_us: f64,
    /// As above, through the library.
    pub engine_us: f64,
    /// The median of the differences of neighbours.
    pub overhead_us: f64,
    /// Median microseconds until the driver's call had returned.
    pub native_call_us: f64,
    /// As above, of the library's.
    pub engine_call_us: f64,
}

/// What a critical copy takes beside background copies.
#[derive(Clone, Debug, Serialize)]
pub struct CriticalReport {
    /// The backend.
    pub device: String,
    /// Whose memory.
    pub target: u32,
    /// Which way.
    pub direction: CopyDirection,
    /// How many bytes.
    pub bytes: u64,
    /// How often each was timed.
    pub runs: u32,
    /// Microseconds of one copy of the driver's with nothing beside it, from the call until the stream is done: the median.
    pub native_us: f64,
    /// As above, of 99 in a hundred.
    pub native_p99_us: f64,
    /// The median of a critical copy with nothing beside it.
    pub alone_us: f64,
    /// As above, of 99 in a hundred.
    pub alone_p99_us: f64,
    /// The median beside background copies.
    pub beside_us: f64,
    /// As above, of 99 in a hundred.
    pub beside_p99_us: f64,
    /// Of 99 in a hundred, until the call had returned, with nothing beside it.
    pub alone_call_p99_us: f64,
    /// As above, beside background copies.
    pub beside_call_p99_us: f64,
    /// How large these are.
    pub background_bytes: u64,
    /// 10^9 bytes of theirs a second meanwhile.
    pub background_gbps: f64,
    /// Whether the bytes were compared: always, or there is no report.
    pub verified: bool,
}
