//! Backend of a device choice: NVIDIA's driver, or a model of a server to simulate.

use std::path::PathBuf;
use std::sync::Arc;

use glake_device::topology::Topology;
use glake_device::{Cuda, Driver as _, DriverError};
use glake_sim::SimTopology;
use glake_sim::{TopologyError, load};

use crate::config::DeviceChoice;

/// Topology that `sim` alone means: the measured one.
const DEFAULT_MODEL: &str = "h200x4";

/// Backend that was found for a device choice.
#[allow(clippy::large_enum_variant)] // a program makes one, at its start
pub enum Backend {
    /// The GPUs of this machine.
    Cuda(Arc<Cuda>),
    /// A model for the simulator. It costs nothing until a simulator is created from it.
    Sim {
        /// Model of the server.
        model: SimTopology,
        /// Folder through which processes share the simulated GPUs.
        shared: Option<PathBuf>,
        /// Error of the CUDA driver, if the choice was left open.
        instead_of: Option<DriverError>,
    },
}

/// Error of a missing backend.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// The driver does not answer.
    #[error("--device cuda: {0}")]
    Driver(#[from] DriverError),
    /// The model does not exist or is incomplete.
    #[error("--device: {0}")]
    Topology(#[from] TopologyError),
}

impl Backend {
    /// Finds the backend of a device choice.
    ///
    /// # Errors
    /// [`BackendError`]: CUDA was asked for and no driver answers, or the model is unknown or incomplete.
    pub fn find(choice: &DeviceChoice) -> Result<Backend, BackendError> {
        match choice {
            DeviceChoice::Cuda => Ok(Backend::Cuda(Arc::new(Cuda::open()?))),
            DeviceChoice::Auto => match Cuda::open() {
                Ok(cuda) => Ok(Backend::Cuda(Arc::new(cuda))),
                Err(error) => {
                    Ok(Backend::Sim { model: load(DEFAULT_MODEL)?, shared: None, instead_of: Some(error) })
                }
            },
            DeviceChoice::Sim { topology, shared } => {
                let model = load(topology.as_deref().unwrap_or(DEFAULT_MODEL))?;
                Ok(Backend::Sim { model, shared: shared.clone(), instead_of: None })
            }
        }
    }

    /// Returns its name in reports, such as `cuda` or `sim:h20x8`.
    pub fn name(&self) -> String {
        match self {
            Backend::Cuda(_) => "cuda".to_owned(),
            Backend::Sim { model, shared, .. } => {
                let choice = DeviceChoice::Sim { topology: Some(model.name.clone()), shared: shared.clone() };
                choice.to_string()
            }
        }
    }

    /// Returns a note about the chosen backend and the reason, if the choice was left open and CUDA is missing; otherwise `None`.
    pub fn notice(&self) -> Option<String> {
        match self {
            Backend::Sim { instead_of: Some(error), .. } => {
                Some(format!("device {}, because there is {error}", self.name()))
            }
            _ => None,
        }
    }

    /// Returns its GPUs and links.
    ///
    /// # Errors
    /// [`BackendError::Driver`]: the driver cannot list its devices.
    pub fn topology(&self) -> Result<Topology, BackendError> {
        match self {
            Backend::Cuda(cuda) => Ok(Topology::of_machine(&cuda.devices()?)),
            Backend::Sim { model, .. } => Ok(Topology::from(model)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(choice: &str) -> Result<Backend, BackendError> {
        Backend::find(&choice.parse().unwrap())
    }

    #[test]
    fn models_are_found_by_name() {
        assert_eq!(find("sim:h20x8").map(|found| found.name()).unwrap(), "sim:h20x8");
        let plain = find("sim").unwrap();
        assert_eq!((plain.name(), plain.notice()), ("sim:h200x4".to_owned(), None));
        assert_eq!(plain.topology().unwrap().devices.len(), 4);
    }

    #[test]
    fn an_unknown_model_is_named() {
        let error = find("sim:h300x9").err().unwrap().to_string();
        assert!(error.contains("\"h300x9\" does not exist") && error.contains("h200x4"), "{error}");
    }

    #[test]
    fn what_is_taken_is_said() {
        match find("auto").unwrap() {
            Backend::Cuda(_) => assert!(find("cuda").is_ok()),
            sim => {
                assert!(
                    sim.notice().unwrap().starts_with("device sim:h200x4, because there is no CUDA driver")
                );
                assert!(find("cuda").err().unwrap().to_string().starts_with("--device cuda: no CUDA driver"));
            }
        }
    }
}
