//! Statistics per path.

use std::time::Duration;

use glake_device::DeviceId;
use glake_units::Bytes;
use serde::Serialize;

use crate::paths::{Direction, Way};

/// Totals of an engine since its creation.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Statistics {
    /// Paths that carried parts of split copies.
    pub paths: Vec<PathStatistics>,
    /// Number of copies made as one driver copy.
    pub native_copies: u64,
    /// Bytes of native copies.
    pub native_bytes: Bytes,
    /// Number of copies over several links.
    pub split_copies: u64,
    /// Number of copies with bytes that may not have arrived, because a relay was lost.
    pub lost_copies: u64,
}

/// Statistics of one path.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PathStatistics {
    /// GPU whose link is used; the target itself for its own link.
    pub relay: DeviceId,
    /// GPU whose memory is copied.
    pub target: DeviceId,
    /// Direction of the copy.
    pub direction: Direction,
    /// Method by which the relay passes bytes on.
    pub way: Way,
    /// Bytes enqueued.
    pub bytes: Bytes,
    /// Number of driver copies.
    pub slices: u64,
    /// Estimated busy time: timed by events for a sample of the copies, scaled to all bytes.
    pub busy: Duration,
    /// Number of parts that failed on this path and took another one.
    pub retries: u64,
    /// Whether the path is disabled until the process ends.
    pub fenced: bool,
}
