//! What a machine looks like: GPUs, links, NUMA nodes, ceilings.
//!
//! ```text
//!   driver's devices ─┐
//!   sysfs ────────────┼─► Topology          whatever is not known is `None`
//!   NVML ─────────────┘
//! ```
//!
//! Reading a machine never fails: a source that is absent leaves gaps. A simulated server has a topology too.
//! With the feature `hwloc` the CPU side is what libhwloc says, but for what it does not know; sysfs is the default because a binary
//! linked with libhwloc does not start where it is absent.

mod cpus;
#[cfg(feature = "hwloc")]
pub mod hwloc;
mod nvlink;
mod pcie;

use std::path::Path;

use glake_units::{Bandwidth, Bytes};

use crate::{DeviceId, DeviceInfo};

pub use cpus::{CpuList, CpuSide, NumaNode};

/// A server's GPUs and what lies between them.
#[derive(Clone, Debug, PartialEq)]
pub struct Topology {
    /// What it is called: a model's name, or the machine's.
    pub name: String,
    /// Whether this is a model for the simulator.
    pub simulated: bool,
    /// NUMA nodes and packages of the host.
    pub cpus: CpuSide,
    /// What host memory gives.
    pub host: HostCeilings,
    /// The GPUs, in order of their ids.
    pub devices: Vec<DeviceNode>,
    /// PCIe switches that GPUs stand behind, by the number in [`DeviceNode::switch`].
    pub switches: Vec<Switch>,
    /// Pairs of GPUs with NVLink between them, the lower id first.
    pub peers: Vec<PeerLink>,
}

/// What host memory gives to all GPUs together; known of models and of calibrated machines only.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HostCeilings {
    /// All copies out of it.
    pub read: Option<Bandwidth>,
    /// All copies into it.
    pub write: Option<Bandwidth>,
    /// Both at once.
    pub both: Option<Bandwidth>,
    /// What one GPU gets over links of other sockets.
    pub far_socket: Option<Bandwidth>,
}

/// One GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceNode {
    /// How the driver counts it.
    pub id: DeviceId,
    /// Its maker's name for it.
    pub name: String,
    /// Its memory.
    pub memory: Bytes,
    /// Its PCI address.
    pub pci: Option<String>,
    /// The NUMA node that it is near to.
    pub node: Option<u32>,
    /// Its PCIe link.
    pub link: Option<HostLink>,
    /// The switch that it stands behind, if others do too.
    pub switch: Option<u32>,
}

/// A way between the host and GPUs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HostLink {
    /// From the host.
    pub to_gpu: Bandwidth,
    /// To the host.
    pub from_gpu: Bandwidth,
    /// Whether the figures are the wires', of which copies reach nine tenths at best, and not measured.
    pub nominal: bool,
}

/// A PCIe switch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Switch {
    /// What the GPUs behind it share, if that is known.
    pub link: Option<HostLink>,
}

/// NVLink between two GPUs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PeerLink {
    /// One GPU.
    pub a: DeviceId,
    /// The other.
    pub b: DeviceId,
    /// Each way.
    pub bandwidth: Option<Bandwidth>,
    /// How many links, of a real machine.
    pub lanes: Option<u32>,
}

impl Topology {
    /// Reads this machine, whose driver shows these devices.
    pub fn of_machine(devices: &[DeviceInfo]) -> Topology {
        let sys = Path::new("/sys");
        let mut switches = pcie::Switches::default();
        let nodes = devices
            .iter()
            .map(|device| {
                let pci = device.pci.as_deref().map(|pci| pcie::read(sys, pci)).unwrap_or_default();
                DeviceNode {
                    id: device.id,
                    name: device.name.clone(),
                    memory: device.memory,
                    pci: device.pci.clone(),
                    node: pci.node,
                    link: pci.link,
                    switch: pci.root.map(|root| switches.number(root)),
                }
            })
            .collect();
        let mut topology = Topology {
            name: std::fs::read_to_string("/proc/sys/kernel/hostname")
                .map_or_else(|_| "this machine".to_owned(), |name| name.trim().to_owned()),
            simulated: false,
            cpus: cpu_side(sys),
            host: HostCeilings::default(),
            devices: nodes,
            switches: Vec::new(),
            peers: nvlink::read(devices),
        };
        topology.keep_shared_switches();
        topology
    }

    /// The NVLink between two GPUs.
    pub fn peer(&self, a: DeviceId, b: DeviceId) -> Option<&PeerLink> {
        let (a, b) = (a.min(b), a.max(b));
        self.peers.iter().find(|peer| (peer.a, peer.b) == (a, b))
    }

    /// A switch with one GPU behind it says nothing: only those with several keep a number.
    fn keep_shared_switches(&mut self) {
        let behind = |devices: &[DeviceNode], switch| devices.iter().filter(|d| d.switch == switch).count();
        let shared: Vec<Option<u32>> = self.devices.iter().map(|device| device.switch).collect();
        let mut kept: Vec<Option<u32>> = Vec::new();
        for switch in shared {
            if switch.is_some() && behind(&self.devices, switch) > 1 && !kept.contains(&switch) {
                kept.push(switch);
            }
        }
        for device in &mut self.devices {
            let number = kept.iter().position(|switch| *switch == device.switch);
            device.switch = number.and_then(|number| u32::try_from(number).ok());
        }
        self.switches = vec![Switch { link: None }; kept.len()];
    }
}

/// The CPU side of this machine: sysfs's.
#[cfg(not(feature = "hwloc"))]
fn cpu_side(sys: &Path) -> CpuSide {
    CpuSide::read(sys)
}

/// The CPU side of this machine: libhwloc's, with what it does not know from sysfs.
#[cfg(feature = "hwloc")]
fn cpu_side(sys: &Path) -> CpuSide {
    let known = CpuSide::read(sys);
    hwloc::read().map_or_else(|| known.clone(), |side| side.filled_from(&known))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_can_be_read() {
        let ghost = DeviceInfo {
            id: DeviceId(0),
            name: "ghost".to_owned(),
            memory: Bytes::gib(1),
            pci: Some("ffff:ff:1f.7".to_owned()),
            exportable: true,
            gpu_direct: true,
        };
        let topology = Topology::of_machine(&[ghost]);
        assert!(!topology.simulated && !topology.name.is_empty());
        assert!(!topology.cpus.nodes.is_empty());
        assert_eq!((topology.devices[0].link, topology.devices[0].switch), (None, None));
    }
}
