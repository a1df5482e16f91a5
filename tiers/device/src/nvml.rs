//! What NVML tells of a GPU without a context on it, where NVML is there.

use glake_units::Bytes;
use nvml_wrapper::Nvml;

use crate::DeviceInfo;

/// The name that a machine with a driver and no toolkit has.
const LIBRARY: &str = "libnvidia-ml.so.1";

pub(crate) fn open() -> Option<Nvml> {
    Nvml::builder().lib_path(LIBRARY.as_ref()).init().ok()
}

/// Memory of a device that nobody has taken; `None` where that is not known, as for a part of a GPU.
pub(crate) fn free_memory(device: &DeviceInfo) -> Option<Bytes> {
    let nvml = open()?;
    let memory = nvml.device_by_pci_bus_id(device.pci.as_deref()?).ok()?.memory_info().ok()?;
    let is_whole = memory.total.abs_diff(device.memory.get()) <= device.memory.get() / 16;
    is_whole.then(|| Bytes::new(memory.free))
}
