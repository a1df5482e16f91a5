//! What a target's copies in one direction may take: its own link, its relays' ways, the ceilings over them.
//!
//! Invariant: lanes are in the order of their relays' ids, the own link first; every relay is below [`MOST_GPUS`].

use std::sync::OnceLock;

use glake_device::DeviceId;
use glake_device::owned::DeviceSet;
use glake_units::{Bytes, Micros};
use smallvec::SmallVec;

use super::rates::{Pipe, fill};
use super::{MOST_GPUS, PathRate, Way};

/// Paths beside each other.
pub(super) type Lanes = SmallVec<[Lane; 8]>;

/// A path, in figures of bytes and microseconds, and what it gets beside the others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Lane {
    pub(super) relay: DeviceId,
    pub(super) way: Way,
    /// Alone.
    pub(super) most: f64,
    /// Alone, besides its bytes.
    pub(super) latency: f64,
    /// Beside the others.
    pub(super) rate: f64,
}

/// Links that share something.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Limit {
    pub(super) links: DeviceSet,
    pub(super) rate: f64,
    /// Whether only copies of this target count.
    pub(super) own_copies: bool,
    /// How many of the links are known to reach it.
    pub(super) reached_by: usize,
}

/// Other copies' bytes on a link.
#[derive(Clone, Copy, Debug)]
pub(super) struct Busy {
    pub(super) link: DeviceId,
    /// What the link gives.
    pub(super) most: f64,
    /// Of this target.
    pub(super) own: f64,
    /// Of other targets.
    pub(super) other: f64,
}

#[derive(Clone, Debug)]
pub(super) struct Target {
    pub(super) own: Lane,
    pub(super) zero_staging: Vec<Lane>,
    pub(super) staged: Vec<Lane>,
    pub(super) limits: Vec<Limit>,
    /// What each relay adds to the latency of those that are issued after it.
    pub(super) fork: f64,
    pub(super) break_even: Bytes,
    pub(super) table: Table,
}

impl Target {
    /// Of these relays, those whose streams are known to serve the target.
    pub(super) fn zero_staging_of(&self, relays: DeviceSet) -> DeviceSet {
        self.zero_staging.iter().map(|lane| lane.relay).filter(|relay| relays.contains(*relay)).collect()
    }

    /// Of these relays, those whose buffers are known to serve the target.
    pub(super) fn staged_of(&self, relays: DeviceSet) -> DeviceSet {
        self.staged.iter().map(|lane| lane.relay).filter(|relay| relays.contains(*relay)).collect()
    }

    /// The lanes that may be used: each relay's better way of those that are open to it.
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

    /// What each of the lanes gets while other copies want `busy` within `time`.
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

    /// What the path of each relay gives alone.
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

/// Lanes with their rates while nothing else is in flight, by the relays that were open: filled once, never changed.
#[derive(Debug, Default)]
pub(super) struct Table([OnceLock<Entry>; 6]);

#[derive(Debug)]
struct Entry {
    zero_staging: DeviceSet,
    staged: DeviceSet,
    lanes: Lanes,
}

impl Table {
    /// The lanes of these relays; `make` makes them where they are not known yet. Where the table is full they are not kept.
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

/// A copy starts empty: what is known is quickly found again.
impl Clone for Table {
    fn clone(&self) -> Table {
        Table::default()
    }
}

const _: () = assert!(3 * MOST_GPUS <= 64, "a path, and two flows of others, for each link in one mask");
