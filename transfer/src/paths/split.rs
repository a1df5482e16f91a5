//! Division of a copy among paths. Pure, deterministic, and free of heap allocations for up to eight paths.
//!
//! ```text
//!   own link   ──latency──┤███████████████████████████┤
//!   relay      ─────latency─────┤█████████████████████┤   all end together, at T:
//!   relay      ─────latency─────┤█████████████████████┤   sum of rate * (T - latency) = size
//!              fork                                   join
//! ```
//!
//! Rates are those of the paths next to each other and next to other copies in flight ([`super::fluid`]). Invariants:
//! - The shares cover the copy once, in order, and begin at multiples of [`GRAIN`].
//! - A relay is given [`SLICE`] at least, up to rounding; paths that would get less are left out.
//! - By its own figures a split copy ends 2 % before the native one, or it is not split.

use std::ops::Deref;

use glake_device::DeviceId;
use glake_device::owned::DeviceSet;
use glake_units::{Bandwidth, Bytes, Micros};
use smallvec::SmallVec;

use super::path_graph::{Busy, Lane, Lanes, PathGraph, Target};
use super::{Direction, Load, Way, float, gigabytes, grains};

/// Alignment of offsets.
pub const GRAIN: Bytes = Bytes::kib(4);
/// Minimum size that justifies a path of its own.
pub const SLICE: Bytes = Bytes::kib(256);

/// Minimum size of a split over staged relays alone: on four H200s 2 MiB took 0.87 to 1.08 of a native copy's time, 4 MiB 0.76.
pub(crate) const LEAST_STAGED: Bytes = Bytes::mib(3);
/// Number of relays above which a copy first queries whether its lanes must wait for its stream: on H200s the query takes the host 1.4 us,
/// and each wait for another GPU's event 1.3 us.
pub(crate) const MANY_RELAYS: usize = 2;
/// Maximum ratio of predicted split to native time that counts as a gain.
const GAIN: f64 = 0.98;
/// Number of iterations that reconcile rates and time under load. Each depends on the other, and both converge fast.
const ROUNDS: usize = 3;

/// Splits a copy over its usable paths.
pub fn split(graph: &PathGraph, ask: &Ask<'_>) -> Shares {
    let Some(target) = graph.target_of(ask.target, ask.direction, ask.size) else {
        return Shares::native(ask, Bandwidth(0.0), Micros(0.0));
    };
    let alone = target.own.latency + float(ask.size) / target.own.most;
    let zero_staging = target.zero_staging_of(ask.zero_staging);
    let staged = target.staged_of(ask.staged).without(zero_staging);
    let least = if zero_staging.is_empty() { LEAST_STAGED } else { Bytes::ZERO };
    if ask.size < target.break_even.max(least) || zero_staging.union(staged).is_empty() {
        return Shares::native(ask, gigabytes(target.own.most), Micros(alone));
    }
    let busy = graph.busy(ask.target, ask.direction, ask.load);
    let size = float(ask.size);
    let mut native: Lanes = SmallVec::from_iter([target.own]);
    let direct = if busy.is_empty() { alone } else { timed(target, &mut native, size, &busy) };
    let open = || useful(target, apportioned(target.lanes(zero_staging, staged), ask.expected), &busy);
    let is_idle = busy.is_empty() && ask.expected == 0;
    let lanes = if is_idle { target.table.lanes(zero_staging, staged, open) } else { open() };
    let (lanes, time) = chosen(target, lanes, size, &busy);
    if lanes.iter().all(|lane| lane.way == Way::Direct) || time > GAIN * direct {
        return Shares::native(ask, gigabytes(native[0].rate), Micros(direct));
    }
    let (shares, rates) = cut(target, &lanes, ask.size, time);
    Shares { shares, rates, predicted: Micros(time), direct: Micros(direct) }
}

/// Divides the relays' rates equally among the copies that will use them; a target's own link is not shared.
fn apportioned(mut lanes: Lanes, others: u32) -> Lanes {
    for lane in lanes.iter_mut().filter(|lane| lane.way != Way::Direct) {
        lane.most /= 1.0 + f64::from(others);
    }
    lanes
}

/// Removes lanes that add nothing on an idle server because other links reach their common ceiling. Busy links are removed first.
fn useful(target: &Target, mut lanes: Lanes, busy: &[Busy]) -> Lanes {
    target.share(&mut lanes, &[], 1.0);
    let all: f64 = lanes.iter().map(|lane| lane.rate).sum();
    let wait = |lane: &Lane| {
        let of_link = busy.iter().find(|busy| busy.link == lane.relay);
        of_link.map_or(0.0, |busy| busy.own + busy.other)
    };
    let mut kept: Lanes = SmallVec::from_iter([target.own]);
    let mut rest: Lanes = lanes.iter().copied().filter(|lane| lane.way != Way::Direct).collect();
    rest.sort_unstable_by(|a, b| wait(a).total_cmp(&wait(b)).then(a.relay.cmp(&b.relay)));
    for lane in rest {
        let reached = target.limits.iter().any(|limit| {
            let members = kept.iter().filter(|lane| limit.links.contains(lane.relay)).count();
            limit.links.contains(lane.relay) && members >= limit.reached_by
        });
        if !reached {
            kept.push(lane);
        }
    }
    if kept.len() == lanes.len() {
        return lanes;
    }
    target.share(&mut kept, &[], 1.0);
    let most: f64 = kept.iter().map(|lane| lane.rate).sum();
    if most >= 0.99 * all { kept } else { lanes }
}

/// Returns the lanes worth using for a copy of this size, with their rates and the predicted end. The given lanes have their rates next to
/// each other with nothing else in flight.
fn chosen(target: &Target, mut lanes: Lanes, size: f64, busy: &[Busy]) -> (Lanes, f64) {
    let least = float(SLICE);
    let mut time =
        if busy.is_empty() { end(target, &lanes, size) } else { timed(target, &mut lanes, size, busy) };
    while lanes.len() > 1 {
        let Some((worst, share)) = smallest(target, &lanes, time) else { break };
        // Where a path's bytes take less than getting them under way, the copy may end sooner without it.
        let short = share < lanes[worst].rate * delay(target, &lanes, worst);
        if share >= least && !short {
            break;
        }
        let mut fewer = lanes.clone();
        fewer.remove(worst);
        let sooner = timed(target, &mut fewer, size, busy);
        if share >= least && sooner >= time {
            break;
        }
        (lanes, time) = (fewer, sooner);
    }
    (lanes, time)
}

/// Computes the rates of the lanes next to all bytes in flight. Returns the predicted end of the copy.
fn timed(target: &Target, lanes: &mut Lanes, size: f64, busy: &[Busy]) -> f64 {
    target.share(lanes, &[], 1.0);
    let mut time = end(target, lanes, size);
    if !busy.is_empty() {
        for _ in 0..ROUNDS {
            target.share(lanes, busy, time);
            time = end(target, lanes, size);
        }
    }
    time
}

/// Returns the time at which all lanes end if they end together.
fn end(target: &Target, lanes: &[Lane], size: f64) -> f64 {
    let (mut rates, mut ahead) = (0.0, 0.0);
    for (index, lane) in lanes.iter().enumerate() {
        rates += lane.rate;
        ahead += lane.rate * delay(target, lanes, index);
    }
    if rates > 0.0 { (size + ahead) / rates } else { f64::INFINITY }
}

/// Returns a lane's fixed cost next to the others: relays are issued one after another. The own link's part waits for the join, half of the
/// relays' additional cost over a native copy.
fn delay(target: &Target, lanes: &[Lane], index: usize) -> f64 {
    let relays = |lanes: &[Lane]| lanes.iter().filter(|lane| lane.way != Way::Direct).count();
    let forks = |relays: usize| target.fork * f64::from(u32::try_from(relays).unwrap_or(u32::MAX));
    let lane = &lanes[index];
    match (lane.way, relays(lanes)) {
        (Way::Direct, 0) => lane.latency,
        (Way::Direct, count) => {
            let relayed = lanes.iter().filter(|lane| lane.way != Way::Direct);
            let least = relayed.map(|lane| lane.latency).fold(f64::INFINITY, f64::min);
            lane.latency.max((lane.latency + least + forks(count - 1)) / 2.0)
        }
        (Way::ZeroStaging | Way::Staged, _) => lane.latency + forks(relays(&lanes[..index])),
    }
}

/// Returns the lane with the smallest share, and its size.
fn smallest(target: &Target, lanes: &[Lane], time: f64) -> Option<(usize, f64)> {
    let carried = |(index, lane): (usize, &Lane)| (index, lane.rate * (time - delay(target, lanes, index)));
    // Of equals the last, so that those that are listed first stay.
    lanes.iter().enumerate().map(carried).rev().min_by(|a, b| a.1.total_cmp(&b.1))
}

/// Computes shares that all end at `time`. The last one absorbs rounding.
fn cut(
    target: &Target,
    lanes: &[Lane],
    size: Bytes,
    time: f64,
) -> (SmallVec<[Share; 8]>, SmallVec<[f64; 8]>) {
    let (mut shares, mut rates) = (SmallVec::new(), SmallVec::new());
    let (mut sum, mut offset) = (0.0, Bytes::ZERO);
    for (index, lane) in lanes.iter().enumerate() {
        sum += lane.rate * (time - delay(target, lanes, index));
        let end = if index + 1 == lanes.len() { size } else { grains(sum).min(size) };
        let part = end.saturating_sub(offset);
        if !part.is_zero() {
            shares.push(Share { relay: lane.relay, way: lane.way, offset, size: part });
            rates.push(gigabytes(lane.rate).0);
        }
        offset = offset.max(end);
    }
    (shares, rates)
}

/// Copy to be split.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// GPU whose memory is copied.
    pub target: DeviceId,
    /// Direction of the copy.
    pub direction: Direction,
    /// Size of the copy.
    pub size: Bytes,
    /// Relays that can access the memory from their own streams.
    pub zero_staging: DeviceSet,
    /// Relays with free buffers.
    pub staged: DeviceSet,
    /// Bytes in flight of other copies, without those of the same stream that precede this copy anyway.
    pub load: &'a Load,
    /// Number of other GPUs whose copies are expected to use the same relays before this copy completes.
    pub expected: u32,
}

/// Part of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// GPU whose link is used; the target itself for its own link.
    pub relay: DeviceId,
    /// Method by which the relay passes the bytes on.
    pub way: Way,
    /// Offset within the copy.
    pub offset: Bytes,
    /// Size of the part.
    pub size: Bytes,
}

impl Share {
    /// Returns the part after the first `sent` bytes; `None` if nothing remains.
    pub(crate) fn behind(self, sent: Bytes) -> Option<Share> {
        let size = self.size.saturating_sub(sent);
        (!size.is_zero()).then_some(Share { offset: self.offset.saturating_add(sent), size, ..self })
    }
}

/// Parts of a copy in the order of their offsets. They cover it exactly and begin at multiples of 4 KiB.
#[derive(Clone, Debug, PartialEq)]
pub struct Shares {
    pub(super) shares: SmallVec<[Share; 8]>,
    /// Predicted rates in GB/s while all parts are in flight.
    pub(super) rates: SmallVec<[f64; 8]>,
    pub(super) predicted: Micros,
    pub(super) direct: Micros,
}

impl Shares {
    /// Returns the predicted time from the fork until all parts have arrived.
    pub fn predicted(&self) -> Micros {
        self.predicted
    }

    /// Returns the predicted time of one native copy over the target's own link; 0 if the copy was too small for a prediction.
    pub fn direct(&self) -> Micros {
        self.direct
    }

    /// Returns the predicted rate of a share while all are in flight; 0 if the share does not exist.
    pub fn rate(&self, share: usize) -> Bandwidth {
        Bandwidth(self.rates.get(share).copied().unwrap_or(0.0))
    }

    /// Returns one share over the target's own link.
    pub(super) fn native(ask: &Ask<'_>, rate: Bandwidth, took: Micros) -> Shares {
        let share = Share { relay: ask.target, way: Way::Direct, offset: Bytes::ZERO, size: ask.size };
        let (shares, rates) = (SmallVec::from_iter([share]), SmallVec::from_iter([rate.0]));
        Shares { shares, rates, predicted: took, direct: took }
    }
}

impl Deref for Shares {
    type Target = [Share];

    fn deref(&self) -> &[Share] {
        &self.shares
    }
}

impl<'a> IntoIterator for &'a Shares {
    type Item = &'a Share;
    type IntoIter = std::slice::Iter<'a, Share>;

    fn into_iter(self) -> Self::IntoIter {
        self.shares.iter()
    }
}

#[cfg(test)]
mod tests {
    use glake_device::DeviceId;
    use glake_device::owned::DeviceSet;
    use glake_device::topology::Topology;

    use super::super::{Ceiling, Direction, GpuLinks, Load};
    use super::*;

    fn graph(name: &str) -> PathGraph {
        PathGraph::conservative(&GpuLinks::of(&Topology::from(&glake_sim::load(name).unwrap())))
    }

    fn ask(size: Bytes, load: &Load) -> Ask<'_> {
        Ask {
            target: DeviceId(0),
            direction: Direction::ToGpu,
            size,
            zero_staging: DeviceSet::ALL,
            staged: DeviceSet::EMPTY,
            load,
            expected: 0,
        }
    }

    #[test]
    fn a_large_copy_goes_over_every_link() {
        let load = Load::new();
        let shares = split(&graph("h200x4"), &ask(Bytes::gib(1), &load));
        assert_eq!(shares.len(), 4);
        assert_eq!((shares[0].relay, shares[0].way), (DeviceId(0), Way::Direct));
        assert!(shares[1..].iter().all(|share| share.way == Way::ZeroStaging));
        assert!(shares.predicted().0 < shares.direct().0 / 3.9);
    }

    #[test]
    fn a_small_copy_goes_over_its_own_link() {
        let load = Load::new();
        let small = ask(Bytes::kib(1023), &load);
        assert_eq!(
            split(&graph("h200x4"), &small)[..],
            Shares::native(&small, Bandwidth(0.0), Micros(0.0))[..]
        );
        let alone = Ask { zero_staging: DeviceSet::EMPTY, ..ask(Bytes::gib(1), &load) };
        assert_eq!(split(&graph("h200x4"), &alone).len(), 1);
    }

    #[test]
    fn times_are_those_measured_on_an_h200() {
        let load = Load::new();
        for (size, measured) in [(2, 30.7), (4, 40.9), (16, 99.3)] {
            let shares = split(&graph("h200x4"), &ask(Bytes::mib(size), &load));
            assert!(shares.predicted().0 < measured * 1.02, "{size} MiB: {:?}", shares.predicted());
        }
    }

    #[test]
    fn links_behind_one_switch_serve_once() {
        let load = Load::new();
        let shares = split(&graph("a100x8"), &ask(Bytes::gib(1), &load));
        let relays: Vec<u32> = shares.iter().map(|share| share.relay.0).collect();
        assert_eq!(relays, [0, 2, 4, 6]);
    }

    #[test]
    fn what_the_host_s_memory_takes_binds_large_copies_only() {
        let free = graph("h200x4");
        let mut paths = free.paths().clone();
        let links = (0..4).map(DeviceId).collect();
        let (direction, rate) = (Direction::FromGpu, Bandwidth(140.0));
        paths.ceilings.push(Ceiling { direction, links, target: None, rate, reached_by: 4 });
        let (bound, load) = (PathGraph::new(paths).unwrap(), Load::new());
        let takes =
            |graph, direction, size| split(graph, &Ask { direction, ..ask(size, &load) }).predicted().0;
        for (direction, size, times) in
            [(direction, 8, 1.0..=1.0), (direction, 64, 1.3..=1.6), (Direction::ToGpu, 64, 1.0..=1.0)]
        {
            let size = Bytes::mib(size);
            let found = takes(&bound, direction, size) / takes(&free, direction, size);
            assert!(times.contains(&found), "{direction:?} {size}: {found}");
        }
    }

    #[test]
    fn small_copies_of_one_of_two_gpus_are_not_split() {
        let (load, gpus) = (Load::new(), GpuLinks::of(&Topology::from(&glake_sim::load("h200x4").unwrap())));
        let (two, four) = (PathGraph::conservative(&gpus[..2]), PathGraph::conservative(&gpus));
        let paths = |graph, direction, size| split(graph, &Ask { direction, ..ask(size, &load) }).len();
        for direction in [Direction::ToGpu, Direction::FromGpu] {
            assert_eq!(paths(&two, direction, Bytes::kib(2047)), 1);
            assert_eq!(paths(&two, direction, Bytes::mib(2)), 2);
            assert_eq!(paths(&four, direction, Bytes::mib(1)), 1);
            assert!(paths(&four, direction, Bytes::kib(1536)) > 1);
        }
    }
}
