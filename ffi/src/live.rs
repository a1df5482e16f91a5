//! Live ranges: the bytes of a block that an eviction has to keep.

use std::ffi::c_void;
use std::sync::Arc;

use glake_abi::{ByteRange, ContextDrop, LiveCallback};
use glake_units::Bytes;

use crate::block::address;
use crate::context::Context;
use crate::status::Failure;
use crate::{guard, library};

/// Declares the live bytes of the block that begins at `pointer` as half-open ranges. Only they, rounded out to 512 bytes, are copied when
/// the memory is evicted; all other bytes are undefined after the refill. `ranges` null: all bytes are live again. `count` 0 with `ranges`
/// not null: none are. Holds until the next call for the block, or until it is freed; for evicted memory, from the next eviction on.
///
/// Declare every byte that may still be read, including free entries that may be hit again, such as a cache's hashed blocks.
///
/// `GLAKE_INVALID`: no block begins there, or a range exceeds the block; the earlier ranges hold.
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

/// Declares the live bytes of a block by a callback, which every shrink that evicts the block calls anew: it calls `add` with `into` for
/// each range, and returns 0. It runs on a thread of the library, with no lock held, once the uses of the block's memory have ended or are
/// parked and all GPU work has completed. If it returns another value, names a range that exceeds the block, or takes longer than hooks may
/// (without hooks, `tiers.drain_timeout_ms`; all callbacks of a shrink together), all bytes are live, and the report contains a warning.
/// `drop`, if not null, is called once when `callback` will not be called again: some time after the block was freed or other ranges were
/// declared, and at once if this call fails.
///
/// `GLAKE_INVALID`: no block begins there, or `callback` is null.
///
/// # Safety
/// `callback` and `drop` may be called on any thread with this context, until `drop` was called.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_live_callback(
    pointer: *const c_void,
    callback: LiveCallback,
    context: *mut c_void,
    drop: ContextDrop,
) -> i32 {
    // Dropped on every path.
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

/// Context of the program; dropping it calls the program's drop function.
struct Owned {
    context: Context,
    drop: ContextDrop,
}

impl Owned {
    /// Returns the pointer itself. A method, so that closures capture the whole value and not the bare pointer.
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
