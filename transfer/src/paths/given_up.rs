//! Paths that were given up are tried again: what was seen of them may have been of a moment in which something else kept the links busy,
//! and copies that no longer take them say nothing of them.
//!
//! ```text
//!   own link alone ── 16 GiB ─► attempt: over all ─┬─ they gain nothing, or nobody can tell ─► own link alone ── 32 GiB ─► attempt ...
//!                                                └─ they gain ─► over all
//! ```
//!
//! By target and direction. Invariant: an attempt ends.

use glake_device::DeviceId;
use glake_units::Bytes;

use super::{Ceiling, Direction, MOST_GPUS, PathGraph, Paths};

/// After so many bytes over the own link alone they are tried again.
const FIRST: Bytes = Bytes::gib(16);
/// After twice as many each time, up to these.
const LAST: Bytes = Bytes::gib(256);
/// So much is seen of an attempt in copies that are timed, or they gain: what gains nothing is seen after a quarter of it.
const ENOUGH: Bytes = Bytes::gib(1);
/// So much is copied in an attempt until it is judged by what was seen, however little: one copy in four is timed at best, of training's one
/// in some hundred.
const MOST: Bytes = Bytes::gib(8);

/// What is copied over the own link alone, and what is tried.
#[derive(Debug)]
pub(crate) struct GivenUp {
    /// What was assumed before copies refined it.
    assumed: PathGraph,
    /// By target and direction.
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
    /// What held, and holds again if it comes to nothing.
    before: PathGraph,
    copied: Bytes,
    /// In copies that were timed, and of that in those that gained.
    seen: Bytes,
    gained: Bytes,
}

impl Default for Place {
    fn default() -> Self {
        Place { alone: Bytes::ZERO, until: FIRST, attempt: None }
    }
}

impl GivenUp {
    /// Of a graph that nothing was seen of yet.
    pub(crate) fn new(assumed: PathGraph) -> GivenUp {
        GivenUp { assumed, places: (0..MOST_GPUS).map(|_| Default::default()).collect() }
    }

    /// Whether something is tried.
    pub(crate) fn is_on(&self) -> bool {
        self.places.iter().flatten().any(|place| place.attempt.is_some())
    }

    /// So many bytes of a target's memory went over its own link alone by a graph, which nothing but the graph was the reason of. The graph to
    /// try, once that was enough.
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

    /// So many bytes went over several links. The graph that holds again, where that is an attempt of which nobody can tell.
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

    /// A copy over several links was timed, and they were not given up; whether it took less than it would have over the own one.
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

/// Paths with those of others of a target in a direction.
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

    /// Of two GPUs that are joined, and a third that is not.
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

    /// The same without relays, and with links that were seen to give half.
    fn without_relays() -> PathGraph {
        let mut paths = assumed().paths().clone();
        paths.relays.clear();
        paths.links.iter_mut().for_each(|link| link.rate = Bandwidth(25.0));
        PathGraph::new(paths).unwrap()
    }

    fn relays(graph: &PathGraph, target: DeviceId) -> Vec<f64> {
        graph.rates(target, WAY).skip(1).map(|path| path.rate.0).collect()
    }

    /// How many GiB over the own link it takes until paths are tried again, and the graph by which they are.
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

    /// In training one copy in some hundred is alone.
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
