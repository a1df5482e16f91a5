//! How a host pool is made.

use std::sync::Arc;

use glake_device::owned::DeviceSet;
use glake_units::Bytes;

use super::{Budget, Pinning};

/// How a host pool is made.
#[derive(Clone, Debug)]
pub struct HostOptions {
    /// The most that it and others of the same budget may pin, retained copies included.
    pub budget: Arc<Budget>,
    /// How much is pinned at once, where no more is asked for. Large, because each costs driver calls; not larger, because
    /// copies begin when the first is pinned. Zero: as much as is asked for.
    pub arena: Bytes,
    /// What is left of the host's memory to others. Zero: nothing, at the risk that the kernel ends a process.
    pub spare: Bytes,
    /// How many threads touch it; 0: one a core.
    pub threads: usize,
    /// The NUMA nodes that it is spread over ([`nodes_of`](super::nodes_of)); fewer than two: it lies where it is touched from.
    pub nodes: Vec<u32>,
    /// The devices whose work touches it: memory that is given back waits for theirs. Those that copies do not use are better
    /// left out, for asking a device makes a context there.
    pub devices: DeviceSet,
    /// Who is told while it is touched and pinned.
    pub pinning: Arc<Pinning>,
}

impl Default for HostOptions {
    /// Everything that the host has but 1 GiB, in arenas of 256 MiB, by one thread a core, for all devices; nobody is told.
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
