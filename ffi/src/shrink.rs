//! Shrink and refill: memory is evicted from its GPUs, and returns.

use std::ffi::{CString, c_char, c_void};
use std::sync::Arc;
use std::time::Duration;

use glake_abi::RegionHook;
use glake_runtime::process::{Hook, Refill, Shrink};

use crate::guard::Context;
use crate::stats::string;
use crate::{guard, library};

/// Evicts memory from GPUs; blocks keep their addresses and, except in regions with `GLAKE_POLICY_DISCARD`, their bytes. `request` is null
/// (everything, to the host) or a JSON object: "tags" (an array; absent: everything, including memory outside of regions and private
/// pools), "bytes" (at least this many, the cheapest first; absent: all), "tier" ("host", "peer", "peer:1", "file"), "verify", "timeout_ms"
/// (for running uses to end).
///
/// The call waits for running uses of the memory (`glake_use_begin`), and holds new ones until it is back. A program without gate calls
/// must enqueue no work on the evicted memory until it is refilled. Allocations and copies by other threads that touch it refill it.
///
/// The report is a JSON object, to be freed with `glake_string_free`. In bytes: "freed", "copied", "clean" (evicted without a copy because
/// an earlier one was valid), "undefined" (not live, and not copied), "resident". "regions": an array of "tag", "device", the same in
/// bytes, "evicted" (total now evicted), "place" (destination of this shrink) and "skipped": an array of "device",
/// "address", "size", "reason", one of "fixed", "exported", "withheld". "skipped": if everything was to be evicted, memory outside of
/// regions that had to stay, with the reason "imported". "warnings": texts about live callbacks without an answer, and about GPUs that do
/// not report their memory usage. "gpu": an array of "device" (null for the host), "holder", "bytes". "seconds",
/// "predicted_refill_seconds". Null on failure (`glake_last_status` gives the status, `glake_last_error` the part evicted by then): no
/// bytes are lost, and a repeated call continues from there.
///
/// # Safety
/// `request` is null or a text that ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_shrink(request: *const c_char) -> *mut c_char {
    guard::value(std::ptr::null_mut(), || {
        // SAFETY: the caller's promise.
        let request = unsafe { guard::text(request, "request") }?;
        let ask = request.map_or_else(|| Ok(Shrink::default()), Shrink::from_json)?;
        string(library::process()?.regions().shrink(&ask)?.json().to_string())
    })
}

/// Refills evicted memory at its addresses. `request` is null (everything) or a JSON object: "tags", "bytes", "verify" as for
/// `glake_shrink`; "wait" (false: the refill continues in the background, and the report is empty); "timeout_ms" (of the wait; absent:
/// none).
///
/// The report is a JSON object, to be freed with `glake_string_free`: "mapped", "copied", "evicted" (still evicted) in bytes, "regions" (an
/// array of "tag", "device", "mapped", "copied", "resident", "evicted"), "seconds". Null
/// on failure, as for `glake_shrink`. `GLAKE_TIMEOUT`: the timeout has expired, and the refill continues in the background.
///
/// # Safety
/// `request` is null or a text that ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_refill(request: *const c_char) -> *mut c_char {
    guard::value(std::ptr::null_mut(), || {
        // SAFETY: the caller's promise.
        let request = unsafe { guard::text(request, "request") }?;
        let ask = request.map_or_else(|| Ok(Refill::default()), Refill::from_json)?;
        string(library::process()?.regions().refill(&ask)?.json().to_string())
    })
}

/// Returns the memory usage of each GPU by holder, as a JSON array of "device", "holder" and "bytes", like "gpu" in the report of a shrink.
/// Null on failure; free it with `glake_string_free`.
#[unsafe(no_mangle)]
pub extern "C" fn glake_memory_usage_json() -> *mut c_char {
    guard::value(std::ptr::null_mut(), || {
        let left = library::process()?.regions().memory_usage()?;
        string(format!("[{}]", left.iter().map(|left| left.json().to_string()).collect::<Vec<_>>().join(",")))
    })
}

/// Sets hooks that run before and after every requested shrink and refill; null: none. The event is a JSON object: "event" ("shrink",
/// "refill"), "when" ("before", "after"), "tags", "bytes", and after it "report" or "error". Hooks run on threads of their own, and the
/// call waits for them up to `timeout_ms` (-1: no timeout). If `before` returns a value other than 0, or takes longer, nothing is moved.
/// Refills on access are reported too ("touched": true, "device"), without a wait. Replaces the earlier hooks; removing them succeeds in a
/// forked child and at the end of the process too.
///
/// # Safety
/// The hooks may be called on any thread with this context for the life of the process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_hooks_set(
    before: RegionHook,
    after: RegionHook,
    context: *mut c_void,
    timeout_ms: i64,
) -> i32 {
    library::give_up_if(before.is_none() && after.is_none(), |process| {
        let context = Context(context);
        let hook = |hook: RegionHook| {
            hook.map(|hook| -> Hook {
                Arc::new(move |event: &str| {
                    let event = CString::new(event).unwrap_or_default();
                    // SAFETY: the promise of who gave it; the text lives until it returns.
                    unsafe { hook(context.get(), event.as_ptr()) }
                })
            })
        };
        process.regions().set_hooks(hook(before), hook(after), duration(timeout_ms));
        Ok(())
    })
}

/// Converts a timeout of the caller; below 0: none.
pub(crate) fn duration(milliseconds: i64) -> Option<Duration> {
    u64::try_from(milliseconds).ok().map(Duration::from_millis)
}
