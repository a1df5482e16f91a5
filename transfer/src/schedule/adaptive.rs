//! The scheduler that looks at what else is under way: priorities, contention, drift, and ways that are found late.

use std::sync::{Arc, OnceLock};

use glake_device::DeviceId;
use glake_device::owned::Epochs;
use glake_units::{Bytes, Micros};

use super::barriers::Barriers;
use super::contention::{Contenders, Contention};
use super::drift::{Begun, Drift};
use super::prioritized::Prioritized;
use super::urgent_calls::UrgentCall;
use crate::engine::ledger::Ledger;
use crate::engine::requests::Requests;
use crate::engine::routes::Routes;
use crate::links::lane_set::{LaneSet, LaneSetState};
use crate::paths::{Direction, PathGraph, Shares};
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

    /// Makes the barriers of the links; without them background copies do not give way. Only the engine's thread is here.
    pub(crate) fn prepare(&self, epochs: &Arc<Epochs>) {
        if self.barriers.get().is_some() {
            return;
        }
        match Barriers::new(epochs) {
            // Nobody else makes them.
            Ok(barriers) => drop(self.barriers.set(barriers)),
            Err(error) => {
                tracing::warn!(target: "glake::transfer", %error, "background copies do not give way");
            }
        }
    }

    pub(crate) fn urgent_call(&self, priority: Priority) -> Option<UrgentCall<'_>> {
        let barriers = self.barriers.get().filter(|_| priority != Priority::Background);
        barriers.and_then(Barriers::urgent_call)
    }

    pub(crate) fn prioritize(
        &self,
        priority: Priority,
        direction: Direction,
        size: Bytes,
        links: u32,
    ) -> Prioritized<'_> {
        Prioritized::of(self.barriers.get(), priority, direction, size, links)
    }

    pub(crate) fn minds_others(&self, priority: Priority) -> bool {
        let barriers = self.barriers.get();
        barriers.is_some_and(|barriers| priority == Priority::Background || barriers.is_needed())
    }

    pub(crate) fn defers(&self, size: Bytes) -> bool {
        self.barriers.get().is_some() && size >= DEFERRED
    }

    pub(crate) fn contenders(&self, target: DeviceId, direction: Direction) -> Contenders {
        self.contention.of(target, direction, &self.ledger.load, self.devices)
    }

    pub(crate) fn keep_apart(&self, target: DeviceId, direction: Direction, took: Micros) {
        self.contention.keep_apart(target, direction, took);
    }

    pub(crate) fn begin(&self) {
        self.drift.begin();
    }

    pub(crate) fn time(
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

    pub(crate) fn timed(
        &self,
        lane_set: &LaneSet,
        state: &mut LaneSetState,
        (on, direction): (UserStream, Direction),
        shares: &Shares,
        begun: Begun,
    ) {
        begun.end(lane_set, state, (on, direction), shares);
    }

    pub(crate) fn observe(&self, lane_set: &LaneSet, state: &mut LaneSetState) {
        self.drift.observe(lane_set, state);
    }

    pub(crate) fn replace_graph(&self, _routes: &Routes, graph: PathGraph) {
        self.drift.replace(graph);
    }

    pub(crate) fn is_stale(&self) -> bool {
        self.drift.is_stale()
    }

    pub(crate) fn stop(&self) {
        if let Some(barriers) = self.barriers.get() {
            barriers.stop();
        }
    }
}
