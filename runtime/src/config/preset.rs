//! Presets: configurations for common programs, by name.

use std::fmt;
use std::str::FromStr;

/// Configuration that ships with GLake. A file, the environment and flags override it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Preset {
    /// Training job that owns its GPUs.
    Training,
    /// Many workers on a GPU, each small or mostly idle.
    Serverless,
    /// Program that moves weights or states between GPU and host beside its computation.
    Offload,
}

/// Error: unknown preset.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is not a preset: write training, serverless or offload")]
pub struct UnknownPreset {
    /// Rejected name.
    pub name: String,
}

impl Preset {
    /// All presets.
    pub const ALL: [Preset; 3] = [Preset::Training, Preset::Serverless, Preset::Offload];

    /// Returns the name, also that of its file in `configs`.
    pub fn name(self) -> &'static str {
        match self {
            Preset::Training => "training",
            Preset::Serverless => "serverless",
            Preset::Offload => "offload",
        }
    }

    /// Returns the TOML text.
    pub fn text(self) -> &'static str {
        match self {
            Preset::Training => glake_configs::TRAINING,
            Preset::Serverless => glake_configs::SERVERLESS,
            Preset::Offload => glake_configs::OFFLOAD,
        }
    }
}

impl FromStr for Preset {
    type Err = UnknownPreset;

    fn from_str(name: &str) -> Result<Self, UnknownPreset> {
        Preset::ALL
            .into_iter()
            .find(|preset| preset.name() == name)
            .ok_or_else(|| UnknownPreset { name: name.to_owned() })
    }
}

impl fmt::Display for Preset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn are_found_by_name() {
        assert!(Preset::ALL.iter().all(|preset| preset.name().parse() == Ok(*preset)));
        let error = "trainig".parse::<Preset>().unwrap_err().to_string();
        assert_eq!(error, "\"trainig\" is not a preset: write training, serverless or offload");
    }
}
