//! Open device: its driver and its properties.
//!
//! ```text
//! Backend ─► Machine ─► Recorder ─► …        one recorder for each measured component
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

/// First GPU of a backend, open. Clones share it.
#[derive(Clone, Debug)]
pub struct Machine {
    name: String,
    gpu: DeviceInfo,
    driver: Arc<dyn Driver>,
    simulator: Option<Arc<Simulator>>,
}

impl Machine {
    /// Opens the first GPU. A simulated server is reduced to that GPU.
    ///
    /// # Errors
    /// Errors of the driver, or of the operating system if it has no memory for a simulator.
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

    /// Returns the backend's name for reports: `cuda`, `sim:h200x4`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the GPU's properties.
    pub fn gpu(&self) -> &DeviceInfo {
        &self.gpu
    }

    /// Returns the GPU's device ID.
    pub fn id(&self) -> DeviceId {
        self.gpu.id
    }

    /// Returns the GPU's driver.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// Returns whether the GPU is simulated.
    pub fn is_simulated(&self) -> bool {
        self.simulator.is_some()
    }

    /// Returns the live objects of a simulated device; `None` on a real one, which does not report them.
    pub fn census(&self) -> Option<Census> {
        self.simulator.as_ref().map(|simulator| simulator.census())
    }

    /// Creates a recorder over the driver: timed on a real GPU, priced as an H200 on the simulator.
    pub fn recorder(&self) -> Recorder {
        match self.is_simulated() {
            true => Recorder::priced(self.driver.clone(), CostTable::H200),
            false => Recorder::measured(self.driver.clone()),
        }
    }

    /// Returns the settings of a pool on this device.
    pub fn settings(&self, pool: &config::Pool) -> Settings {
        // An alias also splits address space at its ends.
        let mappings = if self.is_simulated() { mapping_budget() / 5 * 4 } else { u64::MAX };
        pool::settings(pool, self.gpu.memory, mappings)
    }

    /// Returns the free device memory.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn free_memory(&self) -> Result<Bytes, DriverError> {
        Ok(self.driver.memory_info(self.gpu.id)?.free)
    }
}
