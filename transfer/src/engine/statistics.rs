//! What went over which path.

use std::time::Duration;

use glake_device::DeviceId;
use glake_units::Bytes;
use serde::Serialize;

use crate::paths::{Direction, Way};

/// What an engine has done since it was made.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Statistics {
    /// Copies over several links, by path: those that carried something.
    pub paths: Vec<PathStatistics>,
    /// Copies that were made as one native copy.
    pub native_copies: u64,
    /// Their bytes.
    pub native_bytes: Bytes,
    /// Copies over several links.
    pub split_copies: u64,
    /// Copies whose bytes may not have arrived, because a relay was lost.
    pub lost_copies: u64,
}

/// One path of one target.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PathStatistics {
    /// Whose link; the target for its own.
    pub relay: DeviceId,
    /// Whose memory.
    pub target: DeviceId,
    /// Which way the bytes went.
    pub direction: Direction,
    /// How the relay served it.
    pub way: Way,
    /// What was enqueued.
    pub bytes: Bytes,
    /// In so many copies of the driver's.
    pub slices: u64,
    /// How long the path was busy: measured by events on a sample of the copies, and scaled to all bytes.
    pub busy: Duration,
    /// Shares that went another way because this one failed.
    pub retries: u64,
    /// Whether it is out of use for the rest of the process.
    pub fenced: bool,
}
