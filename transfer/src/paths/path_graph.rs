//! Path graph used by the splitter: validated [`Paths`], indexed by target and direction.
//!
//! Invariant: every target is listed and below [`MOST_GPUS`]; every rate is positive, every latency non-negative.

use glake_device::DeviceId;
use glake_device::owned::DeviceSet;
use glake_units::{Bandwidth, Bytes, Micros};
use serde::{Deserialize, Serialize};

use super::table::{Ceiling, LinkRate, Paths, RelayRate};
use super::target::{Busy, Lane, Limit, Table, Target};
use super::{Direction, Load, MOST_GPUS, PathRate, Way, bytes_a_micro};
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
