//! Assignment of lane sets to program streams.
//!
//! Lock order: a lane set's lock before the table's.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use glake_device::StreamId;
use glake_device::owned::{DeviceSet, StreamRef};
use parking_lot::{Mutex, MutexGuard, RwLock};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::Result;
use crate::links::lane_set::{LaneSet, LaneSetState, Observe};
use crate::links::ledger::Ledger;

/// Time for which a copy spins on its lane set's lock before it sleeps.
const AWAKE: Duration = Duration::from_micros(50);

/// All lane sets of an engine.
#[derive(Debug)]
pub(crate) struct LaneSets {
    ledger: Arc<Ledger>,
    observer: Arc<dyn Observe>,
    all: RwLock<Vec<Arc<LaneSet>>>,
    table: RwLock<FxHashMap<StreamId, Arc<LaneSet>>>,
    /// Number of streams that found no free lane set since the last one was added.
    missed: AtomicUsize,
}

impl LaneSets {
    /// Creates an empty table.
    pub(crate) fn new(ledger: &Arc<Ledger>, observer: Arc<dyn Observe>) -> LaneSets {
        LaneSets {
            ledger: ledger.clone(),
            observer,
            all: RwLock::default(),
            table: RwLock::default(),
            missed: AtomicUsize::new(0),
        }
    }

    /// Creates a lane set without adding it.
    pub(crate) fn make(&self, devices: usize) -> Arc<LaneSet> {
        Arc::new(LaneSet::new(devices, &self.ledger))
    }

    /// Calls `run` with the lane set of a stream, locked; `None` if all lane sets have work of other streams in flight.
    pub(crate) fn with<T>(
        &self,
        stream: StreamId,
        run: impl FnOnce(&Arc<LaneSet>, &mut LaneSetState) -> T,
    ) -> Option<T> {
        let known = self.table.read().get(&stream).cloned();
        if let Some(lane_set) = known {
            let mut state = lock(&lane_set.state);
            // It may have changed hands before it was locked.
            if state.owner == Some(stream) {
                return Some(run(&lane_set, &mut state));
            }
        }
        // Those without an owner first.
        for owned in [false, true] {
            for lane_set in self.snapshot() {
                let Some(mut state) = lane_set.state.try_lock() else { continue };
                if state.owner.is_some() != owned || state.is_retired() {
                    continue;
                }
                self.look(&lane_set, &mut state);
                if !state.is_idle() {
                    continue;
                }
                if !self.claim(&lane_set, &mut state, stream) {
                    // Another thread was given one for the same stream.
                    drop(state);
                    return self.known(stream, run);
                }
                return Some(run(&lane_set, &mut state));
            }
        }
        self.missed.fetch_add(1, Ordering::Relaxed);
        None
    }

    /// Polls other streams' copies in flight.
    pub(crate) fn refresh(&self, but: &Arc<LaneSet>) {
        for lane_set in self.snapshot() {
            if !Arc::ptr_eq(&lane_set, but)
                && let Some(mut state) = lane_set.state.try_lock()
                && state.carries()
            {
                self.look(&lane_set, &mut state);
            }
        }
    }

    /// Returns whether all unjoined work of earlier copies has completed. If a stream is given, makes it wait for the rest.
    ///
    /// # Errors
    /// The driver's: some work still cannot be joined.
    pub(crate) fn settle(&self, on: Option<StreamRef<'_>>) -> Result<bool> {
        self.snapshot().iter().try_fold(true, |is_all, lane_set| Ok(lane_set.settle(on)? && is_all))
    }

    /// Moves the idle lane sets with lanes of `relays` to `retired`. Returns whether that was all of them. A concurrent copy finds a
    /// retired set once it has its lock.
    pub(crate) fn retire(&self, relays: DeviceSet, retired: &mut Vec<Arc<LaneSet>>) -> bool {
        let mut all = true;
        for lane_set in self.snapshot().into_iter().filter(|lane_set| lane_set.is_of(relays)) {
            let gone = lane_set.state.try_lock().is_some_and(|mut state| {
                self.look(&lane_set, &mut state);
                let idle = state.is_idle();
                if idle {
                    if let Some(owner) = state.owner {
                        self.table.write().remove(&owner);
                    }
                    state.retire();
                    lane_set.set_owner(&mut state, None);
                    self.all.write().retain(|other| !Arc::ptr_eq(other, &lane_set));
                }
                idle
            });
            all &= gone;
            retired.extend(gone.then_some(lane_set));
        }
        all
    }

    /// Returns all lane sets.
    pub(crate) fn snapshot(&self) -> SmallVec<[Arc<LaneSet>; 16]> {
        self.all.read().iter().cloned().collect()
    }

    pub(crate) fn add(&self, lane_set: Arc<LaneSet>) {
        self.all.write().push(lane_set);
        self.missed.store(0, Ordering::Relaxed);
    }

    pub(crate) fn len(&self) -> usize {
        self.all.read().len()
    }

    /// Returns whether a stream has found no free lane set since the last one was added.
    pub(crate) fn is_short(&self) -> bool {
        self.missed.load(Ordering::Relaxed) > 0
    }

    /// Releases the lane set of a stream that makes no more copies.
    pub(crate) fn forget(&self, stream: StreamId) {
        let lane_set = self.table.read().get(&stream).cloned();
        if let Some(lane_set) = lane_set {
            let mut state = lane_set.state.lock();
            if state.owner == Some(stream) {
                lane_set.set_owner(&mut state, None);
                self.table.write().remove(&stream);
            }
        }
    }

    /// Polls a lane set that another stream owns.
    fn look(&self, lane_set: &LaneSet, state: &mut LaneSetState) {
        let lost = state.poll(lane_set, DeviceSet::EMPTY, &*self.observer);
        lost.iter().for_each(|relay| self.ledger.relays.fence(relay));
    }

    fn known<T>(
        &self,
        stream: StreamId,
        run: impl FnOnce(&Arc<LaneSet>, &mut LaneSetState) -> T,
    ) -> Option<T> {
        let lane_set = self.table.read().get(&stream).cloned()?;
        let mut state = lock(&lane_set.state);
        (state.owner == Some(stream)).then(|| run(&lane_set, &mut state))
    }

    /// Assigns an idle lane set to a stream. Returns `false` if the stream already has one.
    fn claim(&self, lane_set: &Arc<LaneSet>, state: &mut LaneSetState, stream: StreamId) -> bool {
        let mut table = self.table.write();
        if table.contains_key(&stream) {
            return false;
        }
        if let Some(before) = lane_set.set_owner(state, Some(stream)) {
            table.remove(&before);
        }
        table.insert(stream, lane_set.clone());
        true
    }
}

/// Locks a lane set after spinning briefly: pollers hold the lock for about 10 us, and a sleeping thread resumes 60 us later or more.
fn lock(state: &Mutex<LaneSetState>) -> MutexGuard<'_, LaneSetState> {
    if let Some(state) = state.try_lock() {
        return state;
    }
    let begin = Instant::now();
    while begin.elapsed() < AWAKE {
        std::thread::yield_now();
        if let Some(state) = state.try_lock() {
            return state;
        }
    }
    state.lock()
}
