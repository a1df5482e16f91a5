//! Statistics of a host pool.

use std::time::Duration;

use glake_units::Bytes;

/// Pinned host memory, and the cost of pinning it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostStatistics {
    /// Common limit of this pool and others with the same budget.
    pub budget: Bytes,
    /// Bytes of the budget left.
    pub room: Bytes,
    /// Pinned bytes: in use, retained or free.
    pub pinned: Bytes,
    /// Allocated bytes, including returned blocks with live spans.
    pub in_use: Bytes,
    /// Allocated bytes marked as copies of data that is also on a GPU.
    pub retained: Bytes,
    /// Number of times memory was pinned.
    pub pins: u64,
    /// Total time of pinning, touching included.
    pub pinning: Duration,
}
