//! Statistics in torch's key scheme.

use std::ffi::{CString, c_char};

use glake_abi::{DeviceStats, PoolStats, Stat};
use glake_runtime::process;

use crate::status::Failure;
use crate::{guard, library};

/// The statistics of a device; zeroes where its pool has not started.
///
/// # Safety
/// `out` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_stats(device: i32, out: *mut DeviceStats) -> i32 {
    guard::answer(|| {
        let stats = device_stats(stats_of(device)?);
        // SAFETY: the caller's promise.
        unsafe { guard::put(out, "out", stats) }
    })
}

/// Starts the peaks of a device from what is now.
#[unsafe(no_mangle)]
pub extern "C" fn glake_reset_peaks(device: i32) -> i32 {
    guard::answer(|| Ok(process()?.reports().reset_peaks(device.into())?))
}

/// Starts the totals of a device, and what was done, from zero.
#[unsafe(no_mangle)]
pub extern "C" fn glake_reset_totals(device: i32) -> i32 {
    guard::answer(|| Ok(process()?.reports().reset_totals(device.into())?))
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
    match library::started_process()? {
        Some(process) => Ok(process),
        None => library::process(),
    }
}

fn stats_of(device: i32) -> Result<process::DeviceStats, Failure> {
    Ok(process()?.reports().stats(device.into())?)
}

fn stat(stat: process::Stat) -> Stat {
    let process::Stat { current, peak, allocated, freed } = stat;
    Stat { current, peak, allocated, freed }
}

fn pool_stats(stats: process::PoolStats) -> PoolStats {
    PoolStats {
        allocation: stat(stats.allocation),
        segment: stat(stats.segment),
        active: stat(stats.active),
        inactive_split: stat(stats.inactive_split),
        allocated_bytes: stat(stats.allocated_bytes),
        reserved_bytes: stat(stats.reserved_bytes),
        active_bytes: stat(stats.active_bytes),
        inactive_split_bytes: stat(stats.inactive_split_bytes),
        requested_bytes: stat(stats.requested_bytes),
    }
}

fn device_stats(stats: process::DeviceStats) -> DeviceStats {
    let own = stats.own;
    DeviceStats {
        all: pool_stats(stats.all),
        small_pool: pool_stats(stats.small_pool),
        large_pool: pool_stats(stats.large_pool),
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
