//! The tables of a configuration.

use serde::{Deserialize, Serialize};

use super::{Agent, Device, Launch, Lease, Log, Pool, Tiers, Transfer};

/// Everything that can be set. `configs/default.toml` is written from `Config::default()`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The GPU pool: extents, stitching, borrowing, limits.
    pub pool: Pool,
    /// Copies over every link: relays, slots, threads.
    pub transfer: Transfer,
    /// Regions, and where their bytes go.
    pub tiers: Tiers,
    /// What an agent lets this process hold.
    pub lease: Lease,
    /// The agent that it joins.
    pub agent: Agent,
    /// Which device to run on.
    pub device: Device,
    /// What is logged.
    pub log: Log,
    /// Who this process is to an agent: no key, but what the environment says.
    #[serde(skip)]
    pub launch: Launch,
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::{Preset, Sources, file};
    use super::*;

    #[test]
    fn the_default_file_sets_what_the_code_does() {
        let set = file::settings(Path::new("default.toml"), glake_configs::DEFAULT).unwrap();
        assert_eq!(Sources { flags: set, ..Sources::default() }.load().unwrap(), Config::default());
    }

    #[test]
    fn presets_are_configurations_that_differ() {
        let configs =
            Preset::ALL.map(|preset| Sources { preset: Some(preset), ..Sources::default() }.load().unwrap());
        assert!(configs.iter().enumerate().all(|(i, one)| !configs[..i].contains(one)));
    }
}
