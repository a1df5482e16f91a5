//! The knobs of regions, and of where their bytes go.

use std::path::PathBuf;

use glake_units::Bytes;
use serde::{Deserialize, Serialize};

/// Where bytes go that leave their GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Tiers {
    /// The most host memory to pin, retained copies included.
    ///
    /// Absent or infinity: what the host has available but `host_spare`. 0: nothing goes to the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_budget: Option<Bytes>,
    /// How much of it is pinned ahead, in the background, when the first region is defined.
    ///
    /// Default 0: pinned with the first shrink, which then takes several times as long as the next.
    pub host_prepare: Bytes,
    /// How much is pinned at once, where no more is asked for.
    ///
    /// Default 256 MiB: larger costs fewer driver calls, smaller lets copies begin earlier. 0: as much as is asked for.
    pub host_arena: Bytes,
    /// How much of the host's memory is left to others.
    ///
    /// Default 1 GiB. 0: nothing, at the risk that the kernel ends a process.
    pub host_spare: Bytes,
    /// The folder for bytes that go to files: one on a local disk, that nobody else may write to.
    ///
    /// Absent: nothing goes to files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub files: Option<PathBuf>,
    /// Whether bytes are hashed before they leave, and compared when they are back.
    pub verify: bool,
    /// The size of regions' extents, a multiple of 2 MiB.
    ///
    /// Default 128 MiB: mapping costs by the extent. A smaller one leaves less unused where regions are small.
    pub extent: Bytes,
    /// How long a shrink waits for uses of what it takes to end, where the request does not say.
    ///
    /// Default 30 s. 0: it fails at once where anything is in use.
    pub drain_timeout_ms: u64,
    /// Whether relays are suspended, and give their contexts back, when everything is evicted.
    ///
    /// Default true: the first refill then begins over one link, and the others join it when their contexts are made again.
    pub suspend_relays: bool,
}

impl Default for Tiers {
    fn default() -> Self {
        Tiers {
            host_budget: None,
            host_prepare: Bytes::ZERO,
            host_arena: Bytes::mib(256),
            host_spare: Bytes::gib(1),
            files: None,
            verify: false,
            extent: Bytes::mib(128),
            drain_timeout_ms: 30_000,
            suspend_relays: true,
        }
    }
}
