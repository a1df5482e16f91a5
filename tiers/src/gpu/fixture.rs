//! Test support for single parts of a pool: a simulated GPU and a core, without a pool.

use std::sync::Arc;

use glake_device::owned::{CompletionEvents, OwnedStream};
use glake_device::{DeviceId, Driver, Faults};
use glake_sim::{SimOptions, SimTopology, Simulator};
use glake_stitch::{Allocator, Outcome, Request, Settings, StreamKey};
use glake_units::Bytes;

use super::clock::CompletionClock;
use super::core::Core;
use super::reach::Reach;
use super::waits::WaitTimer;

pub(super) const OWN: DeviceId = DeviceId(0);

/// Core of a pool and the objects it is built from.
pub(super) struct Parts {
    pub(super) sim: Arc<Simulator>,
    pub(super) faults: Arc<Faults>,
    pub(super) driver: Arc<dyn Driver>,
    pub(super) completion_events: Arc<CompletionEvents>,
    pub(super) core: Arc<Core>,
    /// Stream that gives the GPU a context; without one there is nothing to record.
    pub(super) stream: OwnedStream,
}

impl Parts {
    pub(super) fn new() -> Self {
        let topology = SimTopology::uniform(2, Bytes::mib(64));
        let sim = Arc::new(Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap());
        let faults = Arc::new(Faults::new(sim.clone()));
        let driver: Arc<dyn Driver> = faults.clone();
        let completion_events = CompletionEvents::new(driver.clone());
        let memory = Bytes::mib(64);
        let settings = Settings { extent: Bytes::mib(4), near_limit: 1.0, ..Settings::for_memory(memory) };
        let core = Arc::new(Core::new(&completion_events, OWN, settings).unwrap());
        let stream = OwnedStream::new(&driver, OWN).unwrap();
        Parts { sim, faults, driver, completion_events, core, stream }
    }

    pub(super) fn clock(&self) -> CompletionClock {
        let waits = Arc::new(WaitTimer::new(self.driver.clone(), OWN));
        CompletionClock::new(
            self.core.clone(),
            Arc::new(Reach::of(OWN)),
            self.completion_events.clone(),
            waits,
        )
    }

    /// Creates a block in an extent that exists only in the allocator, without device memory.
    pub(super) fn grow(&self, size: Bytes) -> Bytes {
        let request = Request { size, stream: StreamKey(1), domain: Allocator::default_domain() };
        match self.core.plan(&request, true, true).unwrap() {
            Outcome::Work(plan) => self.core.commit(&plan, request.stream).unwrap().offset,
            other => panic!("{other:?}"),
        }
    }
}
