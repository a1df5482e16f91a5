//! What a host pool has done.

use std::time::Duration;

use glake_units::Bytes;

/// Pinned host memory, and what it took to pin it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostStatistics {
    /// The most that it and others of the same budget may pin.
    pub budget: Bytes,
    /// What of it is left.
    pub room: Bytes,
    /// Pinned now: in use, retained or free.
    pub pinned: Bytes,
    /// Handed out, or given back while spans of it live.
    pub in_use: Bytes,
    /// Handed out and marked as a copy of what a GPU has as well.
    pub retained: Bytes,
    /// How often memory was pinned.
    pub pins: u64,
    /// How long that took in all, touching included.
    pub pinning: Duration,
}
