//! Observed times of the program's own copies, which reveal stale graphs and refine assumed ones.
//!
//! ```text
//!   one part:       time ─► its link
//!   several parts:  time ─► their combined rate, and the gain over a native copy
//!
//!   Observations ─┬► refined: rates and ways of a graph that was only assumed
//!                 └► stale:   a measured graph, on a server that has changed
//! ```
//!
//! Observations are ratios to the prediction, averaged with weights that halve about every 180 MiB. Time and bytes are arguments. Only
//! copies that ran alone are meaningful: the caller leaves out the others.

use glake_device::DeviceId;
use glake_units::{Bandwidth, Bytes, Micros};

use super::split::Shares;
use super::{
    Ceiling, Direction, MOST_GPUS, PathGraph, Paths, RelayRate, Way, bytes_a_micro, float, gigabytes,
};

/// Averaging window: older samples are weighted by 1/e after this many bytes.
const WINDOW: Bytes = Bytes::mib(256);
/// Minimum copy size. Smaller copies reveal latency rather than rates.
const LEAST: Bytes = Bytes::mib(2);
/// Relative deviation of a link from the graph that makes the graph stale.
const DRIFT: f64 = 0.2;
/// Bytes that must be observed before a graph is declared stale.
const SURE: Bytes = Bytes::gib(1);
/// Relative deviation for which an assumed graph is changed.
const WORTH: f64 = 0.05;
/// Bytes that must be observed before an assumed graph is changed.
const LIKELY: Bytes = Bytes::mib(256);
/// Upper bound of a single ratio.
const FAR: f64 = 10.0;
/// Minimum gain over a native copy; relays below it are dropped.
const GAIN: f64 = 1.02;

/// Average of ratios, weighted by bytes, with initial value 1.
#[derive(Clone, Copy, Debug)]
struct Average {
    ratio: f64,
    bytes: Bytes,
}

impl Default for Average {
    fn default() -> Self {
        Average { ratio: 1.0, bytes: Bytes::ZERO }
    }
}

impl Average {
    fn note(&mut self, ratio: f64, size: Bytes) {
        if ratio.is_finite() && ratio > 0.0 && size >= LEAST {
            let weight = 1.0 - (-float(size) / float(WINDOW)).exp();
            self.ratio += weight * (ratio.clamp(1.0 / FAR, FAR) - self.ratio);
            self.bytes = self.bytes.saturating_add(size);
        }
    }

    /// Returns the deviation from 1, or 0 until `after` bytes were observed.
    fn off(&self, after: Bytes) -> f64 {
        if self.bytes < after { 0.0 } else { (self.ratio - 1.0).abs() }
    }
}

/// Observations of a target's copies over several paths.
#[derive(Clone, Copy, Debug)]
struct Beside {
    /// Ratio of the measured to the predicted combined rate.
    together: Average,
    /// Predicted rate of the largest such copy, in bytes per microsecond.
    predicted: f64,
    /// Gain over a native copy, by way: zero-staging, staged. Relays count as useful until observed.
    gains: [Average; 2],
}

impl Default for Beside {
    fn default() -> Self {
        let gain = Average { ratio: 2.0, bytes: Bytes::ZERO };
        Beside { together: Average::default(), predicted: 0.0, gains: [gain; 2] }
    }
}

/// Observations of the copies of one graph.
#[derive(Clone, Debug)]
pub struct Observations {
    /// Ratio of the measured to the predicted rate, by link and direction.
    links: Vec<[Average; 2]>,
    /// Indexed by target and direction.
    targets: Vec<[Beside; 2]>,
}

impl Default for Observations {
    fn default() -> Self {
        Observations {
            links: vec![Default::default(); MOST_GPUS],
            targets: vec![Default::default(); MOST_GPUS],
        }
    }
}

impl Observations {
    /// Creates an empty set of observations.
    pub fn new() -> Observations {
        Observations::default()
    }

    /// Discards the observations of a target's combined paths.
    pub fn forget(&mut self, target: DeviceId, direction: Direction) {
        if let Some(beside) = self.target(target, direction) {
            *beside = Beside::default();
        }
    }

    /// Records the time of a copy from fork to join, with nothing else in flight.
    pub fn note_copy(&mut self, target: DeviceId, direction: Direction, shares: &Shares, took: Micros) {
        let size: Bytes = shares.iter().map(|share| share.size).sum();
        let ratio = shares.predicted().0 / took.0;
        if let [share] = shares[..] {
            if let Some(link) = self.link(share.relay, direction) {
                link.note(ratio, size);
            }
            return;
        }
        let Some(beside) = self.target(target, direction) else { return };
        beside.together.note(ratio, size);
        let rates = (0..shares.len()).map(|part| bytes_a_micro(shares.rate(part)));
        beside.predicted = beside.predicted.max(rates.sum());
        let used = |way| shares.iter().any(|share| share.way == way);
        if used(Way::ZeroStaging) != used(Way::Staged) {
            beside.gains[usize::from(used(Way::Staged))].note(shares.direct().0 / took.0, size);
        }
    }

    /// Returns whether a link, or all together, deviate by 20 % from the graph, or relays gain nothing: calibrate again.
    pub fn is_stale(&self) -> bool {
        let together = self.targets.iter().flatten().map(|beside| &beside.together);
        let drifted = self.links.iter().flatten().chain(together).any(|average| average.off(SURE) > DRIFT);
        drifted || self.gains().any(is_lost)
    }

    /// Returns the graph refined by the observations if it deviates enough, and discards them. A measured graph is never changed: it is
    /// valid or stale.
    pub fn refine(&mut self, graph: &PathGraph) -> Option<PathGraph> {
        let together = self.targets.iter().flatten().map(|beside| &beside.together);
        let seen = self.links.iter().flatten().chain(together).any(is_worth) || self.gains().any(is_lost);
        if graph.is_calibrated() || !seen {
            return None;
        }
        let mut paths: Paths = graph.paths().clone();
        let scaled = |rate: Bandwidth, link, direction: Direction| {
            let average =
                index(link).and_then(|link| self.links.get(link)).map(|link| &link[direction.index()]);
            Bandwidth(
                rate.0 * average.filter(|average| is_worth(average)).map_or(1.0, |average| average.ratio),
            )
        };
        for link in &mut paths.links {
            link.rate = scaled(link.rate, link.device, link.direction);
        }
        for relay in &mut paths.relays {
            relay.rate = scaled(relay.rate, relay.relay, relay.direction);
        }
        for ceiling in &mut paths.ceilings {
            // What the links behind it were seen to give, the fastest of them.
            let rates = ceiling.links.iter().map(|link| scaled(ceiling.rate, *link, ceiling.direction).0);
            ceiling.rate = Bandwidth(rates.reduce(f64::max).unwrap_or(ceiling.rate.0));
        }
        paths.relays.retain(|relay| !self.is_useless(relay));
        self.set_ceilings(&mut paths);
        let refined = PathGraph::new(paths).ok()?;
        *self = Observations::new();
        Some(refined)
    }

    /// Returns whether relays of this kind were observed to gain nothing for their target.
    fn is_useless(&self, relay: &RelayRate) -> bool {
        let beside = index(relay.target).and_then(|target| self.targets.get(target));
        let way = usize::from(relay.way == Way::Staged);
        beside.is_some_and(|beside| is_lost(&beside[relay.direction.index()].gains[way]))
    }

    /// Sets a ceiling over all links for each target whose combined rate differs from the prediction.
    fn set_ceilings(&self, paths: &mut Paths) {
        let all: Vec<DeviceId> = paths.gpus.iter().map(|gpu| gpu.device).collect();
        for ((target, beside), direction) in (0_u32..).map(DeviceId).zip(&self.targets).flat_map(each) {
            let beside = &beside[direction.index()];
            if !all.contains(&target) || !is_worth(&beside.together) || beside.predicted <= 0.0 {
                continue;
            }
            let of_all = |known: &Ceiling| {
                (known.target, known.direction) == (Some(target), direction) && known.links == all
            };
            paths.ceilings.retain(|known| !of_all(known));
            let rate = gigabytes(beside.predicted * beside.together.ratio);
            let (links, reached_by) = (all.clone(), u32::try_from(all.len()).unwrap_or(u32::MAX));
            paths.ceilings.push(Ceiling { direction, links, target: Some(target), rate, reached_by });
        }
    }

    fn gains(&self) -> impl Iterator<Item = &Average> {
        self.targets.iter().flatten().flat_map(|beside| &beside.gains)
    }

    fn target(&mut self, target: DeviceId, direction: Direction) -> Option<&mut Beside> {
        self.targets.get_mut(index(target)?).map(|target| &mut target[direction.index()])
    }

    fn link(&mut self, link: DeviceId, direction: Direction) -> Option<&mut Average> {
        self.links.get_mut(index(link)?).map(|link| &mut link[direction.index()])
    }
}

/// Pairs both directions with the values in `of`.
fn each<T: Copy>(of: T) -> [(T, Direction); 2] {
    Direction::BOTH.map(|direction| (of, direction))
}

/// Returns whether an assumed graph should be changed for this average.
fn is_worth(average: &Average) -> bool {
    average.off(LIKELY) > WORTH
}

fn is_lost(gain: &Average) -> bool {
    gain.bytes >= LIKELY && gain.ratio < GAIN
}

fn index(device: DeviceId) -> Option<usize> {
    usize::try_from(device.0).ok()
}

#[cfg(test)]
mod tests {
    use glake_device::owned::DeviceSet;

    use super::super::{Ask, GpuLinks, Load, split};
    use super::*;

    fn assumed(count: u32) -> PathGraph {
        let gpu = |id| GpuLinks {
            device: DeviceId(id),
            name: "GPU".to_owned(),
            pci: None,
            node: None,
            switch: None,
            link: Some(Bandwidth(50.0)),
            peers: (0..count).filter(|peer| *peer != id).map(DeviceId).collect(),
        };
        PathGraph::conservative(&(0..count).map(gpu).collect::<Vec<_>>())
    }

    fn copy(graph: &PathGraph, relays: DeviceSet) -> Shares {
        let ask = Ask {
            target: DeviceId(0),
            direction: Direction::ToGpu,
            size: Bytes::mib(64),
            zero_staging: relays,
            staged: DeviceSet::EMPTY,
            load: &Load::new(),
            expected: 0,
        };
        split(graph, &ask)
    }

    fn own(graph: &PathGraph) -> f64 {
        graph.rates(DeviceId(0), Direction::ToGpu).next().unwrap().rate.0
    }

    #[test]
    fn an_assumed_rate_becomes_the_one_that_is_seen() {
        let (mut graph, mut seen) = (assumed(2), Observations::new());
        assert!(seen.refine(&graph).is_none());
        for _ in 0..40 {
            let shares = copy(&graph, DeviceSet::EMPTY);
            // The link gives 20 GB/s.
            let took = Micros(7.7 + float(Bytes::mib(64)) / 20_000.0);
            seen.note_copy(DeviceId(0), Direction::ToGpu, &shares, took);
            graph = seen.refine(&graph).unwrap_or(graph);
        }
        assert!((own(&graph) - 20.0).abs() < 1.5, "{}", own(&graph));
        let other = graph.rates(DeviceId(1), Direction::ToGpu).next().unwrap();
        assert_eq!(other.rate.0, 50.0, "of which nothing was seen");
    }

    #[test]
    fn what_slows_all_down_alike_is_a_ceiling() {
        let (mut graph, mut seen) = (assumed(4), Observations::new());
        for _ in 0..200 {
            let shares = copy(&graph, DeviceSet::ALL);
            // The links give 50 GB/s each, but 160 together.
            let size = float(Bytes::mib(64));
            seen.note_copy(DeviceId(0), Direction::ToGpu, &shares, Micros(20.0 + size / 160_000.0));
            graph = seen.refine(&graph).unwrap_or(graph);
        }
        let together = graph.together(DeviceId(0), Direction::ToGpu).0;
        assert!((together - 160.0).abs() < 10.0, "{together}");
        assert_eq!(own(&graph), 50.0);
        assert_eq!(copy(&graph, DeviceSet::ALL).len(), 4, "no path is left out for it");
        let ceilings = graph.paths().ceilings.iter().filter(|ceiling| ceiling.direction == Direction::ToGpu);
        assert_eq!(ceilings.count(), 1);
    }

    #[test]
    fn relays_that_gain_nothing_are_given_up() {
        let (graph, mut seen) = (assumed(4), Observations::new());
        let shares = copy(&graph, DeviceSet::ALL);
        assert_eq!(shares.len(), 4);
        for _ in 0..40 {
            seen.note_copy(DeviceId(0), Direction::ToGpu, &shares, shares.direct());
        }
        assert!(seen.is_stale());
        let graph = seen.refine(&graph).unwrap();
        assert_eq!(copy(&graph, DeviceSet::ALL).len(), 1);
        assert!(!seen.is_stale(), "seen of the graph before");
    }

    #[test]
    fn a_measured_graph_goes_stale_at_20_percent() {
        for (part, stale) in [(1.0, false), (0.85, false), (0.75, true), (1.3, true)] {
            let mut paths = assumed(2).paths().clone();
            paths.calibrated = true;
            let graph = PathGraph::new(paths).unwrap();
            let mut seen = Observations::new();
            let shares = copy(&graph, DeviceSet::ALL);
            let took = Micros(shares.predicted().0 / part);
            seen.note_copy(DeviceId(0), Direction::ToGpu, &shares, took);
            assert!(!seen.is_stale(), "after one copy");
            for _ in 0..60 {
                seen.note_copy(DeviceId(0), Direction::ToGpu, &shares, took);
            }
            assert_eq!(seen.is_stale(), stale, "{part}");
            assert!(seen.refine(&graph).is_none());
        }
    }

    #[test]
    fn nonsense_is_not_noted() {
        let (graph, mut seen) = (assumed(2), Observations::new());
        let shares = copy(&graph, DeviceSet::ALL);
        for took in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            for _ in 0..100 {
                seen.note_copy(DeviceId(0), Direction::ToGpu, &shares, Micros(took));
                seen.note_copy(DeviceId(99), Direction::ToGpu, &shares, Micros(took));
            }
        }
        assert!(!seen.is_stale() && seen.refine(&graph).is_none());
    }
}
