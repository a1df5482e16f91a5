//! Derivation of a path graph from a calibration's outcomes: ways, rates, latencies and shared ceilings.
//!
//! ```text
//!   1 each path alone, small and large  ─► latency and rate of links and relays
//!   2 a relay next to the own link      ─► the way exists only if both together are faster than the own link alone
//!   3 two links, each to its own GPU    ─► clearly slower than each alone: they share a ceiling for every target
//!   4 two paths of a target             ─► slower than 3 explains: they share a ceiling for this target
//!   5 all paths of a target, small      ─► additional latency of each further path
//!   6 all links                         ─► faster than 3 and 4 allow: these are pairs, not a group; slower than these explain: the host's
//!                                          ceiling; likewise for each target's paths
//!
//!    a ─ b   c ─ d ─ e   f ┄ g ┄ h      sharing pairs are edges; connected links form a group with one ceiling
//!    └───┘   └───────┘   └───┘
//!                            └───┘      pairs with a small loss have one ceiling each: a third link is faster still
//! ```
//!
//! Each step is compared with the prediction of the fluid model ([`super::fluid`]) from the steps before it. Therefore each ceiling is derived
//! once, and legs of different rates or latencies need no rules of their own. Missing trials leave their question open: nothing is shared, and
//! the way does not exist.

use glake_device::DeviceId;
use glake_device::owned::DeviceSet;
use glake_units::{Bandwidth, Bytes, Micros};

use super::fluid::{Pipe, Stint, ceiling, ends, fill};
use super::path_graph::least_split;
use super::split::{Ask, split};
use super::trials::{Leg, Outcome, SMALL};
use super::{
    Ceiling, Direction, GpuLinks, LinkRate, Load, MOST_GPUS, PathGraph, Paths, RelayRate, Way, bytes_a_micro,
    float, gigabytes, grains,
};
use crate::TransferError;

/// Minimum ratio of the combined rate of own link and relay to the own link's, for the relay to count as a way.
const HELPS: f64 = 1.1;
/// Minimum ratio of combined to separate time of two links that share a limit.
pub(super) const SHARES: f64 = 1.1;
/// Range and step of the search for the break-even size.
const EVEN: (Bytes, Bytes, Bytes) = (Bytes::mib(1), Bytes::mib(64), Bytes::kib(256));
/// Maximum ratio of split to native time at the break-even size: latencies vary more than rates.
const CLEARLY: f64 = 0.92;

impl PathGraph {
    /// Derives the graph from the outcomes of all steps of [`super::trials`].
    pub fn from_outcomes(gpus: &[GpuLinks], outcomes: &[Outcome]) -> Result<PathGraph, TransferError> {
        let mut found = Findings::shared(gpus, outcomes);
        found.find_fork();
        found.part_refuted_groups();
        found.find_host_ceiling();
        found.find_target_ceilings();
        found.slow_staged_down();
        let mut paths = found.paths;
        let graph = PathGraph::new(paths.clone())?;
        for link in &mut paths.links {
            let serves = |relay: &&RelayRate| relay.target == link.device && relay.way == Way::ZeroStaging;
            let relays = graph.paths().relays.iter().filter(serves);
            let relays = relays.filter(|relay| relay.direction == link.direction).count();
            link.break_even = break_even(&graph, link).max(least_split(relays));
        }
        PathGraph::new(paths)
    }
}

/// Findings so far.
#[derive(Debug)]
pub(super) struct Findings<'a> {
    pub(super) paths: Paths,
    pub(super) outcomes: &'a [Outcome],
}

impl<'a> Findings<'a> {
    /// Derives each path's own rate, and which relays are useful ways.
    pub(super) fn ways(gpus: &[GpuLinks], outcomes: &'a [Outcome]) -> Findings<'a> {
        let paths = Paths {
            calibrated: true,
            fork: Micros(0.0),
            gpus: gpus.to_vec(),
            links: Vec::new(),
            relays: Vec::new(),
            ceilings: Vec::new(),
        };
        let mut found = Findings { paths, outcomes };
        for (direction, leg) in found.alone() {
            let Some((rate, latency)) = found.fit(direction, &leg) else { continue };
            let (target, relay, way) = (leg.target, leg.relay, leg.way);
            match way {
                Way::Direct => {
                    let break_even = Bytes::ZERO;
                    found.paths.links.push(LinkRate { device: target, direction, rate, latency, break_even });
                }
                Way::ZeroStaging | Way::Staged => {
                    found.paths.relays.push(RelayRate { target, relay, direction, way, rate, latency });
                }
            }
        }
        let known = found.paths.relays.clone();
        found.paths.relays.clear();
        for relay in known {
            found.paths.relays.push(relay);
            if !found.helps(&relay) {
                found.paths.relays.pop();
            }
        }
        found
    }

    /// Derives the shared limits in addition.
    pub(super) fn shared(gpus: &[GpuLinks], outcomes: &'a [Outcome]) -> Findings<'a> {
        let mut found = Findings::ways(gpus, outcomes);
        found.find_shared_links();
        found.find_shared_relays();
        found
    }

    /// Returns a leg of a known way, sized to take as long as `size` on the fastest link.
    pub(super) fn leg(
        &self,
        target: DeviceId,
        relay: DeviceId,
        way: Way,
        direction: Direction,
        size: Bytes,
    ) -> Option<Leg> {
        let fastest = self.paths.links.iter().map(|link| link.rate.0).fold(0.0, f64::max);
        let leg = Leg { target, relay, way, size };
        let (rate, _) = self.path(direction, &leg)?;
        Some(Leg { size: part(size, rate.0 / fastest), ..leg })
    }

    /// Sizes legs so that all take as long as `size` on the fastest link, at their rates next to each other.
    pub(super) fn in_step(&self, direction: Direction, mut legs: Vec<Leg>, size: Bytes) -> Vec<Leg> {
        let Some((stints, pipes)) = self.fluid(direction, &legs) else { return legs };
        let fastest = self.paths.links.iter().map(|link| bytes_a_micro(link.rate)).fold(0.0, f64::max);
        let demands: Vec<f64> = stints.iter().map(|stint| stint.most).collect();
        let mut rates = vec![0.0; legs.len()];
        fill(&demands, &pipes, &mut rates);
        for (leg, rate) in legs.iter_mut().zip(rates) {
            leg.size = part(size, rate / fastest);
        }
        legs
    }

    /// Returns zero-staging if any relay of the target supports it, otherwise staged.
    pub(super) fn main_way(&self, target: DeviceId, direction: Direction) -> Way {
        let zero_staging = |relay: &RelayRate| {
            (relay.target, relay.direction, relay.way) == (target, direction, Way::ZeroStaging)
        };
        if self.paths.relays.iter().any(zero_staging) { Way::ZeroStaging } else { Way::Staged }
    }

    /// Returns the rate of the slowest link in bytes per microsecond.
    pub(super) fn slowest(&self) -> Option<f64> {
        self.paths.links.iter().map(|link| bytes_a_micro(link.rate)).reduce(f64::min)
    }

    /// Returns each path that was measured alone, once.
    fn alone(&self) -> Vec<(Direction, Leg)> {
        let mut alone: Vec<(Direction, Leg)> = Vec::new();
        for outcome in self.outcomes {
            if let [leg] = outcome.trial.legs[..] {
                let of = (outcome.trial.direction, Leg { size: Bytes::ZERO, ..leg });
                if !alone.contains(&of) {
                    alone.push(of);
                }
            }
        }
        alone
    }

    /// Fits rate and latency by a line through the smallest and the largest copy.
    fn fit(&self, direction: Direction, of: &Leg) -> Option<(Bandwidth, Micros)> {
        let mut points: Vec<(f64, f64)> = self
            .outcomes
            .iter()
            .filter(|outcome| {
                outcome.trial.direction == direction && outcome.took.0.is_finite() && outcome.took.0 > 0.0
            })
            .filter_map(|outcome| match outcome.trial.legs[..] {
                [leg] if Leg { size: Bytes::ZERO, ..leg } == *of && !leg.size.is_zero() => {
                    Some((float(leg.size), outcome.took.0))
                }
                _ => None,
            })
            .collect();
        points.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
        let (small, large) = (points.first()?, points.last()?);
        let slope = (large.1 - small.1) / (large.0 - small.0);
        if slope.is_finite() && slope > 0.0 {
            let latency = (small.1 - small.0 * slope).max(0.0);
            // Where the line cuts below nothing, the large copy alone says the rate.
            return Some((gigabytes(large.0 / (large.1 - latency)), Micros(latency)));
        }
        Some((gigabytes(large.0 / large.1), Micros(0.0)))
    }

    /// Returns whether own link and relay together are clearly faster than the own link.
    fn helps(&self, relay: &RelayRate) -> bool {
        let beside = self.outcomes.iter().find(|outcome| {
            let of_relay = |leg: &Leg| (leg.target, leg.relay, leg.way) == (relay.target, relay.relay, relay.way);
            let trial = &outcome.trial;
            trial.direction == relay.direction
                && matches!(&trial.legs[..], [own, leg] if own.way == Way::Direct && own.target == relay.target && of_relay(leg))
        });
        let own = self
            .paths
            .links
            .iter()
            .find(|link| (link.device, link.direction) == (relay.target, relay.direction));
        let (Some(beside), Some(own)) = (beside, own) else { return false };
        let together = self
            .together(beside, SHARES)
            .unwrap_or_else(|| bytes_a_micro(own.rate) + bytes_a_micro(relay.rate));
        together >= HELPS * bytes_a_micro(own.rate)
    }

    /// Returns the combined rate of a trial's legs if it limited them, that is, if they took more than `late` times the predicted time.
    pub(super) fn together(&self, outcome: &Outcome, late: f64) -> Option<f64> {
        let (stints, pipes, took) = self.measured(outcome)?;
        let all = (1_u64 << stints.len()) - 1;
        (took > late * ends(&stints, &pipes)).then(|| ceiling(&stints, &pipes, all, took))
    }

    /// Converts a trial to the fluid model, with its measured time; `None` if that is not a valid time.
    pub(super) fn measured(&self, outcome: &Outcome) -> Option<(Vec<Stint>, Vec<Pipe>, f64)> {
        let took = Some(outcome.took.0).filter(|took| took.is_finite() && *took > 0.0)?;
        let (stints, pipes) = self.fluid(outcome.trial.direction, &outcome.trial.legs)?;
        Some((stints, pipes, took))
    }

    /// Converts legs to the fluid model with the known ceilings; `None` if a leg's path is unknown.
    fn fluid(&self, direction: Direction, legs: &[Leg]) -> Option<(Vec<Stint>, Vec<Pipe>)> {
        let first = legs.first().filter(|_| legs.len() <= MOST_GPUS)?;
        let forks = f64::from(u32::try_from(legs.len().saturating_sub(2)).ok()?) * self.paths.fork.0;
        let stint = |leg: &Leg| {
            let (rate, latency) = self.path(direction, leg)?;
            // A link of its own target that another target's stream forks to is a relay's distance away.
            let relayed = self.paths.relays.iter().find(|relay| {
                (relay.target, relay.relay, relay.direction) == (first.target, leg.relay, direction)
            });
            let far =
                relayed.filter(|_| leg.target != first.target).map_or(latency.0, |relay| relay.latency.0);
            let starts = if leg.relay == first.target { latency.0 } else { far.max(latency.0) + forks };
            Some(Stint { starts, bytes: float(leg.size), most: bytes_a_micro(rate) })
        };
        let stints = legs.iter().map(stint).collect::<Option<Vec<Stint>>>()?;
        let binds = |known: &&Ceiling| known.direction == direction;
        let pipe = |known: &Ceiling| {
            let through = |leg: &Leg| {
                known.links.contains(&leg.relay) && known.target.is_none_or(|target| target == leg.target)
            };
            let members = legs.iter().enumerate().filter(|(_, leg)| through(leg));
            Pipe {
                flows: members.fold(0, |flows, (flow, _)| flows | 1 << flow),
                rate: bytes_a_micro(known.rate),
            }
        };
        Some((stints, self.paths.ceilings.iter().filter(binds).map(pipe).collect()))
    }

    fn path(&self, direction: Direction, leg: &Leg) -> Option<(Bandwidth, Micros)> {
        match leg.way {
            Way::Direct => {
                let own = |link: &&LinkRate| (link.device, link.direction) == (leg.target, direction);
                self.paths.links.iter().find(own).map(|link| (link.rate, link.latency))
            }
            Way::ZeroStaging | Way::Staged => {
                let known = |relay: &&RelayRate| {
                    (relay.target, relay.relay, relay.direction, relay.way)
                        == (leg.target, leg.relay, direction, leg.way)
                };
                self.paths.relays.iter().find(known).map(|relay| (relay.rate, relay.latency))
            }
        }
    }
}

/// Returns a part of a size, large enough for a trial.
fn part(size: Bytes, part: f64) -> Bytes {
    grains(float(size) * part).min(size).max(SMALL)
}

/// Returns the minimum size at which a split copy is clearly faster, for a graph without a break-even size.
fn break_even(graph: &PathGraph, link: &LinkRate) -> Bytes {
    let (least, most, step) = EVEN;
    let load = Load::new();
    let mut size = least;
    while size < most {
        let ask = Ask {
            target: link.device,
            direction: link.direction,
            size,
            zero_staging: DeviceSet::ALL,
            staged: DeviceSet::ALL,
            load: &load,
            expected: 0,
        };
        let shares = split(graph, &ask);
        if shares.len() > 1 && shares.predicted().0 <= CLEARLY * shares.direct().0 {
            break;
        }
        size = size.saturating_add(step);
    }
    size
}

/// Minimum ratio of measured to predicted time that proves a ceiling common to all links.
const MORE: f64 = 1.02;
/// Minimum ratio of a link's own rate to a ceiling at which that link alone reaches it.
const REACHES: f64 = 0.93;
/// Ratio of the combined rate to the sum of single rates below which two links have a common limit, to which a third link adds nothing. On
/// servers with four GPUs, pairs reached 0.85 to 0.95, varying by calibration, and four links half as much again.
const ONE_LIMIT: f64 = 0.75;
/// Maximum overhead of one more path, in microseconds. A larger measurement has another cause.
const MOST_FORK: f64 = 20.0;

/// Two links that share a limit, with their combined rate.
type Edge = (DeviceId, DeviceId, f64);

impl<'a> Findings<'a> {
    /// Derives the overhead of each path after the second: the delay of small copies over all paths compared with each path alone.
    pub(super) fn find_fork(&mut self) {
        let added = |outcome: &Outcome| {
            let (stints, pipes, took) = self.measured(outcome)?;
            let further = f64::from(u32::try_from(outcome.trial.legs.len()).ok()?) - 2.0;
            let one_target = outcome.trial.legs.iter().all(|leg| leg.target == outcome.trial.legs[0].target);
            let small = outcome.trial.legs.iter().all(|leg| leg.size <= SMALL);
            (small && one_target && further > 0.0 && self.is_main(outcome))
                .then(|| (took - ends(&stints, &pipes)) / further)
        };
        let mut all: Vec<f64> = self.outcomes.iter().filter_map(added).collect();
        all.sort_unstable_by(f64::total_cmp);
        let median = all.get(all.len() / 2).copied().unwrap_or(0.0);
        self.paths.fork = Micros(median.clamp(0.0, MOST_FORK));
    }

    /// Finds pairs of links that share a limit for any target.
    pub(super) fn find_shared_links(&mut self) {
        for direction in Direction::BOTH {
            let edges = self.pairs_that_share(direction, None);
            self.add_groups(direction, None, &edges);
        }
    }

    /// Returns pairs of links (for a target: of its paths) that are clearly slower together than predicted, with their combined rate.
    fn pairs_that_share(&self, direction: Direction, target: Option<DeviceId>) -> Vec<Edge> {
        let asked = |a: &Leg, b: &Leg| match target {
            None => (a.way, b.way) == (Way::Direct, Way::Direct) && a.target != b.target,
            Some(target) => (a.target, b.target) == (target, target),
        };
        let edge = |outcome: &Outcome| {
            let [a, b] = &outcome.trial.legs[..] else { return None };
            let is_asked = asked(a, b) && (target.is_none() || self.is_main(outcome));
            let rate = is_asked.then(|| self.together(outcome, SHARES)).flatten()?;
            Some((a.relay, b.relay, rate))
        };
        self.of(direction, 2).filter_map(edge).collect()
    }

    /// Finds pairs of paths that share a limit for their target only.
    pub(super) fn find_shared_relays(&mut self) {
        let targets: Vec<DeviceId> = self.paths.gpus.iter().map(|gpu| gpu.device).collect();
        for direction in Direction::BOTH {
            for &target in &targets {
                let edges = self.pairs_that_share(direction, Some(target));
                self.add_groups(direction, Some(target), &edges);
            }
        }
    }

    /// Splits groups whose pairs each have a limit of their own: if more links of a group clearly exceed its ceiling, each pair gets one.
    pub(super) fn part_refuted_groups(&mut self) {
        let refutes = |known: &Ceiling, Outcome { trial, took }: &Outcome| {
            let through = |leg: &&Leg| {
                known.links.contains(&leg.relay) && known.target.is_none_or(|target| target == leg.target)
            };
            let members = || trial.legs.iter().filter(through);
            // What was copied in all that time, latencies included: they gave at least this.
            let gave = members().map(|leg| float(leg.size)).sum::<f64>() / took.0;
            trial.direction == known.direction
                && members().count() > 2
                && gave.is_finite()
                && gave > SHARES * bytes_a_micro(known.rate)
        };
        let outcomes = self.outcomes;
        let is_refuted = |known: &mut Ceiling| outcomes.iter().any(|outcome| refutes(known, outcome));
        let refuted: Vec<Ceiling> = self.paths.ceilings.extract_if(.., is_refuted).collect();
        for group in refuted {
            let pairs = self.pairs_that_share(group.direction, group.target).into_iter();
            for pair in pairs.filter(|(a, b, _)| group.links.contains(a) && group.links.contains(b)) {
                self.add_groups(group.direction, group.target, &[pair]);
            }
        }
    }

    /// Derives the ceiling of all links together.
    pub(super) fn find_host_ceiling(&mut self) {
        for direction in Direction::BOTH {
            let all = self.outcomes.iter().filter(|outcome| {
                outcome.trial.direction == direction
                    && outcome.trial.legs.len() > 2
                    && outcome.trial.legs.iter().all(|leg| leg.way == Way::Direct)
            });
            let most = all.max_by_key(|outcome| outcome.trial.legs.len());
            if let Some(outcome) = most
                && let Some(rate) = self.together(outcome, MORE)
            {
                self.add_ceiling(direction, None, &outcome.trial.legs, rate);
            }
        }
    }

    /// Derives the ceiling of all zero-staging paths of a target together.
    pub(super) fn find_target_ceilings(&mut self) {
        let together: Vec<&Outcome> = self.all_paths(Way::ZeroStaging).collect();
        for outcome in together {
            let (direction, target) = (outcome.trial.direction, outcome.trial.legs[0].target);
            if let Some(rate) = self.together(outcome, MORE) {
                self.add_ceiling(direction, Some(target), &outcome.trial.legs, rate);
            }
        }
    }

    /// Derives the slowdown of staged relays, which forward all bytes through their own memory: each bears the common loss.
    pub(super) fn slow_staged_down(&mut self) {
        let together: Vec<&Outcome> = self.all_paths(Way::Staged).collect();
        for outcome in together {
            let (direction, target) = (outcome.trial.direction, outcome.trial.legs[0].target);
            let Some((stints, pipes, took)) = self.measured(outcome) else { continue };
            let part = ends(&stints, &pipes) / took;
            if part * MORE < 1.0 {
                let of_target = |relay: &&mut RelayRate| {
                    (relay.target, relay.direction, relay.way) == (target, direction, Way::Staged)
                };
                for relay in self.paths.relays.iter_mut().filter(of_target) {
                    relay.rate = Bandwidth(relay.rate.0 * part);
                }
            }
        }
    }

    /// Returns whether a trial uses the ways that most copies of its target will use; others must not stand in for them.
    fn is_main(&self, outcome: &Outcome) -> bool {
        let way = |leg: &Leg| self.main_way(leg.target, outcome.trial.direction);
        outcome.trial.legs.iter().all(|leg| leg.way == Way::Direct || leg.way == way(leg))
    }

    fn of(&self, direction: Direction, legs: usize) -> impl Iterator<Item = &'a Outcome> + use<'a> {
        let outcomes = self.outcomes;
        outcomes
            .iter()
            .filter(move |outcome| outcome.trial.direction == direction && outcome.trial.legs.len() == legs)
    }

    /// Returns the trials of all paths of a target with large copies.
    fn all_paths(&self, way: Way) -> impl Iterator<Item = &'a Outcome> + use<'a> {
        let outcomes = self.outcomes;
        outcomes.iter().filter(move |outcome| match &outcome.trial.legs[..] {
            [own, relays @ ..] => {
                own.way == Way::Direct
                    && own.size > SMALL
                    && relays.len() > 1
                    && relays.iter().all(|leg| leg.target == own.target && leg.way == way)
            }
            [] => false,
        })
    }

    /// Adds a ceiling for each group of connected links: the mean of its pairs.
    fn add_groups(&mut self, direction: Direction, target: Option<DeviceId>, edges: &[Edge]) {
        let mut groups: Vec<(DeviceSet, f64, f64)> = Vec::new();
        let mut pairs: Vec<(DeviceSet, f64, f64)> = Vec::new();
        for &(a, b, rate) in edges {
            if rate >= ONE_LIMIT * (self.link_rate(a, direction) + self.link_rate(b, direction)) {
                pairs.push((DeviceSet::of(a).union(DeviceSet::of(b)), rate, 1.0));
                continue;
            }
            let mut joined = (DeviceSet::of(a).union(DeviceSet::of(b)), rate, 1.0);
            groups.retain(|&(links, sum, pairs)| {
                let apart = !links.contains(a) && !links.contains(b);
                if !apart {
                    joined = (joined.0.union(links), joined.1 + sum, joined.2 + pairs);
                }
                apart
            });
            groups.push(joined);
        }
        for (links, sum, pairs) in groups.into_iter().chain(pairs) {
            let rate = sum / pairs;
            let alone = links.iter().map(|link| self.link_rate(link, direction));
            let one = alone.fold(f64::INFINITY, f64::min) >= REACHES * rate;
            self.paths.ceilings.push(Ceiling {
                direction,
                links: links.iter().collect(),
                target,
                rate: gigabytes(rate),
                reached_by: if one { 1 } else { 2 },
            });
        }
    }

    /// Returns a link's own rate in bytes per microsecond; infinite if it was not measured.
    fn link_rate(&self, link: DeviceId, direction: Direction) -> f64 {
        let is_it = |known: &&LinkRate| known.direction == direction && known.device == link;
        self.paths.links.iter().find(is_it).map_or(f64::INFINITY, |known| bytes_a_micro(known.rate))
    }

    fn add_ceiling(&mut self, direction: Direction, target: Option<DeviceId>, legs: &[Leg], rate: f64) {
        self.paths.ceilings.push(Ceiling {
            direction,
            links: legs.iter().map(|leg| leg.relay).collect(),
            target,
            rate: gigabytes(rate),
            reached_by: u32::try_from(legs.len()).unwrap_or(u32::MAX),
        });
    }
}
