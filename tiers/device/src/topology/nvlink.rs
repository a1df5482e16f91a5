//! NVLink connections between GPUs, from NVML if available.

use glake_meter::{NvLinks, Nvml, pci_address};
use glake_units::Bandwidth;

use super::PeerLink;
use crate::{DeviceId, DeviceInfo};

/// Returns the connected pairs; none without NVML.
pub(super) fn read(devices: &[DeviceInfo]) -> Vec<PeerLink> {
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
        assert!(read(&[]).is_empty());
    }
}
