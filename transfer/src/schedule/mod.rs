//! What copies do about each other where several want the same links, and whether the links give what they gave.
//!
//! ```text
//!   first order   split by rate, fork, lanes, join: every hook as it is by default
//!   adaptive ─► prioritized ─► barriers ─► urgent_calls   background copies give way, on the links and on the host
//!            ─► contention                                GPUs whose memory is copied at the same time
//!            ─► drift                                     whether the graph still holds
//!   deferred                                              copies whose ways are found as late as can be, if the scheduler defers
//! ```
//!
//! Invariants:
//! - A hook never waits for what a copy of another stream does later, and makes no copy right or wrong: it costs or saves time alone.
//! - A copy asks its scheduler, never one of the parts behind it.

pub(crate) mod adaptive;
pub(crate) mod barriers;
pub(crate) mod contention;
pub(crate) mod deferred;
pub(crate) mod drift;
pub(crate) mod first_order;
pub(crate) mod prioritized;
pub(crate) mod urgent_calls;

use std::sync::Arc;

use glake_device::DeviceId;
use glake_device::owned::CompletionEvents;
use glake_tiers::Pinning;
use glake_units::{Bytes, Micros};

use crate::engine::ledger::Ledger;
use crate::engine::requests::Requests;
use crate::engine::routes::Routes;
use crate::links::lane_set::{LaneSet, LaneSetState};
use crate::paths::{Direction, PathGraph};
use crate::{Priority, Scheduling, UserStream};
use adaptive::Adaptive;
use contention::Contenders;
use drift::Begun;
use first_order::FirstOrder;
use prioritized::Prioritized;
use urgent_calls::UrgentCall;

/// What an engine's copies ask before they take links. By default nothing is known of other copies but the load of the links, by
/// which every copy is split.
pub(crate) trait Scheduler: std::fmt::Debug + Send + Sync {
    /// The first relay is about to be made ready: makes what hooks need. Only the engine's thread is here.
    fn prepare(&self, _points: &Arc<CompletionEvents>) {}

    /// A copy is about to be enqueued; what is returned is held until it is.
    fn urgent_call(&self, _priority: Priority) -> Option<UrgentCall<'_>> {
        None
    }

    /// How a copy of so many bytes that is about to be enqueued takes turns with others, on each of so many links at most.
    fn prioritize(
        &self,
        _priority: Priority,
        _direction: Direction,
        _size: Bytes,
        _links: u32,
    ) -> Prioritized<'_> {
        Prioritized::alone()
    }

    /// Whether a copy of a priority takes turns even where it is not split.
    fn minds_others(&self, _priority: Priority) -> bool {
        false
    }

    /// Whether a background copy that its caller waits for finds its ways while it runs.
    fn defers(&self, _size: Bytes) -> bool {
        false
    }

    /// The GPUs whose copies a copy has to reckon with beyond what is in flight.
    fn contenders(&self, _target: DeviceId, _direction: Direction) -> Contenders {
        Contenders::default()
    }

    /// A copy takes its target's own link alone, for about so long, because of others.
    fn keep_apart(&self, _target: DeviceId, _direction: Direction, _took: Micros) {}

    /// A copy of so many bytes takes several links, or by its graph alone, and not because of others, its target's own.
    fn chosen(
        &self,
        _graph: &Arc<PathGraph>,
        _of: (UserStream, DeviceId),
        _direction: Direction,
        (_size, _is_split): (Bytes, bool),
    ) {
    }

    /// One more copy begins.
    fn begin(&self) {}

    /// A copy is about to fork, by a graph: begins to time it, if it is to be timed.
    fn time(
        &self,
        _lane_set: &LaneSet,
        _state: &LaneSetState,
        _graph: &Arc<PathGraph>,
        _of: (UserStream, DeviceId),
        _size: Bytes,
    ) -> Option<Begun> {
        None
    }

    /// All lanes of a lane set are idle: looks what a copy took that was timed.
    fn observe(&self, _lane_set: &LaneSet, _state: &mut LaneSetState) {}

    /// Splits copies by another graph from now on.
    fn replace_graph(&self, routes: &Routes, graph: PathGraph) {
        routes.set(graph);
    }

    /// What copies take while host memory is pinned says nothing; told once.
    fn heed(&self, _pinning: &Arc<Pinning>) {}

    /// Whether a calibrated graph was seen not to hold.
    fn is_stale(&self) -> bool {
        false
    }

    /// Ends what the scheduler runs.
    fn stop(&self) {}
}

/// The scheduler that options ask for, for so many GPUs.
pub(crate) fn scheduler(
    scheduling: Scheduling,
    ledger: &Arc<Ledger>,
    routes: &Arc<Routes>,
    requests: &Arc<Requests>,
    devices: usize,
) -> Arc<dyn Scheduler> {
    match scheduling {
        Scheduling::FirstOrder => Arc::new(FirstOrder),
        Scheduling::Adaptive => Arc::new(Adaptive::new(ledger, routes, requests, devices)),
    }
}
