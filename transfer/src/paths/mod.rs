//! Path graph: link rates, ceilings, and the division of a copy among links.
//!
//! ```text
//!              host memory                 ceilings: what links give together,
//!        ┌────────┬────────┬────────┐      for every target or for one
//!      link 0   link 1   link 2   link 3   rates: alone, and beside each other
//!        │        │        │        │
//!       GPU 0 ── GPU 1 ── GPU 2 ── GPU 3   a relay's link serves GPU 0 too, over NVLink: its way
//!
//!   PathGraph ─► split(ask) ─► shares: which bytes go over which link
//! ```
//!
//! Pure: no driver, no clock, no threads of its own; times and measurements are arguments.
//! The link data of a server (`GpuLinks`, `Paths`) is plain: it is the output of calibration and the content of its file.

use std::sync::atomic::{AtomicU64, Ordering};

use glake_device::DeviceId;
use glake_device::owned::DeviceSet;
use glake_device::topology::Topology;
use glake_units::{Bandwidth, Bytes, Micros};
use serde::{Deserialize, Serialize};

pub(crate) use given_up::GivenUp;
pub use observations::Observations;
pub use path_graph::PathGraph;
pub use split::{Ask, GRAIN, SLICE, Share, Shares, split};
pub(crate) use split::{LEAST_STAGED, MANY_RELAYS};

pub mod cache;
mod fluid;
mod given_up;
mod observations;
mod outcomes;
mod path_graph;
mod split;
pub mod trials;

/// Maximum number of GPUs in a graph. Copies of further GPUs use their own links.
pub const MOST_GPUS: usize = 16;

/// Bytes per microsecond at 1 GB/s.
const GIGABYTE: f64 = 1000.0;

fn bytes_a_micro(rate: Bandwidth) -> f64 {
    rate.0 * GIGABYTE
}

fn gigabytes(bytes_a_micro: f64) -> Bandwidth {
    Bandwidth(bytes_a_micro / GIGABYTE)
}

/// Converts bytes to a float; exact up to 2^53, far above any copy.
fn float(bytes: Bytes) -> f64 {
    bytes.get() as f64
}

/// Returns the integer part, or 0 for a negative number.
#[allow(clippy::cast_possible_truncation)]
fn whole(number: f64) -> u64 {
    number as u64
}

/// Rounds bytes to the nearest multiple of [`GRAIN`].
fn grains(bytes: f64) -> Bytes {
    let grain = float(GRAIN);
    Bytes::new(whole((bytes / grain).round()).saturating_mul(GRAIN.get()))
}

/// Direction between host and GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// Host to device.
    ToGpu,
    /// Device to host.
    FromGpu,
}

impl Direction {
    /// Returns the opposite direction.
    pub fn other(self) -> Direction {
        match self {
            Direction::ToGpu => Direction::FromGpu,
            Direction::FromGpu => Direction::ToGpu,
        }
    }

    /// Both directions, in the order of [`Direction::index`].
    pub const BOTH: [Direction; 2] = [Direction::ToGpu, Direction::FromGpu];

    /// Returns an index for tables: 0 or 1.
    pub const fn index(self) -> usize {
        self as usize
    }
}

/// Method by which a GPU's link serves a copy of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// The target's own link, on a stream of the target.
    Direct,
    /// A stream of the relay, directly between host and target memory: over the relay's link and NVLink, without a buffer.
    ZeroStaging,
    /// A buffer in the relay's memory: over the relay's link, then NVLink.
    Staged,
}

/// Rate of one path.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PathRate {
    /// GPU whose link is used; the target itself for its own.
    pub relay: DeviceId,
    /// Way of the path.
    pub way: Way,
    /// Rate of a continuous transfer.
    pub rate: Bandwidth,
    /// Fixed cost from fork to join.
    pub latency: Micros,
}

/// Bytes in flight by target, link and direction. Enqueuing adds to the counters, completion subtracts.
///
/// Invariant: the bytes of a link are the sum over its targets, except while a thread updates both.
#[derive(Debug, Default)]
pub struct Load {
    links: [[AtomicU64; 2]; MOST_GPUS],
    targets: [[[AtomicU64; 2]; MOST_GPUS]; MOST_GPUS],
}

impl Load {
    /// Creates empty counters.
    pub fn new() -> Self {
        Load::default()
    }

    /// Adds `size` bytes of `target` on the link of `relay`.
    pub fn begin(&self, target: DeviceId, relay: DeviceId, direction: Direction, size: Bytes) {
        for counter in self.counters(target, relay, direction).into_iter().flatten() {
            counter.fetch_add(size.get(), Ordering::Relaxed);
        }
    }

    /// Removes `size` completed bytes; the counters saturate at zero.
    pub fn end(&self, target: DeviceId, relay: DeviceId, direction: Direction, size: Bytes) {
        for counter in self.counters(target, relay, direction).into_iter().flatten() {
            let less = |bytes: u64| Some(bytes.saturating_sub(size.get()));
            // The closure always answers, so the update cannot fail.
            let _ = counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
    }

    /// Returns the bytes in flight on the link of `relay`.
    pub fn link(&self, relay: DeviceId, direction: Direction) -> Bytes {
        let bytes = usize::try_from(relay.0).ok().and_then(|relay| self.links.get(relay));
        Bytes::new(bytes.map_or(0, |link| link[direction.index()].load(Ordering::Relaxed)))
    }

    /// Returns those of them that belong to `target`.
    pub fn target(&self, target: DeviceId, relay: DeviceId, direction: Direction) -> Bytes {
        let [_, of_target] = self.counters(target, relay, direction);
        Bytes::new(of_target.map_or(0, |bytes| bytes.load(Ordering::Relaxed)))
    }

    fn counters(&self, target: DeviceId, relay: DeviceId, direction: Direction) -> [Option<&AtomicU64>; 2] {
        let (target, relay) = (usize::try_from(target.0), usize::try_from(relay.0));
        let (Ok(target @ 0..MOST_GPUS), Ok(relay @ 0..MOST_GPUS)) = (target, relay) else { return [None; 2] };
        let way = direction.index();
        [Some(&self.links[relay][way]), Some(&self.targets[target][relay][way])]
    }
}

/// GPU and its connections.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuLinks {
    /// Device ID.
    pub device: DeviceId,
    /// Product name.
    pub name: String,
    /// PCI address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci: Option<String>,
    /// Closest NUMA node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<u32>,
    /// PCIe switch, if other GPUs share it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub switch: Option<u32>,
    /// Rate that copies over its link can reach, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<Bandwidth>,
    /// GPUs connected by NVLink.
    #[serde(default)]
    pub peers: Vec<DeviceId>,
}

/// Ratio of achieved copy rates to the nominal link rate: 55.5 of 63.0 GB/s on PCIe 5, 24.3 to 27 of 31.5 on PCIe 4.
const OF_NOMINAL: f64 = 0.88;

impl GpuLinks {
    /// Returns the GPUs of a topology.
    pub fn of(topology: &Topology) -> Vec<GpuLinks> {
        let joined = |a, b| topology.peer(a, b).is_some();
        let all: DeviceSet = topology.devices.iter().map(|device| device.id).collect();
        topology
            .devices
            .iter()
            .map(|device| GpuLinks {
                device: device.id,
                name: device.name.clone(),
                pci: device.pci.clone(),
                node: device.node,
                switch: device.switch,
                link: device.link.map(|link| {
                    let scale = if link.nominal { OF_NOMINAL } else { 1.0 };
                    Bandwidth(link.to_gpu.0.min(link.from_gpu.0) * scale)
                }),
                peers: all.iter().filter(|&peer| joined(device.id, peer)).collect(),
            })
            .collect()
    }
}

/// Rates of a server's links.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Paths {
    /// Whether the data was measured rather than assumed.
    pub calibrated: bool,
    /// Latency added to all paths by each path after the second.
    pub fork: Micros,
    /// GPUs of the server.
    pub gpus: Vec<GpuLinks>,
    /// Own links of the GPUs.
    #[serde(default)]
    pub links: Vec<LinkRate>,
    /// Rates of relays.
    #[serde(default)]
    pub relays: Vec<RelayRate>,
    /// Limits that several links share.
    #[serde(default)]
    pub ceilings: Vec<Ceiling>,
}

/// Own link of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkRate {
    /// GPU of the link.
    pub device: DeviceId,
    /// Direction of copies.
    pub direction: Direction,
    /// Rate of the link alone.
    pub rate: Bandwidth,
    /// Fixed cost of a native copy over the link.
    pub latency: Micros,
    /// Size below which copies use the own link only.
    pub break_even: Bytes,
}

/// Rate of a relay for a target.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RelayRate {
    /// GPU whose memory is copied.
    pub target: DeviceId,
    /// GPU whose link is used.
    pub relay: DeviceId,
    /// Direction of copies.
    pub direction: Direction,
    /// Way of relaying; never [`Way::Direct`].
    pub way: Way,
    /// Rate of the relay alone.
    pub rate: Bandwidth,
    /// Fixed cost of a copy, fork and join included.
    pub latency: Micros,
}

/// Limit of the combined rate of several links.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ceiling {
    /// Direction of copies.
    pub direction: Direction,
    /// GPUs of the links.
    pub links: Vec<DeviceId>,
    /// Target whose copies are limited; `None`: all targets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<DeviceId>,
    /// Combined rate.
    pub rate: Bandwidth,
    /// Number of links that are known to reach it.
    pub reached_by: u32,
}

#[cfg(test)]
mod load_tests {
    use super::*;

    #[test]
    fn counts_by_link_and_target() {
        let load = Load::new();
        let (a, b, far) = (DeviceId(0), DeviceId(3), DeviceId(40));
        load.begin(a, b, Direction::ToGpu, Bytes::mib(3));
        load.begin(b, b, Direction::ToGpu, Bytes::mib(1));
        load.begin(a, far, Direction::ToGpu, Bytes::mib(1));
        assert_eq!(load.link(b, Direction::ToGpu), Bytes::mib(4));
        assert_eq!(load.target(a, b, Direction::ToGpu), Bytes::mib(3));
        assert_eq!(load.link(b, Direction::FromGpu), Bytes::ZERO);
        assert_eq!(load.link(far, Direction::ToGpu), Bytes::ZERO);
        load.end(a, b, Direction::ToGpu, Bytes::mib(9));
        load.end(b, b, Direction::ToGpu, Bytes::mib(1));
        assert_eq!(load.link(b, Direction::ToGpu), Bytes::ZERO);
    }
}
