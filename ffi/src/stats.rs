//! Statistics in torch's key scheme.

use std::ffi::{CString, c_char};

use glake_runtime::process;

use crate::status::Failure;
use crate::{guard, library};

/// One statistic.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    /// Now.
    pub current: i64,
    /// The most since the peaks were reset.
    pub peak: i64,
    /// All that was ever added.
    pub allocated: i64,
    /// All that was ever taken away.
    pub freed: i64,
}

/// Those of requests up to 1 MiB, of larger ones, or of both.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Blocks handed out.
    pub allocation: Stat,
    /// Extents at home: physical memory is made and released in these.
    pub segment: Stat,
    /// Blocks handed out, or freed and still in use by other streams.
    pub active: Stat,
    /// Free ranges that share an extent with something in use; peak and totals are what is now.
    pub inactive_split: Stat,
    /// Bytes of `allocation`.
    pub allocated_bytes: Stat,
    /// Physical memory held.
    pub reserved_bytes: Stat,
    /// Bytes of `active`.
    pub active_bytes: Stat,
    /// Bytes of `inactive_split`.
    pub inactive_split_bytes: Stat,
    /// Bytes of `allocation` as they were asked for.
    pub requested_bytes: Stat,
}

/// Everything that is counted for a device.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceStats {
    /// Both pools.
    pub all: PoolStats,
    /// Requests up to 1 MiB.
    pub small_pool: PoolStats,
    /// Larger requests.
    pub large_pool: PoolStats,
    /// Requests that had to take memory back first.
    pub num_alloc_retries: i64,
    /// Requests refused.
    pub num_ooms: i64,
    /// Times that everything freed was waited for.
    pub num_sync_all_streams: i64,
    /// Extents made.
    pub num_device_alloc: i64,
    /// Extents released.
    pub num_device_free: i64,
    /// Aliases made.
    pub stitches: u64,
    /// Blocks handed out through an alias that was there.
    pub alias_reuses: u64,
    /// Extents mapped so far, at home and in aliases.
    pub extent_maps: u64,
    /// Waits of one stream for another that the program did not ask for.
    pub stream_waits: u64,
    /// Completion edges, because bytes changed their address.
    pub edges: u64,
    /// Extents mapped now.
    pub mappings: u64,
    /// Bytes of addresses of aliases now.
    pub alias_bytes: u64,
    /// Of them, idle.
    pub idle_alias_bytes: u64,
    /// Reserved and free, but no whole extent.
    pub waste_hard: u64,
    /// Whole free extents, not joined.
    pub waste_soft: u64,
    /// Free, but pending on a stream.
    pub waste_stream: u64,
    /// Misses at which it was measured how far the GPU was behind the host.
    pub epoch_lags: u64,
    /// The median of that, in microseconds.
    pub epoch_lag_us_p50: u64,
    /// What 95 of 100 were below.
    pub epoch_lag_us_p95: u64,
    /// The most.
    pub epoch_lag_us_max: u64,
    /// GPU time in the waits that `borrow = wait` made, in microseconds.
    pub gpu_wait_us: u64,
}

/// The statistics of a device; zeroes where its pool has not started.
///
/// # Safety
/// `out` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_stats(device: i32, out: *mut DeviceStats) -> i32 {
    guard::answer(|| {
        let stats = stats_of(device)?.into();
        // SAFETY: the caller's promise.
        unsafe { guard::put(out, "out", stats) }
    })
}

/// Starts the peaks of a device from what is now.
#[unsafe(no_mangle)]
pub extern "C" fn glake_reset_peaks(device: i32) -> i32 {
    guard::answer(|| Ok(process()?.reset_peaks(device.into())?))
}

/// Starts the totals of a device, and what was done, from zero.
#[unsafe(no_mangle)]
pub extern "C" fn glake_reset_totals(device: i32) -> i32 {
    guard::answer(|| Ok(process()?.reset_totals(device.into())?))
}

/// The statistics as a JSON object: torch's flat keys ("active_bytes.all.peak"), and ours under "glake.". Null on failure;
/// to be given to `glake_string_free`.
#[unsafe(no_mangle)]
pub extern "C" fn glake_stats_json(device: i32) -> *mut c_char {
    guard::value(std::ptr::null_mut(), || string(stats_of(device)?.json().to_string()))
}

/// Gives back a text that this library handed out; null is no error.
///
/// # Safety
/// It is null, or such a text, and not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_string_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: the caller's promise: `string` made it.
        drop(unsafe { CString::from_raw(text) });
    }
}

/// A text for the caller.
pub(crate) fn string(text: String) -> Result<*mut c_char, Failure> {
    CString::new(text).map(CString::into_raw).map_err(Failure::invalid)
}

/// The process, for what needs no driver; at the end of the process too.
pub(crate) fn process() -> Result<&'static process::Process, Failure> {
    match library::books()? {
        Some(process) => Ok(process),
        None => library::process(),
    }
}

fn stats_of(device: i32) -> Result<process::DeviceStats, Failure> {
    Ok(process()?.stats(device.into())?)
}

impl From<process::Stat> for Stat {
    fn from(stat: process::Stat) -> Stat {
        let process::Stat { current, peak, allocated, freed } = stat;
        Stat { current, peak, allocated, freed }
    }
}

impl From<process::PoolStats> for PoolStats {
    fn from(stats: process::PoolStats) -> PoolStats {
        PoolStats {
            allocation: stats.allocation.into(),
            segment: stats.segment.into(),
            active: stats.active.into(),
            inactive_split: stats.inactive_split.into(),
            allocated_bytes: stats.allocated_bytes.into(),
            reserved_bytes: stats.reserved_bytes.into(),
            active_bytes: stats.active_bytes.into(),
            inactive_split_bytes: stats.inactive_split_bytes.into(),
            requested_bytes: stats.requested_bytes.into(),
        }
    }
}

impl From<process::DeviceStats> for DeviceStats {
    fn from(stats: process::DeviceStats) -> DeviceStats {
        let own = stats.own;
        DeviceStats {
            all: stats.all.into(),
            small_pool: stats.small_pool.into(),
            large_pool: stats.large_pool.into(),
            num_alloc_retries: stats.num_alloc_retries,
            num_ooms: stats.num_ooms,
            num_sync_all_streams: stats.num_sync_all_streams,
            num_device_alloc: stats.num_device_alloc,
            num_device_free: stats.num_device_free,
            stitches: own.stitches,
            alias_reuses: own.alias_reuses,
            extent_maps: own.extent_maps,
            stream_waits: own.stream_waits,
            edges: own.edges,
            mappings: own.mappings,
            alias_bytes: own.alias_bytes,
            idle_alias_bytes: own.idle_alias_bytes,
            waste_hard: own.waste_hard,
            waste_soft: own.waste_soft,
            waste_stream: own.waste_stream,
            epoch_lags: own.epoch_lags,
            epoch_lag_us_p50: own.epoch_lag_us_p50,
            epoch_lag_us_p95: own.epoch_lag_us_p95,
            epoch_lag_us_max: own.epoch_lag_us_max,
            gpu_wait_us: own.gpu_wait_us,
        }
    }
}
