//! Gate that keeps the program's work away from evicted memory.
//!
//! ```text
//! active(tags) ─► admit ─► the work ─► leave
//!                   ▲ waits, requests a refill, or fails                state: pure; here: one lock and one condition
//! shrink ─► close ──┴─► no use of these tags runs ─► moves ─► dropped: open, except for evicted memory
//! safepoint ─► one load ─ a shrink is closing ─► parked: counts as not running until all of its memory is back
//!                                              └ with a vote: asked before anything moves, and may continue instead
//! ```
//!
//! The gate does not store which memory is evicted: it queries the regions each time a use wants to begin.
//!
//! A caller that only waits for its tags ([`Gate::wait`]) never counts as a use.
//!
//! Invariants: every change that can let a waiter continue is made under the lock or, for evictions, before [`Gate::changed`] takes it, and
//! wakes all waiters. The lock is held for bookkeeping only.

mod state;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

pub use state::{Ballot, Tags, UseId};
use state::{ClosingId, GateState, Obstacle};
pub(super) use state::{DEFAULT, Evicted, GRAPH, is_reserved};

use super::activity::ActivityWriter;
use super::{ProcessError, Result};
use crate::sync::{Condvar, Mutex, MutexGuard};

/// Maximum time for which a beginning use lets parked ones resume first; their threads wake up long before.
const PARKED_FIRST: Duration = Duration::from_millis(100);

/// Time for which uses are not parked again after a park in vain: their work did not end, or they voted against the move.
pub(super) const PARKED_IN_VAIN: Duration = Duration::from_secs(5);

/// Timeout of a closing for votes; longer than any voter waits for other ranks, because a use that voted for a move is moved.
const VOTES: Duration = Duration::from_secs(300);

/// Behaviour of a use that begins while its tags are closed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenClosed {
    /// Requests the refill itself and waits for it.
    #[default]
    Refill,
    /// Waits until another caller refills.
    Hold,
    /// Fails with [`ProcessError::Closed`].
    Refuse,
}

/// State of the gate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GateView {
    /// Number of uses that have begun and not ended.
    pub uses: usize,
    /// Number of those uses that wait at safe points.
    pub parked: usize,
    /// Tags of each closing in progress.
    pub closing: Vec<Tags>,
    /// Tags with evicted memory.
    pub closed: Vec<String>,
}

impl GateView {
    /// Returns the state as JSON for the C interface.
    pub fn json(&self) -> Value {
        let tags = |tags: &Tags| match tags {
            Tags::All => Value::Null,
            Tags::These(tags) => json!(tags),
        };
        json!({
            "open": self.closing.is_empty() && self.closed.is_empty(),
            "uses": self.uses,
            "parked": self.parked,
            "closing": self.closing.iter().map(tags).collect::<Vec<Value>>(),
            "closed": self.closed,
        })
    }
}

/// Gate of a process: admits uses and closes tags for moves.
#[derive(Debug)]
pub struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
    memory: Arc<dyn Evicted>,
    /// Minimum time for which a use runs between two parks.
    quantum: Duration,
    /// Number of closings in progress, checked by every safe point.
    closings: AtomicUsize,
    /// Set when the process ends: closings no longer wait.
    stopped: AtomicBool,
    activity: Arc<ActivityWriter>,
}

/// Result of a request to begin a use.
#[derive(Debug)]
pub(super) enum Admission<T> {
    Admitted(T),
    /// Memory of these tags is evicted; the caller must refill it.
    Evicted(Vec<String>),
}

/// Guard of closed tags: no use of them runs while it exists.
#[derive(Debug)]
pub(in super::super) struct Closing<'g> {
    gate: &'g Gate,
    id: ClosingId,
}

impl Gate {
    /// Creates an open gate. `memory` reports the evicted tags; `quantum` is the minimum time between two parks.
    pub(super) fn new(memory: Arc<dyn Evicted>, quantum: Duration, activity: Arc<ActivityWriter>) -> Gate {
        let (state, changed) = (Mutex::default(), Condvar::default());
        let (closings, stopped) = (AtomicUsize::new(0), AtomicBool::new(false));
        Gate { state, changed, memory, quantum, closings, stopped, activity }
    }

    /// Publishes the number of running uses (one load unless an agent reads it).
    #[inline]
    fn note_uses(&self, state: &GateState) {
        if self.activity.is_on() && state.is_any_running() != self.activity.says_busy() {
            let running = state.uses() - state.parked();
            self.activity.uses(running as u64, state.begun());
        }
    }

    /// Publishes the running uses again, for an agent that has just connected.
    pub(super) fn tell_activity(&self) {
        let state = self.state.lock();
        let running = state.uses() - state.parked();
        self.activity.uses(running as u64, state.begun());
    }

    /// Ends all waits for uses because the process ends.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.changed();
    }

    /// Returns the state of the gate.
    pub fn view(&self) -> GateView {
        let state = self.state.lock();
        let (closing, closed) = (state.closings().cloned().collect(), self.memory.evicted(&Tags::All));
        GateView { uses: state.uses(), parked: state.parked(), closing, closed }
    }

    /// Returns the number of the last use of a tag; `None` if one runs or a closing touches the tag.
    pub(super) fn idle_since(&self, tag: &str) -> Option<u64> {
        let state = self.state.lock();
        state.is_idle(tag).then(|| state.last_use_of(tag))
    }

    /// Returns the number of the last use of a tag, running or not. The number changes when a use begins or resumes.
    pub(super) fn last_use_of(&self, tag: &str) -> u64 {
        self.state.lock().last_use_of(tag)
    }

    /// Returns whether no use runs and no closing is in progress.
    pub(super) fn is_idle(&self) -> bool {
        self.state.lock().is_all_idle()
    }

    /// Begins a use. Waits while its tags are being closed; if they are evicted, `when` decides.
    ///
    /// # Errors
    /// [`ProcessError::Closed`]; [`ProcessError::HeldTooLong`].
    pub(super) fn admit(
        &self,
        tags: &Tags,
        when: WhenClosed,
        timeout: Option<Duration>,
    ) -> Result<Admission<UseId>> {
        self.pass(tags, when, timeout, |state, parked_first| state.begin(tags, &*self.memory, parked_first))
    }

    /// Waits until a use could begin, but begins none; a later begin may meet another closing.
    ///
    /// # Errors
    /// As [`Gate::admit`].
    pub(super) fn wait(
        &self,
        tags: &Tags,
        when: WhenClosed,
        timeout: Option<Duration>,
    ) -> Result<Admission<()>> {
        let attempt = |state: &mut GateState, _| state.obstacle(tags, &*self.memory).map_or(Ok(()), Err);
        self.pass(tags, when, timeout, attempt)
    }

    fn pass<T>(
        &self,
        tags: &Tags,
        when: WhenClosed,
        timeout: Option<Duration>,
        attempt: impl Fn(&mut GateState, bool) -> std::result::Result<T, Obstacle>,
    ) -> Result<Admission<T>> {
        let wait = Wait::of(timeout);
        // Deadline of the precedence of parked uses, set once no other obstacle is left.
        let mut patience = None;
        let mut state = self.state.lock();
        loop {
            let parked_first =
                when != WhenClosed::Refuse && patience.is_none_or(|until| Instant::now() < until);
            let closed = match attempt(&mut state, parked_first) {
                Ok(passed) => {
                    self.note_uses(&state);
                    return Ok(Admission::Admitted(passed));
                }
                Err(Obstacle::Parked) => {
                    let until = Instant::now() + PARKED_FIRST;
                    let until = *patience.get_or_insert(wait.end.map_or(until, |end| end.min(until)));
                    self.changed.wait_until(&mut state, until);
                    continue;
                }
                Err(Obstacle::Closing) => None,
                Err(Obstacle::Evicted(closed)) => Some(closed),
            };
            match (when, closed) {
                (WhenClosed::Refuse, closed) => {
                    let tags = closed.map_or_else(|| tags.clone(), |closed| Tags::of(&closed));
                    return Err(ProcessError::Closed { tags });
                }
                (WhenClosed::Refill, Some(closed)) => return Ok(Admission::Evicted(closed)),
                (WhenClosed::Refill, None) | (WhenClosed::Hold, _) => {}
            }
            if !wait.on(&self.changed, &mut state) {
                return Err(ProcessError::HeldTooLong { tags: tags.clone(), waited: wait.begin.elapsed() });
            }
        }
    }

    /// Ends the use with this number.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the use does not exist.
    pub fn end_use(&self, id: UseId) -> Result<()> {
        let mut state = self.state.lock();
        let left = state.end_use(id);
        self.note_uses(&state);
        drop(state);
        self.changed.notify_all();
        if left { Ok(()) } else { Err(ProcessError::unknown_use(id)) }
    }

    /// Returns whether a caller waits for uses to end or moves their memory (one relaxed load).
    #[inline]
    pub fn wants_safepoints(&self) -> bool {
        self.closings.load(Ordering::Relaxed) > 0
    }

    /// Marks a safe point of a use: its thread needs none of its memory, and all work enqueued by it ends without the thread. If a shrink
    /// waits for the use, the thread waits until all memory of the use is back. The use is parked while all its threads wait. Returns
    /// whether the thread waited.
    #[inline]
    pub fn safepoint(&self, id: UseId) -> bool {
        self.meets_safe_point() && self.park(id)
    }

    /// Returns [`Gate::wants_safepoints`] and records that the program has safe points.
    #[inline]
    pub fn meets_safe_point(&self) -> bool {
        self.activity.met_safe_point();
        self.wants_safepoints()
    }

    #[cold]
    fn park(&self, id: UseId) -> bool {
        self.arrive(id) && self.go_on(id, None)
    }

    /// Returns whether a shrink waits for this use and it may be parked now.
    pub fn wants(&self, id: UseId) -> bool {
        self.wants_safepoints() && self.state.lock().wants(id, Instant::now())
    }

    /// Arrives like [`Gate::arrive`], but nothing of the use moves before [`Gate::vote`]. For uses that must first agree with other ranks.
    pub fn arrive_to_vote(&self, id: UseId) -> bool {
        let mut state = self.state.lock();
        let arrived = state.arrive_to_vote(id, Instant::now());
        self.note_uses(&state);
        drop(state);
        if arrived {
            self.changed.notify_all();
        }
        arrived
    }

    /// Returns whether the use must vote: the work of all parked uses has ended. Waits for that up to `timeout`.
    pub fn ballot(&self, id: UseId, timeout: Duration) -> Ballot {
        let wait = Wait::of(Some(timeout));
        let mut state = self.state.lock();
        loop {
            let ballot = state.ballot(id);
            if ballot != Ballot::NotYet || !wait.on(&self.changed, &mut state) {
                return ballot;
            }
        }
    }

    /// Votes for a use that was asked. With `yes` its memory moves and its threads keep waiting; otherwise the thread continues at once and
    /// the use is not parked for a while. Returns `false` if the vote came too late: after a yes nothing moves, after a no the use has
    /// already agreed. The thread must then keep waiting with [`Gate::go_on`].
    pub fn vote(&self, id: UseId, yes: bool) -> bool {
        let mut state = self.state.lock();
        let heard = match yes {
            true => state.agree(id),
            false => state.refuse(id, Instant::now() + PARKED_IN_VAIN),
        };
        self.note_uses(&state);
        drop(state);
        self.changed.notify_all();
        heard
    }

    /// Performs the first half of [`Gate::safepoint`]. Returns whether the thread must wait, with [`Gate::go_on`], until that returns
    /// `true`.
    pub fn arrive(&self, id: UseId) -> bool {
        let mut state = self.state.lock();
        let arrived = state.arrive(id, Instant::now());
        self.note_uses(&state);
        drop(state);
        if arrived {
            self.changed.notify_all();
        }
        arrived
    }

    /// Waits until an arrived thread can continue. Returns `false` after `timeout`; the thread must then wait again.
    pub fn go_on(&self, id: UseId, timeout: Option<Duration>) -> bool {
        let wait = Wait::of(timeout);
        let mut state = self.state.lock();
        while !state.can_go_on(id, &*self.memory) {
            if !wait.on(&self.changed, &mut state) {
                return false;
            }
        }
        state.go_on(id, Instant::now() + self.quantum);
        self.note_uses(&state);
        drop(state);
        // Beginning uses wait for the parked ones.
        self.changed.notify_all();
        true
    }

    /// Adds a thread to a use, which is then parked only once this thread is at a safe point too. Returns `false` if the use is parked now:
    /// the thread was not added and must begin a use of its own.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the use does not exist.
    pub fn join_use(&self, id: UseId) -> Result<bool> {
        self.state.lock().join(id).ok_or_else(|| ProcessError::unknown_use(id))
    }

    /// Removes a thread from a use that it joined.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the use does not exist.
    pub fn leave_use(&self, id: UseId) -> Result<()> {
        let mut state = self.state.lock();
        let left = state.leave(id);
        self.note_uses(&state);
        drop(state);
        self.changed.notify_all();
        if left { Ok(()) } else { Err(ProcessError::unknown_use(id)) }
    }

    /// Lets no use of these tags begin, and waits until the running ones have ended or are parked.
    ///
    /// # Errors
    /// [`ProcessError::StillUsed`] after the timeout: the gate is open again.
    pub(super) fn close(&self, tags: &Tags, timeout: Option<Duration>) -> Result<Closing<'_>> {
        self.close_while(tags, timeout, &|| true)
    }

    /// Closes like [`Gate::close`], but gives up once `goes_on` returns `false`; it is called regularly.
    ///
    /// # Errors
    /// As [`Gate::close`].
    pub(super) fn close_while(
        &self,
        tags: &Tags,
        timeout: Option<Duration>,
        goes_on: &dyn Fn() -> bool,
    ) -> Result<Closing<'_>> {
        let wait = Wait::of(timeout);
        let mut state = self.state.lock();
        state.release(&*self.memory);
        self.note_uses(&state);
        let closing = Closing { gate: self, id: state.close(tags.clone()) };
        self.closings.fetch_add(1, Ordering::Relaxed);
        loop {
            let uses = state.running(closing.id);
            if uses == 0 {
                drop(state);
                return Ok(closing);
            }
            let is_stopped = self.stopped.load(Ordering::Acquire) || !goes_on();
            if is_stopped || !wait.on(&self.changed, &mut state) {
                drop(state);
                drop(closing);
                return Err(ProcessError::StillUsed {
                    tags: tags.clone(),
                    uses,
                    waited: wait.begin.elapsed(),
                });
            }
        }
    }

    /// Wakes all waiters because the evicted memory has changed.
    pub(super) fn changed(&self) {
        // A waiter that looked before the change and does not wait yet holds the lock.
        drop(self.state.lock());
        self.changed.notify_all();
    }
}

impl Closing<'_> {
    /// Returns the number of uses parked for this closing.
    pub(super) fn parked(&self) -> usize {
        self.gate.state.lock().parked_for(self.id)
    }

    /// Asks parked uses that vote and waits for their answers. Returns whether the closed memory may move.
    pub(super) fn is_agreed(&self) -> bool {
        let wait = Wait::of(Some(VOTES));
        let mut state = self.gate.state.lock();
        let mut told = false;
        loop {
            let open = state.open_votes(self.id);
            if state.running(self.id) > 0 {
                state.stop_asking(self.id);
                return false;
            }
            if open == 0 {
                return true;
            }
            if !told {
                self.gate.changed.notify_all();
                told = true;
            }
            if !wait.on(&self.gate.changed, &mut state) {
                state.stop_asking(self.id);
                return false;
            }
        }
    }

    /// Excludes the parked uses of this closing from parking for `pause`, because their work does not end.
    pub(super) fn hold_off(&self, pause: Duration) {
        self.gate.state.lock().hold_off(self.id, Instant::now() + pause);
    }
}

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.gate.closings.fetch_sub(1, Ordering::Relaxed);
        self.gate.state.lock().end(self.id);
        self.gate.changed.notify_all();
    }
}

/// Wait with an optional deadline.
struct Wait {
    begin: Instant,
    /// Deadline; `None` waits forever.
    end: Option<Instant>,
}

impl Wait {
    fn of(timeout: Option<Duration>) -> Wait {
        let begin = Instant::now();
        Wait { begin, end: timeout.and_then(|timeout| begin.checked_add(timeout)) }
    }

    /// Waits for a change; returns `false` after the deadline.
    fn on<T>(&self, changed: &Condvar, guard: &mut MutexGuard<'_, T>) -> bool {
        match self.end {
            None => changed.wait(guard),
            Some(end) if end <= Instant::now() => return false,
            // The condition is checked once more after the deadline.
            Some(end) => _ = changed.wait_until(guard, end),
        }
        true
    }
}

#[cfg(test)]
#[cfg(schedules)]
mod schedules;

#[cfg(test)]
#[cfg(not(schedules))]
mod tests;
