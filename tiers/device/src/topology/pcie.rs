//! PCIe position of a GPU, from sysfs.

use std::fs;
use std::path::Path;

use super::HostLink;
use glake_units::Bandwidth;

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
pub(super) fn read(sys: &Path, pci: &str) -> PciDevice {
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
        let found = read(&sys, "0000:3b:00.0");
        assert_eq!(found.node, Some(1));
        assert!((found.link.unwrap().to_gpu.0 - 31.5).abs() < 0.1);
        fs::write(device.join("numa_node"), "-1\n").unwrap();
        assert_eq!(read(&sys, "0000:3b:00.0").node, None);
        fs::remove_dir_all(&sys).unwrap();
        assert_eq!(read(&sys, "0000:3b:00.0"), PciDevice::default());
    }

    #[test]
    fn root_ports_get_one_index_each() {
        let mut switches = Switches::default();
        let numbers: Vec<u32> = ["a", "b", "a"].map(|root| switches.number(root.to_owned())).into();
        assert_eq!(numbers, [0, 1, 0]);
    }
}
