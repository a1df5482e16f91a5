//! The driver, its GPUs, and peer access.

use glake_device::topology::Topology;
use glake_device::{DeviceInfo, Driver, DriverError, ExtentProperties, Place};

use super::Check;
use crate::rig::{self, RigOptions};
use glake_runtime::backend::{Backend, BackendError};
use glake_runtime::calibrations::Calibrations;
use glake_runtime::config::Config;

/// The version of NVIDIA's kernel module.
const VERSION: &str = "/sys/module/nvidia/version";

/// Looks at the chosen device; a driver that does not answer is a result.
///
/// # Errors
/// [`BackendError::Topology`]: the model to simulate is unknown or incomplete.
pub(crate) fn checks(config: &Config) -> Result<Vec<Check>, BackendError> {
    let backend = match Backend::find(&config.device.choice) {
        Ok(Backend::Sim { instead_of: Some(error), .. }) | Err(BackendError::Driver(error)) => {
            return Ok(vec![missing(&error)]);
        }
        found => found?,
    };
    let told = rig::driver(&backend, RigOptions::default()).and_then(|(driver, _)| {
        let infos = driver.devices()?;
        Ok((driver, infos))
    });
    let (driver, infos) = match told {
        Ok(told) => told,
        Err(error) => return Ok(vec![missing(&error)]),
    };
    let mut checks = vec![driver_check(&backend), gpus(&infos), mappings(&*driver, &infos), handles(&infos)];
    checks.push(peers(&*driver, &infos));
    checks.push(links(&backend.topology()?, config));
    Ok(checks)
}

fn missing(error: &DriverError) -> Check {
    Check::problem(
        "gpu",
        format!("no GPU found: {error}"),
        "install NVIDIA's driver, or give the container its GPUs (docker run --gpus all); --device sim:h20x8 looks at a model",
    )
}

fn driver_check(backend: &Backend) -> Check {
    match backend {
        Backend::Sim { .. } => Check::ok(
            "driver",
            format!("{}, simulated", backend.name()),
            "nothing here is a GPU of this machine",
        ),
        Backend::Cuda(_) => {
            let version = std::fs::read_to_string(VERSION).unwrap_or_default();
            match version.trim() {
                "" => Check::note(
                    "driver",
                    "it answers, and does not tell its version",
                    format!("{VERSION} is not to be seen here: nothing depends on it"),
                ),
                version => Check::ok(
                    "driver",
                    format!("NVIDIA {version}"),
                    "CUDA 12 or later is needed: from 525 on",
                ),
            }
        }
    }
}

fn gpus(infos: &[DeviceInfo]) -> Check {
    let mut kinds: Vec<(String, usize)> = Vec::new();
    for info in infos {
        let kind = format!("{}, {}", info.name, info.memory);
        match kinds.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, count)) => *count += 1,
            None => kinds.push((kind, 1)),
        }
    }
    let found: Vec<String> = kinds.into_iter().map(|(kind, count)| format!("{count} of {kind}")).collect();
    Check::ok("gpu", found.join("; "), "CUDA_VISIBLE_DEVICES chooses among them")
}

/// Whether memory can be mapped piece by piece, which stitching is made of.
fn mappings(driver: &dyn Driver, infos: &[DeviceInfo]) -> Check {
    const NAME: &str = "mappings";
    let of = |info: &DeviceInfo| {
        driver.granularity(ExtentProperties {
            place: Place::Gpu(info.id),
            exportable: false,
            gpu_direct: false,
        })
    };
    match infos.iter().map(of).collect::<Result<Vec<_>, _>>() {
        Ok(units) => {
            let unit = units.into_iter().max().unwrap_or_default();
            Check::ok(NAME, format!("memory is mapped in units of {unit}"), "fragments can be stitched")
        }
        Err(error) => Check::problem(
            NAME,
            error.to_string(),
            "GLake needs the driver's virtual memory calls: a newer driver, or a whole GPU instead of a virtual one",
        ),
    }
}

fn handles(infos: &[DeviceInfo]) -> Check {
    const NAME: &str = "handles";
    match infos.iter().find(|info| !info.exportable) {
        None => Check::ok(NAME, "POSIX file descriptors", "other processes can be given memory"),
        Some(info) => Check::note(
            NAME,
            format!("{} exports no memory as file descriptors", info.id),
            "memory cannot be shared with other processes: leave torch.multiprocessing of CUDA tensors out",
        ),
    }
}

/// Checks which GPUs can access each other's memory, as relays require.
fn peers(driver: &dyn Driver, infos: &[DeviceInfo]) -> Check {
    const NAME: &str = "peers";
    if infos.len() < 2 {
        return Check::note(
            NAME,
            "one GPU",
            "its copies have one link; a server of several GPUs lends theirs",
        );
    }
    let pairs = infos.iter().flat_map(|a| infos.iter().map(move |b| (a.id, b.id))).filter(|(a, b)| a != b);
    let apart: Vec<String> = pairs
        .filter(|(a, b)| !driver.can_access_peer(*a, *b).unwrap_or(false))
        .map(|(a, b)| format!("{} from {}", b, a))
        .collect();
    match apart.first() {
        None => Check::ok(NAME, "every GPU reaches every other", "all of them can relay copies"),
        Some(first) => Check::note(
            NAME,
            format!("{} ways are closed, such as {first}", apart.len()),
            "those GPUs relay no copies for each other: see nvidia-smi topo -p2p r, and whether an IOMMU is on",
        ),
    }
}

fn links(topology: &Topology, config: &Config) -> Check {
    const NAME: &str = "links";
    let calibrations = Calibrations::of(topology, config.transfer.calibrations.as_deref());
    let known = topology.devices.iter().filter(|device| device.link.is_some()).count();
    let found = format!(
        "{known} of {} PCIe links known, {} pairs of GPUs with NVLink, {}",
        topology.devices.len(),
        topology.peers.len(),
        if calibrations.measured().is_some() { "calibrated" } else { "not calibrated" },
    );
    match calibrations.measured() {
        Some(_) => Check::ok(NAME, found, "glake topo draws them"),
        None if topology.devices.len() < 2 => Check::ok(NAME, found, "glake topo draws them"),
        None => {
            Check::note(NAME, found, "run glake topo --calibrate once: copies then go by what was measured")
        }
    }
}
