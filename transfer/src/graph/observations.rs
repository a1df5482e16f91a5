//! What copies took that were made anyway: whether the graph still says the truth, and what is truer where it was assumed.
//!
//! ```text
//!   copies ─► Observations ─┬► refined: rates and ways of a graph that was only assumed
//!                           └► stale:   a graph that was measured, on a server that has changed
//! ```
//!
//! A link is observed as the part of its predicted rate that it gives, averaged with weights that fall off by half about
//! every 180 MiB; a target's relays are observed as what their copies gain over native ones. Time and bytes are arguments.
//! Only copies beside which nothing else was in flight say something about a link: the caller leaves out the others.

use glake_device::DeviceId;
use glake_units::{Bandwidth, Bytes, Micros};

use super::paths::{Paths, RelayRate};
use super::shares::Shares;
use super::{Direction, MOST_GPUS, PathGraph, Way, float};

/// The memory of an average: after so many bytes, what was before counts for a part in e.
const WINDOW: Bytes = Bytes::mib(256);
/// Less says more about latency than about rates.
const LEAST: Bytes = Bytes::mib(2);
/// A graph is stale where a link gives so much more or less than it says.
const DRIFT: f64 = 0.2;
/// So much must have been seen before.
const SURE: Bytes = Bytes::gib(1);
/// An assumed graph is worth changing for this.
const WORTH: f64 = 0.05;
/// So much must have been seen before that.
const LIKELY: Bytes = Bytes::mib(256);
/// Nothing counts as further off.
const FAR: f64 = 10.0;
/// Relays that gain less than this are none.
const GAIN: f64 = 1.02;

/// An average of ratios, weighted by bytes, that begins at one.
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

    /// How far off it is, once so many bytes were seen.
    fn off(&self, after: Bytes) -> f64 {
        if self.bytes < after { 0.0 } else { (self.ratio - 1.0).abs() }
    }
}

/// What was seen of the copies of one graph.
#[derive(Clone, Debug)]
pub struct Observations {
    /// By link and direction: what it gave, of what was predicted.
    links: Vec<[Average; 2]>,
    /// By target, direction and way (zero-staging, staged): what its relays gained over a native copy.
    gains: Vec<[[Average; 2]; 2]>,
}

impl Default for Observations {
    fn default() -> Self {
        Observations {
            links: vec![Default::default(); MOST_GPUS],
            // A gain begins where there is one: relays are trusted until they were seen.
            gains: vec![[[Average { ratio: 2.0, bytes: Bytes::ZERO }; 2]; 2]; MOST_GPUS],
        }
    }
}

impl Observations {
    /// Nothing seen.
    pub fn new() -> Observations {
        Observations::default()
    }

    /// A copy took so long from its fork to its join, and nothing else was in flight.
    pub fn note_copy(&mut self, target: DeviceId, direction: Direction, shares: &Shares, took: Micros) {
        let size: Bytes = shares.iter().map(|share| share.size).sum();
        for share in shares {
            if let Some(link) = self.link(share.relay, direction) {
                link.note(shares.predicted().0 / took.0, share.size);
            }
        }
        let ways = [Way::ZeroStaging, Way::Staged];
        let used = ways.map(|way| shares.iter().any(|share| share.way == way));
        let gains = usize::try_from(target.0).ok().and_then(|target| self.gains.get_mut(target));
        if let (Some(gains), [true, false] | [false, true]) = (gains, used) {
            gains[direction.index()][usize::from(used[1])].note(shares.direct().0 / took.0, size);
        }
    }

    /// A part of a copy took so long on its own path, from where its bytes began to flow, and nothing else was in flight
    /// but the other parts.
    pub fn note_share(&mut self, direction: Direction, shares: &Shares, part: usize, took: Micros) {
        if let Some(share) = shares.get(part)
            && let Some(link) = self.link(share.relay, direction)
        {
            link.note(float(share.size) / super::bytes_a_micro(shares.rate(part)) / took.0, share.size);
        }
    }

    /// Whether a link gives 20 % more or less than the graph says, or relays gain nothing: time to calibrate again.
    pub fn is_stale(&self) -> bool {
        let drifted = |average: &Average| average.off(SURE) > DRIFT;
        self.links.iter().flatten().any(drifted) || self.gains.iter().flatten().flatten().any(is_lost)
    }

    /// The graph with what was seen, where that is worth it; what was seen of it is then forgotten. A graph that was
    /// measured is not changed: it holds, or it is stale.
    pub fn refine(&mut self, graph: &PathGraph) -> Option<PathGraph> {
        let worth = |average: &Average| average.off(LIKELY) > WORTH;
        let seen =
            self.links.iter().flatten().any(worth) || self.gains.iter().flatten().flatten().any(is_lost);
        if graph.is_calibrated() || !seen {
            return None;
        }
        let mut paths: Paths = graph.paths().clone();
        let scaled = |rate: Bandwidth, link, direction| {
            let average = index(link).and_then(|link| self.links.get(link)).map(|link| link[direction]);
            Bandwidth(rate.0 * average.filter(worth).map_or(1.0, |average| average.ratio))
        };
        for link in &mut paths.links {
            link.rate = scaled(link.rate, link.device, link.direction.index());
        }
        for relay in &mut paths.relays {
            relay.rate = scaled(relay.rate, relay.relay, relay.direction.index());
        }
        for ceiling in &mut paths.ceilings {
            // What the links behind it were seen to give, the fastest of them.
            let rates =
                ceiling.links.iter().map(|link| scaled(ceiling.rate, *link, ceiling.direction.index()));
            ceiling.rate = Bandwidth(rates.map(|rate| rate.0).fold(0.0, f64::max).max(f64::MIN_POSITIVE));
        }
        let gains = |relay: &RelayRate| {
            let of_target = index(relay.target).and_then(|target| self.gains.get(target));
            let way = usize::from(relay.way == Way::Staged);
            !of_target.is_some_and(|gains| is_lost(&gains[relay.direction.index()][way]))
        };
        paths.relays.retain(gains);
        let refined = PathGraph::new(paths).ok()?;
        *self = Observations::new();
        Some(refined)
    }

    fn link(&mut self, link: DeviceId, direction: Direction) -> Option<&mut Average> {
        self.links.get_mut(index(link)?).map(|link| &mut link[direction.index()])
    }
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
    fn parts_speak_for_their_own_links() {
        let (graph, mut seen) = (assumed(2), Observations::new());
        let shares = copy(&graph, DeviceSet::ALL);
        assert_eq!(shares.len(), 2);
        for _ in 0..40 {
            for (part, rate) in [(0, 50_000.0), (1, 25_000.0)] {
                let took = Micros(float(shares[part].size) / rate);
                seen.note_share(Direction::ToGpu, &shares, part, took);
            }
        }
        let graph = seen.refine(&graph).unwrap();
        let rates: Vec<f64> = graph.rates(DeviceId(0), Direction::ToGpu).map(|path| path.rate.0).collect();
        assert!(rates[0] == 50.0 && (rates[1] - 25.0).abs() < 0.5, "{rates:?}");
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
                seen.note_share(Direction::ToGpu, &shares, 1, Micros(took));
                seen.note_copy(DeviceId(99), Direction::ToGpu, &shares, Micros(took));
                seen.note_share(Direction::ToGpu, &shares, 7, Micros(took));
            }
        }
        assert!(!seen.is_stale() && seen.refine(&graph).is_none());
    }
}
