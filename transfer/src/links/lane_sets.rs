//! Which stream of the program has which lane set.
//!
//! A lane set's lock is taken before the table's, never after it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use glake_device::StreamId;
use glake_device::owned::{DeviceSet, StreamRef};
use parking_lot::{Mutex, MutexGuard, RwLock};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::Result;
use crate::engine::ledger::Ledger;
use crate::links::lane_set::{LaneSet, LaneSetState};
use crate::traffic::Traffic;

/// For so long a copy asks for its lane set's lock again and again before it sleeps.
const AWAKE: Duration = Duration::from_micros(50);

/// All lane sets.
#[derive(Debug)]
pub(crate) struct LaneSets {
    ledger: Arc<Ledger>,
    traffic: Arc<Traffic>,
    all: RwLock<Vec<Arc<LaneSet>>>,
    table: RwLock<FxHashMap<StreamId, Arc<LaneSet>>>,
    /// How many streams were refused one since the last was added.
    missed: AtomicUsize,
}

impl LaneSets {
    /// None yet.
    pub(crate) fn new(ledger: &Arc<Ledger>, traffic: &Arc<Traffic>) -> LaneSets {
        LaneSets {
            ledger: ledger.clone(),
            traffic: traffic.clone(),
            all: RwLock::default(),
            table: RwLock::default(),
            missed: AtomicUsize::new(0),
        }
    }

    /// One more, which is not among them yet.
    pub(crate) fn make(&self, devices: usize) -> Arc<LaneSet> {
        Arc::new(LaneSet::new(devices, &self.ledger))
    }

    /// Runs with the lane set of a stream, under its lock; `None` where all lane sets have work of others under way.
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

    /// Looks what other streams' copies have still under way.
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

    /// Whether what earlier copies left on lanes that could not be joined is over; a stream that is given waits for what is not.
    ///
    /// # Errors
    /// The driver's: something still cannot be joined.
    pub(crate) fn settle(&self, on: Option<StreamRef<'_>>) -> Result<bool> {
        self.snapshot().iter().try_fold(true, |is_all, lane_set| Ok(lane_set.settle(on)? && is_all))
    }

    /// Takes those that have anything of these GPUs out of use, where no work is on them, into `retired`; whether that is all of
    /// them. A copy that looks at one meanwhile finds it retired once it has its lock.
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

    /// Every lane set.
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

    /// Whether a stream was refused one since the last was added.
    pub(crate) fn is_short(&self) -> bool {
        self.missed.load(Ordering::Relaxed) > 0
    }

    /// A stream will copy no more.
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

    /// Looks what another stream's lanes have done.
    fn look(&self, lane_set: &LaneSet, state: &mut LaneSetState) {
        let lost = state.poll(lane_set, DeviceSet::EMPTY, &self.traffic);
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

    /// Gives an idle lane set to a stream; false where the stream has one.
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

/// Others hold it while they look what its lanes have done, for some 10 us. Who is put to sleep meanwhile begins 60 us later and more.
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
