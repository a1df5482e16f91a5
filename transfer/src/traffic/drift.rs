//! Detection of drift: some copies are timed, and their times refine the path graph or show that its calibration is stale.
//!
//! ```text
//!   user's stream  ──begun──fork──┤own share├──join──ended──      the clock of the lane set's marks on that GPU
//!                                     ─► Observations ─► another graph, or stale
//! ```
//!
//! Invariant: a time counts only if no other copy of the engine was in flight during it, and no registered user pinned host memory.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use glake_device::DeviceId;
use glake_tiers::Pinning;
use glake_units::{Bytes, Micros};
use parking_lot::Mutex;

use crate::UserStream;
use crate::links::lane_set::{Begun, LaneSet, LaneSetState, Sample, StreamMarks};
use crate::links::ledger::Ledger;
use crate::links::requests::Requests;
use crate::paths::{Direction, GivenUp, Observations, PathGraph};
use crate::traffic::routes::Routes;

/// Minimum size of a timed copy for a calibrated and for an assumed graph. Smaller copies reveal latency and host overhead rather than link
/// rates.
const LEAST: [Bytes; 2] = [Bytes::mib(64), Bytes::mib(16)];
/// Number of copies of a stream among which one is timed.
const EVERY: u64 = 4;

/// Timing state of an engine.
#[derive(Debug)]
pub(crate) struct Drift {
    routes: Arc<Routes>,
    ledger: Arc<Ledger>,
    requests: Arc<Requests>,
    seen: Mutex<Seen>,
    stale: AtomicBool,
    /// Whether given-up paths are being retried.
    is_trying: AtomicBool,
    /// Number of copies begun on all streams.
    begun: AtomicU64,
    /// Reports pinning of host memory.
    pinning: OnceLock<Arc<Pinning>>,
}

/// Observations of the current graph, and of the graph it was refined from.
#[derive(Debug)]
struct Seen {
    graph: Observations,
    given_up: GivenUp,
}

impl Seen {
    fn nothing(assumed: PathGraph) -> Seen {
        Seen { graph: Observations::new(), given_up: GivenUp::new(assumed) }
    }
}

impl Drift {
    /// Creates an empty state.
    pub(crate) fn new(routes: &Arc<Routes>, ledger: &Arc<Ledger>, requests: &Arc<Requests>) -> Drift {
        Drift {
            routes: routes.clone(),
            ledger: ledger.clone(),
            requests: requests.clone(),
            seen: Mutex::new(Seen::nothing(PathGraph::empty())),
            stale: AtomicBool::new(false),
            is_trying: AtomicBool::new(false),
            begun: AtomicU64::new(0),
            pinning: OnceLock::new(),
        }
    }

    /// See [`super::Traffic::ignore_while_pinning`].
    pub(crate) fn ignore_while_pinning(&self, pinning: &Arc<Pinning>) {
        let _told_already = self.pinning.set(pinning.clone());
    }

    /// Returns the start of the period without pinning; `None` while host memory is pinned.
    fn unpinned(&self) -> Option<u64> {
        self.pinning.get().map_or(Some(0), |pinning| pinning.idle_since())
    }

    /// Returns whether timings contradict a calibrated graph.
    pub(crate) fn is_stale(&self) -> bool {
        self.stale.load(Ordering::Relaxed)
    }

    /// Replaces the graph and discards the observations of the previous one.
    pub(crate) fn replace(&self, graph: PathGraph) {
        let mut seen = self.seen.lock();
        if graph.is_calibrated() {
            self.stale.store(false, Ordering::Relaxed);
        }
        *seen = Seen::nothing(graph.clone());
        self.routes.set(graph);
    }

    /// Counts one more copy.
    pub(crate) fn begin(&self) {
        self.begun.fetch_add(1, Ordering::Relaxed);
    }

    /// Records the paths chosen for a copy: several links, or the target's own only because the graph said so. Retries given-up paths from
    /// time to time.
    pub(crate) fn chosen(
        &self,
        graph: &Arc<PathGraph>,
        (on, target): (UserStream, DeviceId),
        direction: Direction,
        (size, is_split): (Bytes, bool),
        is_crowded: impl FnOnce() -> bool,
    ) {
        // Alone counts what could be timed if it were split, and nothing that others are the reason of.
        let counts = match is_split {
            true => self.is_trying.load(Ordering::Relaxed),
            false => size >= LEAST[1] && on.device == target && self.is_idle() && !is_crowded(),
        };
        if graph.is_calibrated() || !counts {
            return;
        }
        let mut seen = self.seen.lock();
        if !Arc::ptr_eq(&self.routes.graph(), graph) {
            return;
        }
        let next = match is_split {
            true => seen.given_up.split(graph, target, direction, size),
            false => seen.given_up.alone(graph, target, direction, size),
        };
        if let Some(next) = next {
            tracing::debug!(target: "glake::transfer", gpu = %target, ?direction, ends = is_split, "paths that were given up are tried again");
            seen.graph.forget(target, direction);
            self.routes.set(next);
        }
        self.is_trying.store(seen.given_up.is_on(), Ordering::Relaxed);
    }

    fn is_idle(&self) -> bool {
        Direction::BOTH.into_iter().all(|direction| !self.ledger.is_loaded(direction))
    }

    /// Begins to time a copy that is about to fork, if it is selected and runs alone.
    pub(crate) fn time(
        &self,
        lane_set: &LaneSet,
        state: &LaneSetState,
        graph: &Arc<PathGraph>,
        (on, target): (UserStream, DeviceId),
        size: Bytes,
        is_crowded: impl FnOnce() -> bool,
    ) -> Option<Begun> {
        let least = LEAST[usize::from(!graph.is_calibrated())];
        let due = size >= least && on.device == target && state.serial.is_multiple_of(EVERY);
        let others = due.then(|| self.others(state))?;
        let unpinned = self.unpinned()?;
        let begun = state.is_clock_free()
            && self.is_idle()
            && !is_crowded()
            && lane_set.marks(target).is_some_and(|marks| marks.clock[0].record(on.raw).is_ok());
        begun.then(|| Begun { graph: graph.clone(), others, unpinned })
    }

    /// Evaluates the timed copy of an idle lane set once its join has passed.
    pub(crate) fn observe(&self, lane_set: &LaneSet, state: &mut LaneSetState) {
        let marks = state.sample.as_ref().and_then(|sample| lane_set.marks(sample.on));
        let Some(StreamMarks { clock, .. }) = marks else { return };
        if matches!(clock[1].is_passed(), Ok(false)) {
            return;
        }
        let took = clock[1].since(&clock[0]);
        if let (Some(sample), Ok(took)) = (state.sample.take(), took)
            && sample.begun.others == self.others(state)
            && self.unpinned() == Some(sample.begun.unpinned)
            && !sample.shares.iter().any(|share| self.ledger.relays.is_fenced(share.relay))
        {
            self.note(&sample, Micros(took));
        }
    }

    /// Returns the number of copies begun on streams other than the lane set's.
    fn others(&self, state: &LaneSetState) -> u64 {
        self.begun.load(Ordering::Relaxed).wrapping_sub(state.serial)
    }

    fn note(&self, sample: &Sample, took: Micros) {
        let mut seen = self.seen.lock();
        let graph = self.routes.graph();
        if !Arc::ptr_eq(&graph, &sample.begun.graph) {
            return;
        }
        tracing::trace!(
            target: "glake::transfer",
            gpu = %sample.on, direction = ?sample.direction, shares = ?&sample.shares[..], ?took,
            predicted = ?sample.shares.predicted(),
            "a copy was timed"
        );
        seen.graph.note_copy(sample.on, sample.direction, &sample.shares, took);
        if sample.shares.len() > 1 {
            let size = sample.shares.iter().map(|share| share.size).sum();
            let gains = sample.shares.direct().0 > took.0;
            seen.given_up.seen(sample.on, sample.direction, size, gains);
        }
        if graph.is_calibrated() && seen.graph.is_stale() {
            if !self.stale.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    target: "glake::transfer",
                    "link rates differ by a fifth from the calibration: run glake topo --calibrate"
                );
                self.requests.stale();
            }
            // From here on it is no more than assumed.
            let mut paths = graph.paths().clone();
            paths.calibrated = false;
            if let Ok(assumed) = PathGraph::new(paths) {
                *seen = Seen::nothing(assumed.clone());
                self.routes.set(assumed);
            }
        } else if let Some(refined) = seen.graph.refine(&graph) {
            let (relays, before) = (refined.paths().relays.len(), graph.paths().relays.len());
            tracing::debug!(target: "glake::transfer", relays, before, "the paths are refined by what copies took");
            self.routes.set(refined);
        }
    }
}
