//! Memory leaves its GPUs, and comes back.

use std::ffi::{CString, c_char, c_void};
use std::sync::Arc;
use std::time::Duration;

use glake_abi::RegionHook;
use glake_runtime::process::{Hook, Refill, Shrink};

use crate::context::Context;
use crate::stats::string;
use crate::{guard, library};

/// Gives memory of GPUs back; blocks keep their addresses and, but for regions made with `GLAKE_POLICY_DISCARD`, their bytes.
/// `request` is null (everything, to the host) or a JSON object: "tags" (an array; absent: all, the memory of no region and private
/// pools too), "bytes" (at least so much, what costs least first; absent: all), "tier" ("host", "peer", "peer:1", "file"), "verify",
/// "timeout_ms" (for uses that run to end).
///
/// Uses of what leaves (`glake_use_begin`) are waited for, and new ones held until it is back. A program that enters no gate must
/// enqueue no work on what leaves until it is refilled. Other threads' allocations and copies of it bring it back.
///
/// The report is a JSON object, to be given to `glake_string_free`. In bytes: "freed", "copied", "clean" (of what left, what was copied
/// before), "undefined" (what did not count, and was not copied), "resident". "regions": an array of "tag", "device", the same in bytes,
/// "evicted" (all that is away), "place" (where most of it is; absent: nothing is away) and "skipped": an array of "device", "address",
/// "size", "reason", one of "fixed", "exported", "withheld". "skipped": where everything was to leave, what lies in no region and had to
/// stay, with the reason "imported". "warnings": texts, of live callbacks that did not tell, and of GPUs that do not tell what they hold.
/// "gpu": an array of "device" (null for the host), "holder", "bytes". "seconds", "predicted_refill_seconds". Null on failure (`glake_last_status` says which,
/// `glake_last_error` what was evicted by then): no bytes are lost, and the same call goes on from there.
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

/// Brings memory back to the addresses that it had. `request` is null (everything) or a JSON object: "tags", "bytes", "verify" as
/// `glake_shrink`; "wait" (false: it goes on in the background, and the report is empty); "timeout_ms" (how long it is waited for;
/// absent: until it is over).
///
/// The report is a JSON object, to be given to `glake_string_free`: "mapped", "copied", "evicted" (what is still away) in bytes, "regions"
/// (an array of "tag", "device", "mapped", "copied", "resident", "evicted", "place", the last where something is still away), "seconds". Null on failure, as `glake_shrink`. `GLAKE_CLOSED`: the time is over, and the refill goes on in the
/// background.
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

/// What is on each GPU and who holds it, as a JSON array of "device", "holder" and "bytes", as "gpu" of a shrink's report. Null on
/// failure; to be given to `glake_string_free`.
#[unsafe(no_mangle)]
pub extern "C" fn glake_memory_usage_json() -> *mut c_char {
    guard::value(std::ptr::null_mut(), || {
        let left = library::process()?.regions().memory_usage()?;
        string(format!("[{}]", left.iter().map(|left| left.json().to_string()).collect::<Vec<_>>().join(",")))
    })
}

/// Calls `before` and `after` around every shrink and refill that is asked for; null: none. The event is a JSON object: "event"
/// ("shrink", "refill"), "when" ("before", "after"), "tags", "bytes", and after it "report" or "error". They run on threads of
/// their own and are waited for up to `timeout_ms` (-1: for ever). Where `before` answers anything but 0, or takes longer, nothing
/// is moved. Of memory that comes back because it is touched they are told too ("touched": true, "device"), and nothing waits for
/// them. Replaces those that were there: to have none succeeds in a forked child and at the end of the process too.
///
/// # Safety
/// They may be called on any thread with this context for as long as the process lives.
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

/// A time that the caller gives; below 0: for ever.
pub(crate) fn duration(milliseconds: i64) -> Option<Duration> {
    u64::try_from(milliseconds).ok().map(Duration::from_millis)
}
