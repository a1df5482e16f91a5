//! Way and direction of a part of a copy.

use glake_device::DeviceId;
use glake_units::{Bandwidth, Micros};
use serde::{Deserialize, Serialize};

/// Direction between host and GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// Host to device.
    ToGpu,
    /// Device to host.
    FromGpu,
}

impl Direction {
    /// Returns the opposite direction.
    pub fn other(self) -> Direction {
        match self {
            Direction::ToGpu => Direction::FromGpu,
            Direction::FromGpu => Direction::ToGpu,
        }
    }

    /// Both directions, in the order of [`Direction::index`].
    pub const BOTH: [Direction; 2] = [Direction::ToGpu, Direction::FromGpu];

    /// Returns an index for tables: 0 or 1.
    pub const fn index(self) -> usize {
        self as usize
    }
}

/// Method by which a GPU's link serves a copy of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// The target's own link, on a stream of the target.
    Direct,
    /// A stream of the relay, directly between host and target memory: over the relay's link and NVLink, without a buffer.
    ZeroStaging,
    /// A buffer in the relay's memory: over the relay's link, then NVLink.
    Staged,
}

/// Rate of one path.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PathRate {
    /// GPU whose link is used; the target itself for its own.
    pub relay: DeviceId,
    /// Way of the path.
    pub way: Way,
    /// Rate of a continuous transfer.
    pub rate: Bandwidth,
    /// Fixed cost from fork to join.
    pub latency: Micros,
}
