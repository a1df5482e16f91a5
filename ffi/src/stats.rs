//! Statistics of devices in torch's key scheme.

use std::ffi::{CString, c_char};

use glake_abi::{DeviceStats, PoolStats, Stat};
use glake_runtime::{metrics, process};

use crate::status::Failure;
use crate::{guard, library};

/// Returns the statistics of a device; zeros if its pool has not started.
///
/// # Safety
/// `out` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_stats(device: i32, out: *mut DeviceStats) -> i32 {
    guard::answer(|| {
        let stats = device_stats(&stats_of(device)?);
        // SAFETY: the caller's promise.
        unsafe { guard::put(out, "out", stats) }
    })
}

/// Resets the peaks of a device to the current values.
#[unsafe(no_mangle)]
pub extern "C" fn glake_reset_peaks(device: i32) -> i32 {
    guard::answer(|| Ok(process()?.reports().reset_peaks(device.into())?))
}

/// Resets the totals and event counters of a device to zero.
#[unsafe(no_mangle)]
pub extern "C" fn glake_reset_totals(device: i32) -> i32 {
    guard::answer(|| Ok(process()?.reports().reset_totals(device.into())?))
}

/// Returns the statistics as a JSON object: torch's flat keys ("active_bytes.all.peak"), and GLake's under "glake.". Null on failure; free
/// it with `glake_string_free`.
#[unsafe(no_mangle)]
pub extern "C" fn glake_stats_json(device: i32) -> *mut c_char {
    guard::value(std::ptr::null_mut(), || string(stats_of(device)?.json().to_string()))
}

/// Frees a text returned by this library; null is no error.
///
/// # Safety
/// The pointer is null, or such a text, and not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_string_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: the caller's promise: `string` made it.
        drop(unsafe { CString::from_raw(text) });
    }
}

/// Converts a text for the caller.
pub(crate) fn string(text: String) -> Result<*mut c_char, Failure> {
    CString::new(text).map(CString::into_raw).map_err(Failure::invalid)
}

/// Returns the process, for calls that need no driver; works at the end of the process too.
pub(crate) fn process() -> Result<&'static process::Process, Failure> {
    match library::started_process()? {
        Some(process) => Ok(process),
        None => library::process(),
    }
}

fn stats_of(device: i32) -> Result<metrics::DeviceStats, Failure> {
    Ok(process()?.reports().stats(device.into())?)
}

/// Converts the runtime's figures to the C structure: every metric, by its name.
macro_rules! as_in_c {
    (
        $(#[$of_pools:meta])* PoolStats { $( $(#[$a:meta])* $pool:ident: $p:ty, $pu:ident, $ps:ident; )* }
        $(#[$of_torch:meta])* Counters { $( $(#[$b:meta])* $torch:ident: $t:ty, $tu:ident, $ts:ident; )* }
        $(#[$of_own:meta])* OwnStats { $( $(#[$c:meta])* $own:ident: $o:ty, $ou:ident, $os:ident; )* }
    ) => {
        fn pool_stats(stats: &metrics::PoolStats) -> PoolStats {
            PoolStats { $($pool: stat(stats.$pool),)* }
        }

        fn device_stats(stats: &metrics::DeviceStats) -> DeviceStats {
            DeviceStats {
                all: pool_stats(&stats.all),
                small_pool: pool_stats(&stats.small_pool),
                large_pool: pool_stats(&stats.large_pool),
                $($torch: stats.counters.$torch,)*
                $($own: stats.own.$own,)*
            }
        }
    };
}
glake_runtime::device_metrics!(as_in_c);

fn stat(stat: metrics::Stat) -> Stat {
    let metrics::Stat { current, peak, allocated, freed } = stat;
    Stat { current, peak, allocated, freed }
}
