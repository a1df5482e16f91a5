//! Destinations of evicted bytes and the movers that copy them, created on demand and kept; and the move of host copies
//! to files while the memory is not needed.

use std::sync::Arc;

use glake_device::DeviceId;
use glake_device::owned::{DeviceSet, Digests};
use glake_tiers::{
    Budget, Demotion, FileError, FileTier, GpuPool, HostOptions, HostPool, HostStatistics, RegionError,
    Store, nodes_of,
};
use glake_transfer::paths::Direction;
use glake_transfer::{LinkMover, Priority};
use glake_units::Bytes;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use super::super::device::DeviceMemory;
use super::super::device_registry::DeviceRegistry;
use super::super::{ProcessError, Result};
use super::RegionSet;
use super::ask::Tier;
use crate::config;

/// Movers of a process's regions and the destinations of their bytes.
#[derive(Debug)]
pub(in super::super) struct Stores {
    registry: Arc<DeviceRegistry>,
    config: config::Tiers,
    /// Movers by direction, so that shrinks and refills do not wait for each other's stream.
    movers: Mutex<FxHashMap<(DeviceId, Direction), Arc<LinkMover>>>,
    /// Movers for cleaning, each on its own stream, so that cleaning waits for no shrink.
    idle_movers: Mutex<FxHashMap<DeviceId, Arc<LinkMover>>>,
    host_budget: Arc<Budget>,
    /// Host pools, each with the devices that can access it.
    hosts: Mutex<Vec<(DeviceSet, Arc<HostPool>)>>,
    files: Mutex<Files>,
    digests: Mutex<FxHashMap<DeviceId, Arc<Digests>>>,
}

/// Files of a process and their state.
#[derive(Debug, Default)]
enum Files {
    #[default]
    NotYet,
    Open(Arc<FileTier>),
    /// Removed, because the process ends.
    Ended,
}

impl Stores {
    pub(super) fn new(registry: &Arc<DeviceRegistry>, config: config::Tiers) -> Stores {
        Stores {
            registry: registry.clone(),
            host_budget: Budget::new(config.host_budget.unwrap_or(Bytes::MAX)),
            config,
            movers: Mutex::default(),
            idle_movers: Mutex::default(),
            hosts: Mutex::default(),
            files: Mutex::default(),
            digests: Mutex::default(),
        }
    }

    /// Returns the mover for a device and direction.
    ///
    /// # Errors
    /// Errors of creating the engine or a stream.
    pub(super) fn mover(&self, device: DeviceId, direction: Direction) -> Result<Arc<LinkMover>> {
        let engine = self.registry.engine()?;
        let mut movers = self.movers.lock();
        if let Some(mover) = movers.get(&(device, direction)) {
            return Ok(mover.clone());
        }
        let mover = Arc::new(LinkMover::new(engine, device, Priority::Normal)?);
        movers.insert((device, direction), mover.clone());
        Ok(mover)
    }

    /// Returns the mover that copies idle memory of a device to the host. It has normal priority, because low-priority work would delay all
    /// completion points. Users enqueue little at a time, while [`Stores::are_links_busy`] returns `false`.
    ///
    /// # Errors
    /// As [`Stores::mover`].
    pub(super) fn idle_mover(&self, device: DeviceId) -> Result<Arc<LinkMover>> {
        let engine = self.registry.engine()?;
        let mut movers = self.idle_movers.lock();
        if let Some(mover) = movers.get(&device) {
            return Ok(mover.clone());
        }
        let mover = Arc::new(LinkMover::new(engine, device, Priority::Normal)?);
        movers.insert(device, mover.clone());
        Ok(mover)
    }

    /// Returns whether copies of this process from GPUs are in flight, as far as known.
    pub(super) fn are_links_busy(&self) -> bool {
        self.registry.engine.made().is_some_and(|engine| engine.is_busy(Direction::FromGpu))
    }

    /// Checks that a destination exists, before anything is moved.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] without a folder for files or another GPU, [`ProcessError::NoSuchDevice`].
    pub(super) fn check(&self, tier: Tier) -> Result<()> {
        match tier {
            Tier::File if self.config.files.is_none() => Err(ProcessError::no_files()),
            Tier::Peer(_) if self.registry.devices.len() < 2 => Err(ProcessError::no_peer(None)),
            Tier::Peer(Some(device)) => self.registry.device(device.0.into()).map(|_| ()),
            Tier::Host | Tier::Peer(None) | Tier::File => Ok(()),
        }
    }

    /// Returns the store for bytes of a device.
    ///
    /// # Errors
    /// As [`Stores::check`]; errors of creating the store.
    pub(super) fn store(&self, tier: Tier, device: DeviceId) -> Result<Store> {
        match tier {
            Tier::Host => Ok(Store::Host(self.host(device)?)),
            Tier::Peer(peer) => Ok(Store::Peer(self.peer(peer, device)?)),
            Tier::File => Ok(Store::File { files: self.files()?, host: self.host(device)? }),
        }
    }

    /// Returns the pool of another GPU.
    fn peer(&self, peer: Option<DeviceId>, device: DeviceId) -> Result<Arc<GpuPool>> {
        let peer = match peer {
            Some(peer) => peer,
            None => self.roomiest_but(device)?,
        };
        let memory = self.registry.device(peer.0.into())?;
        if peer == device {
            return Err(ProcessError::no_peer(Some(device)));
        }
        Ok(self.registry.started(memory)?.pool.clone())
    }

    /// Returns the other GPU with the most free memory.
    fn roomiest_but(&self, device: DeviceId) -> Result<DeviceId> {
        let driver = self.registry.completion_events.driver();
        let others = self.registry.devices.iter().map(DeviceMemory::id).filter(|other| *other != device);
        let free = |other| driver.memory_info(other).ok().map(|info| (info.free, other));
        let roomiest = others.filter_map(free).max_by_key(|(free, other)| (*free, std::cmp::Reverse(*other)));
        roomiest.map(|(_, other)| other).ok_or_else(|| ProcessError::no_peer(Some(device)))
    }

    /// Returns the files of this process, creating their folder if needed.
    pub(super) fn files(&self) -> Result<Arc<FileTier>> {
        let folder = self.config.files.as_ref().ok_or_else(ProcessError::no_files)?;
        let mut files = self.files.lock();
        match &*files {
            Files::Open(files) => Ok(files.clone()),
            Files::NotYet => {
                let opened = Arc::new(FileTier::open(folder).map_err(RegionError::from)?);
                *files = Files::Open(opened.clone());
                Ok(opened)
            }
            Files::Ended => Err(RegionError::from(FileError::Closed { path: folder.clone() }).into()),
        }
    }

    /// Removes the files because the process ends; no bytes go there afterwards.
    pub(in super::super) fn end_files(&self) {
        let files = std::mem::replace(&mut *self.files.lock(), Files::Ended);
        if let Files::Open(files) = files
            && let Err(error) = files.close()
        {
            tracing::warn!(target: "glake::file", %error, "files stay in their folder: the next process that uses it removes them");
        }
    }

    /// Returns the digest kernels for a device if `verify` is set.
    pub(in super::super) fn digests(&self, verify: bool, device: DeviceId) -> Result<Option<Arc<Digests>>> {
        if !verify {
            return Ok(None);
        }
        let mut digests = self.digests.lock();
        if let Some(digests) = digests.get(&device) {
            return Ok(Some(digests.clone()));
        }
        let made = Arc::new(Digests::new(&self.registry.completion_events, device)?);
        digests.insert(device, made.clone());
        Ok(Some(made))
    }

    /// Returns pinned memory that a device can access. Completion of work is polled on every device of the pool, so a pool covers the
    /// devices in use at its creation. For a device used later, another pool is created under the same budget.
    ///
    /// # Errors
    /// [`ProcessError::Host`].
    pub(in super::super) fn host(&self, device: DeviceId) -> Result<Arc<HostPool>> {
        let mut hosts = self.hosts.lock();
        if let Some((_, pool)) = hosts.iter().find(|(devices, _)| devices.contains(device)) {
            return Ok(pool.clone());
        }
        let started = self.registry.devices.iter().filter(|memory| memory.started().is_some());
        let started: DeviceSet = started.map(DeviceMemory::id).collect();
        let devices = started.union(DeviceSet::of(device)).union(self.registry.engine.relays_of(device));
        let options = HostOptions {
            budget: self.host_budget.clone(),
            arena: self.config.host_arena,
            spare: self.config.host_spare,
            nodes: nodes_of(&self.registry.engine.topology(&self.registry.devices), devices),
            devices,
            pinning: self.registry.pinning.clone(),
            ..HostOptions::default()
        };
        let pool = HostPool::new(&self.registry.completion_events, options)?;
        hosts.push((devices, pool.clone()));
        Ok(pool)
    }

    /// Returns the statistics of each host pool.
    pub(super) fn host_statistics(&self) -> Vec<HostStatistics> {
        self.hosts.lock().iter().map(|(_, pool)| pool.statistics()).collect()
    }
}

impl RegionSet {
    /// Writes host copies of evicted memory to files until at least `amount` bytes of host memory are free; returns the free bytes. Regions
    /// that are refilled last go first. Unpins the freed memory in whole arenas. Ends early once `keep_going` returns `false`, which it
    /// must do as soon as a refill begins.
    ///
    /// # Errors
    /// [`super::super::ProcessError::Refused`] without a folder for files; errors of files: the bytes written so far count.
    pub(in super::super) fn demote(&self, amount: Bytes, keep_going: &dyn Fn() -> bool) -> Result<Bytes> {
        self.stores.check(Tier::File)?;
        let (files, mut tags) = (self.stores.files()?, self.table.named(None)?);
        self.table.sort(&mut tags);
        let mut freed = Bytes::ZERO;
        for region in tags.iter().rev().flat_map(|tagged| tagged.regions()) {
            let left = amount.saturating_sub(freed);
            if left.is_zero() || !keep_going() {
                break;
            }
            let host = &self.stores.host(region.pool().device())?;
            let moved = region.demote(left, Demotion { files: &files, host, keep_going })?;
            freed = freed.saturating_add(moved);
            self.registry.observers.counters.note();
            unpin(host, moved, keep_going);
        }
        Ok(freed)
    }
}

/// Unpins at least `amount` bytes, arena by arena, as far as whole arenas are free; a request for pinned memory waits for at most one of
/// them.
fn unpin(host: &HostPool, amount: Bytes, keep_going: &dyn Fn() -> bool) {
    let mut unpinned = Bytes::ZERO;
    while unpinned < amount && keep_going() {
        let one = host.trim(host.statistics().pinned.saturating_sub(Bytes::new(1)));
        if one.is_zero() {
            break;
        }
        unpinned = unpinned.saturating_add(one);
    }
}
