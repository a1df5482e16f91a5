//! Interface between the process and the threads that talk to the agent.
//!
//! ```text
//! refills, leases, pools, gate ─► AgentHandle: ledger, conversation ─► glake-agent: socket
//!                                 │ wake                          │ commands
//!                                 └◄──────── answers ◄── glake-commands
//! ```
//!
//! Invariants: without an agent, notifications cost one atomic load. Messages are queued in ledger order, under the lock, so that they are
//! consistent with the hello message. While the lock is held, no lock but a lease's may be taken.

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
use super::ledger::Ledger;
use crate::config;
use crate::process::AgentError;
use crate::process::activity::ActivityWriter;
use crate::process::activity::Wake;
use crate::process::observers::{AgentEvents, Observers};

/// Value of `socket` while no connection is open.
const NONE: RawFd = -1;

/// State shared by the process and its agent threads.
#[derive(Debug)]
pub(in super::super) struct AgentHandle {
    /// Whether an agent controls the leases.
    is_on: AtomicBool,
    pub(super) grow_timeout: Duration,
    pub(super) refill_timeout: Duration,
    pub(super) devices: usize,
    state: Mutex<State>,
    changed: Condvar,
    /// Whether the agent threads must stop.
    is_over: AtomicBool,
    /// Whether the program still loads: no use has begun and the program has not declared itself loaded.
    is_loading: AtomicBool,
    joiner: OnceLock<Weak<Joiner>>,
    /// Current agent socket; a forked child closes it.
    socket: AtomicI32,
    /// Number of requests to cancel pending parks.
    unparks: AtomicU64,
    pub(in super::super) activity: Arc<ActivityWriter>,
    pub(super) wake: Arc<Wake>,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) ledger: Ledger,
    pub(super) conversation: Conversation<ToAgent>,
    /// Epoch of the most recently connected agent.
    pub(super) epoch: u64,
    /// Changes with each join and leave; invalidates older refill guards.
    generation: u64,
    /// Holdings of the last report.
    pub(super) told: Vec<Holding>,
    /// Whether an agent is connected.
    pub(super) is_heard: bool,
    /// Whether the goodbye message has been queued.
    pub(super) says_bye: bool,
    /// Result of the first join attempt, and of each further one that a caller asked for.
    outcome: Option<Result<(), AgentError>>,
    /// Whether an agent has welcomed this join.
    pub(super) is_welcomed: bool,
    /// Whether no further attempts follow.
    is_given_up: bool,
    /// Whether the next attempt must begin now.
    is_hurried: bool,
}

impl AgentHandle {
    pub(in super::super) fn new(devices: usize, lease: &config::Lease) -> Arc<AgentHandle> {
        let ms = Duration::from_millis;
        let (grow_timeout, refill_timeout) = (ms(lease.grow_timeout_ms), ms(lease.refill_timeout_ms));
        let wake = Arc::<Wake>::default();
        Arc::new(AgentHandle {
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

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Resets the state for a new join and creates the wake-up eventfd.
    ///
    /// # Errors
    /// The operating system's error if no descriptors are left.
    pub(super) fn open(&self) -> std::io::Result<Arc<OwnedFd>> {
        let wake = self.wake.open()?;
        let mut state = self.state.lock();
        self.is_over.store(false, Ordering::Release);
        *state =
            State { ledger: Ledger::new(self.devices), generation: state.generation + 1, ..State::default() };
        Ok(wake)
    }

    /// Makes the agent control the leases if `set` can set them to the ledger's values. Memory returned meanwhile is recorded afterwards.
    pub(super) fn set_on<T, E>(&self, set: impl FnOnce(&[Bytes]) -> Result<T, E>) -> Result<T, E> {
        // Set before the lease exists, so that its users can request more.
        self.is_on.store(true, Ordering::Release);
        let state = self.state.lock();
        let outcome = set(state.ledger.leases());
        if outcome.is_err() {
            self.is_on.store(false, Ordering::Release);
        }
        outcome
    }

    /// Ends the agent's control of the leases and clears the ledger.
    pub(super) fn set_off(&self) {
        self.is_on.store(false, Ordering::Release);
        let mut state = self.state.lock();
        state.generation += 1;
        state.ledger = Ledger::new(self.devices);
        drop(state);
        self.changed.notify_all();
    }

    /// Asks the agent threads to stop and cancels pending parks.
    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
        self.unparked();
        self.wake();
        self.changed.notify_all();
    }

    /// Wakes all waiters to re-check their conditions.
    pub(super) fn notify(&self) {
        self.changed.notify_all();
    }

    /// Queues a goodbye if connected, then stops the threads.
    pub(super) fn say_bye(&self) {
        let mut state = self.state.lock();
        if state.is_heard {
            state.says_bye = true;
            state.conversation.push(ToAgent::Bye);
        }
        drop(state);
        self.end();
    }

    /// Returns whether the threads must stop. Callable under any lock.
    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Returns whether host copies may move to files for the agent of `epoch`: it is the connected one, and no refill runs.
    pub(super) fn may_demote(&self, epoch: u64) -> bool {
        let state = self.state.lock();
        state.epoch == epoch && !state.ledger.is_refilling() && !self.is_over()
    }

    /// Wakes the agent thread.
    pub(super) fn wake(&self) {
        self.wake.wake();
    }

    /// Applies `change` to the ledger and wakes the agent thread.
    pub(super) fn note(&self, change: impl FnOnce(&mut Ledger, Instant)) {
        change(&mut self.state.lock().ledger, Instant::now());
        self.changed.notify_all();
        self.wake();
    }

    /// Cancels pending parks.
    pub(super) fn unparked(&self) {
        self.unparks.fetch_add(1, Ordering::AcqRel);
    }

    /// Returns the number of cancellations so far.
    pub(super) fn unparks(&self) -> u64 {
        self.unparks.load(Ordering::Acquire)
    }

    /// Records the result of a join attempt.
    pub(super) fn set_outcome(&self, outcome: Result<(), AgentError>, goes_on: bool) {
        let mut state = self.state.lock();
        state.outcome.get_or_insert(outcome);
        state.is_given_up = !goes_on;
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until an agent welcomes a session that joins by itself, or until its next attempt, which begins now, has failed. `None`: no
    /// more attempts follow.
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

    /// Returns whether an agent has welcomed this join.
    pub(super) fn is_welcomed(&self) -> bool {
        self.state.lock().is_welcomed
    }

    /// Waits for the result of an attempt and takes it.
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

    /// Waits until the agent admits a start, at most until `until`. Calls `pause` repeatedly, without holding a lock.
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

    /// Returns the agent's socket for a forked child, which must not use it.
    pub(super) fn socket(&self) -> Option<RawFd> {
        Some(self.socket.load(Ordering::Acquire)).filter(|socket| *socket != NONE)
    }

    #[cold]
    fn end_loading(&self) {
        self.is_loading.store(false, Ordering::Relaxed);
        self.activity.has_loaded();
        self.start_is_over();
    }

    /// Returns whether the program may use its memory although no use runs.
    #[inline]
    pub(super) fn is_loading(&self) -> bool {
        self.is_loading.load(Ordering::Relaxed)
    }

    /// Records that the worker begins or continues to load its initial memory, of which `made` bytes exist.
    pub(super) fn starts(&self, made: Bytes) {
        self.note(|ledger, now| ledger.starts(made, now));
    }

    /// Sets the joiner through which the process joins by itself.
    pub(super) fn set_joiner(&self, joiner: Weak<Joiner>) {
        let _ = self.joiner.set(joiner);
    }
}

impl AgentEvents for AgentHandle {
    #[inline]
    fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Acquire)
    }

    fn told(&self, event: LeaseEvent, device: DeviceId, bytes: Bytes) {
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

    fn want_again(&self) {
        if self.is_on() {
            self.note(|ledger, now| ledger.want_again(now));
        }
    }

    fn changed(&self) {
        if self.is_on() {
            self.note(|ledger, _| ledger.changed());
        }
    }

    fn start_is_over(&self) {
        self.note(|ledger, _| ledger.start_is_over());
    }

    #[inline]
    fn has_loaded(&self) {
        if self.is_loading() {
            self.end_loading();
        }
    }

    fn pool_starts(&self, device: DeviceId, observers: &Observers) {
        let joiner = self.joiner.get().and_then(Weak::upgrade);
        if let Some(joiner) = joiner {
            joiner.pool_starts(device, observers);
        }
    }

    fn refill_begins(&self) -> Option<u64> {
        self.is_on().then(|| {
            let mut state = self.state.lock();
            state.ledger.refill_begun();
            state.generation
        })
    }

    fn refill_ended(&self, generation: u64, outcome: Result<(), String>) {
        let mut state = self.state.lock();
        if state.generation == generation {
            state.ledger.refill_ended(outcome);
            drop(state);
            self.wake();
        }
    }
}

impl State {
    /// Returns whether the next attempt must begin now, and clears the request.
    pub(super) fn take_hurried(&mut self) -> bool {
        std::mem::take(&mut self.is_hurried)
    }
}
