//! Links of GPUs: their place on PCIe, from sysfs, and NVLink connections between them, from NVML if available.

use std::fs;
use std::path::Path;

use glake_meter::{NvLinks, Nvml, pci_address};
use glake_units::Bandwidth;

use super::{HostLink, PeerLink};
use crate::{DeviceId, DeviceInfo};

/// Properties of a PCI device in sysfs; unknown ones are `None`.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct PciDevice {
    /// NUMA node nearest to the device.
    pub(super) node: Option<u32>,
    /// Link bandwidth, computed from speed and width.
    pub(super) link: Option<HostLink>,
    /// Root port above the device: GPUs with the same one share a switch.
    pub(super) root: Option<String>,
}

/// Assigns an index to each root port.
#[derive(Debug, Default)]
pub(super) struct Switches(Vec<String>);

impl Switches {
    pub(super) fn number(&mut self, root: String) -> u32 {
        let index = self.0.iter().position(|known| *known == root).unwrap_or_else(|| {
            self.0.push(root);
            self.0.len() - 1
        });
        u32::try_from(index).unwrap_or(u32::MAX)
    }
}

/// Reads one device by its PCI address.
pub(super) fn read_pci(sys: &Path, pci: &str) -> PciDevice {
    let device = sys.join("bus/pci/devices").join(pci);
    let line = |name: &str| fs::read_to_string(device.join(name)).ok().map(|text| text.trim().to_owned());
    // An idle GPU slows its link down, so the maximum speed is read; the width does not change.
    let speed = line("max_link_speed").and_then(|text| text.split(' ').next()?.parse::<f64>().ok());
    let lanes = line("current_link_width").or_else(|| line("max_link_width")).and_then(|t| t.parse().ok());
    let link = speed.zip(lanes).and_then(|(speed, lanes)| wire_rate(speed, lanes)).map(|rate| HostLink {
        to_gpu: rate,
        from_gpu: rate,
        nominal: true,
    });
    PciDevice {
        // The value is -1 if the firmware does not report a node.
        node: line("numa_node").and_then(|text| text.parse().ok()),
        link,
        root: fs::canonicalize(&device).ok().and_then(|path| root_port(&path)),
    }
}

/// Returns the wire rate in GB/s of `lanes` lanes at `speed` GT/s: 8b/10b coding up to 5 GT/s, 128b/130b up to 32, flits of 242 in 256
/// bytes above (PCI Express Base Specification 6.0).
fn wire_rate(speed: f64, lanes: u32) -> Option<Bandwidth> {
    if !(speed > 0.0 && speed < 1000.0) || lanes == 0 {
        return None;
    }
    let coding = match speed {
        ..=5.0 => 8.0 / 10.0,
        ..=32.0 => 128.0 / 130.0,
        _ => 242.0 / 256.0,
    };
    Some(Bandwidth(speed * f64::from(lanes) * coding / 8.0))
}

/// Returns the device below the root complex on the path to this one, if there is any in between.
fn root_port(path: &Path) -> Option<String> {
    let names: Vec<String> = path.iter().map(|name| name.to_string_lossy().into_owned()).collect();
    let complex = names.iter().rposition(|name| name.starts_with("pci") && name.contains(':'))?;
    match &names[complex + 1..] {
        [root, _, ..] => Some(root.clone()),
        _ => None,
    }
}

/// Returns the connected pairs; none without NVML.
pub(super) fn read_nvlinks(devices: &[DeviceInfo]) -> Vec<PeerLink> {
    let Some(nvml) = Nvml::open() else { return Vec::new() };
    let ends: Vec<(DeviceId, String, NvLinks)> = devices
        .iter()
        .filter_map(|device| {
            let pci = device.pci.clone()?;
            let ends = nvml.nv_links(&pci)?;
            Some((device.id, pci, ends))
        })
        .collect();
    pairs(&ends)
}

/// Finds connected pairs. Two GPUs are connected directly by links of one that end at the other, or else through the switches at the end of
/// all other links; the GPU with fewer such links then sets the bandwidth.
fn pairs(ends: &[(DeviceId, String, NvLinks)]) -> Vec<PeerLink> {
    let gpus: Vec<String> = ends.iter().map(|(_, pci, _)| pci_address(pci)).collect();
    let to = |of: &NvLinks, pci: &str| of.remotes.iter().filter(|remote| *remote == pci).count();
    let to_switches = |of: &NvLinks| of.remotes.iter().filter(|remote| !gpus.contains(remote)).count();
    let mut pairs = Vec::new();
    for (i, (a, _, first)) in ends.iter().enumerate() {
        for (j, (b, _, second)) in ends.iter().enumerate().skip(i + 1) {
            let direct = to(first, &gpus[j]).max(to(second, &gpus[i]));
            let lanes = if direct > 0 { direct } else { to_switches(first).min(to_switches(second)) };
            let Ok(lanes @ 1..) = u32::try_from(lanes) else { continue };
            let bandwidth = first.speed.or(second.speed).map(|speed| Bandwidth(speed.0 * f64::from(lanes)));
            let (a, b) = (*a.min(b), *a.max(b));
            pairs.push(PeerLink { a, b, bandwidth, lanes: Some(lanes) });
        }
    }
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wire_rates_follow_the_standard() {
        for (speed, lanes, expected) in [(16.0, 16, 31.5), (32.0, 16, 63.0), (5.0, 8, 4.0), (64.0, 16, 121.0)]
        {
            let rate = wire_rate(speed, lanes).unwrap().0;
            assert!((rate - expected).abs() < 0.1, "{speed} x{lanes}: {rate}");
        }
        assert_eq!(wire_rate(0.0, 16), None);
        assert_eq!(wire_rate(16.0, 0), None);
    }

    #[test]
    fn the_root_port_is_the_first_below_the_complex() {
        let of = |path: &str| root_port(Path::new(path));
        assert_eq!(
            of("/sys/devices/pci0000:37/0000:37:01.0/0000:38:00.0/0000:3b:00.0").as_deref(),
            Some("0000:37:01.0")
        );
        assert_eq!(of("/sys/devices/pci0000:00/0000:00:04.0"), None);
        assert_eq!(of("/elsewhere"), None);
    }

    #[test]
    fn pci_device_is_read_from_its_files() {
        let sys = std::env::temp_dir().join(format!("glake-pcie-{}", std::process::id()));
        let device = sys.join("bus/pci/devices/0000:3b:00.0");
        fs::create_dir_all(&device).unwrap();
        for (name, text) in [
            ("max_link_speed", "32.0 GT/s PCIe\n"),
            ("max_link_width", "16\n"),
            ("current_link_width", "8\n"),
            ("numa_node", "1\n"),
        ] {
            fs::write(device.join(name), text).unwrap();
        }
        let found = read_pci(&sys, "0000:3b:00.0");
        assert_eq!(found.node, Some(1));
        assert!((found.link.unwrap().to_gpu.0 - 31.5).abs() < 0.1);
        fs::write(device.join("numa_node"), "-1\n").unwrap();
        assert_eq!(read_pci(&sys, "0000:3b:00.0").node, None);
        fs::remove_dir_all(&sys).unwrap();
        assert_eq!(read_pci(&sys, "0000:3b:00.0"), PciDevice::default());
    }

    #[test]
    fn root_ports_get_one_index_each() {
        let mut switches = Switches::default();
        let numbers: Vec<u32> = ["a", "b", "a"].map(|root| switches.number(root.to_owned())).into();
        assert_eq!(numbers, [0, 1, 0]);
    }
}

#[cfg(test)]
mod nvlink_tests {
    use super::*;

    fn gpu(id: u32, remotes: &[(&str, usize)]) -> (DeviceId, String, NvLinks) {
        let remotes = remotes.iter().flat_map(|(pci, count)| vec![(*pci).to_owned(); *count]).collect();
        (DeviceId(id), format!("0000:{id:02x}:00.0"), NvLinks { remotes, speed: Some(Bandwidth(26.562)) })
    }

    #[test]
    fn switches_connect_all_gpus() {
        let switches = [("0000:80:00.0", 9), ("0000:81:00.0", 9)];
        let pairs = pairs(&[gpu(0, &switches), gpu(1, &switches), gpu(2, &switches)]);
        assert_eq!(pairs.len(), 3);
        assert!(pairs.iter().all(|pair| pair.lanes == Some(18)));
        assert!((pairs[0].bandwidth.unwrap().0 - 478.1).abs() < 0.1);
    }

    #[test]
    fn direct_links_connect_their_ends_only() {
        let ends = [gpu(0, &[("0000:01:00.0", 4)]), gpu(1, &[("0000:00:00.0", 4)]), gpu(2, &[])];
        let pairs = pairs(&ends);
        assert_eq!(pairs.len(), 1);
        assert_eq!((pairs[0].a, pairs[0].b, pairs[0].lanes), (DeviceId(0), DeviceId(1), Some(4)));
    }

    #[test]
    fn without_nvml_no_links_are_found() {
        assert!(read_nvlinks(&[]).is_empty());
    }
}
