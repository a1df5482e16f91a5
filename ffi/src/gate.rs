//! The gate: separates the program's uses of memory from evictions.

use std::ffi::c_char;

use glake_abi::{GLAKE_WHEN_CLOSED_HOLD, GLAKE_WHEN_CLOSED_REFILL, GLAKE_WHEN_CLOSED_REFUSE};
use glake_runtime::process::{Ballot, Gate, Tags, UseId, WhenClosed};

use crate::region::texts;
use crate::shrink::duration;
use crate::stats::string;
use crate::status::Failure;
use crate::{guard, library};

/// Begins a use of these regions and of all memory outside of regions; with `count` 0, of everything. Until `glake_use_end` none of this
/// memory is evicted: a shrink waits. Any thread may end the use. Uses do not nest: if a shrink waits for a use, another use that begins
/// inside it waits for that shrink.
///
/// `GLAKE_INVALID`: no region has one of these tags; the text lists the existing ones. `GLAKE_CLOSED`: the memory is evicted, and
/// `when_closed` says to refuse. `GLAKE_TIMEOUT`: `timeout_ms` (-1: none) has expired; a refill that the call began continues, and the next
/// use benefits.
///
/// # Safety
/// `tags` may be read for `count` texts that end with zeros; `use` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_use_begin(
    tags: *const *const c_char,
    count: usize,
    when_closed: u32,
    timeout_ms: i64,
    r#use: *mut u64,
) -> i32 {
    guard::answer(|| {
        if r#use.is_null() {
            return Err(Failure::invalid("use is null: it must point to where the use's number goes"));
        }
        // SAFETY: the caller's promise.
        let tags = Tags::of(&unsafe { texts(tags, count) }?);
        let id = library::process()?.regions().begin_use(
            &tags,
            when_closed_of(when_closed)?,
            duration(timeout_ms),
        )?;
        // SAFETY: not null, and the caller's promise.
        unsafe { r#use.write(id.0) };
        Ok(())
    })
}

/// Waits until a use of these regions could begin, without beginning one: no shrink waits for the caller. If a shrink comes first, the next
/// use waits again.
///
/// Returns the same statuses as `glake_use_begin`.
///
/// # Safety
/// `tags` may be read for `count` texts that end with zeros.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_gate_wait(
    tags: *const *const c_char,
    count: usize,
    when_closed: u32,
    timeout_ms: i64,
) -> i32 {
    guard::answer(|| {
        // SAFETY: the caller's promise.
        let tags = Tags::of(&unsafe { texts(tags, count) }?);
        library::process()?.regions().wait_for_gate(
            &tags,
            when_closed_of(when_closed)?,
            duration(timeout_ms),
        )?;
        Ok(())
    })
}

fn when_closed_of(number: u32) -> Result<WhenClosed, Failure> {
    match number {
        GLAKE_WHEN_CLOSED_REFILL => Ok(WhenClosed::Refill),
        GLAKE_WHEN_CLOSED_HOLD => Ok(WhenClosed::Hold),
        GLAKE_WHEN_CLOSED_REFUSE => Ok(WhenClosed::Refuse),
        other => Err(Failure::invalid(format_args!(
            "when_closed {other}: 0 (refill), 1 (hold) and 2 (refuse) are there"
        ))),
    }
}

/// Ends a use of memory. Does nothing in a forked child and at the end of the process.
///
/// `GLAKE_INVALID`: the use was ended before, or never begun.
#[unsafe(no_mangle)]
pub extern "C" fn glake_use_end(r#use: u64) -> i32 {
    library::give_up(|process| Ok(process.regions().gate().end_use(UseId(r#use))?))
}

/// Marks a safe point between two steps of a use: the thread needs none of the use's memory now, and work that it has enqueued completes
/// without its help. If a shrink waits for the use, the thread waits here until all of the memory is back. The shrink proceeds once all
/// threads of the use wait and the work of the process on its GPUs has completed. Without a waiting shrink the call costs one load. Does
/// nothing for a use that has ended, in a forked child, and at the end of the process. Returns whether it waited. Not under a capture.
#[unsafe(no_mangle)]
pub extern "C" fn glake_safepoint(r#use: u64) -> i32 {
    i32::from(with_gate(|gate| gate.safepoint(UseId(r#use))))
}

/// Returns whether a shrink waits for uses or is in progress; if not, safe points have nothing to do.
#[unsafe(no_mangle)]
pub extern "C" fn glake_safepoint_wanted() -> bool {
    with_gate(Gate::meets_safe_point)
}

/// Arrives at a safe point without waiting: the first half of `glake_safepoint`. Returns 1 if the thread has to wait, with
/// `glake_safepoint_go_on` until that returns 1.
#[unsafe(no_mangle)]
pub extern "C" fn glake_safepoint_arrive(r#use: u64) -> i32 {
    i32::from(with_gate(|gate| gate.arrive(UseId(r#use))))
}

/// Leaves a safe point: the second half of `glake_safepoint`. Waits at most `timeout_ms` (-1: no timeout) until all memory of the use is
/// back. Returns 0 if the timeout expired first; the thread then has to call again before it continues.
#[unsafe(no_mangle)]
pub extern "C" fn glake_safepoint_go_on(r#use: u64, timeout_ms: i64) -> i32 {
    let over = guard::value(true, || Ok(library::started_process()?.is_none() || library::is_over()));
    i32::from(over || with_gate(|gate| gate.go_on(UseId(r#use), duration(timeout_ms))))
}

/// Returns whether a shrink waits for this use, which may be parked now because it has run for its quantum.
#[unsafe(no_mangle)]
pub extern "C" fn glake_use_wanted(r#use: u64) -> bool {
    with_gate(|gate| gate.wants(UseId(r#use)))
}

/// Arrives at a safe point like `glake_safepoint_arrive`, for a thread that must first agree with others, such as one of several ranks: no
/// memory of the use moves before `glake_vote_cast`. Returns 1 if the thread has to wait: it calls `glake_vote_asked` until it is asked or
/// the shrink has ended, and votes.
#[unsafe(no_mangle)]
pub extern "C" fn glake_vote_arrive(r#use: u64) -> i32 {
    i32::from(with_gate(|gate| gate.arrive_to_vote(UseId(r#use))))
}

/// Waits at most `timeout_ms` until a use that has arrived to vote is asked for its vote. Returns 1 if it is asked, and all work of the
/// parked uses has completed; 0 if not yet; -1 if no shrink waits for it any more.
#[unsafe(no_mangle)]
pub extern "C" fn glake_vote_asked(r#use: u64, timeout_ms: i64) -> i32 {
    let timeout = duration(timeout_ms.max(0)).unwrap_or_default();
    match ask_gate(|gate| gate.ballot(UseId(r#use), timeout)) {
        Some(Ballot::NotYet) => 0,
        Some(Ballot::Asked) => 1,
        Some(Ballot::Over) | None => -1,
    }
}

/// Votes for a use that has arrived to vote. A yes, once asked, lets its memory move, and the thread waits with `glake_safepoint_go_on`
/// until it is back. After a no the thread continues at once, the shrink ends with `GLAKE_CLOSED`, nothing has moved, and the use is not
/// parked again for five seconds. Returns 1 if the vote counts. 0 for a yes: the use is not being asked, and `glake_vote_asked` tells
/// whether the shrink has ended or the vote is too early. 0 for a no: the use had agreed before, and the thread waits with
/// `glake_safepoint_go_on`.
#[unsafe(no_mangle)]
pub extern "C" fn glake_vote_cast(r#use: u64, yes: bool) -> i32 {
    i32::from(with_gate(|gate| gate.vote(UseId(r#use), yes)))
}

/// Adds a thread to a use: the use is parked only when this thread is at a safe point too. Ended by `glake_use_leave` or with the use.
///
/// Does nothing in a forked child and at the end of the process. `GLAKE_CLOSED`: the use is parked now, and the thread was not added: it
/// should begin its own use. `GLAKE_INVALID`: no such use.
#[unsafe(no_mangle)]
pub extern "C" fn glake_use_join(r#use: u64) -> i32 {
    library::give_up(|process| match process.regions().gate().join_use(UseId(r#use))? {
        true => Ok(()),
        false => {
            Err(Failure::closed("the use is parked at a safe point: begin one of its own for this thread"))
        }
    })
}

/// Removes a thread from a use that it joined. Does nothing in a forked child and at the end of the process.
///
/// `GLAKE_INVALID`: no such use.
#[unsafe(no_mangle)]
pub extern "C" fn glake_use_leave(r#use: u64) -> i32 {
    library::give_up(|process| Ok(process.regions().gate().leave_use(UseId(r#use))?))
}

/// Calls the gate of a serving process; returns false if the process does not serve.
#[inline]
fn with_gate(ask: impl FnOnce(&Gate) -> bool) -> bool {
    ask_gate(ask).unwrap_or_default()
}

/// Calls the gate of a serving process; returns `None` if the process does not serve.
#[inline]
fn ask_gate<T>(ask: impl FnOnce(&Gate) -> T) -> Option<T> {
    match library::started_process() {
        Ok(Some(process)) if !library::is_over() => {
            guard::value(None, || Ok(Some(ask(process.regions().gate()))))
        }
        _ => None,
    }
}

/// Returns the state of the gate as a JSON object: "open", "uses" (number of open uses), "parked" (number of these waiting at safe points),
/// "closing" (pending evictions: arrays of tags, null for everything), "closed" (tags of regions with evicted memory). Null on failure;
/// free it with `glake_string_free`.
#[unsafe(no_mangle)]
pub extern "C" fn glake_gate_json() -> *mut c_char {
    guard::value(std::ptr::null_mut(), || {
        string(library::process()?.regions().gate().view().json().to_string())
    })
}
