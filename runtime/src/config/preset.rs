//! Presets: configurations for common programs, by name.

use std::fmt;
use std::str::FromStr;

/// Configuration that ships with GLake. A file, the environment and flags override it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Preset {
    /// Many workers on a GPU, each small or mostly idle.
    Serverless,
}

/// Error: unknown preset.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is not a preset: {}", advice(name))]
pub struct UnknownPreset {
    /// Rejected name.
    pub name: String,
}

fn advice(name: &str) -> &'static str {
    match name {
        "training" => "it was removed, the defaults are for training",
        "offload" => {
            "it was removed, set pool.extent = \"32MiB\" and pool.completion_interval_us = 100 instead"
        }
        _ => "write serverless",
    }
}

impl Preset {
    /// Returns the name, also that of its file in `configs`.
    pub fn name(self) -> &'static str {
        match self {
            Preset::Serverless => "serverless",
        }
    }

    /// Returns the TOML text.
    pub fn text(self) -> &'static str {
        match self {
            Preset::Serverless => include_str!("../../../configs/serverless.toml"),
        }
    }
}

impl FromStr for Preset {
    type Err = UnknownPreset;

    fn from_str(name: &str) -> Result<Self, UnknownPreset> {
        match name {
            "serverless" => Ok(Preset::Serverless),
            _ => Err(UnknownPreset { name: name.to_owned() }),
        }
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
    fn presets_are_found_by_name() {
        assert_eq!(Preset::Serverless.name().parse(), Ok(Preset::Serverless));
        let error = |name: &str| name.parse::<Preset>().unwrap_err().to_string();
        assert_eq!(error("serverles"), "\"serverles\" is not a preset: write serverless");
        assert!(error("training").contains("the defaults are for training"));
        assert!(error("offload").contains("pool.extent = \"32MiB\""));
    }
}
