//! Queries to the host system.

use glake_meter::ProcessStat;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Returns whether a process is stopped or blocked in the kernel, so that it cannot respond.
pub(crate) fn is_stopped(pid: u32) -> bool {
    ProcessStat::of(pid).is_ok_and(|process| process.is_stopped())
}

/// Returns an epoch that differs at each start.
pub(crate) fn epoch() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    // Below 2^53, which every reader of JSON knows exactly.
    u64::try_from(now.tv_sec * 1_000_000 + now.tv_nsec / 1000).unwrap_or(1).max(1)
}

/// Raises the limit of open files, because a worker takes three descriptors. Returns the previous limit.
pub(crate) fn raise_descriptors() -> Rlimit {
    let before = getrlimit(Resource::Nofile);
    let mut limit = before;
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::debug!(target: "glake::agent", %error, "the limit of open files stays as it is");
    }
    before
}
