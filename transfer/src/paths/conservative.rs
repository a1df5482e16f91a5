//! What is assumed of a server that was not calibrated.
//!
//! ```text
//!   every GPU has a link of its own, all equal      but those behind one switch, as the system shows it, share one
//!   where NVLink joins two, each relays the other   and not otherwise
//!   the links of another socket                     give one target no more than one of the fastest links does
//! ```

use glake_device::DeviceId;
use glake_units::{Bandwidth, Bytes, Micros};

use super::table::{Ceiling, GpuLinks, LinkRate, Paths, RelayRate};
use super::{Direction, PathGraph, Way};

/// A link of which nothing is known: PCIe 4 with 16 lanes.
const LINK: Bandwidth = Bandwidth(25.0);
/// A native copy, besides its bytes; measured on an H200.
const NATIVE: Micros = Micros(7.7);
/// A copy over one relay, fork and join included; measured there too: 13 with one, 16 with two, 19.5 with three.
const RELAYED: Micros = Micros(13.3);
/// What each path after the second adds: its calls are issued after those of the others. 4.4 where lanes have to wait for the stream.
const FORK: Micros = Micros(3.1);
/// The same through a buffer: the first piece has to be there before it can go on. 38 to 51 with three relays.
const STAGED: Micros = Micros(35.0);
/// What of its link a staged relay gives: gaps between pieces.
const STAGED_PART: f64 = 0.95;
/// What the links of another socket give one target, or one link where that is more. Between sockets lies no PCIe link, so it
/// is not of their kind: eight H20 give 60 GB/s beside links of 53, eight A100 more than one of their links of 24.3.
const FAR: Bandwidth = Bandwidth(50.0);
/// Smaller copies go over the own link: on four H200s two paths took 0.98 to 1.19 of a native copy's time at 1 MiB, 0.82 at 2 MiB.
const BREAK_EVEN: Bytes = Bytes::kib(1536);
/// Those of a GPU that has one relay: on an H200 two paths took 0.99 to 1.09 of a native copy's time at 1 MiB, 0.76 to 0.85 at 2 MiB.
const BREAK_EVEN_OF_TWO: Bytes = Bytes::mib(2);

/// The least copy that is split, however well its links do: what the call takes on the host counts too.
pub(super) fn least_split(relays: usize) -> Bytes {
    if relays == 1 { BREAK_EVEN_OF_TWO } else { BREAK_EVEN }
}

impl PathGraph {
    /// What is assumed without calibration; [`super::Observations`] refine it.
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
