//! The tables of a configuration.

use serde::{Deserialize, Serialize};

use super::{Device, Log, Pool, Tiers, Transfer};

/// Everything that can be set. `Config::default()` is what `configs/default.toml` says.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The GPU pool: extents, stitching, borrowing, limits.
    pub pool: Pool,
    /// Copies over every link: relays, slots, threads.
    pub transfer: Transfer,
    /// Regions, and where their bytes go.
    pub tiers: Tiers,
    /// Which device to run on.
    pub device: Device,
    /// What is logged.
    pub log: Log,
}

#[cfg(test)]
mod tests {
    use super::super::{KNOBS, Preset};
    use super::*;
    use glake_configs::DEFAULT;

    #[test]
    fn the_default_file_says_what_the_code_does() {
        assert_eq!(toml::from_str::<Config>(DEFAULT).unwrap(), Config::default());
    }

    /// The default file shows every knob: as a value, or commented out where the default is to leave it away.
    #[test]
    fn the_default_file_names_every_knob() {
        let mut table = String::new();
        let mut named = Vec::new();
        for line in DEFAULT.lines() {
            if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
                table = name.to_owned();
            } else if let Some((key, _)) = line.trim_start_matches('#').split_once(" = ")
                && key.chars().all(|c| c.is_ascii_lowercase() || c == '_')
            {
                named.push(format!("{table}.{key}"));
            }
        }
        named.sort();
        let mut knobs: Vec<_> = KNOBS.iter().map(|knob| knob.key.to_owned()).collect();
        knobs.sort();
        assert_eq!(named, knobs);
    }

    #[test]
    fn presets_are_configurations_that_differ() {
        let configs: Vec<_> = Preset::ALL
            .iter()
            .map(|preset| toml::from_str::<Config>(preset.text()).unwrap_or_else(|e| panic!("{preset}: {e}")))
            .collect();
        assert!(configs.iter().enumerate().all(|(i, one)| !configs[..i].contains(one)));
    }
}
