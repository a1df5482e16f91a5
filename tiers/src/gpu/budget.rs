//! Soft upper bound of a pool's reserved memory, below its hard limit.
//!
//! Up to the budget the pool treats it like a limit: it releases free memory of other domains and makes streams wait for copies that still
//! read freed memory. Only a request that cannot be served in this way may exceed the budget, up to the limit.

use std::sync::Arc;

use glake_units::Bytes;
use parking_lot::Mutex;

use super::core::Core;

/// Budget and limit of a pool.
#[derive(Debug)]
pub(super) struct Budget {
    core: Arc<Core>,
    state: Mutex<State>,
}

#[derive(Clone, Copy, Debug)]
struct State {
    limit: Bytes,
    budget: Option<Bytes>,
    passed: u64,
}

impl Budget {
    /// Creates the state of a pool without a budget, with the limit of its settings.
    pub(super) fn new(core: &Arc<Core>) -> Self {
        let limit = core.lock().settings().limit;
        Budget { core: core.clone(), state: Mutex::new(State { limit, budget: None, passed: 0 }) }
    }

    /// Sets the limit in bytes.
    pub(super) fn set_limit(&self, limit: Bytes) {
        let mut state = self.state.lock();
        state.limit = limit;
        let mut core = self.core.lock();
        core.set_limit(limit);
        core.set_budget(state.most());
    }

    /// Returns the limit in bytes.
    pub(super) fn limit(&self) -> Bytes {
        self.state.lock().limit
    }

    /// Sets or removes the budget.
    pub(super) fn set(&self, budget: Option<Bytes>) {
        let mut state = self.state.lock();
        if state.budget != budget {
            state.budget = budget;
            self.core.lock().set_budget(state.most());
        }
    }

    /// Returns the budget and the number of requests that exceeded it.
    pub(super) fn told(&self) -> (Option<Bytes>, u64) {
        let state = self.state.lock();
        (state.budget, state.passed)
    }

    /// Retries a request that the budget did not allow, with the hard limit in force. Returns `None` if the limit allows no more than the
    /// budget.
    pub(super) fn beyond<T>(&self, serve: impl FnOnce() -> T) -> Option<T> {
        {
            let mut state = self.state.lock();
            if state.most() >= state.limit {
                return None;
            }
            state.passed += 1;
            self.core.lock().set_budget(state.limit);
        }
        let served = serve();
        let state = self.state.lock();
        self.core.lock().set_budget(state.most());
        Some(served)
    }
}

impl State {
    fn most(&self) -> Bytes {
        self.budget.map_or(self.limit, |budget| budget.min(self.limit))
    }
}

#[cfg(test)]
mod tests {
    use glake_device::DeviceId;
    use glake_sim::{SimOptions, SimTopology, Simulator};

    use super::super::{GpuPool, PoolOptions, PoolStream};
    use super::*;

    #[test]
    fn requests_stay_below_it_where_they_can_and_the_limit_is_as_ever() {
        let topology = SimTopology::uniform(1, Bytes::mib(64));
        let sim = Arc::new(Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap());
        let stream = PoolStream::of(&*sim, DeviceId(0), glake_device::Stream(0)).unwrap();
        let pool = GpuPool::new(sim, DeviceId(0), PoolOptions::default()).unwrap();
        pool.set_budget(Some(Bytes::mib(8)));
        let blocks = [(); 3].map(|()| pool.malloc(Bytes::mib(2), stream).unwrap());
        assert!(pool.reserved() <= Bytes::mib(8) && pool.budget() == (Some(Bytes::mib(8)), 0));
        assert_eq!(pool.take_most(), (Bytes::mib(6), Bytes::mib(6)));
        let above = pool.malloc(Bytes::mib(8), stream).unwrap();
        assert_eq!(pool.budget().1, 1);
        pool.free(above.address).unwrap();
        assert_eq!(pool.take_most(), (Bytes::mib(6), Bytes::mib(14)));
        pool.set_memory_fraction(0.25);
        assert!((pool.memory_fraction() - 0.25).abs() < 1e-9);
        pool.settle().unwrap();
        pool.trim(Bytes::mib(8)).unwrap();
        assert!(pool.malloc(Bytes::mib(32), stream).is_err(), "above the limit");
        assert_eq!(pool.budget().1, 2);
        blocks.iter().for_each(|block| drop(pool.free(block.address)));
    }
}
