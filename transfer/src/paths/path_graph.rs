//! Path graph used by the splitter: validated [`Paths`], indexed by target and direction. Each entry holds the paths of a target's copies: its
//! own link, its relays, and the ceilings over them.
//!
//! Without a calibration, the graph is assumed:
//!
//! ```text
//!   every GPU has a link of its own, all equal      GPUs behind one switch, as reported by the system, share one
//!   NVLink peers relay for each other               no other GPUs do
//!   all links of another socket together            give one target at most the rate of one of the fastest links
//! ```
//!
//! Invariants: every target is listed and below [`MOST_GPUS`], as is every relay; every rate is positive, every latency non-negative; lanes are
//! ordered by relay ID, the own link first.

use std::sync::OnceLock;

use glake_device::DeviceId;
use glake_device::owned::DeviceSet;
use glake_units::{Bandwidth, Bytes, Micros};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use super::fluid::{Pipe, fill};
use super::{
    Ceiling, Direction, GpuLinks, LinkRate, Load, MOST_GPUS, PathRate, Paths, RelayRate, Way, bytes_a_micro,
};
use crate::TransferError;

/// Size below which copies to the host land in its caches: on four H200s 16 MiB arrived at 190 GB/s, larger copies at 140 to 160.
const BURST: Bytes = Bytes::mib(16);

/// Rates of a server's links for each target, with shared ceilings.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(try_from = "Paths", into = "Paths")]
pub struct PathGraph {
    paths: Paths,
    targets: Vec<[Option<Target>; 2]>,
    /// Targets for copies to the host below [`BURST`], which the ceiling of host memory does not limit.
    bursts: Vec<Option<Target>>,
    /// Own rate of each link, by device and direction; 0 if unknown.
    links: Vec<[f64; 2]>,
}

impl PathGraph {
    /// Validates and indexes link data. GPUs beyond [`MOST_GPUS`] are left out.
    pub fn new(paths: Paths) -> Result<PathGraph, TransferError> {
        check(&paths)?;
        let mut links = vec![[0.0; 2]; MOST_GPUS];
        for link in &paths.links {
            if let Some(place) = index(link.device).and_then(|index| links.get_mut(index)) {
                place[link.direction.index()] = bytes_a_micro(link.rate);
            }
        }
        let (mut targets, mut bursts) = (vec![[None, None]; MOST_GPUS], vec![None; MOST_GPUS]);
        for link in &paths.links {
            let Some(index) = index(link.device) else { continue };
            targets[index][link.direction.index()] = Some(target(&paths, link, |_| true));
            if link.direction == Direction::FromGpu {
                // A switch that all are behind is reached by few of them.
                let is_host =
                    |ceiling: &Ceiling| ceiling.links.len() == paths.gpus.len() && ceiling.reached_by > 2;
                bursts[index] = Some(target(&paths, link, |ceiling| !is_host(ceiling)));
            }
        }
        Ok(PathGraph { paths, targets, bursts, links })
    }

    /// Creates a graph without links: every copy uses its target's own link.
    pub fn empty() -> PathGraph {
        let paths = Paths {
            calibrated: false,
            fork: Micros(0.0),
            gpus: Vec::new(),
            links: Vec::new(),
            relays: Vec::new(),
            ceilings: Vec::new(),
        };
        PathGraph { paths, targets: Vec::new(), bursts: Vec::new(), links: Vec::new() }
    }

    /// Returns the data the graph was created from.
    pub fn paths(&self) -> &Paths {
        &self.paths
    }

    /// Returns whether the graph was measured rather than assumed.
    pub fn is_calibrated(&self) -> bool {
        self.paths.calibrated
    }

    /// Returns the own rate of each path of a target, its own link first.
    pub fn rates(&self, target: DeviceId, direction: Direction) -> impl Iterator<Item = PathRate> {
        self.target(target, direction).into_iter().flat_map(Target::rates)
    }

    /// Returns the combined rate of all paths of a target if all relays can access the memory.
    pub fn together(&self, target: DeviceId, direction: Direction) -> Bandwidth {
        let Some(target) = self.target(target, direction) else { return Bandwidth(0.0) };
        let mut lanes = target.lanes(DeviceSet::ALL, DeviceSet::ALL);
        target.share(&mut lanes, &[], 1.0);
        super::gigabytes(lanes.iter().map(|lane| lane.rate).sum())
    }

    /// Returns the minimum size of a split copy of a target's memory; `None` if the target is unknown.
    pub fn break_even(&self, target: DeviceId, direction: Direction) -> Option<Bytes> {
        self.target(target, direction).map(|target| target.break_even)
    }

    /// Returns the paths for a copy of this size.
    pub(super) fn target_of(&self, device: DeviceId, direction: Direction, size: Bytes) -> Option<&Target> {
        match direction {
            Direction::FromGpu if size < BURST => self.bursts.get(index(device)?)?.as_ref(),
            _ => self.target(device, direction),
        }
    }

    pub(super) fn target(&self, device: DeviceId, direction: Direction) -> Option<&Target> {
        self.targets.get(index(device)?)?[direction.index()].as_ref()
    }

    /// Returns the bytes in flight of other copies, for the busy links.
    pub(super) fn busy(
        &self,
        target: DeviceId,
        direction: Direction,
        load: &Load,
    ) -> smallvec::SmallVec<[Busy; 8]> {
        (0_u32..)
            .map(DeviceId)
            .zip(&self.links)
            .filter_map(|(link, rates)| {
                let all = load.link(link, direction);
                if all.is_zero() || rates[direction.index()] <= 0.0 {
                    return None;
                }
                let own = load.target(target, link, direction);
                Some(Busy {
                    link,
                    most: rates[direction.index()],
                    own: super::float(own.min(all)),
                    other: super::float(all.saturating_sub(own)),
                })
            })
            .collect()
    }
}

impl TryFrom<Paths> for PathGraph {
    type Error = TransferError;

    fn try_from(paths: Paths) -> Result<PathGraph, TransferError> {
        PathGraph::new(paths)
    }
}

impl From<PathGraph> for Paths {
    fn from(graph: PathGraph) -> Paths {
        graph.paths
    }
}

fn index(device: DeviceId) -> Option<usize> {
    usize::try_from(device.0).ok().filter(|index| *index < MOST_GPUS)
}

fn target(paths: &Paths, link: &LinkRate, counts: impl Fn(&Ceiling) -> bool) -> Target {
    let of_target = |relay: &&RelayRate| {
        (relay.target, relay.direction) == (link.device, link.direction) && index(relay.relay).is_some()
    };
    let lanes = |way: Way| {
        let mut lanes: Vec<Lane> = paths
            .relays
            .iter()
            .filter(of_target)
            .filter(|relay| relay.way == way && relay.relay != link.device)
            .map(|relay| lane(relay.relay, way, relay.rate, relay.latency))
            .collect();
        lanes.sort_unstable_by_key(|lane| lane.relay);
        lanes.dedup_by_key(|lane| lane.relay);
        lanes
    };
    let limit = |ceiling: &Ceiling| Limit {
        links: ceiling.links.iter().copied().collect(),
        rate: bytes_a_micro(ceiling.rate),
        own_copies: ceiling.target.is_some(),
        reached_by: usize::try_from(ceiling.reached_by).unwrap_or(usize::MAX),
    };
    let binds = |ceiling: &&Ceiling| {
        ceiling.direction == link.direction && ceiling.target.is_none_or(|target| target == link.device)
    };
    Target {
        own: lane(link.device, Way::Direct, link.rate, link.latency),
        zero_staging: lanes(Way::ZeroStaging),
        staged: lanes(Way::Staged),
        limits: paths.ceilings.iter().filter(binds).filter(|ceiling| counts(ceiling)).map(limit).collect(),
        fork: paths.fork.0,
        break_even: link.break_even,
        table: Table::default(),
    }
}

fn lane(relay: DeviceId, way: Way, rate: Bandwidth, latency: Micros) -> Lane {
    let most = bytes_a_micro(rate);
    Lane { relay, way, most, latency: latency.0, rate: most }
}

/// Rejects figures that would make the arithmetic meaningless.
fn check(paths: &Paths) -> Result<(), TransferError> {
    let known = |device: DeviceId| match paths.gpus.iter().any(|gpu| gpu.device == device) {
        true => Ok(()),
        false => Err(TransferError::UnknownGpu { device, count: paths.gpus.len() }),
    };
    let refused =
        |figure, device, found, allowed| TransferError::BadFigure { figure, device, found, allowed };
    let rate = |device, rate: Bandwidth| match rate.0.is_finite() && rate.0 > 0.0 {
        true => Ok(()),
        false => Err(refused("rate", device, rate.0, "GB/s above 0")),
    };
    let latency = |device, latency: Micros| match latency.0.is_finite() && latency.0 >= 0.0 {
        true => Ok(()),
        false => Err(refused("latency", device, latency.0, "microseconds that are not negative")),
    };
    for link in &paths.links {
        known(link.device)?;
        rate(link.device, link.rate)?;
        latency(link.device, link.latency)?;
        latency(link.device, paths.fork)?;
    }
    for relay in &paths.relays {
        known(relay.target)?;
        known(relay.relay)?;
        rate(relay.relay, relay.rate)?;
        latency(relay.relay, relay.latency)?;
    }
    for ceiling in &paths.ceilings {
        for device in ceiling.links.iter().copied().chain(ceiling.target) {
            known(device)?;
            rate(device, ceiling.rate)?;
        }
    }
    Ok(())
}

/// Lanes of one copy.
pub(super) type Lanes = SmallVec<[Lane; 8]>;

/// Path with its rates in bytes per microsecond.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Lane {
    pub(super) relay: DeviceId,
    pub(super) way: Way,
    /// Rate of the path alone.
    pub(super) most: f64,
    /// Fixed cost of the path alone, in microseconds.
    pub(super) latency: f64,
    /// Rate next to the other lanes.
    pub(super) rate: f64,
}

/// Limit that several links share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Limit {
    pub(super) links: DeviceSet,
    pub(super) rate: f64,
    /// Whether the limit applies to copies of this target only.
    pub(super) own_copies: bool,
    /// Number of links that are known to reach it.
    pub(super) reached_by: usize,
}

/// Bytes in flight of other copies on a link.
#[derive(Clone, Copy, Debug)]
pub(super) struct Busy {
    pub(super) link: DeviceId,
    /// Rate of the link.
    pub(super) most: f64,
    /// Bytes of this target's copies.
    pub(super) own: f64,
    /// Bytes of other targets' copies.
    pub(super) other: f64,
}

#[derive(Clone, Debug)]
pub(super) struct Target {
    pub(super) own: Lane,
    pub(super) zero_staging: Vec<Lane>,
    pub(super) staged: Vec<Lane>,
    pub(super) limits: Vec<Limit>,
    /// Latency that each relay adds to those issued after it.
    pub(super) fork: f64,
    pub(super) break_even: Bytes,
    pub(super) table: Table,
}

impl Target {
    /// Returns the relays that can serve the target without staging.
    pub(super) fn zero_staging_of(&self, relays: DeviceSet) -> DeviceSet {
        self.zero_staging.iter().map(|lane| lane.relay).filter(|relay| relays.contains(*relay)).collect()
    }

    /// Returns the relays that can serve the target by staging.
    pub(super) fn staged_of(&self, relays: DeviceSet) -> DeviceSet {
        self.staged.iter().map(|lane| lane.relay).filter(|relay| relays.contains(*relay)).collect()
    }

    /// Returns the usable lanes: the better available way of each relay.
    pub(super) fn lanes(&self, zero_staging: DeviceSet, staged: DeviceSet) -> Lanes {
        let mut lanes: Lanes = SmallVec::from_iter([self.own]);
        lanes.extend(self.zero_staging.iter().copied().filter(|lane| zero_staging.contains(lane.relay)));
        for lane in self.staged.iter().filter(|lane| staged.contains(lane.relay)) {
            if !lanes.iter().any(|known| known.relay == lane.relay) {
                lanes.push(*lane);
            }
        }
        lanes[1..].sort_unstable_by_key(|lane| lane.relay);
        lanes
    }

    /// Computes the rate of each lane while other copies transfer `busy` within `time`.
    pub(super) fn share(&self, lanes: &mut [Lane], busy: &[Busy], time: f64) {
        let mut demands: SmallVec<[f64; 24]> = lanes.iter().map(|lane| lane.most).collect();
        let mut pipes: SmallVec<[Pipe; 16]> = SmallVec::new();
        let on = |links: DeviceSet| {
            let of = lanes.iter().enumerate().filter(|(_, lane)| links.contains(lane.relay));
            of.fold(0, |flows, (flow, _)| flows | 1 << flow)
        };
        let flow_at = |index: usize| 1_u64 << index.min(63);
        for limit in &self.limits {
            pipes.push(Pipe { flows: on(limit.links), rate: limit.rate });
        }
        for link in busy {
            let mut flows = on(DeviceSet::of(link.link));
            for (bytes, own) in [(link.own, true), (link.other, false)] {
                if bytes > 0.0 {
                    let flow = flow_at(demands.len());
                    flows |= flow;
                    for (pipe, limit) in pipes.iter_mut().zip(&self.limits) {
                        if limit.links.contains(link.link) && (own || !limit.own_copies) {
                            pipe.flows |= flow;
                        }
                    }
                    demands.push(bytes / time);
                }
            }
            pipes.push(Pipe { flows, rate: link.most });
        }
        let mut rates: SmallVec<[f64; 24]> = SmallVec::from_elem(0.0, demands.len());
        fill(&demands, &pipes, &mut rates);
        for (lane, rate) in lanes.iter_mut().zip(rates) {
            lane.rate = rate;
        }
    }

    /// Returns the own rate of each path.
    pub(super) fn rates(&self) -> impl Iterator<Item = PathRate> {
        [self.own]
            .into_iter()
            .chain(self.zero_staging.iter().copied())
            .chain(self.staged.iter().copied())
            .map(|lane| PathRate {
                relay: lane.relay,
                way: lane.way,
                rate: super::gigabytes(lane.most),
                latency: Micros(lane.latency),
            })
    }
}

/// Cache of lanes with their idle rates, keyed by the available relays. Entries never change.
#[derive(Debug, Default)]
pub(super) struct Table([OnceLock<Entry>; 6]);

#[derive(Debug)]
struct Entry {
    zero_staging: DeviceSet,
    staged: DeviceSet,
    lanes: Lanes,
}

impl Table {
    /// Returns the lanes for a set of relays, computed by `make` on the first call. A full table does not cache further sets.
    pub(super) fn lanes(
        &self,
        zero_staging: DeviceSet,
        staged: DeviceSet,
        make: impl FnOnce() -> Lanes,
    ) -> Lanes {
        let of = |entry: &&Entry| (entry.zero_staging, entry.staged) == (zero_staging, staged);
        if let Some(entry) = self.0.iter().map_while(OnceLock::get).find(of) {
            return entry.lanes.clone();
        }
        let mut entry = Entry { zero_staging, staged, lanes: make() };
        let lanes = entry.lanes.clone();
        for place in &self.0 {
            // Another thread may have taken the place, perhaps for the same: a double does no harm.
            match place.set(entry) {
                Ok(()) => break,
                Err(refused) => entry = refused,
            }
        }
        lanes
    }
}

/// Clones start empty: the entries are quickly recomputed.
impl Clone for Table {
    fn clone(&self) -> Table {
        Table::default()
    }
}

const _: () = assert!(3 * MOST_GPUS <= 64, "a path, and two flows of others, for each link in one mask");

/// Assumed rate of an unknown link: PCIe 4 with 16 lanes.
const LINK: Bandwidth = Bandwidth(25.0);
/// Fixed cost of a native copy, measured on an H200.
const NATIVE: Micros = Micros(7.7);
/// Fixed cost of a copy over one relay, fork and join included. Measured on an H200: 13 with one relay, 16 with two, 19.5 with three.
const RELAYED: Micros = Micros(13.3);
/// Additional cost of each path after the second, whose calls are issued later. Measured: 4.4 if lanes wait for the stream.
const FORK: Micros = Micros(3.1);
/// Fixed cost of a staged copy, whose first chunk must arrive before it is forwarded. Measured: 38 to 51 with three relays.
const STAGED: Micros = Micros(35.0);
/// Share of its link's rate that a staged relay achieves, due to gaps between chunks.
const STAGED_PART: f64 = 0.95;
/// Combined rate of the other socket's links for one target, or one link's rate if higher. The limit is the socket interconnect, not PCIe:
/// eight H20 reach 60 GB/s with links of 53, eight A100 more than one of their links of 24.3.
const FAR: Bandwidth = Bandwidth(50.0);
/// Size below which copies use their own link. On four H200s two paths took 0.98 to 1.19 of a native copy's time at 1 MiB, 0.82 at 2 MiB.
const BREAK_EVEN: Bytes = Bytes::kib(1536);
/// The same for a GPU with one relay: on an H200 two paths took 0.99 to 1.09 of a native copy's time at 1 MiB, 0.76 to 0.85 at 2 MiB.
const BREAK_EVEN_OF_TWO: Bytes = Bytes::mib(2);

/// Returns the minimum size of a split copy. It accounts for the time of the call on the host, however good the links are.
pub(super) fn least_split(relays: usize) -> Bytes {
    if relays == 1 { BREAK_EVEN_OF_TWO } else { BREAK_EVEN }
}

impl PathGraph {
    /// Returns the assumed path graph, which [`super::Observations`] refine.
    pub fn conservative(gpus: &[GpuLinks]) -> PathGraph {
        let rates = gpus.iter().filter_map(|gpu| gpu.link).map(|link| link.0);
        let least = rates.filter(|rate| rate.is_finite() && *rate > 0.0).reduce(f64::min);
        let rate = least.map_or(LINK, Bandwidth);
        let reaches = |(links, _): &(u32, _)| f64::from(*links) * rate.0 >= FAR.0;
        let reached_by = (1..).zip(gpus).find(reaches).map_or(u32::MAX, |(links, _)| links);
        let mut paths = Paths {
            calibrated: false,
            fork: FORK,
            gpus: gpus.to_vec(),
            links: Vec::new(),
            relays: Vec::new(),
            ceilings: Vec::new(),
        };
        for direction in Direction::BOTH {
            for gpu in gpus {
                let device = gpu.device;
                let joined = |other: &&GpuLinks| {
                    other.device != device
                        && (gpu.peers.contains(&other.device) || other.peers.contains(&device))
                };
                let break_even = least_split(gpus.iter().filter(joined).count());
                paths.links.push(LinkRate { device, direction, rate, latency: NATIVE, break_even });
                for relay in gpus.iter().filter(joined) {
                    let path = |way, rate, latency| RelayRate {
                        target: device,
                        relay: relay.device,
                        direction,
                        way,
                        rate,
                        latency,
                    };
                    paths.relays.push(path(Way::ZeroStaging, rate, RELAYED));
                    paths.relays.push(path(Way::Staged, Bandwidth(rate.0 * STAGED_PART), STAGED));
                }
                let far =
                    |other: &&GpuLinks| gpu.node.is_some() && other.node.is_some() && other.node != gpu.node;
                let links: Vec<DeviceId> = gpus.iter().filter(far).map(|gpu| gpu.device).collect();
                if !links.is_empty() {
                    let rate = Bandwidth(rate.0.max(FAR.0));
                    paths.ceilings.push(Ceiling { direction, links, target: Some(device), rate, reached_by });
                }
            }
            let mut switches: Vec<u32> = gpus.iter().filter_map(|gpu| gpu.switch).collect();
            switches.sort_unstable();
            switches.dedup();
            for switch in switches {
                let behind = gpus.iter().filter(|gpu| gpu.switch == Some(switch)).map(|gpu| gpu.device);
                let links = behind.collect();
                paths.ceilings.push(Ceiling { direction, links, target: None, rate, reached_by: 1 });
            }
        }
        // Every figure is one of the constants above, or was checked to be a number.
        PathGraph::new(paths).unwrap_or_else(|_| PathGraph::empty())
    }
}
