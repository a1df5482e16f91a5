//! Topology of a machine: GPUs, links, NUMA nodes, bandwidth limits.
//!
//! ```text
//!   driver's devices ─┐
//!   sysfs ────────────┼─► Topology          unknown properties are `None`
//!   NVML ─────────────┘
//! ```
//!
//! Reading a machine never fails: an absent source leaves gaps. A simulated server has a topology too. With the feature `hwloc` the CPU
//! side comes from libhwloc, completed from sysfs. The default is sysfs, because a binary linked with libhwloc does not start where the
//! library is absent.

mod cpus;
mod links;

use std::path::Path;

use glake_units::{Bandwidth, Bytes};

use crate::{DeviceId, DeviceInfo};

pub use cpus::{CpuList, CpuSide, NumaNode};

/// GPUs of a server and the links between them.
#[derive(Clone, Debug, PartialEq)]
pub struct Topology {
    /// Name of the model or of the machine.
    pub name: String,
    /// Whether this is a model for the simulator.
    pub simulated: bool,
    /// NUMA nodes and packages of the host.
    pub cpus: CpuSide,
    /// Bandwidth limits of host memory.
    pub host: HostCeilings,
    /// GPUs in order of their ids.
    pub devices: Vec<DeviceNode>,
    /// PCIe switches above GPUs, indexed by [`DeviceNode::switch`].
    pub switches: Vec<Switch>,
    /// Pairs of GPUs with NVLink between them, the lower id first.
    pub peers: Vec<PeerLink>,
}

/// Bandwidth of host memory for all GPUs together; known only for models and calibrated machines.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HostCeilings {
    /// Limit of all copies from host memory.
    pub read: Option<Bandwidth>,
    /// Limit of all copies to host memory.
    pub write: Option<Bandwidth>,
    /// Limit of both directions at once.
    pub both: Option<Bandwidth>,
    /// Limit of one GPU over links of other sockets.
    pub far_socket: Option<Bandwidth>,
}

/// A GPU and its place in the machine.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceNode {
    /// Ordinal of the device.
    pub id: DeviceId,
    /// Product name, as the vendor gives it.
    pub name: String,
    /// Total memory in bytes.
    pub memory: Bytes,
    /// PCI address, if it has one.
    pub pci: Option<String>,
    /// Nearest NUMA node, if known.
    pub node: Option<u32>,
    /// PCIe link to the host, if known.
    pub link: Option<HostLink>,
    /// Index of its PCIe switch, if it shares one with other GPUs.
    pub switch: Option<u32>,
}

/// A link between the host and GPUs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HostLink {
    /// Bandwidth from the host.
    pub to_gpu: Bandwidth,
    /// Bandwidth to the host.
    pub from_gpu: Bandwidth,
    /// Whether the figures are the wire rate, of which copies reach 90 % at best, instead of measurements.
    pub nominal: bool,
}

/// A PCIe switch shared by several GPUs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Switch {
    /// Link shared by the GPUs behind the switch, if known.
    pub link: Option<HostLink>,
}

/// NVLink connection between two GPUs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PeerLink {
    /// Device with the lower id.
    pub a: DeviceId,
    /// Device with the higher id.
    pub b: DeviceId,
    /// Bandwidth in each direction, if known.
    pub bandwidth: Option<Bandwidth>,
    /// Number of links; `None` for models.
    pub lanes: Option<u32>,
}

impl Topology {
    /// Reads this machine, given the devices that the driver reports.
    pub fn of_machine(devices: &[DeviceInfo]) -> Topology {
        let sys = Path::new("/sys");
        let mut switches = links::Switches::default();
        let nodes = devices
            .iter()
            .map(|device| {
                let pci = device.pci.as_deref().map(|pci| links::read_pci(sys, pci)).unwrap_or_default();
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
            peers: links::read_nvlinks(devices),
        };
        topology.keep_shared_switches();
        topology
    }

    /// Returns the NVLink connection between two GPUs.
    pub fn peer(&self, a: DeviceId, b: DeviceId) -> Option<&PeerLink> {
        let (a, b) = (a.min(b), a.max(b));
        self.peers.iter().find(|peer| (peer.a, peer.b) == (a, b))
    }

    /// Drops switches with a single GPU, which constrain nothing; the others keep an index.
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

/// Reads the CPU side of this machine from sysfs.
#[cfg(not(feature = "hwloc"))]
fn cpu_side(sys: &Path) -> CpuSide {
    CpuSide::read(sys)
}

/// Reads the CPU side of this machine from libhwloc, completed from sysfs.
#[cfg(feature = "hwloc")]
fn cpu_side(sys: &Path) -> CpuSide {
    let known = CpuSide::read(sys);
    cpus::read_hwloc().map_or_else(|| known.clone(), |side| side.filled_from(&known))
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
