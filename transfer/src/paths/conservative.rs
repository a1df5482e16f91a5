//! Assumed path graph of a server that was not calibrated.
//!
//! ```text
//!   every GPU has a link of its own, all equal      GPUs behind one switch, as reported by the system, share one
//!   NVLink peers relay for each other               no other GPUs do
//!   all links of another socket together            give one target at most the rate of one of the fastest links
//! ```

use glake_device::DeviceId;
use glake_units::{Bandwidth, Bytes, Micros};

use super::table::{Ceiling, GpuLinks, LinkRate, Paths, RelayRate};
use super::{Direction, PathGraph, Way};

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
