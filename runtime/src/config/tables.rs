//! Root of the configuration, with one struct for each table.

use serde::{Deserialize, Serialize};

use super::{Agent, Device, Launch, Lease, Log, Pool, Tiers, Transfer};

/// Complete configuration. `configs/default.toml` is written from `Config::default()`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// GPU pool: extents, stitching, borrowing, limits.
    pub pool: Pool,
    /// Copies over several links: relays, threads.
    pub transfer: Transfer,
    /// Regions, and the destinations of evicted bytes.
    pub tiers: Tiers,
    /// Timeouts of lease requests.
    pub lease: Lease,
    /// Connection to the node agent.
    pub agent: Agent,
    /// Device to run on.
    pub device: Device,
    /// Logging.
    pub log: Log,
    /// Launch environment of the process. It has no keys; environment variables set it.
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
        let text = include_str!("../../../configs/default.toml");
        let set = file::settings(Path::new("default.toml"), text).unwrap();
        assert_eq!(Sources { flags: set, ..Sources::default() }.load().unwrap(), Config::default());
    }

    #[test]
    fn a_preset_differs_from_the_defaults() {
        let preset = Sources { preset: Some(Preset::Serverless), ..Sources::default() };
        assert_ne!(preset.load().unwrap(), Config::default());
    }
}
