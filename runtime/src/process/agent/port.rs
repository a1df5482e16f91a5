//! Where the rest of the process and the agent's threads meet.
//!
//! ```text
//! refills, leases, pools, gate ─► Port: ledger, conversation ─► glake-agent: socket
//!                                 │ wake                          │ commands
//!                                 └◄──────── answers ◄── glake-commands
//! ```
//!
//! Invariants: while nothing is joined, one load tells that there is nobody to tell. What is said is put into the conversation in the
//! order of the ledger, under the lock, so that what hello told and what comes after it make a whole. Under the lock that of a lease is taken, and no other.

use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use glake_device::DeviceId;
use glake_tiers::LeaseEvent;
use glake_units::Bytes;
use glake_wire::{Conversation, Holding, ToAgent};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::Joiner;
use super::activity::ActivityWriter;
use super::ledger::Ledger;
use super::wake::Wake;
use crate::process::AgentError;
use crate::process::observers::Observers;

/// Nothing is open.
const NONE: RawFd = -1;

/// Shared by the process and the threads that speak to its agent.
#[derive(Debug)]
pub(in super::super) struct Port {
    /// Leases are an agent's.
    is_on: AtomicBool,
    pub(super) grow_timeout: Duration,
    pub(super) refill_timeout: Duration,
    pub(super) devices: usize,
    state: Mutex<State>,
    changed: Condvar,
    /// The threads are to end.
    is_over: AtomicBool,
    /// The program has begun no use, and has not said that it holds what it will.
    is_loading: AtomicBool,
    joiner: OnceLock<Weak<Joiner>>,
    /// The socket of the moment, for a forked child to close.
    socket: AtomicI32,
    /// Raised by whatever ends a park before its time.
    unparks: AtomicU64,
    pub(in super::super) activity: Arc<ActivityWriter>,
    pub(super) wake: Arc<Wake>,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) ledger: Ledger,
    pub(super) conversation: Conversation<ToAgent>,
    /// The agent that was heard last.
    pub(super) epoch: u64,
    /// Which joining it is.
    generation: u64,
    /// The holdings that were said last.
    pub(super) told: Vec<Holding>,
    /// An agent is there now.
    pub(super) is_heard: bool,
    /// The last word has been said.
    pub(super) says_bye: bool,
    /// Outcome of the first attempt, and of the next one where it was asked for.
    outcome: Option<Result<(), AgentError>>,
    /// An agent has welcomed this joining.
    pub(super) is_welcomed: bool,
    /// No more attempts follow.
    is_given_up: bool,
    /// The next attempt is asked for now.
    is_hurried: bool,
}

/// A refill that an agent is told of.
#[derive(Debug)]
pub(in super::super) struct Refilling {
    port: Arc<Port>,
    generation: Option<u64>,
}

impl Port {
    pub(in super::super) fn new(
        devices: usize,
        grow_timeout: Duration,
        refill_timeout: Duration,
    ) -> Arc<Port> {
        let wake = Arc::<Wake>::default();
        Arc::new(Port {
            is_on: AtomicBool::new(false),
            grow_timeout,
            refill_timeout,
            devices,
            state: Mutex::default(),
            changed: Condvar::new(),
            is_over: AtomicBool::new(false),
            is_loading: AtomicBool::new(true),
            joiner: OnceLock::new(),
            socket: AtomicI32::new(NONE),
            unparks: AtomicU64::new(0),
            activity: Arc::new(ActivityWriter::new(wake.clone())),
            wake,
        })
    }

    /// Whether leases are an agent's: one load.
    #[inline]
    pub(in super::super) fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Acquire)
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// A joining begins.
    ///
    /// # Errors
    /// What the operating system answers where there are no more descriptors.
    pub(super) fn open(&self) -> std::io::Result<Arc<OwnedFd>> {
        let wake = self.wake.open()?;
        let mut state = self.state.lock();
        self.is_over.store(false, Ordering::Release);
        *state =
            State { ledger: Ledger::new(self.devices), generation: state.generation + 1, ..State::default() };
        Ok(wake)
    }

    /// Leases are the agent's from now on, where they can be set to what the ledger has. What goes back of them meanwhile is noted after
    /// that.
    pub(super) fn set_on<T, E>(&self, set: impl FnOnce(&[Bytes]) -> Result<T, E>) -> Result<T, E> {
        // First: who finds a lease has somebody to ask.
        self.is_on.store(true, Ordering::Release);
        let state = self.state.lock();
        let outcome = set(state.ledger.leases());
        if outcome.is_err() {
            self.is_on.store(false, Ordering::Release);
        }
        outcome
    }

    /// They are nobody's.
    pub(super) fn set_off(&self) {
        self.is_on.store(false, Ordering::Release);
        let mut state = self.state.lock();
        state.generation += 1;
        state.ledger = Ledger::new(self.devices);
        drop(state);
        self.changed.notify_all();
    }

    /// The threads end.
    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
        self.unparked();
        self.wake();
        self.changed.notify_all();
    }

    /// Whoever waits here looks again.
    pub(super) fn notify(&self) {
        self.changed.notify_all();
    }

    /// Says bye, and ends the threads once that is said.
    pub(super) fn say_bye(&self) {
        let mut state = self.state.lock();
        if state.is_heard {
            state.says_bye = true;
            state.conversation.push(ToAgent::Bye);
        }
        drop(state);
        self.end();
    }

    /// Whether the threads are to end. Asked under any lock.
    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Whether copies go to files for this agent: it is the one that is heard, and nothing comes back.
    pub(super) fn may_demote(&self, epoch: u64) -> bool {
        let state = self.state.lock();
        state.epoch == epoch && !state.ledger.is_refilling() && !self.is_over()
    }

    /// Has the agent's thread look.
    pub(super) fn wake(&self) {
        self.wake.wake();
    }

    /// Changes the ledger, and has the agent's thread look.
    pub(super) fn note(&self, change: impl FnOnce(&mut Ledger, Instant)) {
        change(&mut self.state.lock().ledger, Instant::now());
        self.changed.notify_all();
        self.wake();
    }

    /// Parks that are under way end.
    pub(super) fn unparked(&self) {
        self.unparks.fetch_add(1, Ordering::AcqRel);
    }

    /// How many have been ended so far.
    pub(super) fn unparks(&self) -> u64 {
        self.unparks.load(Ordering::Acquire)
    }

    /// An attempt is over.
    pub(super) fn set_outcome(&self, outcome: Result<(), AgentError>, goes_on: bool) {
        let mut state = self.state.lock();
        state.outcome.get_or_insert(outcome);
        state.is_given_up = !goes_on;
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until an agent has welcomed a session that tries by itself, or until its next attempt, which begins now, has failed. None: it
    /// makes no more attempts.
    pub(super) fn attempt(&self) -> Option<Result<(), AgentError>> {
        let mut state = self.state.lock();
        if state.is_given_up {
            return None;
        }
        if state.is_welcomed {
            return Some(Ok(()));
        }
        (state.outcome, state.is_hurried) = (None, true);
        drop(state);
        self.wake();
        Some(self.outcome())
    }

    /// Whether an agent has welcomed this joining.
    pub(super) fn is_welcomed(&self) -> bool {
        self.state.lock().is_welcomed
    }

    /// Waits for the outcome of an attempt.
    pub(super) fn outcome(&self) -> Result<(), AgentError> {
        let mut state = self.state.lock();
        loop {
            if let Some(outcome) = state.outcome.take() {
                return outcome;
            }
            if self.is_over() {
                return Err(AgentError::Ending);
            }
            self.changed.wait(&mut state);
        }
    }

    /// Waits until the agent lets a start go on, `until` at most; `pause` is called again and again meanwhile, with no lock held.
    pub(super) fn wait_for_admission(&self, until: Instant, pause: impl Fn()) {
        let mut state = self.state.lock();
        while self.is_on() && !self.is_over() && state.ledger.start_waits() {
            let now = Instant::now();
            if now >= until || state.ledger.is_orphan(now) {
                break;
            }
            let step = Instant::now() + Duration::from_millis(5);
            if self.changed.wait_until(&mut state, step.min(until)).timed_out() {
                MutexGuard::unlocked(&mut state, &pause);
            }
        }
        state.ledger.release_start();
    }

    pub(super) fn set_socket(&self, socket: Option<&OwnedFd>) {
        self.socket.store(socket.map_or(NONE, |socket| socket.as_raw_fd()), Ordering::Release);
    }

    /// The socket to the agent, for a forked child, in which it is nobody's and nobody uses it.
    pub(super) fn socket(&self) -> Option<RawFd> {
        Some(self.socket.load(Ordering::Acquire)).filter(|socket| *socket != NONE)
    }

    /// A lease's event.
    pub(in super::super) fn told(&self, event: LeaseEvent, device: DeviceId, bytes: Bytes) {
        if !self.is_on() {
            return;
        }
        match event {
            LeaseEvent::Want => {
                let timeout = self.refill_timeout;
                self.note(|ledger, now| ledger.wanted(device, timeout, now));
            }
            LeaseEvent::Grow => {
                let timeout = self.grow_timeout;
                self.note(|ledger, now| ledger.grows(device, bytes, timeout, now));
            }
            LeaseEvent::Returned => self.note(|ledger, _| ledger.returned(device, bytes)),
            LeaseEvent::Waiting => {}
        }
    }

    /// Memory is about to come back.
    pub(in super::super) fn refill_begins(self: &Arc<Self>) -> Refilling {
        let generation = self.is_on().then(|| {
            let mut state = self.state.lock();
            state.ledger.refill_begun();
            state.generation
        });
        Refilling { port: self.clone(), generation }
    }

    /// Whoever waits for memory waits for more than was said.
    pub(in super::super) fn want_again(&self) {
        if self.is_on() {
            self.note(|ledger, now| ledger.want_again(now));
        }
    }

    /// What is held is another than was said.
    pub(in super::super) fn changed(&self) {
        if self.is_on() {
            self.note(|ledger, _| ledger.changed());
        }
    }

    /// Ends a start: others may load.
    pub(in super::super) fn start_is_over(&self) {
        self.note(|ledger, _| ledger.start_is_over());
    }

    /// A use has begun, or the program says that it holds what it will: between uses its memory may leave from now on. One load, but for
    /// the first.
    #[inline]
    pub(in super::super) fn has_loaded(&self) {
        if self.is_loading() {
            self.end_loading();
        }
    }

    #[cold]
    fn end_loading(&self) {
        self.is_loading.store(false, Ordering::Relaxed);
        self.activity.has_loaded();
        self.start_is_over();
    }

    /// Whether the program may be using its memory though no use runs.
    #[inline]
    pub(super) fn is_loading(&self) -> bool {
        self.is_loading.load(Ordering::Relaxed)
    }

    /// The worker begins, or goes on, to load what it will hold; so much is made.
    pub(super) fn starts(&self, made: Bytes) {
        self.note(|ledger, now| ledger.starts(made, now));
    }

    /// The pool of a device is about to start.
    pub(in super::super) fn pool_starts(&self, device: DeviceId, observers: &Observers) {
        let joiner = self.joiner.get().and_then(Weak::upgrade);
        if let Some(joiner) = joiner {
            joiner.pool_starts(device, observers);
        }
    }

    /// Who joins by itself.
    pub(super) fn set_joiner(&self, joiner: Weak<Joiner>) {
        let _ = self.joiner.set(joiner);
    }
}

impl State {
    /// Whether the next attempt is asked for, since this was asked last.
    pub(super) fn take_hurried(&mut self) -> bool {
        std::mem::take(&mut self.is_hurried)
    }
}

impl Refilling {
    /// It has ended so.
    pub(in super::super) fn ended<T, E: std::fmt::Display>(mut self, outcome: &Result<T, E>) {
        self.end(outcome.as_ref().map(|_| ()).map_err(ToString::to_string));
    }

    fn end(&mut self, outcome: Result<(), String>) {
        let Some(generation) = self.generation.take() else { return };
        let mut state = self.port.state.lock();
        if state.generation == generation {
            state.ledger.refill_ended(outcome);
            drop(state);
            self.port.wake();
        }
    }
}

impl Drop for Refilling {
    fn drop(&mut self) {
        self.end(Err("it was given up".to_owned()));
    }
}
