//! Paths of a target's copies in one direction: its own link, its relays, and the ceilings over them.
//!
//! Invariant: lanes are ordered by relay ID, the own link first; every relay is below [`MOST_GPUS`].

use std::sync::OnceLock;

use glake_device::DeviceId;
use glake_device::owned::DeviceSet;
use glake_units::{Bytes, Micros};
use smallvec::SmallVec;

use super::rates::{Pipe, fill};
use super::{MOST_GPUS, PathRate, Way};

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
