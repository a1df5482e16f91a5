//! Root of the configuration, and the keys of its smaller tables: agent, lease, log and tiers.

use std::path::PathBuf;

use glake_units::Bytes;
use serde::{Deserialize, Serialize};

use super::knob::{FOLDER, MAPPABLE, SIZE, SWITCH, is_mappable, knobs};
use super::{Device, Launch, Pool, Transfer};

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

/// Returns whether `text` is a valid worker name.
pub(crate) fn is_name(text: &str) -> bool {
    let is_allowed =
        |character: char| character.is_ascii_alphanumeric() || matches!(character, '.' | '_' | '-');
    (1..=64).contains(&text.len()) && text.chars().all(is_allowed)
}

knobs! {
    /// Connection to the node agent.
    Agent as agent {
        [agent]
        /// Socket of the agent that the process joins when its first pool starts, as printed by `glake serve`.
        ///
        /// If the agent cannot be reached, the process logs it once, continues without a lease and retries in the background. A set-uid or
        /// set-gid process, one with file capabilities, and one with simulated GPUs of its own do not join by themselves. Empty: as absent.
        socket: Option<PathBuf> = None, "the path of a socket, from the root",
            if |socket| socket.as_ref().is_none_or(|path| path.is_absolute() || path.as_os_str().is_empty()),
            absent "it joins none by itself" as "";
        /// Name of this worker at the agent, unless `glake_join` sets another one before the first pool starts: the name of its entry in
        /// the agent's file.
        name: Option<String> = None, "1 to 64 of A-Z a-z 0-9 . _ -",
            if |name| name.as_ref().is_none_or(|name| is_name(name)),
            absent "the program's name and its number" as "chat";
    }
}

const MILLISECONDS: &str = "a whole number of milliseconds";

knobs! {
    /// Timeouts of lease requests.
    Lease as lease {
        [lease]
        /// Memory for growth that a refill requests in addition to what comes back.
        ///
        /// An agent grants it only from free memory and evicts nothing for it. Growth up to the grant needs no further request. 0: every
        /// new extent is requested by itself. Raise it if a worker's requests create much new memory; other workers cannot use the
        /// granted memory while this worker is awake.
        growth: Bytes = Bytes::gib(1), SIZE;
        /// Timeout for an allocation that exceeds the lease.
        ///
        /// 0: the allocation fails at once unless the request is granted within the call. Raise it if other workers take longer to release
        /// memory. A waiting process keeps the memory it holds.
        grow_timeout_ms: u64 = 2_000, MILLISECONDS;
        /// Timeout of a refill for its next grant. After it the refill is rolled back and fails.
        ///
        /// 0: the refill uses only memory that is already granted. Raise it if other workers keep their memory for longer.
        refill_timeout_ms: u64 = 30_000, MILLISECONDS;
    }
}

knobs! {
    /// Configuration of logging.
    Log as log {
        [log]
        /// Tracing filter: a level, or levels by target.
        ///
        /// Logs go to standard error. `off` disables them, `trace` logs everything (`info` logs one event per stitch). A part that no event
        /// matches is warned of, with a list of the parts that exist.
        filter: String = "warn".to_owned(),
            "off, error, warn, info, debug, trace, or levels by part, such as \"warn,glake::transfer=debug\"",
            if |filter| is_filter(filter);
    }
}

/// Returns whether every part is a level or names its target. A lone word that is no level, or a level with a space, would disable all
/// other targets.
fn is_filter(filter: &str) -> bool {
    let is_part = |part: &str| {
        part.is_empty()
            || part.contains(['=', '['])
            || part.starts_with("glake")
            || part.parse::<tracing_subscriber::filter::LevelFilter>().is_ok()
    };
    let is_parsed = tracing_subscriber::EnvFilter::builder().parse(filter).is_ok();
    is_parsed && filter.split(',').all(is_part)
}

knobs! {
    /// Destinations of evicted bytes.
    Tiers as tiers {
        [tiers]
        /// Maximum pinned host memory, including retained copies.
        ///
        /// 0: no bytes go to the host. Set it if other programs need host memory or retained copies must not grow.
        host_budget: Option<Bytes> = None, SIZE, absent "what the host has available but `host_spare`" as "64GiB";
        /// Host memory pinned in the background when the first region is defined.
        ///
        /// 0: memory is pinned by the first shrink, which then takes several times as long as the next one. More than the budget or the
        /// host allows is an error. Set it if the first shrink has to be as fast as later ones.
        host_prepare: Bytes = Bytes::ZERO, SIZE;
        /// Host memory left to other programs.
        ///
        /// 0: none, at the risk that the kernel kills a process; a very large size: nothing is pinned. Raise it if other programs on the
        /// host need more.
        host_spare: Bytes = Bytes::gib(1), SIZE;
        /// Folder for bytes that go to files: on a local disk, and writable by nobody else.
        files: Option<PathBuf> = None, FOLDER, absent "nothing goes to files" as "";
        /// Whether bytes are hashed on the GPU before eviction and compared after the refill.
        ///
        /// If they differ, the refill fails, and the error names the region, its extent and the blocks. An eviction and a refill take 0.1 to
        /// 0.4 % longer. `glake.wait` waits until the bytes were compared. Switch it off if its stream has to wait on the GPU instead.
        verify: bool = true, SWITCH;
        /// Full size of a region's extent, for regions of 4 GiB or more.
        ///
        /// A smaller region grows by a smaller unit in proportion to its size. Lower it if parts of blocks are decommitted. A larger size
        /// never helps: the cost of mapping depends on the number of extents, and copies of one extent overlap with mapping the next.
        extent: Bytes = Bytes::mib(128), MAPPABLE, if is_mappable;
        /// Timeout of a shrink for active uses of its regions, unless the request sets one.
        ///
        /// 0: the shrink fails at once if anything is in use. Raise it if requests take longer.
        drain_timeout_ms: u64 = 30_000, "a whole number of milliseconds";
        /// Idle time after which a region's bytes are copied to the host, or host memory for them is pinned, in the background.
        ///
        /// Applies to regions created with `clean`, or with `host_copy` `prepare`. Counted from the completion of the work of the last use.
        /// 0: at once. Raise it if pauses between uses are long and the copies would be wasted.
        clean_after_ms: u64 = 1_000, "a whole number of milliseconds";

        @constants
        /// Minimum running time of a use between two parks, in milliseconds. Without it, a use whose refill takes long would do little
        /// but move.
        park_quantum_ms: u64 = 300;
        /// Host memory pinned at once, unless a request needs more.
        host_arena: Bytes = Bytes::mib(256);
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::{Preset, Sources, sources};
    use super::*;

    #[test]
    fn the_default_file_sets_what_the_code_does() {
        let text = include_str!("../../../configs/default.toml");
        let set = sources::settings(Path::new("default.toml"), text).unwrap();
        assert_eq!(Sources { flags: set, ..Sources::default() }.load().unwrap(), Config::default());
    }

    #[test]
    fn a_preset_differs_from_the_defaults() {
        let preset = Sources { preset: Some(Preset::Serverless), ..Sources::default() };
        assert_ne!(preset.load().unwrap(), Config::default());
    }
}
