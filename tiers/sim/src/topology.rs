//! Description of the simulated server: its GPUs and links, as plain data; models of published servers, built in and from files.
//!
//! Links are full duplex unless a `both` limit says otherwise. An error in a model's name or file is one line long.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use glake_device::DeviceId;
use glake_device::topology::{CpuSide, DeviceNode, HostCeilings, HostLink, PeerLink, Switch, Topology};
use glake_units::Bytes;
use serde::{Deserialize, Serialize};

pub use glake_units::{Bandwidth, Micros};

/// Models of published servers: names and texts of the files in `configs/topologies`.
const TOPOLOGIES: &[(&str, &str)] = &[
    ("h200x4", include_str!("../../../configs/topologies/h200x4.toml")),
    ("h20x8", include_str!("../../../configs/topologies/h20x8.toml")),
    ("a100x8", include_str!("../../../configs/topologies/a100x8.toml")),
    ("h200x4-direct", include_str!("../../../configs/topologies/h200x4-direct.toml")),
    ("pcie4x4", include_str!("../../../configs/topologies/pcie4x4.toml")),
];

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

/// Maximum number of GPUs, more than a server has.
const MOST_GPUS: usize = 64;

/// Loads a model by the name of a preset or the path of a file (contains a slash, or ends in `.toml`).
pub fn load(name: &str) -> Result<SimTopology, TopologyError> {
    if let Some((name, text)) = TOPOLOGIES.iter().find(|(preset, _)| *preset == name) {
        return parse(&PathBuf::from(format!("{name}.toml")), text);
    }
    if !name.contains('/') && !name.ends_with(".toml") {
        let names: Vec<&str> = TOPOLOGIES.iter().map(|(name, _)| *name).collect();
        return Err(TopologyError::Unknown { name: name.to_owned(), allowed: names.join(", ") });
    }
    let path = Path::new(name);
    let text = std::fs::read_to_string(path)
        .map_err(|source| TopologyError::Read { path: path.to_owned(), source })?;
    parse(path, &text)
}

/// Parses a model; `path` is used in errors only.
fn parse(path: &Path, text: &str) -> Result<SimTopology, TopologyError> {
    let model: SimTopology = toml::from_str(text).map_err(|error| {
        let offset = error.span().map_or(0, |span| span.start);
        let line = text.bytes().take(offset).filter(|byte| *byte == b'\n').count() + 1;
        TopologyError::Malformed {
            path: path.to_owned(),
            line,
            text: text.lines().nth(line - 1).unwrap_or_default().trim().chars().take(80).collect(),
            reason: error.message().replace('\n', " "),
        }
    })?;
    check(path, &model)?;
    Ok(model)
}

/// Rejects values that no server has.
fn check(path: &Path, model: &SimTopology) -> Result<(), TopologyError> {
    let refused = |key: String, found: &dyn Display, allowed: &str| TopologyError::Refused {
        path: path.to_owned(),
        key,
        found: found.to_string(),
        allowed: allowed.to_owned(),
    };
    let rate = |key: String, rate: Bandwidth| match rate.0.is_finite() && rate.0 > 0.0 {
        true => Ok(()),
        false => Err(refused(key, &rate.0, "GB/s above 0")),
    };
    let link = |key: &str, link: &SimLink| {
        rate(format!("{key}.to_gpu"), link.to_gpu)?;
        rate(format!("{key}.from_gpu"), link.from_gpu)?;
        link.both.map_or(Ok(()), |both| rate(format!("{key}.both"), both))
    };
    if model.gpus.is_empty() || model.gpus.len() > MOST_GPUS {
        return Err(refused("gpus".to_owned(), &format!("{} GPUs", model.gpus.len()), "1 to 64 GPUs"));
    }
    let host = &model.host;
    rate("host.read".to_owned(), host.read)?;
    rate("host.write".to_owned(), host.write)?;
    rate("host.pageable_to_gpu".to_owned(), host.pageable_to_gpu)?;
    rate("host.pageable_from_gpu".to_owned(), host.pageable_from_gpu)?;
    for (key, value) in [("host.both", host.both), ("host.far_socket", host.far_socket)] {
        value.map_or(Ok(()), |value| rate(key.to_owned(), value))?;
    }
    for (i, switch) in model.switches.iter().enumerate() {
        link(&format!("switches[{i}]"), switch)?;
    }
    for (i, gpu) in model.gpus.iter().enumerate() {
        link(&format!("gpus[{i}].link"), &gpu.link)?;
        rate(format!("gpus[{i}].local"), gpu.local)?;
        gpu.nvlink.map_or(Ok(()), |nvlink| rate(format!("gpus[{i}].nvlink"), nvlink))?;
        if !(gpu.latency.0.is_finite() && gpu.latency.0 >= 0.0) {
            return Err(refused(
                format!("gpus[{i}].latency"),
                &gpu.latency.0,
                "microseconds that are not negative",
            ));
        }
        if gpu.memory.is_zero() {
            return Err(refused(format!("gpus[{i}].memory"), &gpu.memory, "a size such as \"80GiB\""));
        }
        let count = model.switches.len();
        let missing = |switch: &u32| usize::try_from(*switch).is_ok_and(|switch| switch >= count);
        if let Some(switch) = gpu.switch.filter(missing) {
            let allowed = match count {
                0 => "none: there are no switches".to_owned(),
                count => format!("0 to {}", count - 1),
            };
            return Err(refused(format!("gpus[{i}].switch"), &switch, &allowed));
        }
    }
    Ok(())
}

/// Reason why a topology could not be loaded.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum TopologyError {
    /// The name is neither a preset nor a file.
    #[error("topology {name:?} does not exist: allowed is {allowed}, or the path of a .toml file")]
    Unknown {
        /// Name that was requested.
        name: String,
        /// Names of the presets.
        allowed: String,
    },
    /// The file cannot be read.
    #[error("{} cannot be read: {source}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: std::io::Error,
    },
    /// The file is not a valid topology: not TOML, or a key is missing, unknown or of another type.
    #[error("{}:{line}: {text}: {reason}", path.display())]
    Malformed {
        /// Path of the file.
        path: PathBuf,
        /// Line number in the file.
        line: usize,
        /// Text of the line.
        text: String,
        /// Description of the mistake.
        reason: String,
    },
    /// A value is out of range.
    #[error("{}: {key} = {found}: allowed is {allowed}", path.display())]
    Refused {
        /// Path of the file.
        path: PathBuf,
        /// Key, from the root.
        key: String,
        /// Value that was found.
        found: String,
        /// Description of the allowed values.
        allowed: String,
    },
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

#[cfg(test)]
mod models_tests {
    use super::*;

    fn text(from: &str, to: &str) -> String {
        let text = TOPOLOGIES[0].1;
        assert!(text.contains(from), "{from}");
        text.replacen(from, to, 1)
    }

    fn error(text: &str) -> String {
        let message = parse(Path::new("my.toml"), text).unwrap_err().to_string();
        assert!(!message.contains('\n'), "{message}");
        message
    }

    #[test]
    fn presets_match_their_names() {
        for (name, _) in TOPOLOGIES {
            assert_eq!(&load(name).unwrap().name, name);
        }
        let h200 = load("h200x4").unwrap();
        assert_eq!((h200.gpus.len(), h200.host.read, h200.host.write.0), (4, Bandwidth(213.0), 160.0));
        let h20 = load("h20x8").unwrap();
        assert_eq!((h20.gpus[3].socket, h20.gpus[4].socket), (0, 1));
        assert_eq!((h20.host.far_socket, h20.gpus[0].link.to_gpu.0), (Some(Bandwidth(60.0)), 53.0));
        let a100 = load("a100x8").unwrap();
        assert_eq!((a100.switches.len(), a100.switches[0].to_gpu.0), (4, 24.3));
        let direct = load("h200x4-direct").unwrap();
        assert!(!direct.relay && h200.relay);
        assert_eq!(SimTopology { name: h200.name.clone(), relay: true, ..direct }, h200);
        assert!(load("pcie4x4").unwrap().gpus.iter().all(|gpu| gpu.nvlink.is_none()));
    }

    #[test]
    fn an_unknown_name_lists_the_presets() {
        assert_eq!(
            load("h300x4").unwrap_err().to_string(),
            "topology \"h300x4\" does not exist: allowed is h200x4, h20x8, a100x8, h200x4-direct, pcie4x4, or the path of a .toml file"
        );
        let message = load("no/such/file.toml").unwrap_err().to_string();
        assert!(message.starts_with("no/such/file.toml cannot be read: No such file"), "{message}");
    }

    #[test]
    fn errors_name_file_line_and_key() {
        let message = error(&text("write = 160.0\n", ""));
        assert!(message.starts_with("my.toml:15: [host]: missing field `write`"), "{message}");
        let message = error(&text("read = 213.0", "reed = 213.0"));
        assert!(message.starts_with("my.toml:16: reed = 213.0: unknown field `reed`"), "{message}");
        assert!(message.contains("`read`") && message.contains("`far_socket`"), "{message}");
        let message = error(&text("read = 213.0", "read = \"fast\""));
        assert!(message.starts_with("my.toml:16: read = \"fast\": invalid type"), "{message}");
        let message = error(&text("\"143770MiB\"", "\"143770MB\""));
        assert!(message.contains("143770MB") && message.contains("143770MiB"), "{message}");
        let message = error("name = ");
        assert!(message.starts_with("my.toml:1: "), "{message}");
        assert!(error("").contains("missing field `name`"));
    }

    #[test]
    fn impossible_servers_are_refused() {
        assert_eq!(
            error(&text("read = 213.0", "read = -1")),
            "my.toml: host.read = -1: allowed is GB/s above 0"
        );
        assert_eq!(
            error(&text("nvlink = 396.0", "nvlink = nan")),
            "my.toml: gpus[0].nvlink = NaN: allowed is GB/s above 0"
        );
        let message = error(&text("socket = 0,", "socket = 0, switch = 0,"));
        assert_eq!(message, "my.toml: gpus[0].switch = 0: allowed is none: there are no switches");
        assert!(
            error(&text("memory = \"143770MiB\"", "memory = 0")).contains("gpus[0].memory = 0 B: allowed is")
        );
        assert!(error(&text("latency = 7.0", "latency = -1")).contains("gpus[0].latency = -1: allowed is"));
    }
}
