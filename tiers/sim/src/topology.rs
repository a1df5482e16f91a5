//! Description of the simulated server: its GPUs and links, as plain data.
//!
//! Links are full duplex unless a `both` limit says otherwise. Models of published servers are read from files by [`crate::load`].

use glake_device::DeviceId;
use glake_device::topology::{CpuSide, DeviceNode, HostCeilings, HostLink, PeerLink, Switch, Topology};
use glake_units::Bytes;
pub use glake_units::{Bandwidth, Micros};
use serde::{Deserialize, Serialize};

/// A server to simulate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SimTopology {
    /// Name of the model.
    pub name: String,
    /// Bandwidth limits of host memory, for all GPUs together.
    pub host: SimHost,
    /// PCIe switches shared by several GPUs; empty if each GPU has its own link to the host.
    #[serde(default)]
    pub switches: Vec<SimLink>,
    /// GPUs in order of their ids.
    pub gpus: Vec<SimGpu>,
    /// Whether a copy between pinned host memory and a GPU's mapped memory, on a stream of another GPU, goes over that other GPU's link and
    /// NVLink. If false, it goes over the link of the GPU that owns the memory, as for plain memory.
    #[serde(default = "yes")]
    pub relay: bool,
}

fn yes() -> bool {
    true
}

/// Host side of the server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SimHost {
    /// Limit of all copies from host memory.
    pub read: Bandwidth,
    /// Limit of all copies to host memory.
    pub write: Bandwidth,
    /// Limit of both directions together, in equal parts.
    #[serde(default)]
    pub both: Option<Bandwidth>,
    /// Limit of one GPU over links of sockets other than its own, per direction.
    #[serde(default)]
    pub far_socket: Option<Bandwidth>,
    /// Rate of one copy from pageable memory to a GPU.
    pub pageable_to_gpu: Bandwidth,
    /// Rate of one copy from a GPU to pageable memory.
    pub pageable_from_gpu: Bandwidth,
}

/// Link of a GPU or switch to the host.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SimLink {
    /// Rate from the host to the GPU.
    pub to_gpu: Bandwidth,
    /// Rate from the GPU to the host.
    pub from_gpu: Bandwidth,
    /// Rate of both directions at once, in equal parts.
    #[serde(default)]
    pub both: Option<Bandwidth>,
}

/// Description of a simulated GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SimGpu {
    /// Product name, as the vendor gives it.
    pub name: String,
    /// Total memory in bytes.
    pub memory: Bytes,
    /// NUMA node that its link ends at.
    #[serde(default)]
    pub socket: u32,
    /// PCIe link to the host.
    pub link: SimLink,
    /// Index of its PCIe switch, if it shares one.
    #[serde(default)]
    pub switch: Option<u32>,
    /// NVLink rate to the other GPUs, per direction; without it peers communicate over PCIe.
    #[serde(default)]
    pub nvlink: Option<Bandwidth>,
    /// Rate of copies inside its memory.
    pub local: Bandwidth,
    /// Fixed latency of every operation.
    pub latency: Micros,
    /// Whether its memory can be exported; false under WSL2.
    #[serde(default = "yes")]
    pub exportable: bool,
    /// Whether its mapped memory can be registered for RDMA.
    #[serde(default = "yes")]
    pub gpu_direct: bool,
    /// Memory that a context takes, if processes share the GPU.
    #[serde(default = "context")]
    pub context: Bytes,
    /// Time until a dead process's memory is free again, if processes share the GPU.
    #[serde(default = "reclaim")]
    pub reclaim: Micros,
}

/// Measured on an H200: a context, its modules and cuBLAS.
fn context() -> Bytes {
    Bytes::mib(640)
}

/// Measured on an H200 with 12 GiB.
fn reclaim() -> Micros {
    Micros(300_000.0)
}

impl SimTopology {
    /// Returns a test topology of `count` equal GPUs of the given memory, each with the links of an H200; no limit is shared.
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

/// Converts a model into a topology.
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
