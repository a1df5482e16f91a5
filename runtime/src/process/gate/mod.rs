//! Keeps the program's work and what is evicted apart.
//!
//! ```text
//! active(tags) ─► admit ─► the work ─► leave
//!                   ▲ waits, asks for a refill, or is refused             state: pure; here: one lock and one condition
//! shrink ─► close ──┴─► no use of these tags runs ─► moves ─► dropped: open, but for what is evicted
//! safepoint ─► one load ─ somebody closes ─► parked: counts as not running, until all of its memory is back
//!                                              └ on a vote: asked before anything moves, and may go on instead
//! ```
//!
//! What is evicted the gate does not remember: it asks, each time somebody wants to begin.
//!
//! Who only waits until its tags are there ([`Gate::wait`]) is no use at any time.
//!
//! Invariants: what can let somebody go on is said under the lock, or, of what is evicted, before [`Gate::changed`] takes it; and
//! everybody who waits is woken. The lock is held for bookkeeping only.

mod last_uses;
mod state;
mod tags;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

pub(super) use state::Evicted;
pub use state::{Ballot, UseId};
use state::{ClosingId, GateState, Obstacle};
pub use tags::Tags;
pub(super) use tags::{DEFAULT, GRAPH, is_reserved};

use super::agent::ActivityWriter;
use super::{ProcessError, Result};
use crate::sync::{Condvar, Mutex, MutexGuard};

/// How long a use that begins lets parked ones go on first: they are awake long before, if their threads are there.
const PARKED_FIRST: Duration = Duration::from_millis(100);

/// How long uses are not parked again that were parked in vain: their work did not end, or they voted against it.
pub(super) const PARKED_IN_VAIN: Duration = Duration::from_secs(5);

/// How long a closing waits for votes at most. Longer than any who votes waits for others: who has voted for a move is moved.
const VOTES: Duration = Duration::from_secs(300);

/// What a use does that begins while its tags are closed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenClosed {
    /// It asks for the refill itself, and waits for it.
    #[default]
    Refill,
    /// It waits until somebody refills.
    Hold,
    /// It is refused.
    Refuse,
}

/// How it stands with the gate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GateView {
    /// Uses that have begun and not ended.
    pub uses: usize,
    /// Of these, uses that wait at safe points.
    pub parked: usize,
    /// What is being closed.
    pub closing: Vec<Tags>,
    /// Tags of which some memory is evicted.
    pub closed: Vec<String>,
}

impl GateView {
    /// As the C interface gives it.
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

/// The gate of a process.
#[derive(Debug)]
pub struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
    memory: Arc<dyn Evicted>,
    /// How long a use runs at least between two parks.
    quantum: Duration,
    /// Closings under way: what a safe point looks at.
    closings: AtomicUsize,
    /// The process ends: nothing is waited for to be closed.
    stopped: AtomicBool,
    activity: Arc<ActivityWriter>,
}

/// What a use that wants to begin finds.
#[derive(Debug)]
pub(super) enum Admission<T> {
    Admitted(T),
    /// These are evicted, and whoever asked shall bring them back.
    Evicted(Vec<String>),
}

/// Tags that are closed while this lives: no use of them runs.
#[derive(Debug)]
pub(in super::super) struct Closing<'g> {
    gate: &'g Gate,
    id: ClosingId,
}

impl Gate {
    /// Open, but for what of this memory is evicted.
    pub(super) fn new(memory: Arc<dyn Evicted>, quantum: Duration, activity: Arc<ActivityWriter>) -> Gate {
        let (state, changed) = (Mutex::default(), Condvar::default());
        let (closings, stopped) = (AtomicUsize::new(0), AtomicBool::new(false));
        Gate { state, changed, memory, quantum, closings, stopped, activity }
    }

    /// Uses may have begun to run, or run no more: one load, but where an agent reads it.
    #[inline]
    fn note_uses(&self, state: &GateState) {
        if self.activity.is_on() && state.is_any_running() != self.activity.says_busy() {
            let running = state.uses() - state.parked();
            self.activity.uses(running as u64, state.begun());
        }
    }

    /// Says anew what runs, for who reads it from now on.
    pub(super) fn tell_activity(&self) {
        let state = self.state.lock();
        let running = state.uses() - state.parked();
        self.activity.uses(running as u64, state.begun());
    }

    /// The process ends: who waits for uses to end waits no more.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.changed();
    }

    /// How it stands.
    pub fn view(&self) -> GateView {
        let state = self.state.lock();
        let (closing, closed) = (state.closings().cloned().collect(), self.memory.evicted(&Tags::All));
        GateView { uses: state.uses(), parked: state.parked(), closing, closed }
    }

    /// The number of the last use of a tag, if none of it runs and nothing of it leaves or is about to.
    pub(super) fn idle_since(&self, tag: &str) -> Option<u64> {
        let state = self.state.lock();
        state.is_idle(tag).then(|| state.last_use_of(tag))
    }

    /// The number of the last use of a tag, whether it runs or not: another one, once a use begins or goes on.
    pub(super) fn last_use_of(&self, tag: &str) -> u64 {
        self.state.lock().last_use_of(tag)
    }

    /// Whether no use runs, and nothing leaves or is about to.
    pub(super) fn is_idle(&self) -> bool {
        self.state.lock().is_all_idle()
    }

    /// Begins a use. It waits while its tags are being closed, and as `when` says where they are closed.
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

    /// Waits until a use could begin, and begins none: it may meet another closing when it does.
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
        // Until when parked uses go first, once nothing else is in the way.
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

    /// Ends a use.
    ///
    /// # Errors
    /// [`ProcessError::UnknownUse`].
    pub fn end_use(&self, id: UseId) -> Result<()> {
        let mut state = self.state.lock();
        let left = state.end_use(id);
        self.note_uses(&state);
        drop(state);
        self.changed.notify_all();
        if left { Ok(()) } else { Err(ProcessError::UnknownUse { id: id.0 }) }
    }

    /// Whether anybody waits for uses, or moves what they use: one relaxed load.
    #[inline]
    pub fn wants_safepoints(&self) -> bool {
        self.closings.load(Ordering::Relaxed) > 0
    }

    /// A thread of a use is at a point at which it needs none of its memory, and all work that it has enqueued ends without it. Where a
    /// shrink waits for the use, the thread waits here until all memory of the use is back; the use is parked while all its threads do.
    /// Answers whether it waited.
    #[inline]
    pub fn safepoint(&self, id: UseId) -> bool {
        self.meets_safe_point() && self.park(id)
    }

    /// As [`Gate::wants_safepoints`], from a safe point of a use: that there are such is noted.
    #[inline]
    pub fn meets_safe_point(&self) -> bool {
        self.activity.met_safe_point();
        self.wants_safepoints()
    }

    #[cold]
    fn park(&self, id: UseId) -> bool {
        self.arrive(id) && self.go_on(id, None)
    }

    /// Whether a shrink waits for this use, and it may be parked now.
    pub fn wants(&self, id: UseId) -> bool {
        self.wants_safepoints() && self.state.lock().wants(id, Instant::now())
    }

    /// As [`Gate::arrive`], and nothing of the use moves before [`Gate::vote`]: for who first has to hear others.
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

    /// Whether the vote of a use is asked for: the work of all that is parked has ended. Waits for that up to the timeout.
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

    /// Votes, for a use that is asked: with `yes` its memory moves and its threads wait on; else the thread goes on at once and the use
    /// is not parked for a while. False: the vote is not heard. After a yes nothing moves then, after a no something has been agreed to;
    /// the thread has to wait on in both cases, with [`Gate::go_on`].
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

    /// The first half of [`Gate::safepoint`]: whether the thread has to wait, with [`Gate::go_on`] until that answers true.
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

    /// Waits until a thread that has arrived can go on; false where it still cannot after the timeout, and has to wait on.
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
        // Who wants to begin waits for those that were parked.
        self.changed.notify_all();
        true
    }

    /// One more thread is inside a use, which is parked only when that one is at a safe point too. False where it is parked now: the
    /// thread is not inside, and begins a use of its own.
    ///
    /// # Errors
    /// [`ProcessError::UnknownUse`].
    pub fn join_use(&self, id: UseId) -> Result<bool> {
        self.state.lock().join(id).ok_or(ProcessError::UnknownUse { id: id.0 })
    }

    /// A thread that joined a use is no longer inside it.
    ///
    /// # Errors
    /// [`ProcessError::UnknownUse`].
    pub fn leave_use(&self, id: UseId) -> Result<()> {
        let mut state = self.state.lock();
        let left = state.leave(id);
        self.note_uses(&state);
        drop(state);
        self.changed.notify_all();
        if left { Ok(()) } else { Err(ProcessError::UnknownUse { id: id.0 }) }
    }

    /// Lets no use of these tags begin, and waits until those that run have ended or are parked.
    ///
    /// # Errors
    /// [`ProcessError::StillUsed`]: the gate is open again.
    pub(super) fn close(&self, tags: &Tags, timeout: Option<Duration>) -> Result<Closing<'_>> {
        self.close_while(tags, timeout, &|| true)
    }

    /// As [`Gate::close`], for as long as `goes_on` says so, which is asked now and then.
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

    /// What is evicted has changed: who waits looks again.
    pub(super) fn changed(&self) {
        // Who has looked before the change and does not wait yet holds the lock.
        drop(self.state.lock());
        self.changed.notify_all();
    }
}

impl Closing<'_> {
    /// How many uses are parked for it.
    pub(super) fn parked(&self) -> usize {
        self.gate.state.lock().parked_for(self.id)
    }

    /// Asks parked uses that vote, and waits for their answers: whether what is closed may move.
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

    /// The work of what is parked does not end: these uses go on with the closing's end, and are not parked again for so long.
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

/// A wait for something that may never come.
struct Wait {
    begin: Instant,
    /// None: for ever.
    end: Option<Instant>,
}

impl Wait {
    fn of(timeout: Option<Duration>) -> Wait {
        let begin = Instant::now();
        Wait { begin, end: timeout.and_then(|timeout| begin.checked_add(timeout)) }
    }

    /// Waits for a change; false once the time is over.
    fn on<T>(&self, changed: &Condvar, guard: &mut MutexGuard<'_, T>) -> bool {
        match self.end {
            None => changed.wait(guard),
            Some(end) if end <= Instant::now() => return false,
            // What has changed by the end is looked at once more.
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
