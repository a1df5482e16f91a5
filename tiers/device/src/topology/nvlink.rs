//! NVLink between GPUs, from NVML where it is there.

use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::structs::device::FieldId;

use super::PeerLink;
use crate::{DeviceId, DeviceInfo, nvml};
use glake_units::Bandwidth;

/// More links than a GPU has: 18 on Hopper and Blackwell.
const MOST_LINKS: u32 = 36;
/// `NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON`: what one link carries each way, in MB/s.
const SPEED: FieldId = FieldId(90);

/// One GPU's links: what is at their other ends, by PCI address.
#[derive(Clone, Debug, Default, PartialEq)]
struct Ends {
    remotes: Vec<String>,
    speed: Option<f64>,
}

/// The linked pairs; none where there is no NVML.
pub(super) fn read(devices: &[DeviceInfo]) -> Vec<PeerLink> {
    let Some(nvml) = nvml::open() else { return Vec::new() };
    let ends: Vec<(DeviceId, String, Ends)> = devices
        .iter()
        .filter_map(|device| {
            let pci = device.pci.clone()?;
            let ends = ends_of(&nvml, &pci)?;
            Some((device.id, pci, ends))
        })
        .collect();
    pairs(&ends)
}

fn ends_of(nvml: &Nvml, pci: &str) -> Option<Ends> {
    let device = nvml.device_by_pci_bus_id(pci).ok()?;
    let mut remotes = Vec::new();
    for link in 0..MOST_LINKS {
        let link = device.link_wrapper_for(link);
        if link.is_active().unwrap_or(false) {
            // Some machines hide the switches: their end has no address.
            remotes.push(link.remote_pci_info().map(|info| short(&info.bus_id)).unwrap_or_default());
        }
    }
    let samples = device.field_values_for(&[SPEED]).unwrap_or_default();
    let value = samples.into_iter().next().and_then(Result::ok).and_then(|sample| sample.value.ok());
    let speed = match value {
        Some(SampleValue::U32(megabytes)) => Some(f64::from(megabytes) / 1000.0),
        Some(SampleValue::U64(megabytes)) => u32::try_from(megabytes).ok().map(|mb| f64::from(mb) / 1000.0),
        _ => None,
    };
    Some(Ends { remotes, speed: speed.filter(|speed| *speed > 0.0) })
}

/// Two GPUs are linked directly, by links of the one that end at the other, or else through the switches that all
/// other links end at: then each gets what the one with fewer such links has.
fn pairs(ends: &[(DeviceId, String, Ends)]) -> Vec<PeerLink> {
    let gpus: Vec<String> = ends.iter().map(|(_, pci, _)| short(pci)).collect();
    let to = |of: &Ends, pci: &str| of.remotes.iter().filter(|remote| *remote == pci).count();
    let to_switches = |of: &Ends| of.remotes.iter().filter(|remote| !gpus.contains(remote)).count();
    let mut pairs = Vec::new();
    for (i, (a, _, first)) in ends.iter().enumerate() {
        for (j, (b, _, second)) in ends.iter().enumerate().skip(i + 1) {
            let direct = to(first, &gpus[j]).max(to(second, &gpus[i]));
            let lanes = if direct > 0 { direct } else { to_switches(first).min(to_switches(second)) };
            let Ok(lanes @ 1..) = u32::try_from(lanes) else { continue };
            let bandwidth = first.speed.or(second.speed).map(|speed| Bandwidth(speed * f64::from(lanes)));
            let (a, b) = (*a.min(b), *a.max(b));
            pairs.push(PeerLink { a, b, bandwidth, lanes: Some(lanes) });
        }
    }
    pairs
}

/// NVML writes domains with eight digits, sysfs with four.
fn short(pci: &str) -> String {
    let pci = pci.to_ascii_lowercase();
    match pci.split_once(':') {
        Some((domain, rest)) if domain.len() == 8 => format!("{}:{rest}", &domain[4..]),
        _ => pci,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(id: u32, remotes: &[(&str, usize)]) -> (DeviceId, String, Ends) {
        let remotes = remotes.iter().flat_map(|(pci, count)| vec![(*pci).to_owned(); *count]).collect();
        (DeviceId(id), format!("0000:{id:02x}:00.0"), Ends { remotes, speed: Some(26.562) })
    }

    #[test]
    fn through_switches_all_reach_all() {
        let switches = [("0000:80:00.0", 9), ("0000:81:00.0", 9)];
        let pairs = pairs(&[gpu(0, &switches), gpu(1, &switches), gpu(2, &switches)]);
        assert_eq!(pairs.len(), 3);
        assert!(pairs.iter().all(|pair| pair.lanes == Some(18)));
        assert!((pairs[0].bandwidth.unwrap().0 - 478.1).abs() < 0.1);
    }

    #[test]
    fn direct_links_are_between_their_ends_only() {
        let ends = [gpu(0, &[("0000:01:00.0", 4)]), gpu(1, &[("0000:00:00.0", 4)]), gpu(2, &[])];
        let pairs = pairs(&ends);
        assert_eq!(pairs.len(), 1);
        assert_eq!((pairs[0].a, pairs[0].b, pairs[0].lanes), (DeviceId(0), DeviceId(1), Some(4)));
    }

    #[test]
    fn addresses_are_compared_in_one_spelling() {
        assert_eq!(short("00000000:3B:00.0"), "0000:3b:00.0");
        assert_eq!(short("0000:3b:00.0"), "0000:3b:00.0");
    }

    #[test]
    fn without_nvml_nothing_is_known() {
        assert!(read(&[]).is_empty());
    }
}
