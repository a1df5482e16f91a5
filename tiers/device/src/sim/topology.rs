//! The server that is simulated: its GPUs and the links between them, as plain data.
//!
//! Links are full duplex unless a `both` ceiling says otherwise. Models of published servers are read from files by
//! [`crate::topology::load`].

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
    }
}
