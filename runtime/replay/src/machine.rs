//! A device that was opened: a driver, and what is known of it.
//!
//! ```text
//! Backend ─► Machine ─► Recorder ─► …        one recorder for each thing that is counted
//!              └ driver: CUDA, or one simulated GPU in virtual time
//! ```

use std::sync::Arc;

use glake_device::{CostTable, DeviceId, DeviceInfo, Driver, DriverError, Recorder};
use glake_sim::{Census, Clock, SimOptions, Simulator, mapping_budget};
use glake_stitch::Settings;
use glake_units::Bytes;

use glake_runtime::backend::Backend;
use glake_runtime::config;
use glake_runtime::pool;

/// The first GPU of a backend, open. Clones share it.
#[derive(Clone, Debug)]
pub struct Machine {
    name: String,
    gpu: DeviceInfo,
    driver: Arc<dyn Driver>,
    simulator: Option<Arc<Simulator>>,
}

impl Machine {
    /// Opens the first GPU. A simulated server is cut down to it.
    ///
    /// # Errors
    /// What the driver answers, or the operating system where it has no memory for a simulator.
    pub fn open(backend: &Backend) -> Result<Machine, DriverError> {
        let name = backend.name();
        let (driver, simulator): (Arc<dyn Driver>, _) = match backend {
            Backend::Cuda(cuda) => (cuda.clone(), None),
            Backend::Sim { model, .. } => {
                let mut model = model.clone();
                model.gpus.truncate(1);
                let simulator = Arc::new(Simulator::new(SimOptions {
                    topology: model,
                    clock: Clock::Virtual,
                    strict_ordering: false,
                    ..SimOptions::default()
                })?);
                (simulator.clone(), Some(simulator))
            }
        };
        let found = driver.devices()?.into_iter().next();
        let gpu = found.ok_or(DriverError::NoSuchDevice { device: DeviceId(0), count: 0 })?;
        Ok(Machine { name, gpu, driver, simulator })
    }

    /// The backend's name, for reports: `cuda`, `sim:h200x4`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The GPU.
    pub fn gpu(&self) -> &DeviceInfo {
        &self.gpu
    }

    /// Its id.
    pub fn id(&self) -> DeviceId {
        self.gpu.id
    }

    /// Its driver.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// Whether it is simulated.
    pub fn is_simulated(&self) -> bool {
        self.simulator.is_some()
    }

    /// What is alive on a simulated device; `None` on a real one, which cannot be asked.
    pub fn census(&self) -> Option<Census> {
        self.simulator.as_ref().map(|simulator| simulator.census())
    }

    /// A recorder of its own over the driver: timed on a GPU, priced as an H200 on the simulator.
    pub fn recorder(&self) -> Recorder {
        match self.is_simulated() {
            true => Recorder::priced(self.driver.clone(), CostTable::H200),
            false => Recorder::measured(self.driver.clone()),
        }
    }

    /// The settings of a pool on it.
    pub fn settings(&self, pool: &config::Pool) -> Settings {
        // An alias cuts address space at its ends too.
        let mappings = if self.is_simulated() { mapping_budget() / 5 * 4 } else { u64::MAX };
        pool::settings(pool, self.gpu.memory, mappings)
    }

    /// Device memory that nobody holds.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn free_memory(&self) -> Result<Bytes, DriverError> {
        Ok(self.driver.memory_info(self.gpu.id)?.free)
    }
}
