//! Keeps the program's work and what is evicted apart.
//!
//! ```text
//! active(tags) ─► admit ─► the work ─► leave
//!                   ▲ waits, asks for a refill, or is refused             state: pure; here: one lock and one condition
//! shrink ─► close ──┴─► no use of these tags runs ─► moves ─► dropped: open, but for what is evicted
//! safepoint ─► one load ─ somebody closes ─► parked: counts as not running, until all of its memory is back
//! ```
//!
//! What is evicted the gate does not remember: it asks, each time somebody wants to begin.
//!
//! Who only waits until its tags are there ([`Gate::wait`]) is no use at any time.
//!
//! Invariants: what can let somebody go on is said under the lock, or, of what is evicted, before [`Gate::changed`] takes it; and
//! everybody who waits is woken. The lock is held for bookkeeping only.

mod state;
mod tags;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

pub(super) use state::Evicted;
pub use state::UseId;
use state::{ClosingId, GateState, Obstacle};
pub use tags::Tags;
pub(super) use tags::{DEFAULT, GRAPH, is_reserved};

use super::{ProcessError, Result};
use crate::sync::{Condvar, Mutex, MutexGuard};

/// How long a use that begins lets parked ones go on first: they are awake long before, if their threads are there.
const PARKED_FIRST: Duration = Duration::from_millis(100);

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
}

/// What a use that wants to begin finds.
#[derive(Debug)]
pub(super) enum Admission<T> {
    Admitted(T),
    /// These are evicted, and whoever asked shall bring them back.
    Away(Vec<String>),
}

/// Tags that are closed while this lives: no use of them runs.
#[derive(Debug)]
pub(in super::super) struct Closing<'g> {
    gate: &'g Gate,
    id: ClosingId,
}

impl Gate {
    /// Open, but for what of this memory is evicted.
    pub(super) fn new(memory: Arc<dyn Evicted>, quantum: Duration) -> Gate {
        let (state, changed) = (Mutex::default(), Condvar::default());
        Gate { state, changed, memory, quantum, closings: AtomicUsize::new(0) }
    }

    /// How it stands.
    pub fn view(&self) -> GateView {
        let state = self.state.lock();
        let (closing, closed) = (state.closings().cloned().collect(), self.memory.evicted(&Tags::All));
        GateView { uses: state.uses(), parked: state.parked(), closing, closed }
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
        let begin = Instant::now();
        let attempt = |state: &mut GateState| {
            let parked_first = when != WhenClosed::Refuse && begin.elapsed() < PARKED_FIRST;
            state.begin(tags, &*self.memory, parked_first)
        };
        self.pass(tags, when, timeout, attempt)
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
        let attempt = |state: &mut GateState| state.obstacle(tags, &*self.memory).map_or(Ok(()), Err);
        self.pass(tags, when, timeout, attempt)
    }

    fn pass<T>(
        &self,
        tags: &Tags,
        when: WhenClosed,
        timeout: Option<Duration>,
        attempt: impl Fn(&mut GateState) -> std::result::Result<T, Obstacle>,
    ) -> Result<Admission<T>> {
        let wait = Wait::of(timeout);
        let mut state = self.state.lock();
        loop {
            let closed = match attempt(&mut state) {
                Ok(passed) => return Ok(Admission::Admitted(passed)),
                Err(Obstacle::Parked) => {
                    self.changed.wait_until(&mut state, Instant::now() + PARKED_FIRST);
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
                (WhenClosed::Refill, Some(closed)) => return Ok(Admission::Away(closed)),
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
        let left = self.state.lock().end_use(id);
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
        self.wants_safepoints() && self.park(id)
    }

    #[cold]
    fn park(&self, id: UseId) -> bool {
        self.arrive(id) && self.go_on(id, None)
    }

    /// The first half of [`Gate::safepoint`]: whether the thread has to wait, with [`Gate::go_on`] until that answers true.
    pub fn arrive(&self, id: UseId) -> bool {
        let arrived = self.state.lock().arrive(id, Instant::now());
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
        let left = self.state.lock().leave(id);
        self.changed.notify_all();
        if left { Ok(()) } else { Err(ProcessError::UnknownUse { id: id.0 }) }
    }

    /// Lets no use of these tags begin, and waits until those that run have ended or are parked.
    ///
    /// # Errors
    /// [`ProcessError::StillUsed`]: the gate is open again.
    pub(super) fn close(&self, tags: &Tags, timeout: Option<Duration>) -> Result<Closing<'_>> {
        let wait = Wait::of(timeout);
        let mut state = self.state.lock();
        let closing = Closing { gate: self, id: state.close(tags.clone()) };
        self.closings.fetch_add(1, Ordering::Relaxed);
        loop {
            let uses = state.running(closing.id);
            if uses == 0 {
                drop(state);
                return Ok(closing);
            }
            if !wait.on(&self.changed, &mut state) {
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
#[cfg(feature = "shuttle")]
mod schedules;

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use super::*;

    /// What is evicted.
    #[derive(Debug, Default)]
    struct Memory(Mutex<BTreeSet<String>>);

    impl Evicted for Memory {
        fn evicted(&self, tags: &Tags) -> Vec<String> {
            self.0.lock().iter().filter(|tag| tags.use_of(tag)).cloned().collect()
        }
    }

    /// A gate, and the memory that it asks about.
    #[derive(Debug)]
    struct Gated {
        memory: Arc<Memory>,
        gate: Gate,
    }

    impl std::ops::Deref for Gated {
        type Target = Gate;

        fn deref(&self) -> &Gate {
            &self.gate
        }
    }

    impl Gated {
        fn new() -> Gated {
            let memory = Arc::<Memory>::default();
            Gated { gate: Gate::new(memory.clone(), Duration::ZERO), memory }
        }

        fn set(&self, tag: &str, evicted: bool) {
            let mut all = self.memory.0.lock();
            if evicted {
                all.insert(tag.to_owned())
            } else {
                all.remove(tag)
            };
            drop(all);
            self.gate.changed();
        }
    }

    const SOON: Option<Duration> = Some(Duration::from_millis(20));
    const NEVER: Option<Duration> = None;

    fn admitted(gate: &Gate, tags: &Tags) -> UseId {
        match gate.admit(tags, WhenClosed::Refuse, NEVER).unwrap() {
            Admission::Admitted(id) => id,
            Admission::Away(tags) => panic!("{tags:?} are away"),
        }
    }

    #[test]
    fn a_timeout_opens_the_gate_again() {
        let gate = Gated::new();
        let (weights, cache) = (Tags::of(&["weights"]), Tags::of(&["cache"]));
        let running = admitted(&gate, &weights);
        let error = gate.close(&weights, SOON).unwrap_err();
        assert!(matches!(error, ProcessError::StillUsed { uses: 1, .. }), "{error}");
        assert!(error.to_string().contains("1 use of 'weights' was still running after"), "{error}");
        gate.end_use(admitted(&gate, &weights)).unwrap();
        drop(gate.close(&cache, SOON).unwrap());
        assert!(gate.close(&Tags::of(&[DEFAULT]), SOON).is_err(), "every use touches what is in no region");
        gate.end_use(running).unwrap();
        assert!(matches!(gate.end_use(running), Err(ProcessError::UnknownUse { .. })));
        assert_eq!(gate.view(), GateView { uses: 0, parked: 0, closing: vec![], closed: vec![] });
    }

    #[test]
    fn what_is_closed_is_refused_held_or_to_be_refilled() {
        let gate = Gated::new();
        let weights = Tags::of(&["weights"]);
        {
            let closing = gate.close(&Tags::All, SOON).unwrap();
            assert_eq!(gate.view().closing, [Tags::All]);
            assert!(matches!(
                gate.admit(&weights, WhenClosed::Refuse, NEVER),
                Err(ProcessError::Closed { .. })
            ));
            assert!(matches!(
                gate.admit(&weights, WhenClosed::Refill, SOON),
                Err(ProcessError::HeldTooLong { .. })
            ));
            gate.set("weights", true);
            drop(closing);
        }
        assert!(matches!(gate.admit(&weights, WhenClosed::Refuse, NEVER), Err(ProcessError::Closed { .. })));
        assert!(matches!(
            gate.admit(&weights, WhenClosed::Hold, SOON),
            Err(ProcessError::HeldTooLong { .. })
        ));
        let away = gate.admit(&Tags::All, WhenClosed::Refill, NEVER).unwrap();
        assert!(matches!(away, Admission::Away(tags) if tags == ["weights"]));
        gate.end_use(admitted(&gate, &Tags::of(&["cache"]))).unwrap();
        std::thread::scope(|scope| {
            let held = scope.spawn(|| gate.admit(&weights, WhenClosed::Hold, NEVER));
            gate.set("weights", false);
            assert!(matches!(held.join().unwrap().unwrap(), Admission::Admitted(_)));
        });
    }

    #[test]
    fn who_waits_is_no_use() {
        let gate = Gated::new();
        let weights = Tags::of(&["weights"]);
        gate.set("weights", true);
        assert!(matches!(gate.wait(&weights, WhenClosed::Refuse, NEVER), Err(ProcessError::Closed { .. })));
        assert!(matches!(gate.wait(&weights, WhenClosed::Hold, SOON), Err(ProcessError::HeldTooLong { .. })));
        let away = gate.wait(&weights, WhenClosed::Refill, NEVER).unwrap();
        assert!(matches!(away, Admission::Away(tags) if tags == ["weights"]));
        std::thread::scope(|scope| {
            let held = scope.spawn(|| gate.wait(&weights, WhenClosed::Hold, NEVER));
            gate.set("weights", false);
            assert!(matches!(held.join().unwrap().unwrap(), Admission::Admitted(())));
        });
        assert_eq!(gate.view().uses, 0);
    }

    /// Nobody sleeps through a change, and no use meets a move.
    #[test]
    fn uses_and_moves_of_many_threads_never_meet() {
        let gate = Gated::new();
        let moving = [const { AtomicBool::new(false) }; 2];
        let using = [const { AtomicUsize::new(0) }; 2];
        let tags = [Tags::of(&["0"]), Tags::of(&["1"])];
        std::thread::scope(|scope| {
            for worker in 0..4_usize {
                let (gate, moving, using, tags) = (&gate, &moving, &using, &tags);
                scope.spawn(move || {
                    for round in 0..300 {
                        let which = (worker + round) % 2;
                        match gate.admit(&tags[which], WhenClosed::Refill, NEVER).unwrap() {
                            Admission::Admitted(id) => {
                                using[which].fetch_add(1, Ordering::SeqCst);
                                assert!(!moving[which].load(Ordering::SeqCst));
                                using[which].fetch_sub(1, Ordering::SeqCst);
                                gate.end_use(id).unwrap();
                            }
                            Admission::Away(away) => away.iter().for_each(|tag| gate.set(tag, false)),
                        }
                    }
                });
            }
            for which in 0..2_usize {
                let (gate, moving, using, tags) = (&gate, &moving, &using, &tags);
                scope.spawn(move || {
                    for round in 0..100 {
                        let _closing = gate.close(&tags[which], NEVER).unwrap();
                        moving[which].store(true, Ordering::SeqCst);
                        assert_eq!(using[which].load(Ordering::SeqCst), 0);
                        gate.set(&which.to_string(), round % 3 != 0);
                        moving[which].store(false, Ordering::SeqCst);
                    }
                });
            }
        });
        assert_eq!(gate.view().uses, 0);
    }
}
