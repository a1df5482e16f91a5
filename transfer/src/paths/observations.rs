//! What copies took that were made anyway: whether the graph still says the truth, and what is truer where it was assumed.
//!
//! ```text
//!   one part:       took ─► its link
//!   several parts:  took ─► what they give together, and what that gains over a native copy
//!                   each part's ─► its link, beside the fastest part: what slows all down alike is no link's fault
//!
//!   Observations ─┬► refined: rates and ways of a graph that was only assumed
//!                 └► stale:   a graph that was measured, on a server that has changed
//! ```
//!
//! Everything is observed as a ratio to what was predicted, averaged with weights that fall off by half about every
//! 180 MiB. Time and bytes are arguments. Only copies beside which nothing else was in flight say something: the caller
//! leaves out the others.

use glake_device::DeviceId;
use glake_units::{Bandwidth, Bytes, Micros};
use smallvec::SmallVec;

use super::shares::Shares;
use super::table::{Ceiling, LinkRate, Paths, RelayRate};
use super::{Direction, MOST_GPUS, PathGraph, Way, bytes_a_micro, float, gigabytes};

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
/// A path that was to give less than this part of what it gives alone shares something with others.
const BOUND: f64 = 0.98;
/// No link is taken to give less than this part of what was assumed: what gets no share of a copy is never seen again.
const LOW: f64 = 0.125;

/// An average of ratios, weighted by bytes; one where nothing was seen.
#[derive(Clone, Copy, Debug)]
struct Average {
    ratio: f64,
    /// The last of them.
    last: Option<f64>,
    bytes: Bytes,
}

impl Default for Average {
    fn default() -> Self {
        Average { ratio: 1.0, last: None, bytes: Bytes::ZERO }
    }
}

impl Average {
    fn note(&mut self, ratio: f64, size: Bytes) {
        if !ratio.is_finite() || ratio <= 0.0 || size < LEAST {
            return;
        }
        // Something else may have held one copy up: what is slower than the one before it counts as that one, and the first as none.
        let Some(last) = self.last.replace(ratio) else { return };
        self.bytes = self.bytes.saturating_add(size);
        let weight = (1.0 - (-float(size) / float(WINDOW)).exp()).max(float(size) / float(self.bytes));
        self.ratio += weight * (ratio.max(last).clamp(1.0 / FAR, FAR) - self.ratio);
    }

    /// How far off it is, once so many bytes were seen.
    fn off(&self, after: Bytes) -> f64 {
        if self.bytes < after { 0.0 } else { (self.ratio - 1.0).abs() }
    }
}

/// What was seen of a target's copies over several paths.
#[derive(Clone, Copy, Debug, Default)]
struct Beside {
    /// What they gave, of what was predicted.
    together: Average,
    /// What their parts gave, each while it flowed, of what was predicted: where one ends late this is more than what they gave together.
    flowed: Average,
    /// How many bytes a microsecond were predicted of the largest such copy.
    predicted: f64,
    /// What they gained over a native copy, by way: zero-staging, staged.
    gains: [Average; 2],
}

/// What was seen of the copies of one graph.
#[derive(Clone, Debug)]
pub struct Observations {
    /// By link and direction: what it gave, of what was predicted.
    links: Vec<[Average; 2]>,
    /// By target and direction.
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
    /// Nothing seen.
    pub fn new() -> Observations {
        Observations::default()
    }

    /// Nothing was seen of what a target's paths give together.
    pub fn forget(&mut self, target: DeviceId, direction: Direction) {
        if let Some(beside) = self.target(target, direction) {
            *beside = Beside::default();
        }
    }

    /// A copy took so long from its fork to its join, and nothing else was in flight.
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

    /// The parts of a copy took so long, each on its own path from where its bytes began to flow, and nothing else was in
    /// flight; in the order of the shares. Where a part was not measured the others say nothing: what it left them is not known.
    pub fn note_parts(
        &mut self,
        graph: &PathGraph,
        (target, direction): (DeviceId, Direction),
        shares: &Shares,
        took: &[Option<Micros>],
    ) {
        let ratio = |(part, took): (usize, &Option<Micros>)| {
            let (share, rate) = (shares.get(part)?, shares.rate(part));
            let ratio = float(share.size) / bytes_a_micro(rate) / (*took)?.0;
            let path = graph
                .rates(target, direction)
                .find(|path| (path.relay, path.way) == (share.relay, share.way));
            // Of what several share one may get more than its part: that is no faster link.
            let is_bound = path.is_none_or(|path| rate.0 < BOUND * path.rate.0);
            let ratio = if is_bound { ratio.min(1.0) } else { ratio };
            Some(ratio).filter(|ratio| ratio.is_finite() && *ratio > 0.0)
        };
        let ratios: Option<SmallVec<[f64; 8]>> = took.iter().enumerate().map(ratio).collect();
        let Some(ratios) = ratios.filter(|ratios| ratios.len() == shares.len()) else { return };
        let fastest = ratios.iter().copied().fold(0.0, f64::max).min(1.0);
        // Each says as much as the copy: else what they give together would be judged before what each gives.
        let size: Bytes = shares.iter().map(|share| share.size).sum();
        let flowed: f64 =
            shares.iter().zip(took.iter().flatten()).map(|(share, took)| float(share.size) / took.0).sum();
        let rates: f64 = (0..shares.len()).map(|part| bytes_a_micro(shares.rate(part))).sum();
        if let Some(beside) = self.target(target, direction).filter(|_| shares.len() > 1) {
            beside.flowed.note(flowed / rates, size);
        }
        for (share, ratio) in shares.iter().zip(ratios) {
            if let Some(link) = self.link(share.relay, direction) {
                link.note(ratio / fastest, size);
            }
        }
    }

    /// Whether all paths of a target together give 20 % more or less than the graph says, or relays gain nothing: time to calibrate again.
    pub fn is_stale(&self) -> bool {
        let mut together = self.targets.iter().flatten().map(|beside| &beside.together);
        together.any(|average| average.off(SURE) > DRIFT) || self.gains().any(is_lost)
    }

    /// The graph with what was seen, where that is worth it, and what it was before anything was; what was seen of it is then forgotten.
    /// A graph that was measured is not changed: it holds, or it is stale.
    pub fn refine(&mut self, graph: &PathGraph, assumed: &PathGraph) -> Option<PathGraph> {
        let together = self.targets.iter().flatten().flat_map(|beside| [&beside.together, &beside.flowed]);
        let seen = self.links.iter().flatten().chain(together).any(is_worth) || self.gains().any(is_lost);
        if graph.is_calibrated() || !seen {
            return None;
        }
        let mut paths: Paths = graph.paths().clone();
        // By how much a link's rate changes, and what rates become by it: that of a relay which is tried again is not its link's.
        let change = |link: DeviceId, direction: Direction| {
            let average = self.link_of(link, direction).filter(|average| is_worth(average));
            average.map_or(1.0, |average| average.ratio)
        };
        let changed = |rate: Bandwidth, change: f64, assumed: Option<Bandwidth>| {
            let least = assumed.map_or(0.0, |assumed| LOW * assumed.0).min(rate.0);
            Bandwidth((rate.0 * change).max(least))
        };
        let of_link = |known: &LinkRate| {
            let key = |of: &LinkRate| (of.device, of.direction);
            let first = assumed.paths().links.iter().find(|of| key(of) == key(known));
            changed(known.rate, change(known.device, known.direction), first.map(|of| of.rate))
        };
        let of_relay = |known: &RelayRate| {
            let key = |of: &RelayRate| (of.target, of.relay, of.way, of.direction);
            let first = assumed.paths().relays.iter().find(|of| key(of) == key(known));
            changed(known.rate, change(known.relay, known.direction), first.map(|of| of.rate))
        };
        paths.links.iter_mut().for_each(|link| link.rate = of_link(link));
        paths.relays.iter_mut().for_each(|relay| relay.rate = of_relay(relay));
        for ceiling in &mut paths.ceilings {
            // Only where all links behind it were seen to give more, or all less: as the one that changed least.
            let changes = || ceiling.links.iter().map(|link| change(*link, ceiling.direction));
            let (least, most) = (changes().fold(FAR, f64::min), changes().fold(1.0 / FAR, f64::max));
            ceiling.rate.0 *= 1.0_f64.clamp(least.min(most), most.max(least));
        }
        // Parts that did not end together say nothing of what links give that all end together.
        let is_uneven = |target: DeviceId, direction: Direction| {
            let is_off = |before: Bandwidth, after: Bandwidth| (after.0 / before.0 - 1.0).abs() > WORTH;
            let of_target = |relay: &&RelayRate| (relay.target, relay.direction) == (target, direction);
            let own = |link: &&LinkRate| (link.device, link.direction) == (target, direction);
            let mut relays = graph.paths().relays.iter().filter(of_target);
            let mut links = graph.paths().links.iter().filter(own);
            relays.any(|relay| is_off(relay.rate, of_relay(relay)))
                || links.any(|link| is_off(link.rate, of_link(link)))
        };
        paths.relays.retain(|relay| !self.is_useless(relay) || is_uneven(relay.target, relay.direction));
        self.set_ceilings(&mut paths, is_uneven);
        let refined = PathGraph::new(paths).ok()?;
        *self = Observations::new();
        Some(refined)
    }

    /// Whether its kind was seen to gain nothing for its target.
    fn is_useless(&self, relay: &RelayRate) -> bool {
        let beside = index(relay.target).and_then(|target| self.targets.get(target));
        let way = usize::from(relay.way == Way::Staged);
        beside.is_some_and(|beside| is_lost(&beside[relay.direction.index()].gains[way]))
    }

    /// A ceiling over all links for each target whose paths together gave something else than was predicted.
    fn set_ceilings(&self, paths: &mut Paths, is_uneven: impl Fn(DeviceId, Direction) -> bool) {
        let all: Vec<DeviceId> = paths.gpus.iter().map(|gpu| gpu.device).collect();
        for ((target, beside), direction) in (0_u32..).map(DeviceId).zip(&self.targets).flat_map(each) {
            let beside = &beside[direction.index()];
            // Parts that ended early could have had more of the copy: what they gave together is no ceiling.
            let is_more = beside.flowed.bytes >= LIKELY && beside.flowed.ratio > beside.together.ratio;
            let seen = if is_more { &beside.flowed } else { &beside.together };
            if !all.contains(&target) || !is_worth(seen) || beside.predicted <= 0.0 {
                continue;
            }
            if is_uneven(target, direction) {
                continue;
            }
            let of_all = |known: &Ceiling| {
                (known.target, known.direction) == (Some(target), direction) && known.links == all
            };
            paths.ceilings.retain(|known| !of_all(known));
            let rate = gigabytes(beside.predicted * seen.ratio);
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

    fn link_of(&self, link: DeviceId, direction: Direction) -> Option<&Average> {
        Some(&self.links.get(index(link)?)?[direction.index()])
    }

    fn link(&mut self, link: DeviceId, direction: Direction) -> Option<&mut Average> {
        self.links.get_mut(index(link)?).map(|link| &mut link[direction.index()])
    }
}

/// Both directions of something.
fn each<T: Copy>(of: T) -> [(T, Direction); 2] {
    Direction::BOTH.map(|direction| (of, direction))
}

/// Whether an assumed graph is worth changing for it.
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

    fn ask(relays: DeviceSet, load: &Load) -> Ask<'_> {
        Ask {
            target: DeviceId(0),
            direction: Direction::ToGpu,
            size: Bytes::mib(64),
            zero_staging: relays,
            staged: DeviceSet::EMPTY,
            load,
            expected: 0,
        }
    }

    fn copy(graph: &PathGraph, relays: DeviceSet) -> Shares {
        split(graph, &ask(relays, &Load::new()))
    }

    fn own(graph: &PathGraph) -> f64 {
        graph.rates(DeviceId(0), Direction::ToGpu).next().unwrap().rate.0
    }

    #[test]
    fn an_assumed_rate_becomes_the_one_that_is_seen() {
        let (first, mut graph, mut seen) = (assumed(2), assumed(2), Observations::new());
        assert!(seen.refine(&graph, &graph).is_none());
        for _ in 0..40 {
            let shares = copy(&graph, DeviceSet::EMPTY);
            // The link gives 20 GB/s.
            let took = Micros(7.7 + float(Bytes::mib(64)) / 20_000.0);
            seen.note_copy(DeviceId(0), Direction::ToGpu, &shares, took);
            graph = seen.refine(&graph, &first).unwrap_or(graph);
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
            let took = |part: usize, rate| Some(Micros(float(shares[part].size) / rate));
            seen.note_parts(
                &graph,
                (DeviceId(0), Direction::ToGpu),
                &shares,
                &[took(0, 50_000.0), took(1, 25_000.0)],
            );
        }
        let graph = seen.refine(&graph, &graph).unwrap();
        let rates: Vec<f64> = graph.rates(DeviceId(0), Direction::ToGpu).map(|path| path.rate.0).collect();
        assert!(rates[0] == 50.0 && (rates[1] - 25.0).abs() < 0.5, "{rates:?}");
    }

    #[test]
    fn what_slows_all_down_alike_is_a_ceiling() {
        let (first, mut graph, mut seen) = (assumed(4), assumed(4), Observations::new());
        for _ in 0..200 {
            let shares = copy(&graph, DeviceSet::ALL);
            // The links give 50 GB/s each, but 160 together.
            let size = float(Bytes::mib(64));
            seen.note_copy(DeviceId(0), Direction::ToGpu, &shares, Micros(20.0 + size / 160_000.0));
            let took: Vec<Option<Micros>> =
                shares.iter().map(|share| Some(Micros(float(share.size) / 40_000.0))).collect();
            seen.note_parts(&graph, (DeviceId(0), Direction::ToGpu), &shares, &took);
            graph = seen.refine(&graph, &first).unwrap_or(graph);
        }
        let together = graph.together(DeviceId(0), Direction::ToGpu).0;
        assert!((together - 160.0).abs() < 10.0, "{together}");
        assert_eq!(own(&graph), 50.0);
        assert_eq!(copy(&graph, DeviceSet::ALL).len(), 4, "no path is left out for it");
        let ceilings = graph.paths().ceilings.iter().filter(|ceiling| ceiling.direction == Direction::ToGpu);
        assert_eq!(ceilings.count(), 1);
    }

    #[test]
    fn one_copy_that_is_held_up_changes_nothing() {
        for size in [Bytes::mib(64), Bytes::gib(1)] {
            let (graph, mut seen) = (assumed(2), Observations::new());
            let load = Load::new();
            let shares = split(&graph, &Ask { size, ..ask(DeviceSet::ALL, &load) });
            for copy in 0..100 {
                let late = if copy % 8 == 0 { 9.0 } else { 1.0 };
                seen.note_copy(DeviceId(0), Direction::ToGpu, &shares, Micros(shares.predicted().0 * late));
                let parts = [1.0, late].map(|late| Some(Micros(shares.predicted().0 * late)));
                seen.note_parts(&graph, (DeviceId(0), Direction::ToGpu), &shares, &parts);
                assert!(seen.refine(&graph, &graph).is_none() && !seen.is_stale(), "{size}, copy {copy}");
            }
        }
    }

    /// A host that writes 160 GB/s in all, of which the target's own link gets more than its part.
    #[test]
    fn who_gets_more_of_what_is_shared_is_no_faster_link() {
        let (size, shared) = (Bytes::mib(256), 160_000.0);
        for own in [42_000.0, 45_000.0, 50_000.0] {
            let (first, mut graph, mut seen) = (assumed(4), assumed(4), Observations::new());
            let load = Load::new();
            let mut slowest = f64::INFINITY;
            for copy in 0..400 {
                let shares = split(&graph, &Ask { size, ..ask(DeviceSet::ALL, &load) });
                assert_eq!(shares.len(), 4, "{own}, copy {copy}");
                let rate = |part: usize| if part == 0 { own } else { (shared - own) / 3.0 };
                let took: Vec<f64> = (0..4).map(|part| float(shares[part].size) / rate(part)).collect();
                let last = took.iter().copied().fold(0.0, f64::max);
                seen.note_copy(DeviceId(0), Direction::ToGpu, &shares, Micros(last));
                let parts: Vec<_> = took.into_iter().map(|took| Some(Micros(took))).collect();
                seen.note_parts(&graph, (DeviceId(0), Direction::ToGpu), &shares, &parts);
                graph = seen.refine(&graph, &first).unwrap_or(graph);
                if copy >= 100 {
                    slowest = slowest.min(float(size) / last);
                }
            }
            assert!(slowest > 0.9 * shared, "{own}: {slowest}");
        }
    }

    /// Links that give what they were assumed to, and as much together, now a little more and now a little less.
    #[test]
    fn a_ceiling_stays_where_it_is_whatever_copies_differ_by() {
        let (first, mut seen, mut random) = (assumed(4), Observations::new(), 3_u64);
        let mut paths = first.paths().clone();
        let links = (0..4).map(DeviceId).collect();
        let (target, rate) = (Some(DeviceId(0)), Bandwidth(160.0));
        paths.ceilings.push(Ceiling { direction: Direction::ToGpu, links, target, rate, reached_by: 4 });
        let mut graph = PathGraph::new(paths).unwrap();
        let mut noise = || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            0.9 + 0.2 * (random >> 40) as f64 / (1_u64 << 24) as f64
        };
        let load = Load::new();
        for _ in 0..4000 {
            let shares = split(&graph, &Ask { size: Bytes::mib(256), ..ask(DeviceSet::ALL, &load) });
            let took: Vec<f64> = (0..4).map(|part| float(shares[part].size) / 40_000.0 * noise()).collect();
            let last = took.iter().copied().fold(0.0, f64::max);
            seen.note_copy(DeviceId(0), Direction::ToGpu, &shares, Micros(last));
            let parts: Vec<_> = took.into_iter().map(|took| Some(Micros(took))).collect();
            seen.note_parts(&graph, (DeviceId(0), Direction::ToGpu), &shares, &parts);
            graph = seen.refine(&graph, &first).unwrap_or(graph);
            let most = graph.paths().ceilings.iter().map(|ceiling| ceiling.rate.0).fold(0.0, f64::max);
            assert!(most < 250.0, "{most}");
        }
    }

    #[test]
    fn a_calibrated_graph_holds_whoever_gets_more_of_what_is_shared() {
        let mut paths = assumed(4).paths().clone();
        paths.calibrated = true;
        let (graph, load, mut seen) = (PathGraph::new(paths).unwrap(), Load::new(), Observations::new());
        let shares = split(&graph, &Ask { size: Bytes::mib(256), ..ask(DeviceSet::ALL, &load) });
        for _ in 0..100 {
            seen.note_copy(DeviceId(0), Direction::ToGpu, &shares, shares.predicted());
            let took = |part| shares.predicted().0 / if part == 0 { 1.5 } else { 1.0 };
            let parts: Vec<_> = (0..4).map(|part| Some(Micros(took(part)))).collect();
            seen.note_parts(&graph, (DeviceId(0), Direction::ToGpu), &shares, &parts);
            assert!(!seen.is_stale());
        }
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
        let graph = seen.refine(&graph, &graph).unwrap();
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
            assert!(seen.refine(&graph, &graph).is_none());
        }
    }

    #[test]
    fn nonsense_is_not_noted() {
        let (graph, mut seen) = (assumed(2), Observations::new());
        let shares = copy(&graph, DeviceSet::ALL);
        for took in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            for _ in 0..100 {
                seen.note_copy(DeviceId(0), Direction::ToGpu, &shares, Micros(took));
                seen.note_parts(
                    &graph,
                    (DeviceId(0), Direction::ToGpu),
                    &shares,
                    &[None, Some(Micros(took)), Some(Micros(1.0))],
                );
                seen.note_copy(DeviceId(99), Direction::ToGpu, &shares, Micros(took));
            }
        }
        assert!(!seen.is_stale() && seen.refine(&graph, &graph).is_none());
    }
}
