//! Whether the links still give what copies are split by: some copies are timed, and what they took refines the graph, or says
//! that its calibration is stale.
//!
//! ```text
//!   user's stream  ──begun──fork──┤own share├──join──ended──      the clock of the lane set's marks on that GPU
//!                                     ─► Observations ─► another graph, or stale
//! ```
//!
//! Invariant: a copy says something only if no other copy of the engine was under way between its begin and its end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use glake_device::DeviceId;
use glake_units::{Bytes, Micros};
use parking_lot::Mutex;

use crate::links::lane_set::{LaneSet, LaneSetState, StreamMarks};
use crate::paths::{Direction, Observations, PathGraph, Shares};
use crate::schedule::barriers::Barriers;
use crate::{Engine, UserStream};

/// Smaller copies say more of latencies, and of the host, than of links: too much to give a calibration up, or to mend what
/// was assumed.
const LEAST: [Bytes; 2] = [Bytes::mib(64), Bytes::mib(16)];
/// One copy of so many on a stream is timed.
const EVERY: u64 = 4;

/// What was seen of the copies of the engine's graph.
#[derive(Debug, Default)]
pub(crate) struct Drift {
    seen: Mutex<Observations>,
    stale: AtomicBool,
    /// How many copies were begun, on all streams.
    begun: AtomicU64,
}

/// A copy that is timed.
#[derive(Debug)]
pub(crate) struct Sample {
    /// Whose stream it is on, and whose memory it is of.
    on: DeviceId,
    direction: Direction,
    shares: Shares,
    graph: Arc<PathGraph>,
    /// How many copies were begun on other streams before.
    others: u64,
}

impl Drift {
    /// Whether a calibrated graph was seen not to hold.
    pub(crate) fn is_stale(&self) -> bool {
        self.stale.load(Ordering::Relaxed)
    }

    /// Copies are split by another graph: what was seen of the last one is forgotten.
    pub(crate) fn replace(&self, graph: PathGraph, set: impl FnOnce(PathGraph)) {
        let mut seen = self.seen.lock();
        if graph.is_calibrated() {
            self.stale.store(false, Ordering::Relaxed);
        }
        *seen = Observations::new();
        set(graph);
    }

    /// One more copy begins.
    pub(crate) fn begin(&self) {
        self.begun.fetch_add(1, Ordering::Relaxed);
    }

    /// How many were begun on streams other than that of a lane set.
    fn others(&self, state: &LaneSetState) -> u64 {
        self.begun.load(Ordering::Relaxed).wrapping_sub(state.serial)
    }
}

impl Engine {
    /// Begins to time a copy that is about to fork, if its turn has come and it is alone: how many were begun on other streams.
    pub(crate) fn time(
        &self,
        lane_set: &LaneSet,
        state: &LaneSetState,
        graph: &PathGraph,
        (on, target): (UserStream, DeviceId),
        size: Bytes,
    ) -> Option<u64> {
        let least = LEAST[usize::from(!graph.is_calibrated())];
        let due = size >= least && on.device == target && state.serial.is_multiple_of(EVERY);
        let others = due.then(|| self.drift.others(state))?;
        let begun = state.is_clock_free()
            && Direction::BOTH.into_iter().all(|direction| !self.is_loaded(direction))
            && !self.barriers.get().is_some_and(Barriers::is_needed)
            && lane_set.marks(target).is_some_and(|marks| marks.clock[0].record(on.raw).is_ok());
        begun.then_some(others)
    }

    /// The copy that is timed is joined.
    pub(crate) fn timed(
        &self,
        lane_set: &LaneSet,
        state: &mut LaneSetState,
        (on, direction): (UserStream, Direction),
        shares: &Shares,
        (graph, others): (Arc<PathGraph>, u64),
    ) {
        if lane_set.marks(on.device).is_some_and(|marks| marks.clock[1].record(on.raw).is_ok()) {
            let shares = shares.clone();
            state.sample = Some(Sample { on: on.device, direction, shares, graph, others });
        }
    }

    /// All lanes of a lane set are idle: what a copy took, if one was timed and its join has passed.
    pub(crate) fn observe(&self, lane_set: &LaneSet, state: &mut LaneSetState) {
        let marks = state.sample.as_ref().and_then(|sample| lane_set.marks(sample.on));
        let Some(StreamMarks { clock, .. }) = marks else { return };
        if matches!(clock[1].is_passed(), Ok(false)) {
            return;
        }
        let took = clock[1].since(&clock[0]);
        if let (Some(sample), Ok(took)) = (state.sample.take(), took)
            && sample.others == self.drift.others(state)
            && !sample.shares.iter().any(|share| self.relays.is_fenced(share.relay))
        {
            self.note(&sample, Micros(took));
        }
    }

    fn note(&self, sample: &Sample, took: Micros) {
        let mut seen = self.drift.seen.lock();
        let graph = self.graph();
        if !Arc::ptr_eq(&graph, &sample.graph) {
            return;
        }
        seen.note_copy(sample.on, sample.direction, &sample.shares, took);
        if graph.is_calibrated() && seen.is_stale() {
            if !self.drift.stale.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    target: "glake::transfer",
                    "the links give a fifth more or less than when they were calibrated: calibrate again"
                );
                self.worker.stale();
            }
            // From here on it is no more than assumed.
            let mut paths = graph.paths().clone();
            paths.calibrated = false;
            if let Ok(assumed) = PathGraph::new(paths) {
                *seen = Observations::new();
                self.set_graph(assumed);
            }
        } else if let Some(refined) = seen.refine(&graph) {
            tracing::debug!(target: "glake::transfer", "the paths are refined by what copies took");
            self.set_graph(refined);
        }
    }
}
