//! Interaction of copies that share links: priorities, contention, and drift of the measured link rates.
//!
//! ```text
//!   Traffic ─► prioritized ─► barriers   background copies yield, on the links and on the host
//!           ─► Contention                GPUs whose memory is copied at the same time
//!           ─► drift ─► routes           current path graph, and whether it is still valid
//! ```
//!
//! Invariants:
//! - No call waits for later work of another stream's copy, or affects the correctness of a copy: it only costs or saves time.
//! - Copies call `Traffic` only, never one of its parts.
//!
//! Contention of GPUs whose memory is copied concurrently: for half a second, the links of these GPUs serve their own copies only.
//!
//! ```text
//!   at first     GPU 0  ══links 0, 1══        GPU 1  ══links 0, 1══      both at once: links that serve two copies give less
//!   after that   GPU 0  ══link 0══            GPU 1  ══link 1══          and the links of idle GPUs serve either
//! ```
//!
//! A program that copies to all its GPUs usually does so repeatedly, and the first copy of each round cannot see the others. A wrong
//! prediction only costs time. The driver makes the copies over the own link only, and their end is not observed: it is predicted.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use barriers::{Barriers, UrgentCall};
use drift::Drift;
use glake_device::DeviceId;
use glake_device::owned::{CompletionEvents, DeviceSet};
use glake_tiers::Pinning;
use glake_units::{Bytes, Micros};
use prioritized::Prioritized;

use crate::links::lane_set::{Begun, LaneSet, LaneSetState, Observe};
use crate::links::ledger::Ledger;
use crate::links::requests::Requests;
use crate::paths::{Direction, Load, MOST_GPUS, PathGraph};
use crate::traffic::routes::Routes;
use crate::{Priority, UserStream};

pub(crate) mod barriers;
pub(crate) mod drift;
pub(crate) mod prioritized;
pub(crate) mod routes;

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

/// Time for which copies of two GPUs that met are expected to meet again.
const EXPECTED: Duration = Duration::from_millis(500);

/// Time of each GPU by direction, in microseconds since creation.
type Moments = [[AtomicU64; MOST_GPUS]; 2];

#[derive(Debug)]
pub(crate) struct Contention {
    begin: Instant,
    /// End of the period in which each GPU's copies are expected to run next to others'.
    until: Moments,
    /// Latest of these, by direction.
    last: [AtomicU64; 2],
    /// Predicted end of the copies that use each GPU's own link only.
    busy: Moments,
}

/// Other GPUs that contend with a copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Contenders {
    /// GPUs that keep their own links.
    pub(crate) rivals: DeviceSet,
    /// Number of these without a copy in flight, whose next copies will use the other links too.
    pub(crate) expected: u32,
}

impl Contention {
    pub(crate) fn new() -> Contention {
        let none = || [const { AtomicU64::new(0) }; MOST_GPUS];
        let (begin, last) = (Instant::now(), [const { AtomicU64::new(0) }; 2]);
        Contention { begin, until: [none(), none()], last, busy: [none(), none()] }
    }

    /// Returns the GPUs whose copies recently ran next to copies of `target`, and records those that run now.
    pub(crate) fn of(
        &self,
        target: DeviceId,
        direction: Direction,
        load: &Load,
        devices: usize,
    ) -> Contenders {
        self.at(|| micros(self.begin.elapsed()), target, direction, load, devices)
    }

    /// Records that a copy of `target` uses its own link only for about `took`, after earlier ones.
    pub(crate) fn keep_apart(&self, target: DeviceId, direction: Direction, took: Micros) {
        self.keep_apart_at(micros(self.begin.elapsed()), target, direction, took);
    }

    /// Like [`Contention::of`]; reads the clock only if GPUs have contended before.
    fn at(
        &self,
        now: impl FnOnce() -> u64,
        target: DeviceId,
        direction: Direction,
        load: &Load,
        devices: usize,
    ) -> Contenders {
        let others = || (0_u32..).map(DeviceId).take(devices).filter(|other| *other != target);
        let links = || (0_u32..).map(DeviceId).take(devices);
        let copied = |other: &DeviceId| links().any(|link| !load.target(*other, link, direction).is_zero());
        let seen: DeviceSet = others().filter(copied).collect();
        let last = &self.last[direction.index()];
        if seen.is_empty() && last.load(Ordering::Relaxed) == 0 {
            return Contenders::default();
        }
        let now = now();
        let later = |moments: &Moments, other: &DeviceId| {
            place(moments, *other, direction).is_some_and(|moment| now < moment.load(Ordering::Relaxed))
        };
        let met = seen.union(others().filter(|other| later(&self.busy, other)).collect());
        let rivals: DeviceSet = others().filter(|other| later(&self.until, other)).collect();
        if !met.is_empty() {
            let until = now.saturating_add(micros(EXPECTED));
            for gpu in met.union(DeviceSet::of(target)).iter() {
                if let Some(place) = place(&self.until, gpu, direction) {
                    place.store(until, Ordering::Relaxed);
                }
            }
            last.store(until, Ordering::Relaxed);
        }
        Contenders { rivals, expected: rivals.without(met).len() }
    }

    fn keep_apart_at(&self, now: u64, target: DeviceId, direction: Direction, took: Micros) {
        if let Some(busy) = place(&self.busy, target, direction) {
            let begin = busy.load(Ordering::Relaxed).max(now);
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
            // saturates; not a number is nothing
            busy.store(begin.saturating_add(took.0 as u64), Ordering::Relaxed);
        }
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

fn place(moments: &Moments, gpu: DeviceId, direction: Direction) -> Option<&AtomicU64> {
    moments[direction.index()].get(usize::try_from(gpu.0).ok()?)
}

#[cfg(test)]
mod contention_tests {
    use glake_units::Bytes;

    use super::*;

    const TO: Direction = Direction::ToGpu;

    fn contenders_of(rivals: DeviceSet, expected: u32) -> Contenders {
        Contenders { rivals, expected }
    }

    #[test]
    fn those_that_met_are_expected_to_meet_again() {
        let (rivals, load) = (Contention::new(), Load::new());
        let [a, b, idle] = [0, 1, 2].map(DeviceId);
        let at = |now: u64, gpu| rivals.at(|| now, gpu, TO, &load, 3);
        assert_eq!(at(0, a), Contenders::default());
        load.begin(a, b, TO, Bytes::mib(1));
        // Where they meet first, the first one's copy uses both links already.
        assert_eq!(at(1, b), Contenders::default());
        load.end(a, b, TO, Bytes::mib(1));
        assert_eq!(at(2, a), contenders_of(DeviceSet::of(b), 1));
        assert_eq!(at(2, b), contenders_of(DeviceSet::of(a), 1));
        assert_eq!(at(2, idle), contenders_of(DeviceSet::of(a).union(DeviceSet::of(b)), 2));
        assert_eq!(rivals.at(|| 2, a, Direction::FromGpu, &load, 3), Contenders::default());
        assert_eq!(at(1 + micros(EXPECTED), a), Contenders::default(), "not for ever");
    }

    #[test]
    fn copies_that_nobody_sees_end_keep_the_expectation_up() {
        let (rivals, load) = (Contention::new(), Load::new());
        let [a, b] = [0, 1].map(DeviceId);
        let at = |now: u64, gpu| rivals.at(|| now, gpu, TO, &load, 2);
        load.begin(a, b, TO, Bytes::mib(1));
        at(0, b);
        load.end(a, b, TO, Bytes::mib(1));
        // A round in 50 ms, whose copies take 20 ms each.
        for round in 1..100 {
            let now = round * 50_000;
            assert_eq!(at(now, a), contenders_of(DeviceSet::of(b), 1));
            rivals.keep_apart_at(now, a, TO, Micros(20_000.0));
            assert_eq!(at(now + 10, b), contenders_of(DeviceSet::of(a), 0), "it is under way");
            assert_eq!(at(now + 30_000, b), contenders_of(DeviceSet::of(a), 1), "it has ended");
        }
    }
}
