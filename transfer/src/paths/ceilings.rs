//! Ceilings that links and paths share, derived from a calibration's outcomes: steps 3 to 6 of [`super::outcomes`].
//!
//! ```text
//!    a ─ b   c ─ d ─ e   f ┄ g ┄ h      sharing pairs are edges; connected links form a group with one ceiling
//!    └───┘   └───────┘   └───┘
//!                            └───┘      pairs that lose little have one ceiling each: a third link adds to them
//! ```
//!
//! Invariant: each ceiling is derived with the earlier ones in place, so that none is counted twice.

use glake_device::DeviceId;
use glake_device::owned::DeviceSet;
use glake_units::{Bandwidth, Micros};

use super::fluid::ends;
use super::outcomes::{Findings, SHARES};
use super::table::{Ceiling, LinkRate, RelayRate};
use super::trials::{Leg, Outcome, SMALL};
use super::{Direction, Way, bytes_a_micro, float, gigabytes};

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
