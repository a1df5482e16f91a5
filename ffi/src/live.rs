//! Live ranges: which bytes of a block count when its memory leaves.

use std::ffi::c_void;
use std::sync::Arc;

use glake_abi::{ByteRange, ContextDrop, LiveCallback};
use glake_units::Bytes;

use crate::block::address;
use crate::context::Context;
use crate::status::Failure;
use crate::{guard, library};

/// Of the block that begins at `pointer` these half-open ranges of bytes count and no others: only they, rounded out to 512 bytes, are
/// copied when its memory leaves, and the rest has any value once it is back. `ranges` null: all bytes count again. `count` 0 and
/// `ranges` not null: none do. Holds until it is said anew, or the block is freed; for memory that is evicted, from its next way out on.
///
/// Everything that may still be read counts, what is free and may be hit again too: a cache's blocks that are hashed.
///
/// `GLAKE_INVALID`: no block begins there, or a range leaves it; what was said before holds.
///
/// # Safety
/// `ranges` is null or may be read for `count` ranges.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_live_ranges(
    pointer: *const c_void,
    ranges: *const ByteRange,
    count: usize,
) -> i32 {
    guard::answer(|| {
        let process = library::process()?;
        if ranges.is_null() {
            if count > 0 {
                return Err(Failure::invalid("ranges is null: it must point to count ranges"));
            }
            return Ok(process.regions().set_live(address(pointer), None)?);
        }
        // SAFETY: not null, and the caller's promise.
        let ranges = unsafe { std::slice::from_raw_parts(ranges, count) };
        let ranges: Vec<_> = ranges.iter().map(|range| bytes(range.start, range.end)).collect();
        Ok(process.regions().set_live(address(pointer), Some(&ranges))?)
    })
}

/// As `glake_live_ranges`, asked of `callback` anew at each shrink that takes the block: it calls `add` with `into` for each range, and
/// answers 0. It runs on a thread of the library's, with no lock held, once the uses of the block's memory have ended or are parked and
/// the work of all GPUs has ended. Where it answers anything else, names a range that leaves the block, or takes longer than
/// hooks may (without hooks, `tiers.drain_timeout_ms`; all callbacks of a shrink together), all bytes count, and the report warns of it.
/// `drop`, where not null, is called once when `callback` is called no more: some time after the block was freed or something else was
/// said of it, and at once where this call fails.
///
/// `GLAKE_INVALID`: no block begins there, or `callback` is null.
///
/// # Safety
/// `callback` and `drop` may be called on any thread with this context, until `drop` was.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_live_callback(
    pointer: *const c_void,
    callback: LiveCallback,
    context: *mut c_void,
    drop: ContextDrop,
) -> i32 {
    // Given back whatever happens.
    let owned = Owned { context: Context(context), drop };
    guard::answer(move || {
        let Some(callback) = callback else {
            return Err(Failure::invalid("callback is null: it must be a function"));
        };
        let ask = move || {
            let mut ranges = Vec::new();
            let into: *mut Vec<glake_tiers::ByteRange> = &raw mut ranges;
            // SAFETY: the promise of who gave it; `add` is given what it takes, which lives until the call returns.
            let answer = unsafe { callback(owned.context(), Some(add), into.cast()) };
            (answer == 0).then_some(ranges)
        };
        Ok(library::process()?.regions().ask_live(address(pointer), Arc::new(ask))?)
    })
}

/// A context of the program's; dropping it gives it back.
struct Owned {
    context: Context,
    drop: ContextDrop,
}

impl Owned {
    /// A method, so that a closure takes hold of all of it and not of the pointer alone.
    fn context(&self) -> *mut c_void {
        self.context.get()
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        if let Some(drop) = self.drop {
            // SAFETY: the promise of who gave it; it is called once, here.
            unsafe { drop(self.context.get()) };
        }
    }
}

unsafe extern "C" fn add(into: *mut c_void, start: u64, end: u64) {
    // SAFETY: it is the list that `glake_live_callback` gives with this function.
    let ranges = unsafe { &mut *into.cast::<Vec<glake_tiers::ByteRange>>() };
    ranges.push(bytes(start, end));
}

fn bytes(start: u64, end: u64) -> glake_tiers::ByteRange {
    glake_tiers::ByteRange { start: Bytes::new(start), end: Bytes::new(end) }
}
