//! Meter over NVIDIA's management library, if the machine has it.

use std::collections::BTreeMap;

use glake_units::{Bandwidth, Bytes};
use nvml_wrapper::Device;
use nvml_wrapper::enums::device::{SampleValue, UsedGpuMemory};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;

use crate::{GpuMemory, Meter, MeterError, ProcessMemory};

/// File name on a machine with a driver and without a toolkit.
const LIBRARY: &str = "libnvidia-ml.so.1";
/// Upper bound of the number of NVLinks; Hopper and Blackwell have 18.
const MOST_LINKS: u32 = 36;
/// Field `NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON`: rate of one link per direction, in MB/s.
const SPEED: FieldId = FieldId(90);

/// Handle of NVIDIA's management library.
#[derive(Debug)]
pub struct Nvml(nvml_wrapper::Nvml);

/// Active NVLinks of one GPU.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NvLinks {
    /// PCI address of each link's remote end; empty if the machine hides it, as some do for switches.
    pub remotes: Vec<String>,
    /// Rate of one link per direction, if reported.
    pub speed: Option<Bandwidth>,
}

impl Nvml {
    /// Opens the library; `None` if it or the driver is missing.
    pub fn open() -> Option<Nvml> {
        nvml_wrapper::Nvml::builder().lib_path(LIBRARY.as_ref()).init().ok().map(Nvml)
    }

    /// Returns the links of the GPU at a PCI address; `None` if there is no such GPU.
    pub fn nv_links(&self, pci: &str) -> Option<NvLinks> {
        let device = self.0.device_by_pci_bus_id(pci).ok()?;
        let mut remotes = Vec::new();
        for link in 0..MOST_LINKS {
            let link = device.link_wrapper_for(link);
            if link.is_active().unwrap_or(false) {
                remotes
                    .push(link.remote_pci_info().map(|info| pci_address(&info.bus_id)).unwrap_or_default());
            }
        }
        let samples = device.field_values_for(&[SPEED]).unwrap_or_default();
        let value = samples.into_iter().next().and_then(Result::ok).and_then(|sample| sample.value.ok());
        let speed = match value {
            Some(SampleValue::U32(megabytes)) => Some(f64::from(megabytes) / 1000.0),
            Some(SampleValue::U64(megabytes)) => {
                u32::try_from(megabytes).ok().map(|mb| f64::from(mb) / 1000.0)
            }
            _ => None,
        };
        Some(NvLinks { remotes, speed: speed.filter(|speed| *speed > 0.0).map(Bandwidth) })
    }
}

impl Meter for Nvml {
    fn gpus(&self) -> Vec<String> {
        let count = self.0.device_count().unwrap_or(0);
        let address = |index| Some(pci_address(&self.0.device_by_index(index).ok()?.pci_info().ok()?.bus_id));
        (0..count).filter_map(address).collect()
    }

    fn read(&self, gpu: &str) -> Result<GpuMemory, MeterError> {
        let failed = |source| MeterError::Nvml { gpu: gpu.to_owned(), source };
        let device = self.0.device_by_pci_bus_id(gpu).map_err(|error| match error {
            NvmlError::NotFound | NvmlError::InvalidArg => {
                MeterError::Unknown { gpu: gpu.to_owned(), known: self.gpus() }
            }
            other => failed(other),
        })?;
        let memory = device.memory_info().map_err(failed)?;
        let processes = processes(&device).map_err(failed)?;
        let [total, used, reserved] = [memory.total, memory.used, memory.reserved].map(Bytes::new);
        Ok(GpuMemory { total, used, reserved, processes })
    }
}

/// Returns the processes that compute or draw on a GPU. NVML lists one that does both twice, with the same sum.
fn processes(device: &Device<'_>) -> Result<Vec<ProcessMemory>, NvmlError> {
    let mut found = BTreeMap::new();
    for process in device.running_compute_processes()?.into_iter().chain(device.running_graphics_processes()?)
    {
        if let UsedGpuMemory::Used(bytes) = process.used_gpu_memory {
            let known: &mut u64 = found.entry(process.pid).or_default();
            *known = bytes.max(*known);
        }
    }
    Ok(found.into_iter().map(|(pid, used)| ProcessMemory { pid, used: Bytes::new(used) }).collect())
}

/// Normalizes a PCI address: NVML writes domains with eight digits, the kernel with four.
pub fn pci_address(text: &str) -> String {
    let text = text.to_ascii_lowercase();
    match text.split_once(':') {
        Some((domain, rest)) if domain.len() == 8 => format!("{}:{rest}", &domain[4..]),
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pci_addresses_are_normalised() {
        assert_eq!(pci_address("00000000:3B:00.0"), "0000:3b:00.0");
        assert_eq!(pci_address("0000:3b:00.0"), "0000:3b:00.0");
    }

    #[test]
    fn nvml_readings_are_complete() {
        let Some(nvml) = Nvml::open() else {
            println!("SKIPPED: no NVML");
            return;
        };
        for gpu in nvml.gpus() {
            let memory = nvml.read(&gpu).unwrap();
            assert!(memory.used <= memory.total && !memory.total.is_zero(), "{gpu}: {memory:?}");
        }
        assert!(matches!(nvml.read("ffff:ff:1f.0"), Err(MeterError::Unknown { .. })));
    }
}
