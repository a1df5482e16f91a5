//! Which device to run on.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The device table.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Device {
    /// Which device to run on (`GLAKE_DEVICE`, `--device`).
    ///
    /// Default `auto`.
    pub choice: DeviceChoice,
}

/// `auto`, `cuda`, `sim` or `sim:` and the name or the file of a topology.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DeviceChoice {
    /// CUDA where a driver answers, else the simulator; which one is said.
    #[default]
    Auto,
    /// CUDA; without a driver an error.
    Cuda,
    /// The simulated device.
    Sim {
        /// A topology's name (`h20x8`) or file; absent: `h200x4`, the one that was measured.
        topology: Option<String>,
    },
}

/// Text that is not a [`DeviceChoice`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a device: write auto, cuda, sim or sim:TOPOLOGY")]
pub struct DeviceChoiceError {
    /// What was given.
    pub text: String,
}

impl FromStr for DeviceChoice {
    type Err = DeviceChoiceError;

    fn from_str(text: &str) -> Result<Self, DeviceChoiceError> {
        match text {
            "auto" => Ok(DeviceChoice::Auto),
            "cuda" => Ok(DeviceChoice::Cuda),
            "sim" => Ok(DeviceChoice::Sim { topology: None }),
            _ => match text.strip_prefix("sim:") {
                Some(name) if !name.trim().is_empty() => {
                    Ok(DeviceChoice::Sim { topology: Some(name.to_owned()) })
                }
                _ => Err(DeviceChoiceError { text: text.to_owned() }),
            },
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
            DeviceChoice::Sim { topology: None } => f.write_str("sim"),
            DeviceChoice::Sim { topology: Some(name) } => write!(f, "sim:{name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_back_what_it_prints() {
        for text in ["auto", "cuda", "sim", "sim:h20x8", "sim:configs/topologies/mine.toml"] {
            assert_eq!(text.parse::<DeviceChoice>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn refuses_everything_else() {
        for text in ["", "gpu", "CUDA", "sim:", "sim: ", "simulator"] {
            assert!(text.parse::<DeviceChoice>().is_err(), "{text}");
        }
    }
}
