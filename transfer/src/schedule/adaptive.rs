//! The scheduler that looks at what else is under way: priorities, contention, drift, and ways that are found late.

use std::sync::{Arc, OnceLock};

use glake_device::DeviceId;
use glake_device::owned::CompletionEvents;
use glake_tiers::Pinning;
use glake_units::{Bytes, Micros};

use super::Scheduler;
use super::barriers::Barriers;
use super::contention::{Contenders, Contention};
use super::drift::{Begun, Drift};
use super::prioritized::Prioritized;
use super::urgent_calls::UrgentCall;
use crate::engine::ledger::Ledger;
use crate::engine::requests::Requests;
use crate::engine::routes::Routes;
use crate::links::lane_set::{LaneSet, LaneSetState};
use crate::paths::{Direction, PathGraph};
use crate::{Priority, UserStream};

/// Smaller copies are over before it matters which way they find.
const DEFERRED: Bytes = Bytes::mib(64);

/// One engine's.
#[derive(Debug)]
pub(crate) struct Adaptive {
    ledger: Arc<Ledger>,
    /// Made with the first relay.
    barriers: OnceLock<Barriers>,
    contention: Contention,
    drift: Drift,
    devices: usize,
}

impl Adaptive {
    /// For so many GPUs.
    pub(crate) fn new(
        ledger: &Arc<Ledger>,
        routes: &Arc<Routes>,
        requests: &Arc<Requests>,
        devices: usize,
    ) -> Adaptive {
        Adaptive {
            ledger: ledger.clone(),
            barriers: OnceLock::new(),
            contention: Contention::new(),
            drift: Drift::new(routes, ledger, requests),
            devices,
        }
    }
}

impl Scheduler for Adaptive {
    /// The barriers of the links: without them background copies do not give way.
    fn prepare(&self, completion_events: &Arc<CompletionEvents>) {
        if self.barriers.get().is_some() {
            return;
        }
        match Barriers::new(completion_events) {
            // Nobody else makes them.
            Ok(barriers) => drop(self.barriers.set(barriers)),
            Err(error) => {
                tracing::warn!(target: "glake::transfer", %error, "background copies do not give way");
            }
        }
    }

    fn urgent_call(&self, priority: Priority) -> Option<UrgentCall<'_>> {
        let barriers = self.barriers.get().filter(|_| priority != Priority::Background);
        barriers.and_then(Barriers::urgent_call)
    }

    fn prioritize(
        &self,
        priority: Priority,
        direction: Direction,
        size: Bytes,
        links: u32,
    ) -> Prioritized<'_> {
        Prioritized::of(self.barriers.get(), priority, direction, size, links)
    }

    fn minds_others(&self, priority: Priority) -> bool {
        let barriers = self.barriers.get();
        barriers.is_some_and(|barriers| priority == Priority::Background || barriers.is_needed())
    }

    fn defers(&self, size: Bytes) -> bool {
        self.barriers.get().is_some() && size >= DEFERRED
    }

    fn contenders(&self, target: DeviceId, direction: Direction) -> Contenders {
        self.contention.of(target, direction, &self.ledger.load, self.devices)
    }

    fn keep_apart(&self, target: DeviceId, direction: Direction, took: Micros) {
        self.contention.keep_apart(target, direction, took);
    }

    fn chosen(
        &self,
        graph: &Arc<PathGraph>,
        of: (UserStream, DeviceId),
        direction: Direction,
        what: (Bytes, bool),
    ) {
        let is_crowded = || self.barriers.get().is_some_and(Barriers::is_needed);
        self.drift.chosen(graph, of, direction, what, is_crowded);
    }

    fn begin(&self) {
        self.drift.begin();
    }

    fn time(
        &self,
        lane_set: &LaneSet,
        state: &LaneSetState,
        graph: &Arc<PathGraph>,
        (on, target): (UserStream, DeviceId),
        size: Bytes,
    ) -> Option<Begun> {
        let is_crowded = || self.barriers.get().is_some_and(Barriers::is_needed);
        self.drift.time(lane_set, state, graph, (on, target), size, is_crowded)
    }

    fn observe(&self, lane_set: &LaneSet, state: &mut LaneSetState) {
        self.drift.observe(lane_set, state);
    }

    fn replace_graph(&self, _routes: &Routes, graph: PathGraph) {
        self.drift.replace(graph);
    }

    fn heed(&self, pinning: &Arc<Pinning>) {
        self.drift.heed(pinning);
    }

    fn is_stale(&self) -> bool {
        self.drift.is_stale()
    }

    fn stop(&self) {
        if let Some(barriers) = self.barriers.get() {
            barriers.stop();
        }
    }
}
