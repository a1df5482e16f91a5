//! Which stream of the program has which lease.
//!
//! A lease's lock is taken before the table's, never after it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use glake_device::StreamId;
use glake_device::owned::DeviceSet;
use parking_lot::{Mutex, MutexGuard, RwLock};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::Engine;
use super::lease::{Lease, LeaseState};

/// For so long a copy asks for its lease's lock again and again before it sleeps.
const AWAKE: Duration = Duration::from_micros(50);

#[derive(Debug, Default)]
pub(super) struct Leases {
    all: RwLock<Vec<Arc<Lease>>>,
    table: RwLock<FxHashMap<StreamId, Arc<Lease>>>,
    /// How many streams were refused one since the last was added.
    missed: AtomicUsize,
}

impl Leases {
    /// Runs with the lease of a stream, under its lock; `None` where all leases have work of others under way.
    pub(super) fn with<T>(
        &self,
        engine: &Engine,
        stream: StreamId,
        run: impl FnOnce(&Arc<Lease>, &mut LeaseState) -> T,
    ) -> Option<T> {
        let known = self.table.read().get(&stream).cloned();
        if let Some(lease) = known {
            let mut state = lock(&lease.state);
            // It may have changed hands before it was locked.
            if state.owner == Some(stream) {
                return Some(run(&lease, &mut state));
            }
        }
        // Those without an owner first.
        for owned in [false, true] {
            for lease in self.snapshot() {
                let Some(mut state) = lease.state.try_lock() else { continue };
                if state.owner.is_some() != owned || state.is_retired() {
                    continue;
                }
                look(engine, &lease, &mut state);
                if !state.is_idle() {
                    continue;
                }
                if !self.claim(&lease, &mut state, stream) {
                    // Another thread was given one for the same stream.
                    drop(state);
                    return self.known(stream, run);
                }
                return Some(run(&lease, &mut state));
            }
        }
        self.missed.fetch_add(1, Ordering::Relaxed);
        None
    }

    /// Looks what other streams' copies have still under way.
    pub(super) fn refresh(&self, engine: &Engine, but: &Arc<Lease>) {
        for lease in self.snapshot() {
            if !Arc::ptr_eq(&lease, but)
                && let Some(mut state) = lease.state.try_lock()
                && !state.is_idle()
            {
                look(engine, &lease, &mut state);
            }
        }
    }

    /// Takes those that have anything of these GPUs out of use, where no work is on them, into `retired`; whether that is all of
    /// them. A copy that looks at one meanwhile finds it retired once it has its lock.
    pub(super) fn retire(&self, engine: &Engine, relays: DeviceSet, retired: &mut Vec<Arc<Lease>>) -> bool {
        let mut all = true;
        for lease in self.snapshot().into_iter().filter(|lease| lease.is_of(relays)) {
            let gone = lease.state.try_lock().is_some_and(|mut state| {
                look(engine, &lease, &mut state);
                let idle = state.is_idle();
                if idle {
                    if let Some(owner) = state.owner {
                        self.table.write().remove(&owner);
                    }
                    state.retire(engine);
                    lease.set_owner(&mut state, None);
                    self.all.write().retain(|other| !Arc::ptr_eq(other, &lease));
                }
                idle
            });
            all &= gone;
            retired.extend(gone.then_some(lease));
        }
        all
    }

    /// Every lease.
    pub(super) fn snapshot(&self) -> SmallVec<[Arc<Lease>; 16]> {
        self.all.read().iter().cloned().collect()
    }

    pub(super) fn add(&self, lease: Arc<Lease>) {
        self.all.write().push(lease);
        self.missed.store(0, Ordering::Relaxed);
    }

    pub(super) fn len(&self) -> usize {
        self.all.read().len()
    }

    /// Whether a stream was refused one since the last was added.
    pub(super) fn is_short(&self) -> bool {
        self.missed.load(Ordering::Relaxed) > 0
    }

    /// A stream will copy no more.
    pub(super) fn forget(&self, stream: StreamId) {
        let lease = self.table.read().get(&stream).cloned();
        if let Some(lease) = lease {
            let mut state = lease.state.lock();
            if state.owner == Some(stream) {
                lease.set_owner(&mut state, None);
                self.table.write().remove(&stream);
            }
        }
    }

    fn known<T>(&self, stream: StreamId, run: impl FnOnce(&Arc<Lease>, &mut LeaseState) -> T) -> Option<T> {
        let lease = self.table.read().get(&stream).cloned()?;
        let mut state = lock(&lease.state);
        (state.owner == Some(stream)).then(|| run(&lease, &mut state))
    }

    /// Gives an idle lease to a stream; false where the stream has one.
    fn claim(&self, lease: &Arc<Lease>, state: &mut LeaseState, stream: StreamId) -> bool {
        let mut table = self.table.write();
        if table.contains_key(&stream) {
            return false;
        }
        if let Some(before) = lease.set_owner(state, Some(stream)) {
            table.remove(&before);
        }
        table.insert(stream, lease.clone());
        true
    }
}

/// Others hold it while they look what its lanes have done, for some 10 us. Who is put to sleep meanwhile begins 60 us later and more.
fn lock(state: &Mutex<LeaseState>) -> MutexGuard<'_, LeaseState> {
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

/// Looks what another stream's lanes have done.
fn look(engine: &Engine, lease: &Lease, state: &mut LeaseState) {
    let lost = state.poll(engine, lease, DeviceSet::EMPTY);
    lost.iter().for_each(|relay| engine.relays.fence(relay));
}
