//! Interaction of copies that share links: priorities, contention, and drift of the measured link rates.
//!
//! ```text
//!   Traffic ─► prioritized ─► barriers   background copies yield, on the links and on the host
//!           ─► contention                GPUs whose memory is copied at the same time
//!           ─► drift ─► routes           current path graph, and whether it is still valid
//! ```
//!
//! Invariants:
//! - No call waits for later work of another stream's copy, or affects the correctness of a copy: it only costs or saves time.
//! - Copies call `Traffic` only, never one of its parts.

pub(crate) mod barriers;
pub(crate) mod contention;
pub(crate) mod drift;
pub(crate) mod prioritized;
pub(crate) mod routes;

use std::sync::{Arc, OnceLock};

use glake_device::DeviceId;
use glake_device::owned::CompletionEvents;
use glake_tiers::Pinning;
use glake_units::{Bytes, Micros};

use crate::links::lane_set::{Begun, LaneSet, LaneSetState, Observe};
use crate::links::ledger::Ledger;
use crate::links::requests::Requests;
use crate::paths::{Direction, PathGraph};
use crate::traffic::routes::Routes;
use crate::{Priority, UserStream};
use barriers::{Barriers, UrgentCall};
use contention::{Contenders, Contention};
use drift::Drift;
use prioritized::Prioritized;

/// Traffic state of one engine.
#[derive(Debug)]
pub(crate) struct Traffic {
    ledger: Arc<Ledger>,
    /// Created with the first relay.
    barriers: OnceLock<Barriers>,
    contention: Contention,
    drift: Drift,
    devices: usize,
}

impl Traffic {
    pub(crate) fn new(
        ledger: &Arc<Ledger>,
        routes: &Arc<Routes>,
        requests: &Arc<Requests>,
        devices: usize,
    ) -> Arc<Traffic> {
        Arc::new(Traffic {
            ledger: ledger.clone(),
            barriers: OnceLock::new(),
            contention: Contention::new(),
            drift: Drift::new(routes, ledger, requests),
            devices,
        })
    }

    /// Creates the barriers of the links, without which background copies do not yield. Called on the engine's thread only, before the
    /// first relay is set up.
    pub(crate) fn prepare(&self, completion_events: &Arc<CompletionEvents>) {
        if self.barriers.get().is_some() {
            return;
        }
        match Barriers::new(completion_events) {
            // The engine's thread is the only caller.
            Ok(barriers) => drop(self.barriers.set(barriers)),
            Err(error) => {
                tracing::warn!(target: "glake::transfer", %error, "background copies do not yield to other copies");
            }
        }
    }

    /// Announces a copy that is about to be enqueued; the guard must be held until it is. `None` for background copies.
    pub(crate) fn urgent_call(&self, priority: Priority) -> Option<UrgentCall<'_>> {
        let barriers = self.barriers.get().filter(|_| priority != Priority::Background);
        barriers.and_then(Barriers::urgent_call)
    }

    /// Returns the turn-taking of a copy of `size` bytes over at most `links` links.
    pub(crate) fn prioritize(
        &self,
        priority: Priority,
        direction: Direction,
        size: Bytes,
        links: u32,
    ) -> Prioritized<'_> {
        Prioritized::of(self.barriers.get(), priority, direction, size, links)
    }

    /// Returns whether a copy takes turns with others even if it is not split.
    pub(crate) fn minds_others(&self, priority: Priority) -> bool {
        let barriers = self.barriers.get();
        barriers.is_some_and(|barriers| priority == Priority::Background || barriers.is_needed())
    }

    /// Returns the GPUs whose copies contend with a copy of `target`, beyond the copies in flight.
    pub(crate) fn contenders(&self, target: DeviceId, direction: Direction) -> Contenders {
        self.contention.of(target, direction, &self.ledger.load, self.devices)
    }

    /// Records that contention restricted a copy to its target's own link for about `took`.
    pub(crate) fn keep_apart(&self, target: DeviceId, direction: Direction, took: Micros) {
        self.contention.keep_apart(target, direction, took);
    }

    /// Records the paths chosen for a copy of `size` bytes: several links, or the target's own because the graph alone said so.
    pub(crate) fn chosen(
        &self,
        graph: &Arc<PathGraph>,
        of: (UserStream, DeviceId),
        direction: Direction,
        (size, is_split): (Bytes, bool),
    ) {
        self.drift.chosen(graph, of, direction, (size, is_split), || self.is_crowded());
    }

    /// Counts one more copy.
    pub(crate) fn begin(&self) {
        self.drift.begin();
    }

    /// Begins to time a copy that is about to fork; `None` if it is not selected for timing.
    pub(crate) fn time(
        &self,
        lane_set: &LaneSet,
        state: &LaneSetState,
        graph: &Arc<PathGraph>,
        of: (UserStream, DeviceId),
        size: Bytes,
    ) -> Option<Begun> {
        self.drift.time(lane_set, state, graph, of, size, || self.is_crowded())
    }

    /// Replaces the graph by which later copies are split.
    pub(crate) fn replace_graph(&self, graph: PathGraph) {
        self.drift.replace(graph);
    }

    /// Ignores the timings of copies that run while host memory is pinned. Called once.
    pub(crate) fn ignore_while_pinning(&self, pinning: &Arc<Pinning>) {
        self.drift.ignore_while_pinning(pinning);
    }

    /// Returns whether timings contradict a calibrated graph.
    pub(crate) fn is_stale(&self) -> bool {
        self.drift.is_stale()
    }

    pub(crate) fn stop(&self) {
        if let Some(barriers) = self.barriers.get() {
            barriers.stop();
        }
    }

    fn is_crowded(&self) -> bool {
        self.barriers.get().is_some_and(Barriers::is_needed)
    }
}

impl Observe for Traffic {
    fn observe(&self, lane_set: &LaneSet, state: &mut LaneSetState) {
        self.drift.observe(lane_set, state);
    }
}
