//! Link data of a server in plain form: the output of calibration and the content of its file.

use glake_device::DeviceId;
use glake_device::owned::DeviceSet;
use glake_device::topology::Topology;
use glake_units::{Bandwidth, Bytes, Micros};
use serde::{Deserialize, Serialize};

use super::{Direction, Way};

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
