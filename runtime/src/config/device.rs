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
        /// Absolute path of the folder through which processes share the GPUs; `None`: each process has its own GPUs.
        shared: Option<PathBuf>,
    },
}

/// Error: the text is not a [`DeviceChoice`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not a device: write auto, cuda, sim, sim:TOPOLOGY or sim:TOPOLOGY@/FOLDER, the folder's path from the root"
)]
pub struct DeviceChoiceError {
    /// Rejected text.
    pub text: String,
}

impl FromStr for DeviceChoice {
    type Err = DeviceChoiceError;

    fn from_str(text: &str) -> Result<Self, DeviceChoiceError> {
        // A folder begins with a slash, so that a topology's file may have an @ in its name.
        let (device, shared) = match text.rsplit_once("@/") {
            Some((device, folder)) => (device, Some(Path::new("/").join(folder))),
            None => (text, None),
        };
        match (device, device.strip_prefix("sim:"), shared) {
            ("auto", _, None) => Ok(DeviceChoice::Auto),
            ("cuda", _, None) => Ok(DeviceChoice::Cuda),
            ("sim", _, shared) => Ok(DeviceChoice::Sim { topology: None, shared }),
            // What is behind an @ was to be a folder, but for that of a file's name.
            (_, Some(name), None) if name.contains('@') && !name.ends_with(".toml") => {
                Err(DeviceChoiceError { text: text.to_owned() })
            }
            (_, Some(name), shared) if !name.trim().is_empty() => {
                Ok(DeviceChoice::Sim { topology: Some(name.to_owned()), shared })
            }
            _ => Err(DeviceChoiceError { text: text.to_owned() }),
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
            "sim@x",
            "sim:h20x8@x",
        ] {
            assert!(text.parse::<DeviceChoice>().is_err(), "{text}");
        }
    }
}
