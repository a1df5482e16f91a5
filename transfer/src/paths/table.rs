//! What is known of a server's links, as plain data: what calibration finds, what its file holds.

use glake_device::DeviceId;
use glake_device::owned::DeviceSet;
use glake_device::topology::Topology;
use glake_units::{Bandwidth, Bytes, Micros};
use serde::{Deserialize, Serialize};

use super::{Direction, Way};

/// A GPU and what joins it to the others.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuLinks {
    /// Which.
    pub device: DeviceId,
    /// Its maker's name for it.
    pub name: String,
    /// Its PCI address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci: Option<String>,
    /// The NUMA node that it is near to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<u32>,
    /// The PCIe switch that it stands behind, if others do too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub switch: Option<u32>,
    /// What copies over its link can reach, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<Bandwidth>,
    /// The GPUs that NVLink joins it to.
    #[serde(default)]
    pub peers: Vec<DeviceId>,
}

/// Of the wires' rate, what copies reach: 55.5 of 63.0 GB/s on PCIe 5, 24.3 to 27 of 31.5 on PCIe 4.
const OF_NOMINAL: f64 = 0.88;

impl GpuLinks {
    /// The GPUs of a server.
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

/// What the links of a server give.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Paths {
    /// Whether it was measured, and not assumed.
    pub calibrated: bool,
    /// What each path after the second adds to the latency of all.
    pub fork: Micros,
    /// The GPUs.
    pub gpus: Vec<GpuLinks>,
    /// The GPUs' own links.
    #[serde(default)]
    pub links: Vec<LinkRate>,
    /// What relays give.
    #[serde(default)]
    pub relays: Vec<RelayRate>,
    /// What several links share.
    #[serde(default)]
    pub ceilings: Vec<Ceiling>,
}

/// A GPU's own link.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkRate {
    /// Whose.
    pub device: DeviceId,
    /// Which way.
    pub direction: Direction,
    /// What it gives alone.
    pub rate: Bandwidth,
    /// What a native copy over it takes besides its bytes.
    pub latency: Micros,
    /// Smaller copies go over the own link.
    pub break_even: Bytes,
}

/// What a relay gives a target.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RelayRate {
    /// Whose memory.
    pub target: DeviceId,
    /// Whose link.
    pub relay: DeviceId,
    /// Which way the bytes go.
    pub direction: Direction,
    /// How: never [`Way::Direct`].
    pub way: Way,
    /// What it gives alone.
    pub rate: Bandwidth,
    /// What it takes besides its bytes, fork and join included.
    pub latency: Micros,
}

/// Links that give less together than each for itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ceiling {
    /// Which way.
    pub direction: Direction,
    /// Whose links.
    pub links: Vec<DeviceId>,
    /// Whose copies, where it binds those of one target only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<DeviceId>,
    /// What they give together.
    pub rate: Bandwidth,
    /// How many of the links are known to reach it.
    pub reached_by: u32,
}
