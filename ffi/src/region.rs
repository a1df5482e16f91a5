//! Regions: memory that is evicted when it is not needed, and refilled at the same addresses. Live ranges tell which bytes of a block an eviction
//! has to keep.

use std::cell::Cell;
use std::ffi::{c_char, c_void};
use std::sync::Arc;

use glake_abi::{
    ByteRange, ContextDrop, GLAKE_HOST_COPY_CLEAN, GLAKE_HOST_COPY_DROP, GLAKE_HOST_COPY_PREPARE,
    GLAKE_HOST_COPY_RETAIN, GLAKE_OK, GLAKE_POLICY_DISCARD, GLAKE_POLICY_KEEP, GLAKE_POLICY_SEALED,
    LiveCallback,
};
use glake_runtime::process::Process;
use glake_tiers::{CopyPolicy, Policy, RegionOptions};
use glake_units::Bytes;

use crate::block::{address, stream};
use crate::guard::Context;
use crate::stats::string;
use crate::status::Failure;
use crate::{guard, library};

/// Defines a region with this tag, on every device where memory is allocated in it. Repeating the same definition is no error. `host_copy`
/// may include `GLAKE_HOST_COPY_CLEAN`.
///
/// `GLAKE_INVALID`: a region with this tag and another policy exists; the tag is "default" or begins with "graph ".
///
/// # Safety
/// `tag` is null or a text that ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_region_define(tag: *const c_char, policy: u32, host_copy: u32) -> i32 {
    guard::answer(|| {
        // SAFETY: the caller's promise.
        let tag = unsafe { required(tag, "tag") }?;
        let policy = match policy {
            GLAKE_POLICY_KEEP => Policy::Keep,
            GLAKE_POLICY_SEALED => Policy::Sealed,
            GLAKE_POLICY_DISCARD => Policy::Discard,
            other => {
                return Err(Failure::invalid(format_args!(
                    "policy {other}: 0 (keep), 1 (sealed) and 2 (discard) are there"
                )));
            }
        };
        let clean = host_copy & GLAKE_HOST_COPY_CLEAN != 0;
        let host_copy = match host_copy & !GLAKE_HOST_COPY_CLEAN {
            GLAKE_HOST_COPY_DROP => CopyPolicy::Drop,
            GLAKE_HOST_COPY_RETAIN => CopyPolicy::Retain,
            GLAKE_HOST_COPY_PREPARE => CopyPolicy::Prepare,
            other => {
                return Err(Failure::invalid(format_args!(
                    "host_copy {other}: 0 (drop), 1 (retain) and 2 (prepare) are there"
                )));
            }
        };
        let options = RegionOptions { policy, host_copy, clean, ..RegionOptions::of(tag) };
        Ok(library::process()?.regions().define(options)?)
    })
}

/// Takes back one `glake_region_define` of this tag. Once more than 256 regions have no definition left, those of them without live blocks
/// are forgotten: their tags are unknown then, and their memory is released. Does nothing in a forked child and at the end of the process.
///
/// `GLAKE_INVALID`: no such region, or it was released as often as it was defined.
///
/// # Safety
/// `tag` is null or a text that ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_region_release(tag: *const c_char) -> i32 {
    library::give_up(|process| {
        // SAFETY: the caller's promise.
        let tag = unsafe { required(tag, "tag") }?;
        Ok(process.regions().release(tag)?)
    })
}

/// Makes the calling thread allocate from this region from now on, except for allocations that a private pool takes. Entries nest.
///
/// # Safety
/// `tag` is null or a text that ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_region_push(tag: *const c_char) -> i32 {
    guard::answer(|| {
        // SAFETY: the caller's promise.
        let tag = unsafe { required(tag, "tag") }?;
        Ok(library::process()?.regions().enter(tag)?)
    })
}

/// Leaves the region that the calling thread entered last. Does nothing in a forked child and at the end of the process.
#[unsafe(no_mangle)]
pub extern "C" fn glake_region_pop() -> i32 {
    library::give_up(|process| Ok(process.regions().leave()?))
}

/// Makes the calling thread allocate plain memory from now on (`cuMemAlloc`), also for private pools: it has a legacy IPC handle
/// (`cudaIpcGetMemHandle`), and `cuMemGetAddressRange` returns its whole allocation. It counts like the pool's other memory, never leaves
/// its GPU, and is neither stitched, shared by `glake_share` nor offloaded. Entries nest; a region that is entered later takes precedence.
/// Does not start the library: before the start, it takes effect once the same thread starts it.
#[unsafe(no_mangle)]
pub extern "C" fn glake_plain_push() -> i32 {
    guard::answer(|| {
        match library::started_process()? {
            Some(process) => process.regions().enter_plain(),
            None => EARLY.set(EARLY.get() + 1),
        }
        Ok::<(), Failure>(())
    })
}

thread_local! {
    /// Number of the thread's `glake_plain_push` before the library started.
    static EARLY: Cell<u32> = const { Cell::new(0) };
}

/// Repeats what the thread that starts the library entered before.
pub(crate) fn enter_early(process: &Process) {
    for _ in 0..EARLY.take() {
        process.regions().enter_plain();
    }
}

/// Reverts the calling thread's last `glake_plain_push`. Does nothing in a forked child and at the end of the process.
#[unsafe(no_mangle)]
pub extern "C" fn glake_plain_pop() -> i32 {
    // Entered before another thread started the library.
    if EARLY.get() > 0 {
        EARLY.set(EARLY.get() - 1);
        return GLAKE_OK;
    }
    library::give_up(|process| Ok(process.regions().leave_plain()?))
}

/// Promises not to write to the bytes of a region until it is unsealed; the region serves no allocations meanwhile. With `strict` its
/// memory is mapped read-only, which waits until no use of it runs.
///
/// `GLAKE_INVALID`: its policy is not `GLAKE_POLICY_SEALED`.
///
/// # Safety
/// `tag` is null or a text that ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_region_seal(tag: *const c_char, strict: bool) -> i32 {
    guard::answer(|| {
        // SAFETY: the caller's promise.
        let tag = unsafe { required(tag, "tag") }?;
        Ok(library::process()?.regions().seal(tag, strict)?)
    })
}

/// Ends the seal of a region: its bytes may change again; retained copies of them are released.
///
/// # Safety
/// `tag` is null or a text that ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_region_unseal(tag: *const c_char) -> i32 {
    guard::answer(|| {
        // SAFETY: the caller's promise.
        let tag = unsafe { required(tag, "tag") }?;
        Ok(library::process()?.regions().unseal(tag)?)
    })
}

/// Pins host memory for a region's live bytes ahead, if the region was defined with `GLAKE_HOST_COPY_PREPARE`.
///
/// # Safety
/// `tag` is null or a text that ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_region_prepare(tag: *const c_char) -> i32 {
    guard::answer(|| {
        // SAFETY: the caller's promise.
        let tag = unsafe { required(tag, "tag") }?;
        Ok(library::process()?.regions().prepare(tag)?)
    })
}

/// Fixes the memory of the block that contains an address on its GPU, or ends that; ending it does nothing in a forked child and at the end
/// of the process.
#[unsafe(no_mangle)]
pub extern "C" fn glake_region_fix(pointer: *const c_void, fixed: bool) -> i32 {
    library::give_up_if(!fixed, |process| Ok(process.regions().fix(address(pointer), fixed)?))
}

/// Refills the evicted memory of a region on a device before later work of a stream: work enqueued after this call finds it.
///
/// # Safety
/// `tag` is null or a text that ends with a zero; `stream` is null or a stream of the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_region_wait(tag: *const c_char, device: i32, stream: *mut c_void) -> i32 {
    guard::answer(|| {
        // SAFETY: the caller's promise.
        let tag = unsafe { required(tag, "tag") }?;
        Ok(library::process()?.regions().wait_for(tag, device.into(), self::stream(stream))?)
    })
}

/// Sets the order in which regions are refilled. Other regions follow, in the order of their first allocations.
///
/// # Safety
/// `tags` may be read for `count` texts that end with zeros.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_region_order(tags: *const *const c_char, count: usize) -> i32 {
    guard::answer(|| {
        // SAFETY: the caller's promise.
        let tags = unsafe { texts(tags, count) }?;
        Ok(library::process()?.regions().set_order(&tags)?)
    })
}

/// Returns the tag of the region of a block, to be freed with `glake_string_free`; null if the block is in no region or the pointer is no
/// block, without a change of `glake_last_error`.
#[unsafe(no_mangle)]
pub extern "C" fn glake_region_of(pointer: *const c_void) -> *mut c_char {
    guard::value(std::ptr::null_mut(), || {
        let tag = library::started_process()?.and_then(|process| process.regions().tag_of(address(pointer)));
        tag.map_or(Ok(std::ptr::null_mut()), string)
    })
}

/// Returns every region on every device as a JSON array: "tag", "policy", "host_copy", "sealed", "device" (null: no allocation yet); in
/// bytes "resident", "evicted", "decommitted" (memory released, addresses kept) and "live"; "place" (of most of the evicted bytes),
/// "places" (bytes by place); "clean" (null: idle memory is not copied ahead; in bytes "now", with a copy, and so far "copied", "voided" by
/// uses, allocations and copies, "released" without another copy, "refused" because they had changed outside of any use, "reclaimed" for
/// others); "predicted_refill_seconds". Memory outside of regions is "default", memory of private pools "graph (a, b)". Null on failure;
/// free it with `glake_string_free`.
#[unsafe(no_mangle)]
pub extern "C" fn glake_regions_json() -> *mut c_char {
    guard::value(std::ptr::null_mut(), || {
        let views = library::process()?.regions().views()?;
        string(format!(
            "[{}]",
            views.iter().map(|view| view.json().to_string()).collect::<Vec<_>>().join(",")
        ))
    })
}

/// Reads a required text of the caller.
///
/// # Safety
/// The conditions of [`guard::text`] hold.
pub(crate) unsafe fn required<'a>(text: *const c_char, name: &str) -> Result<&'a str, Failure> {
    // SAFETY: the caller's promise.
    let text = unsafe { guard::text(text, name) }?;
    text.ok_or_else(|| Failure::invalid(format_args!("{name} is null: it must be a text")))
}

/// Reads a list of texts of the caller.
///
/// # Safety
/// `texts` may be read for `count` texts that end with zeros.
pub(crate) unsafe fn texts(texts: *const *const c_char, count: usize) -> Result<Vec<String>, Failure> {
    if texts.is_null() && count > 0 {
        return Err(Failure::invalid("tags is null: it must point to count texts"));
    }
    // SAFETY: not null where there is any, and the caller's promise.
    let texts = if count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(texts, count) } };
    // SAFETY: the caller's promise.
    let owned = |text: &*const c_char| unsafe { required(*text, "a tag") }.map(str::to_owned);
    texts.iter().map(owned).collect()
}

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
