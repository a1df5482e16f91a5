//! Calibration of this server's links: measured since its last boot, or assumed.
//!
//! A calibration is stored in the user's cache folder (`transfer.calibrations`), for these GPUs and their interconnects, this driver
//! version and this boot. Calibrations of simulated models are stored separately, one for each distinct model.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use glake_device::Driver;
use glake_device::owned::CompletionEvents;
use glake_device::topology::Topology;
use glake_sim::{Clock, SimOptions, Simulator};
use glake_transfer::calibrate::{Calibration, Progress};
use glake_transfer::paths::cache::{self, CacheKey};
use glake_transfer::paths::{GpuLinks, PathGraph};

use crate::backend::Backend;

/// Time budget of a calibration.
const BUDGET: Duration = Duration::from_secs(2);
/// File with the version of NVIDIA's kernel module, if it is loaded.
const DRIVER: &str = "/sys/module/nvidia/version";
/// File with an id that changes at each boot.
const BOOT: &str = "/proc/sys/kernel/random/boot_id";

/// Stored calibration of a server.
#[derive(Clone, Debug)]
pub struct Calibrations {
    gpus: Vec<GpuLinks>,
    key: CacheKey,
    folder: Option<PathBuf>,
}

impl Calibrations {
    /// Creates the calibration of these links; without a folder nothing is stored.
    pub fn of(topology: &Topology, folder: Option<&Path>) -> Calibrations {
        let gpus = GpuLinks::of(topology);
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        let driver = match topology.simulated {
            // A model may be a file of any name that has changed since, and its GPUs have no addresses: all of its contents count.
            true => format!("sim:{}:{}", topology.name, cache::digest(&format!("{topology:?}"))),
            false => read(DRIVER).trim().to_owned(),
        };
        let key = CacheKey::new(&gpus, &driver, &read(BOOT), rustix::process::getuid().as_raw());
        let folder = folder.filter(|folder| !folder.as_os_str().is_empty()).map(Path::to_owned);
        Calibrations { gpus, key, folder }
    }

    /// Returns the GPUs and their links.
    pub fn gpus(&self) -> &[GpuLinks] {
        &self.gpus
    }

    /// Returns the stored measurement, if there is one.
    pub fn measured(&self) -> Option<PathGraph> {
        cache::load(self.folder.as_deref()?, &self.key)
    }

    /// Returns the stored measurement, or assumed rates.
    pub fn graph(&self) -> PathGraph {
        self.measured().unwrap_or_else(|| PathGraph::conservative(&self.gpus))
    }

    /// Measures the links, which takes about two seconds.
    ///
    /// # Errors
    /// The driver's error if no measurement is possible.
    pub fn measure(
        &self,
        backend: Backend,
        progress: &mut dyn FnMut(Progress),
    ) -> glake_transfer::Result<Calibration> {
        let (driver, simulator): (Arc<dyn Driver>, _) = match backend {
            Backend::Cuda(cuda) => (cuda, None),
            Backend::Sim { model, .. } => {
                let (clock, strict_ordering) = (Clock::Virtual, false);
                let options = SimOptions { topology: model, clock, strict_ordering, ..SimOptions::default() };
                let simulator = Arc::new(Simulator::new(options)?);
                (simulator.clone(), Some(simulator))
            }
        };
        let begin = Instant::now();
        // Links of a model take simulated time, not that of this machine.
        let clock = || simulator.as_ref().map_or_else(|| begin.elapsed(), |simulator| simulator.now());
        Calibration::run(&CompletionEvents::new(driver), &self.gpus, BUDGET, &clock, progress)
    }

    /// Stores a measurement; returns the path of its file, or `None` if calibrations are not stored.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn keep(&self, graph: &PathGraph) -> glake_transfer::Result<Option<PathBuf>> {
        self.folder.as_deref().map(|folder| cache::store(folder, &self.key, graph)).transpose()
    }

    /// Deletes the stored measurement, because the links have changed since.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub fn drop_kept(&self) -> glake_transfer::Result<()> {
        self.folder.as_deref().map_or(Ok(()), |folder| cache::remove(folder, &self.key))
    }
}

#[cfg(test)]
mod tests {
    use glake_sim::load;

    use super::*;

    #[test]
    fn what_is_kept_is_found_by_the_same_server_alone() {
        let folder = std::env::temp_dir().join(format!("glake-calibrations-{}", std::process::id()));
        let of = |name, folder| Calibrations::of(&Topology::from(&load(name).unwrap()), folder);
        let mine = of("h200x4", Some(folder.as_path()));
        assert!(mine.measured().is_none() && !mine.graph().is_calibrated());
        let mut paths = mine.graph().paths().clone();
        paths.calibrated = true;
        let kept = mine.keep(&PathGraph::new(paths).unwrap()).unwrap();
        assert!(kept.is_some_and(|path| path.starts_with(&folder)));
        assert!(mine.graph().is_calibrated());
        of("h20x8", Some(folder.as_path())).drop_kept().unwrap();
        assert!(mine.measured().is_some());
        assert!(of("h20x8", Some(folder.as_path())).measured().is_none());
        assert!(of("h200x4", None).measured().is_none());
        let nowhere = of("h200x4", Some(Path::new("")));
        assert!(nowhere.keep(&mine.graph()).unwrap().is_none());
        mine.drop_kept().and_then(|()| mine.drop_kept()).unwrap();
        assert!(mine.measured().is_none());
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn models_of_one_name_that_differ_share_nothing() {
        let folder = std::env::temp_dir().join(format!("glake-calibrations-named-{}", std::process::id()));
        let one = Topology::from(&load("h200x4").unwrap());
        let change = |change: &dyn Fn(&mut Topology)| {
            let mut other = one.clone();
            change(&mut other);
            other
        };
        let slower = |link: &mut glake_units::Bandwidth| link.0 /= 2.0;
        let others = [
            change(&|other| drop(other.devices.pop())),
            change(&|other| other.devices[1].name.push('X')),
            change(&|other| other.devices[1].node = Some(7)),
            change(&|other| other.peers.truncate(other.peers.len() - 1)),
            change(&|other| other.host.read.iter_mut().for_each(slower)),
            change(&|other| other.host.far_socket = Some(glake_units::Bandwidth(1.0))),
            change(&|other| {
                other
                    .devices
                    .iter_mut()
                    .filter_map(|gpu| gpu.link.as_mut())
                    .for_each(|link| slower(&mut link.from_gpu))
            }),
        ];
        let mine = Calibrations::of(&one, Some(folder.as_path()));
        let mut paths = mine.graph().paths().clone();
        paths.calibrated = true;
        mine.keep(&PathGraph::new(paths).unwrap()).unwrap();
        assert!(Calibrations::of(&one, Some(folder.as_path())).measured().is_some());
        for other in others {
            assert!(other.name == one.name && other != one);
            assert!(Calibrations::of(&other, Some(folder.as_path())).measured().is_none(), "{other:?}");
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}
