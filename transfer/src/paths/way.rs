//! Which way a part of a copy takes.

use glake_device::DeviceId;
use glake_units::{Bandwidth, Micros};
use serde::{Deserialize, Serialize};

/// Between the host and a GPU, which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// From the host.
    ToGpu,
    /// To the host.
    FromGpu,
}

impl Direction {
    /// The other one.
    pub fn other(self) -> Direction {
        match self {
            Direction::ToGpu => Direction::FromGpu,
            Direction::FromGpu => Direction::ToGpu,
        }
    }

    /// Both, in the order of [`Direction::index`].
    pub const BOTH: [Direction; 2] = [Direction::ToGpu, Direction::FromGpu];

    /// 0 or 1, for tables.
    pub const fn index(self) -> usize {
        self as usize
    }
}

/// How a GPU's link serves a copy of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// The target's own link, on a stream of the target.
    Direct,
    /// A stream of the relay, between the host and the target's memory: the relay's link, then NVLink, and no buffer between.
    ZeroStaging,
    /// Through a buffer in the relay's memory: the relay's link, then NVLink.
    Staged,
}

/// What one path gives.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PathRate {
    /// Whose link it is; the target itself for its own.
    pub relay: DeviceId,
    /// How it serves the target.
    pub way: Way,
    /// Bytes over time, once they flow.
    pub rate: Bandwidth,
    /// What it takes besides its bytes, from the fork to the join.
    pub latency: Micros,
}
