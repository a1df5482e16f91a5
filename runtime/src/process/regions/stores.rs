//! Where bytes go, and by what they travel: made when they are first needed, and kept.

use std::sync::Arc;

use glake_device::DeviceId;
use glake_device::owned::{DeviceSet, Digests};
use glake_tiers::{
    Budget, FileError, FileTier, GpuPool, HostOptions, HostPool, HostStatistics, RegionError, Store, nodes_of,
};
use glake_transfer::paths::Direction;
use glake_transfer::{LinkMover, Priority};
use glake_units::Bytes;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use super::super::device::DeviceMemory;
use super::super::device_registry::DeviceRegistry;
use super::super::{ProcessError, Result};
use super::ask::Tier;
use crate::config;

/// What moves the bytes of a process's regions, and where they go.
#[derive(Debug)]
pub(super) struct Stores {
    registry: Arc<DeviceRegistry>,
    config: config::Tiers,
    /// One a direction, because what goes out and what comes in shall not wait for each other's stream.
    movers: Mutex<FxHashMap<(DeviceId, Direction), Arc<LinkMover>>>,
    /// Those of what is cleaned, each on a stream of its own: it waits for no shrink.
    idle_movers: Mutex<FxHashMap<DeviceId, Arc<LinkMover>>>,
    host_budget: Arc<Budget>,
    /// Each with the devices whose work may touch it.
    hosts: Mutex<Vec<(DeviceSet, Arc<HostPool>)>>,
    files: Mutex<Files>,
    digests: Mutex<FxHashMap<DeviceId, Arc<Digests>>>,
}

/// The files of a process.
#[derive(Debug, Default)]
enum Files {
    #[default]
    NotYet,
    Open(Arc<FileTier>),
    /// The process ends.
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

    /// What moves bytes of a device.
    ///
    /// # Errors
    /// What making the engine or a stream meets.
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

    /// What moves bytes of a device to the host while nobody waits for them. Of the usual priority: what gives way on the GPU keeps all
    /// completion points waiting. Whoever uses it enqueues little at a time, while [`Stores::are_links_busy`] says no.
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

    /// Whether copies of ours from GPUs are in flight, as far as it was seen.
    pub(super) fn are_links_busy(&self) -> bool {
        self.registry.engine.made().is_some_and(|engine| engine.is_busy(Direction::FromGpu))
    }

    /// Whether there is such a place at all; asked before anything is done.
    ///
    /// # Errors
    /// [`ProcessError::NoFiles`], [`ProcessError::NoPeer`], [`ProcessError::NoSuchDevice`].
    pub(super) fn check(&self, tier: Tier) -> Result<()> {
        match tier {
            Tier::File if self.config.files.is_none() => Err(ProcessError::NoFiles),
            Tier::Peer(_) if self.registry.devices.len() < 2 => Err(ProcessError::NoPeer { device: None }),
            Tier::Peer(Some(device)) => self.registry.device(device.0.into()).map(|_| ()),
            Tier::Host | Tier::Peer(None) | Tier::File => Ok(()),
        }
    }

    /// Where bytes of a device go.
    ///
    /// # Errors
    /// As [`Stores::check`]; what making it meets.
    pub(super) fn store(&self, tier: Tier, device: DeviceId) -> Result<Store> {
        match tier {
            Tier::Host => Ok(Store::Host(self.host(device)?)),
            Tier::Peer(peer) => Ok(Store::Peer(self.peer(peer, device)?)),
            Tier::File => Ok(Store::File { files: self.files()?, host: self.host(device)? }),
        }
    }

    /// The pool of another GPU.
    fn peer(&self, peer: Option<DeviceId>, device: DeviceId) -> Result<Arc<GpuPool>> {
        let peer = match peer {
            Some(peer) => peer,
            None => self.roomiest_but(device)?,
        };
        let memory = self.registry.device(peer.0.into())?;
        if peer == device {
            return Err(ProcessError::NoPeer { device: Some(device) });
        }
        Ok(self.registry.started(memory)?.pool.clone())
    }

    /// The other GPU that has the most free memory.
    fn roomiest_but(&self, device: DeviceId) -> Result<DeviceId> {
        let driver = self.registry.completion_events.driver();
        let others = self.registry.devices.iter().map(DeviceMemory::id).filter(|other| *other != device);
        let free = |other| driver.memory_info(other).ok().map(|info| (info.free, other));
        let roomiest = others.filter_map(free).max_by_key(|(free, other)| (*free, std::cmp::Reverse(*other)));
        roomiest.map(|(_, other)| other).ok_or(ProcessError::NoPeer { device: Some(device) })
    }

    /// The files of this process.
    pub(super) fn files(&self) -> Result<Arc<FileTier>> {
        let folder = self.config.files.as_ref().ok_or(ProcessError::NoFiles)?;
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

    /// Removes what is in files, because the process ends; nothing goes there any more.
    pub(super) fn end_files(&self) {
        let files = std::mem::replace(&mut *self.files.lock(), Files::Ended);
        if let Files::Open(files) = files
            && let Err(error) = files.close()
        {
            tracing::warn!(target: "glake::file", %error, "files stay in their folder: the next process that uses it removes them");
        }
    }

    /// What compares bytes of a device with what they were, where that is wanted.
    pub(super) fn digests(&self, verify: bool, device: DeviceId) -> Result<Option<Arc<Digests>>> {
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

    /// Pinned memory that work of a device may touch. Every device that it is for is asked when that work is done, so it is for
    /// the devices that are used by then; for one that is used later another is made, under the same budget.
    ///
    /// # Errors
    /// [`ProcessError::Host`].
    pub(super) fn host(&self, device: DeviceId) -> Result<Arc<HostPool>> {
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
            nodes: nodes_of(&self.registry.topology(), devices),
            devices,
            pinning: self.registry.pinning.clone(),
            ..HostOptions::default()
        };
        let pool = HostPool::new(&self.registry.completion_events, options)?;
        hosts.push((devices, pool.clone()));
        Ok(pool)
    }

    /// What is pinned.
    pub(super) fn host_statistics(&self) -> Vec<HostStatistics> {
        self.hosts.lock().iter().map(|(_, pool)| pool.statistics()).collect()
    }
}
