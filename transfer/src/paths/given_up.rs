//! Periodic retries of multi-link paths that were given up. The links may only have been busy at the time, and unused paths yield no
//! timings.
//!
//! ```text
//!   own link only ── 16 GiB ─► attempt: all links ─┬─ no gain, or inconclusive ─► own link only ── 32 GiB ─► attempt ...
//!                                                └─ gain ─► all links
//! ```
//!
//! State is kept per target and direction. Invariant: every attempt ends.

use glake_device::DeviceId;
use glake_units::Bytes;

use super::{Ceiling, Direction, MOST_GPUS, PathGraph, Paths};

/// Bytes over the own link before the first retry.
const FIRST: Bytes = Bytes::gib(16);
/// Upper bound of the retry interval, which doubles each time.
const LAST: Bytes = Bytes::gib(256);
/// Bytes of timed copies after which an attempt succeeds. Paths without a gain are rejected after about a quarter of this.
const ENOUGH: Bytes = Bytes::gib(1);
/// Maximum bytes copied in an attempt before it is decided on the timings so far: at best 1 copy in 4 is timed, in training about 1 in 100.
const MOST: Bytes = Bytes::gib(8);

/// Retry state of all targets and directions.
#[derive(Debug)]
pub(crate) struct GivenUp {
    /// Initial graph, before timings refined it.
    assumed: PathGraph,
    /// Indexed by target, then direction.
    places: Vec<[Place; 2]>,
}

#[derive(Debug)]
struct Place {
    alone: Bytes,
    until: Bytes,
    attempt: Option<Attempt>,
}

#[derive(Debug)]
struct Attempt {
    /// Graph to restore if the attempt fails.
    before: PathGraph,
    copied: Bytes,
    /// Bytes of timed copies, and of the faster ones among them.
    seen: Bytes,
    gained: Bytes,
}

impl Default for Place {
    fn default() -> Self {
        Place { alone: Bytes::ZERO, until: FIRST, attempt: None }
    }
}

impl GivenUp {
    /// Creates the state for an initial graph.
    pub(crate) fn new(assumed: PathGraph) -> GivenUp {
        GivenUp { assumed, places: (0..MOST_GPUS).map(|_| Default::default()).collect() }
    }

    /// Returns whether any attempt is in progress.
    pub(crate) fn is_on(&self) -> bool {
        self.places.iter().flatten().any(|place| place.attempt.is_some())
    }

    /// Records a copy that used only the target's own link because `graph` chose so. Returns the graph to try once the retry interval is
    /// reached.
    pub(crate) fn alone(
        &mut self,
        graph: &PathGraph,
        target: DeviceId,
        direction: Direction,
        size: Bytes,
    ) -> Option<PathGraph> {
        let place = of(&mut self.places, target, direction)?;
        // What was tried was given up again.
        place.attempt = None;
        place.alone = place.alone.saturating_add(size);
        if place.alone < place.until {
            return None;
        }
        (place.alone, place.until) = (Bytes::ZERO, place.until.saturating_add(place.until).min(LAST));
        let (now, assumed) = (graph.paths(), self.assumed.paths());
        let tried = with_paths_of(now, assumed, target, direction);
        if tried.relays.len() <= now.relays.len() && tried.ceilings.len() >= now.ceilings.len() {
            return None;
        }
        let tried = PathGraph::new(tried).ok()?;
        place.attempt = Some(Attempt {
            before: graph.clone(),
            copied: Bytes::ZERO,
            seen: Bytes::ZERO,
            gained: Bytes::ZERO,
        });
        Some(tried)
    }

    /// Records a copy over several links. Returns the graph to restore if this ends an attempt without a measured gain.
    pub(crate) fn split(
        &mut self,
        graph: &PathGraph,
        target: DeviceId,
        direction: Direction,
        size: Bytes,
    ) -> Option<PathGraph> {
        let place = of(&mut self.places, target, direction)?;
        let attempt = place.attempt.as_mut()?;
        attempt.copied = attempt.copied.saturating_add(size);
        if attempt.copied < MOST {
            return None;
        }
        let Attempt { before, seen, gained, .. } = place.attempt.take()?;
        if gained > seen.saturating_sub(gained) {
            // What comes may have them given up again.
            return None;
        }
        PathGraph::new(with_paths_of(graph.paths(), before.paths(), target, direction)).ok()
    }

    /// Records a timed copy over several links. `gains`: it was faster than the own link alone would have been.
    pub(crate) fn seen(&mut self, target: DeviceId, direction: Direction, size: Bytes, gains: bool) {
        let Some(place) = of(&mut self.places, target, direction) else { return };
        if let Some(attempt) = &mut place.attempt {
            attempt.seen = attempt.seen.saturating_add(size);
            attempt.gained = attempt.gained.saturating_add(if gains { size } else { Bytes::ZERO });
            place.attempt = place.attempt.take().filter(|attempt| attempt.seen < ENOUGH);
        }
    }
}

fn of(places: &mut [[Place; 2]], target: DeviceId, direction: Direction) -> Option<&mut Place> {
    places.get_mut(usize::try_from(target.0).ok()?)?.get_mut(direction.index())
}

/// Returns `now` with the paths of one target and direction from `others`.
fn with_paths_of(now: &Paths, others: &Paths, target: DeviceId, direction: Direction) -> Paths {
    let rate = |paths: &Paths, link| {
        let found = paths.links.iter().find(|known| (known.device, known.direction) == (link, direction));
        found.map(|known| known.rate.0).filter(|rate| *rate > 0.0)
    };
    let mut paths = now.clone();
    paths.relays.retain(|relay| (relay.target, relay.direction) != (target, direction));
    for relay in others.relays.iter().filter(|relay| (relay.target, relay.direction) == (target, direction)) {
        let mut relay = *relay;
        // By what its link was seen to give since.
        if let (Some(seen), Some(first)) = (rate(now, relay.relay), rate(others, relay.relay)) {
            relay.rate.0 *= seen / first;
        }
        paths.relays.push(relay);
    }
    let of_target = |known: &&Ceiling| (known.target, known.direction) == (Some(target), direction);
    paths.ceilings.retain(|known| !of_target(&known));
    paths.ceilings.extend(others.ceilings.iter().filter(of_target).cloned());
    paths
}

#[cfg(test)]
mod tests {
    use glake_units::Bandwidth;

    use super::super::GpuLinks;
    use super::*;

    const GPU: DeviceId = DeviceId(0);
    const OTHER: DeviceId = DeviceId(1);
    const WAY: Direction = Direction::FromGpu;
    const GIB: Bytes = Bytes::gib(1);

    /// Returns two GPUs connected by NVLink and a third without peers.
    fn assumed() -> PathGraph {
        let gpu = |id: u32| GpuLinks {
            device: DeviceId(id),
            name: "GPU".to_owned(),
            pci: None,
            node: None,
            switch: None,
            link: Some(Bandwidth(50.0)),
            peers: if id < 2 { vec![DeviceId(1 - id)] } else { Vec::new() },
        };
        PathGraph::conservative(&(0..3).map(gpu).collect::<Vec<_>>())
    }

    /// Returns the same without relays, with links at half their rate.
    fn without_relays() -> PathGraph {
        let mut paths = assumed().paths().clone();
        paths.relays.clear();
        paths.links.iter_mut().for_each(|link| link.rate = Bandwidth(25.0));
        PathGraph::new(paths).unwrap()
    }

    fn relays(graph: &PathGraph, target: DeviceId) -> Vec<f64> {
        graph.rates(target, WAY).skip(1).map(|path| path.rate.0).collect()
    }

    /// Returns the GiB over the own link until a retry, and the graph it tries.
    fn until_tried(given_up: &mut GivenUp, target: DeviceId) -> Option<(usize, PathGraph)> {
        let graph = without_relays();
        (1..1000).find_map(|count| Some((count, given_up.alone(&graph, target, WAY, GIB)?)))
    }

    #[test]
    fn what_is_not_taken_is_tried_again_ever_more_seldom() {
        let mut given_up = GivenUp::new(assumed());
        for expected in [16, 32, 64, 128, 256, 256] {
            let (count, tried) = until_tried(&mut given_up, GPU).unwrap();
            assert_eq!(count, expected);
            assert_eq!(relays(&tried, GPU)[0], 25.0, "by what its link was seen to give");
            assert_eq!(relays(&tried, OTHER), [], "of one target in one direction");
            assert!(given_up.is_on());
        }
        assert_eq!(until_tried(&mut given_up, OTHER).unwrap().0, 16, "each has its own wait");
        assert!(given_up.alone(&without_relays(), GPU, Direction::ToGpu, FIRST).is_some());
    }

    /// In training, about one copy in a hundred runs alone and can be timed.
    #[test]
    fn few_copies_that_are_timed_are_enough_where_most_are_not() {
        for (gains, stays) in [([true, true], true), ([false, true], false), ([false, false], false)] {
            let mut given_up = GivenUp::new(assumed());
            let (_, tried) = until_tried(&mut given_up, GPU).unwrap();
            gains.into_iter().for_each(|gains| given_up.seen(GPU, WAY, Bytes::mib(32), gains));
            let ended = (0..1000).all(|_| given_up.split(&tried, GPU, WAY, GIB).is_none());
            assert_eq!((ended, given_up.is_on()), (stays, false), "{gains:?}");
        }
    }

    #[test]
    fn an_attempt_of_which_nobody_can_tell_ends() {
        let mut given_up = GivenUp::new(assumed());
        let (_, tried) = until_tried(&mut given_up, GPU).unwrap();
        let mut split = |target| given_up.split(&tried, target, WAY, GIB);
        assert!((0..100).all(|_| split(OTHER).is_none()) && (0..7).all(|_| split(GPU).is_none()));
        assert_eq!(relays(&split(GPU).unwrap(), GPU), []);
        assert!((0..100).all(|_| split(GPU).is_none()) && !given_up.is_on());
        assert_eq!(until_tried(&mut given_up, GPU).unwrap().0, 32);
    }

    #[test]
    fn one_copy_in_six_that_is_timed_is_enough() {
        let mut given_up = GivenUp::new(assumed());
        let (_, tried) = until_tried(&mut given_up, GPU).unwrap();
        let size = Bytes::mib(64);
        for copy in 0.. {
            assert!(given_up.split(&tried, GPU, WAY, size).is_none(), "ended after {copy} copies");
            if copy % 6 == 0 {
                given_up.seen(GPU, WAY, size, false);
            }
            if !given_up.is_on() {
                break;
            }
        }
        assert!((0..1000).all(|_| given_up.split(&tried, GPU, WAY, size).is_none()));
    }

    #[test]
    fn one_that_gains_goes_on_and_one_that_does_not_is_over() {
        let mut given_up = GivenUp::new(assumed());
        let (_, tried) = until_tried(&mut given_up, GPU).unwrap();
        given_up.seen(OTHER, WAY, ENOUGH, true);
        assert!(given_up.is_on());
        (0..8).for_each(|_| given_up.seen(GPU, WAY, Bytes::mib(256), false));
        assert!(!given_up.is_on() && given_up.split(&tried, GPU, WAY, MOST).is_none());
        until_tried(&mut given_up, GPU).unwrap();
        assert!(
            given_up.alone(&without_relays(), GPU, WAY, GIB).is_none() && !given_up.is_on(),
            "it was given up again"
        );
    }

    #[test]
    fn where_nothing_was_given_up_nothing_is_tried() {
        let mut given_up = GivenUp::new(assumed());
        assert!(
            [DeviceId(2), DeviceId(99)].into_iter().all(|lone| until_tried(&mut given_up, lone).is_none())
        );
        assert!((0..1000).all(|_| given_up.alone(&assumed(), GPU, WAY, GIB).is_none()));
    }

    #[test]
    fn a_ceiling_that_was_seen_is_lifted() {
        let mut paths = assumed().paths().clone();
        let ceiling = |target| {
            let (links, rate) = (vec![GPU, OTHER], Bandwidth(40.0));
            Ceiling { direction: WAY, links, target: Some(target), rate, reached_by: 2 }
        };
        paths.ceilings.extend([ceiling(GPU), ceiling(OTHER)]);
        let graph = PathGraph::new(paths).unwrap();
        let tried = GivenUp::new(assumed()).alone(&graph, GPU, WAY, FIRST).unwrap();
        assert_eq!(tried.paths().ceilings, [ceiling(OTHER)]);
    }
}
