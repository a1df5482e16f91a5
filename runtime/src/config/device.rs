//! Configuration of the device.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::knob::knobs;

knobs! {
    /// Device to run on.
    Device as device {
        [device]
        /// Device to run on: CUDA, the simulator, or `auto`, which takes CUDA if a driver answers and the simulator otherwise.
        ///
        /// With `@` and a folder, processes that name the same folder share the simulated GPUs.
        choice: DeviceChoice = DeviceChoice::Auto,
            "\"auto\", \"cuda\", \"sim\", \"sim:TOPOLOGY\" or \"sim:TOPOLOGY@/FOLDER\"";
    }
}

/// Choice of device: `auto`, `cuda`, `sim`, or `sim:` with the name or the file of a topology. With `@` and a folder, processes that name
/// the same folder share the simulated GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DeviceChoice {
    /// CUDA if a driver answers, else the simulator. The choice is logged.
    #[default]
    Auto,
    /// CUDA; an error without a driver.
    Cuda,
    /// Simulated device.
    Sim {
        /// Name (`h20x8`) or file of a topology; `None`: `h200x4`, the measured server.
        topology: Option<String>,
        /// Absolute path of the folder through which processes share the GPUs, from the working directory if it is given as a relative one; `None`: each process has its own GPUs.
        shared: Option<PathBuf>,
    },
}

/// Error: the text is not a [`DeviceChoice`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a device: write auto, cuda, sim, sim:TOPOLOGY or sim:TOPOLOGY@/FOLDER")]
pub struct DeviceChoiceError {
    /// Rejected text.
    pub text: String,
}

impl FromStr for DeviceChoice {
    type Err = DeviceChoiceError;

    fn from_str(text: &str) -> Result<Self, DeviceChoiceError> {
        // The name of a topology's file may have an @ too.
        let (device, folder) = match text.rsplit_once("@/") {
            Some((device, folder)) => (device, Some(Path::new("/").join(folder))),
            None if text.ends_with(".toml") => (text, None),
            None => match text.rsplit_once('@') {
                Some((device, folder)) => (device, Some(PathBuf::from(folder))),
                None => (text, None),
            },
        };
        // Processes with other working directories share the folder by this text.
        let refused = || DeviceChoiceError { text: text.to_owned() };
        let shared = folder.map(std::path::absolute).transpose().map_err(|_| refused())?;
        match (device, device.strip_prefix("sim:"), shared) {
            ("auto", _, None) => Ok(DeviceChoice::Auto),
            ("cuda", _, None) => Ok(DeviceChoice::Cuda),
            ("sim", _, shared) => Ok(DeviceChoice::Sim { topology: None, shared }),
            (_, Some(name), shared) if !name.trim().is_empty() => {
                Ok(DeviceChoice::Sim { topology: Some(name.to_owned()), shared })
            }
            _ => Err(refused()),
        }
    }
}

impl TryFrom<String> for DeviceChoice {
    type Error = DeviceChoiceError;

    fn try_from(text: String) -> Result<Self, DeviceChoiceError> {
        text.parse()
    }
}

impl From<DeviceChoice> for String {
    fn from(choice: DeviceChoice) -> String {
        choice.to_string()
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceChoice::Auto => f.write_str("auto"),
            DeviceChoice::Cuda => f.write_str("cuda"),
            DeviceChoice::Sim { topology, shared } => {
                f.write_str("sim")?;
                topology.as_ref().map_or(Ok(()), |name| write!(f, ":{name}"))?;
                shared.as_ref().map_or(Ok(()), |folder| write!(f, "@{}", folder.display()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_back_what_it_prints() {
        for text in [
            "auto",
            "cuda",
            "sim",
            "sim:h20x8",
            "sim:configs/topologies/mine.toml",
            "sim@/run/gpus",
            "sim:a@b/c.toml@/x",
        ] {
            assert_eq!(text.parse::<DeviceChoice>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn a_folder_is_absolute() {
        let here = std::env::current_dir().unwrap();
        for (text, topology, folder) in [
            ("sim@gpus", None, "gpus"),
            ("sim:h20x8@./run/gpus", Some("h20x8"), "run/gpus"),
            ("sim@/x", None, "/x"),
        ] {
            let shared = Some(here.join(folder));
            let wanted = DeviceChoice::Sim { topology: topology.map(str::to_owned), shared };
            assert_eq!(text.parse(), Ok(wanted), "{text}");
        }
    }

    #[test]
    fn refuses_everything_else() {
        for text in [
            "",
            "gpu",
            "CUDA",
            "sim:",
            "sim: ",
            "simulator",
            "auto@/x",
            "cuda@/x",
            "sim:@/x",
            "sim@",
            "sim:h20x8@",
        ] {
            assert!(text.parse::<DeviceChoice>().is_err(), "{text}");
        }
    }
}
