//! The server that is simulated: its GPUs and the links between them, as plain data.
//!
//! Links are full duplex unless a `both` ceiling says otherwise. Models of published servers are read from files by
//! [`crate::load`].

use glake_device::DeviceId;
use glake_device::topology::{CpuSide, DeviceNode, HostCeilings, HostLink, PeerLink, Switch, Topology};
use glake_units::Bytes;
pub use glake_units::{Bandwidth, Micros};
use serde::{Deserialize, Serialize};

/// A server to simulate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SimTopology {
    /// What it is called.
    pub name: String,
    /// What the host's memory gives, to all GPUs together.
    pub host: SimHost,
    /// PCIe switches that several GPUs stand behind; empty where each GPU has its own way to the host.
    #[serde(default)]
    pub switches: Vec<SimLink>,
    /// The GPUs, in order of their ids.
    pub gpus: Vec<SimGpu>,
    /// Whether a copy between pinned host memory and a GPU's mapped memory, on a stream of another GPU, goes over
    /// that other GPU's link and NVLink. Where it does not, it goes over the link of the GPU whose memory it is, as
    /// for plain memory.
    #[serde(default = "yes")]
    pub relay: bool,
}

fn yes() -> bool {
    true
}

/// The host's side.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SimHost {
    /// Ceiling of all copies out of host memory.
    pub read: Bandwidth,
    /// Ceiling of all copies into host memory.
    pub write: Bandwidth,
    /// Ceiling of both together, in equal parts.
    #[serde(default)]
    pub both: Option<Bandwidth>,
    /// What one GPU can get over links of sockets other than its own, each way.
    #[serde(default)]
    pub far_socket: Option<Bandwidth>,
    /// One copy from pageable memory to a GPU.
    pub pageable_to_gpu: Bandwidth,
    /// One copy from a GPU to pageable memory.
    pub pageable_from_gpu: Bandwidth,
}

/// One link to the host.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SimLink {
    /// From the host to the GPU.
    pub to_gpu: Bandwidth,
    /// From the GPU to the host.
    pub from_gpu: Bandwidth,
    /// Both ways at once, in equal parts.
    #[serde(default)]
    pub both: Option<Bandwidth>,
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SimGpu {
    /// Its maker's name for it.
    pub name: String,
    /// Its memory.
    pub memory: Bytes,
    /// The NUMA node that its link ends at.
    #[serde(default)]
    pub socket: u32,
    /// Its PCIe link.
    pub link: SimLink,
    /// Which of the switches it stands behind.
    #[serde(default)]
    pub switch: Option<u32>,
    /// To the other GPUs, each way; without it peers talk over PCIe.
    #[serde(default)]
    pub nvlink: Option<Bandwidth>,
    /// Copies inside its memory.
    pub local: Bandwidth,
    /// What every operation takes besides its bytes.
    pub latency: Micros,
    /// Whether its memory can be exported: not under WSL2.
    #[serde(default = "yes")]
    pub exportable: bool,
    /// Whether its mapped memory can be registered for RDMA.
    #[serde(default = "yes")]
    pub gpu_direct: bool,
    /// What a context costs, where processes share the GPU.
    #[serde(default = "context")]
    pub context: Bytes,
    /// How long memory of a process that has died stays used, where processes share the GPU.
    #[serde(default = "reclaim")]
    pub reclaim: Micros,
}

/// As measured on an H200: a context, its modules and cuBLAS.
fn context() -> Bytes {
    Bytes::mib(640)
}

/// As measured on an H200 with 12 GiB.
fn reclaim() -> Micros {
    Micros(300_000.0)
}

impl SimTopology {
    /// `count` equal GPUs, each with the links of an H200 and so much memory; no ceiling is shared. For tests.
    pub fn uniform(count: u32, memory: Bytes) -> Self {
        let wide = Bandwidth::NO_CEILING;
        SimTopology {
            name: "uniform".to_owned(),
            host: SimHost {
                read: wide,
                write: wide,
                both: None,
                far_socket: None,
                pageable_to_gpu: Bandwidth(9.5),
                pageable_from_gpu: Bandwidth(19.4),
            },
            switches: Vec::new(),
            gpus: (0..count).map(|_| h200(memory)).collect(),
            relay: true,
        }
    }
}

fn h200(memory: Bytes) -> SimGpu {
    SimGpu {
        name: "Simulated H200".to_owned(),
        memory,
        socket: 0,
        link: SimLink { to_gpu: Bandwidth(55.5), from_gpu: Bandwidth(55.4), both: Some(Bandwidth(101.7)) },
        switch: None,
        nvlink: Some(Bandwidth(396.0)),
        local: Bandwidth(1980.0),
        latency: Micros(7.0),
        exportable: true,
        gpu_direct: true,
        context: context(),
        reclaim: reclaim(),
    }
}

/// A model as a topology.
impl From<&SimTopology> for Topology {
    fn from(model: &SimTopology) -> Topology {
        let link = |link: &SimLink| HostLink { to_gpu: link.to_gpu, from_gpu: link.from_gpu, nominal: false };
        let ids = || (0_u32..).map(DeviceId).zip(&model.gpus);
        let mut peers = Vec::new();
        for (a, first) in ids() {
            for (b, second) in ids().filter(|(b, _)| *b > a) {
                if let (Some(x), Some(y)) = (first.nvlink, second.nvlink) {
                    peers.push(PeerLink { a, b, bandwidth: Some(if x < y { x } else { y }), lanes: None });
                }
            }
        }
        Topology {
            name: model.name.clone(),
            simulated: true,
            cpus: CpuSide::of_sockets(model.gpus.iter().map(|gpu| gpu.socket)),
            host: HostCeilings {
                read: model.host.read.ceiling(),
                write: model.host.write.ceiling(),
                both: model.host.both,
                far_socket: model.host.far_socket,
            },
            devices: ids()
                .map(|(id, gpu)| DeviceNode {
                    id,
                    name: gpu.name.clone(),
                    memory: gpu.memory,
                    pci: None,
                    node: Some(gpu.socket),
                    link: Some(link(&gpu.link)),
                    switch: gpu.switch,
                })
                .collect(),
            switches: model.switches.iter().map(|switch| Switch { link: Some(link(switch)) }).collect(),
            peers,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load;

    #[test]
    fn a_model_becomes_a_topology() {
        let topology = Topology::from(&load("a100x8").unwrap());
        assert!(topology.simulated);
        assert_eq!((topology.devices.len(), topology.switches.len(), topology.peers.len()), (8, 4, 28));
        assert_eq!(topology.cpus.packages, 2);
        assert_eq!(topology.devices[7].switch, Some(3));
        let pair = topology.peer(DeviceId(6), DeviceId(2)).unwrap();
        assert_eq!((pair.a, pair.bandwidth), (DeviceId(2), Some(Bandwidth(250.0))));
        assert!(topology.peer(DeviceId(1), DeviceId(1)).is_none());
    }
}
