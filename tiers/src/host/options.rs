//! Options of a host pool.

use std::sync::Arc;

use glake_device::owned::DeviceSet;
use glake_units::Bytes;

use super::{Budget, Pinning};

/// Options of a host pool at its creation.
#[derive(Clone, Debug)]
pub struct HostOptions {
    /// Common limit of this pool and others with the same budget, retained copies included.
    pub budget: Arc<Budget>,
    /// Minimum size that is pinned at once. Large, because each arena costs driver calls; not larger, because copies begin when the first
    /// is pinned. Zero: the requested size.
    pub arena: Bytes,
    /// Host memory left to other programs. Zero: none, at the risk that the kernel kills a process.
    pub spare: Bytes,
    /// Number of threads that touch memory; 0: one for each core.
    pub threads: usize,
    /// NUMA nodes to spread memory over ([`nodes_of`](super::nodes_of)); with fewer than two, memory is local to the touching thread.
    pub nodes: Vec<u32>,
    /// Devices whose work uses the memory: returned memory waits for theirs. Leave out devices that no copy uses, because recording creates
    /// a context there.
    pub devices: DeviceSet,
    /// Counter that tells others when memory is being pinned.
    pub pinning: Arc<Pinning>,
}

impl Default for HostOptions {
    /// Returns a budget of all the host's memory but 1 GiB, arenas of 256 MiB, one thread for each core, and all devices.
    fn default() -> Self {
        HostOptions {
            budget: Budget::new(Bytes::MAX),
            arena: Bytes::mib(256),
            spare: Bytes::gib(1),
            threads: 0,
            nodes: Vec::new(),
            devices: DeviceSet::ALL,
            pinning: Arc::default(),
        }
    }
}
