//! The gate: a program's uses of memory, and what is evicted, kept apart.

use std::ffi::c_char;

use glake_abi::{GLAKE_WHEN_CLOSED_HOLD, GLAKE_WHEN_CLOSED_REFILL, GLAKE_WHEN_CLOSED_REFUSE};
use glake_runtime::process::{Ballot, Gate, Tags, UseId, WhenClosed};

use crate::region::texts;
use crate::shrink::duration;
use crate::stats::string;
use crate::status::Failure;
use crate::{guard, library};

/// Begins a use of these regions and of all memory that lies in none; of everything where `count` is 0. Until `glake_use_end`
/// nothing of that leaves: a shrink waits. Any thread may end it. Uses do not nest: one that begins under another, while a shrink
/// waits for the other, waits for that shrink.
///
/// `GLAKE_INVALID`: there is no region of one of these tags; the text says which are there. `GLAKE_CLOSED`: it is evicted, and
/// `when_closed` says to refuse it, or `timeout_ms` (-1: none) is over. A refill that it began goes on then, and the next use finds
/// it done.
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

/// Waits until a use of these regions could begin, and begins none: no shrink waits for it. A shrink that comes before the use that
/// begins next makes that one wait again.
///
/// Answers as `glake_use_begin`.
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

/// Ends a use. In a forked child and at the end of the process nothing is done.
///
/// `GLAKE_INVALID`: it was ended before, or never begun.
#[unsafe(no_mangle)]
pub extern "C" fn glake_use_end(r#use: u64) -> i32 {
    library::give_up(|process| Ok(process.regions().gate().end_use(UseId(r#use))?))
}

/// A place between two steps of a use, where its thread needs none of its memory, and where the work that it has enqueued ends without
/// it. Where a shrink waits for the use, the thread waits here until all of its memory is back; the shrink goes on once all threads of
/// the use wait so, and the work of the process on its GPUs has ended. Where nobody waits it is one load. Nothing is done for a use that
/// is over, in a forked child and at the end of the process. Answers whether it waited. Not under a capture.
#[unsafe(no_mangle)]
pub extern "C" fn glake_safepoint(r#use: u64) -> i32 {
    i32::from(with_gate(|gate| gate.safepoint(UseId(r#use))))
}

/// Whether a shrink waits for uses, or is under way: where not, no safe point has anything to do.
#[unsafe(no_mangle)]
pub extern "C" fn glake_safepoint_wanted() -> bool {
    with_gate(Gate::meets_safe_point)
}

/// The first half of `glake_safepoint`, which waits for nothing: 1 where the thread has to wait, with `glake_safepoint_go_on` until that
/// answers 1.
#[unsafe(no_mangle)]
pub extern "C" fn glake_safepoint_arrive(r#use: u64) -> i32 {
    i32::from(with_gate(|gate| gate.arrive(UseId(r#use))))
}

/// The second half: waits at most `timeout_ms` (-1: as long as it takes) until all memory of the use is back. 0: it is not, and the
/// thread has to ask again before it goes on.
#[unsafe(no_mangle)]
pub extern "C" fn glake_safepoint_go_on(r#use: u64, timeout_ms: i64) -> i32 {
    let over = guard::value(true, || Ok(library::started_process()?.is_none() || library::is_over()));
    i32::from(over || with_gate(|gate| gate.go_on(UseId(r#use), duration(timeout_ms))))
}

/// Whether a shrink waits for this use, which may be parked now: it has run for its quantum.
#[unsafe(no_mangle)]
pub extern "C" fn glake_use_wanted(r#use: u64) -> bool {
    with_gate(|gate| gate.wants(UseId(r#use)))
}

/// As `glake_safepoint_arrive`, for a thread that first has to hear others, as a rank of several: nothing of the use moves before
/// `glake_vote_cast`. 1 where the thread has to wait: it asks `glake_vote_asked` until it is asked, or the shrink is over, and votes.
#[unsafe(no_mangle)]
pub extern "C" fn glake_vote_arrive(r#use: u64) -> i32 {
    i32::from(with_gate(|gate| gate.arrive_to_vote(UseId(r#use))))
}

/// Waits at most `timeout_ms` until a use that has arrived to vote is asked for it. 1: it is, the work of all that is parked has ended.
/// 0: not yet. -1: no shrink waits for it any more.
#[unsafe(no_mangle)]
pub extern "C" fn glake_vote_asked(r#use: u64, timeout_ms: i64) -> i32 {
    let timeout = duration(timeout_ms.max(0)).unwrap_or_default();
    match ask_gate(|gate| gate.ballot(UseId(r#use), timeout)) {
        Some(Ballot::NotYet) => 0,
        Some(Ballot::Asked) => 1,
        Some(Ballot::Over) | None => -1,
    }
}

/// A use that has arrived to vote says whether its memory may move: with yes, once it is asked, it does, and the thread waits with
/// `glake_safepoint_go_on` until it is back. With no the thread goes on at once, the shrink is `GLAKE_CLOSED`, nothing has moved, and the
/// use is not parked again for five seconds. Answers 1 where the vote is heard. 0 for a yes: the use is not asked, so
/// `glake_vote_asked` tells whether the shrink is over or the vote is too early. 0 for a no: the use had agreed before, and the thread
/// waits with `glake_safepoint_go_on`.
#[unsafe(no_mangle)]
pub extern "C" fn glake_vote_cast(r#use: u64, yes: bool) -> i32 {
    i32::from(with_gate(|gate| gate.vote(UseId(r#use), yes)))
}

/// One more thread is inside a use: it is parked only when that one is at a safe point too. Ended by `glake_use_leave` or with the use.
///
/// In a forked child and at the end of the process nothing is done. `GLAKE_CLOSED`: it is parked now, and the thread is not inside: it
/// begins a use of its own. `GLAKE_INVALID`: there is no such use.
#[unsafe(no_mangle)]
pub extern "C" fn glake_use_join(r#use: u64) -> i32 {
    library::give_up(|process| match process.regions().gate().join_use(UseId(r#use))? {
        true => Ok(()),
        false => {
            Err(Failure::closed("the use is parked at a safe point: begin one of its own for this thread"))
        }
    })
}

/// A thread that joined a use is no longer inside it. In a forked child and at the end of the process nothing is done.
///
/// `GLAKE_INVALID`: there is no such use.
#[unsafe(no_mangle)]
pub extern "C" fn glake_use_leave(r#use: u64) -> i32 {
    library::give_up(|process| Ok(process.regions().gate().leave_use(UseId(r#use))?))
}

/// What the gate of a process that serves answers; false where none does.
#[inline]
fn with_gate(ask: impl FnOnce(&Gate) -> bool) -> bool {
    ask_gate(ask).unwrap_or_default()
}

/// What the gate of a process that serves answers.
#[inline]
fn ask_gate<T>(ask: impl FnOnce(&Gate) -> T) -> Option<T> {
    match library::started_process() {
        Ok(Some(process)) if !library::is_over() => {
            guard::value(None, || Ok(Some(ask(process.regions().gate()))))
        }
        _ => None,
    }
}

/// How it stands with the gate, as a JSON object: "open", "uses" (how many have begun), "parked" (how many of these wait at
/// safe points), "closing" (what is being closed: arrays of tags,
/// null for everything), "closed" (tags of which memory is evicted). Null on failure; to be given to `glake_string_free`.
#[unsafe(no_mangle)]
pub extern "C" fn glake_gate_json() -> *mut c_char {
    guard::value(std::ptr::null_mut(), || {
        string(library::process()?.regions().gate().view().json().to_string())
    })
}
