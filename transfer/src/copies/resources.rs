//! Resources of copies other than lanes, created by the engine's thread: kernels, block lists, slots for pageable memory, branches of
//! captures.
//!
//! ```text
//!   kernels of targets   in the primary context of a GPU whose memory is copied   launched on the program's own streams
//!   kernels of relays    in GLake's own context on a relay                        launched on lanes and branches
//! ```
//!
//! Invariants:
//! - A copy requests a missing resource once, and takes another path until it exists.
//! - A copy uses one set of kernels from its beginning to its end and keeps them alive. Only the engine's thread replaces the set for later
//!   copies.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use glake_device::owned::{CompletionEvents, DeviceSet, Gather, OwnedEvent, OwnedStream, Side};
use glake_device::{CaptureState, DeviceId, Driver, EventKind, StreamId};
use glake_units::Bytes;
use parking_lot::{Mutex, MutexGuard, RwLock};
use rustc_hash::FxHashMap;

use crate::Result;
use crate::copies::pageable::staging::Staging;
use crate::links::Contexts;
use crate::links::lane::StagingStream;
use crate::links::requests::Requests;

/// Resources by GPU: in primary contexts of targets, and in GLake's own contexts of relays.
#[derive(Debug)]
pub(crate) struct Resources {
    contexts: Arc<Contexts>,
    requests: Arc<Requests>,
    /// Bit set of GPUs with a request.
    asked: AtomicU64,
    /// Pinned memory per GPU for block lists.
    lists: Bytes,
    /// Copy kernels for lists of blocks.
    pub(crate) kernels: Kernels,
    /// Branches of captured copies.
    pub(crate) branches: Branches,
    /// Staging of pageable copies.
    pub(crate) staging: Staging,
}

impl Resources {
    /// Creates an empty set; `lists` is the pinned memory per GPU for block lists.
    pub(crate) fn new(
        contexts: &Arc<Contexts>,
        requests: &Arc<Requests>,
        staging: Staging,
        lists: Bytes,
    ) -> Resources {
        Resources {
            contexts: contexts.clone(),
            requests: requests.clone(),
            asked: AtomicU64::new(0),
            lists,
            kernels: Kernels::new(contexts.devices()),
            branches: Branches::new(contexts.devices()),
            staging,
        }
    }

    /// Requests the resources for copies of a GPU's memory, once.
    pub(crate) fn want(&self, device: DeviceId) {
        let bit = DeviceSet::of(device).bits();
        if self.asked.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
            self.requests.resources(device);
        }
    }

    /// Returns the GPUs whose resources were requested.
    pub(crate) fn targets(&self) -> DeviceSet {
        DeviceSet::from_bits(self.asked.load(Ordering::Relaxed))
    }

    /// Creates the missing resources of a target in its primary context. Copies take other paths in place of any that fail.
    pub(crate) fn make_target(&self, device: DeviceId) {
        if let Err(error) = self.kernels.make_target(self.contexts.program(), device, self.lists) {
            tracing::warn!(target: "glake::transfer", %device, %error, "lists of blocks are copied one by one");
        }
        if let Err(error) = self.branches.open_target(self.contexts.driver(), device) {
            tracing::warn!(target: "glake::transfer", %device, %error, "copies in graphs take one link");
        }
        if let Err(error) = self.staging.open_target(device) {
            tracing::warn!(target: "glake::transfer", %device, %error, "the driver copies pageable memory");
        }
    }

    /// Creates the missing resources of a relay in GLake's own context.
    pub(crate) fn make_relay(&self, relay: DeviceId) {
        if let Err(error) = self.kernels.make_relay(self.contexts.own(), relay, self.lists) {
            tracing::warn!(target: "glake::transfer", %relay, %error, "lists of blocks do without this relay");
        }
        if let Err(error) = self.branches.open_relay(self.contexts.own_driver(), relay) {
            tracing::warn!(target: "glake::transfer", %relay, %error, "copies in graphs do without this relay");
        }
        if let Err(error) = self.staging.open_relay(relay) {
            tracing::warn!(target: "glake::transfer", %relay, %error, "pageable copies do without this relay");
        }
    }

    /// Takes a relay's resources out of use. Copies in progress keep them until they end.
    pub(crate) fn take_relay(&self, relay: DeviceId) -> (Option<Arc<Gather>>, Option<Arc<StagingStream>>) {
        (self.kernels.take_relay(relay), self.staging.close_relay(relay))
    }

    /// Returns the pinned host memory of slots and block lists.
    pub(crate) fn pinned(&self) -> Bytes {
        self.staging.pinned().saturating_add(self.kernels.now().pinned())
    }
}

#[derive(Debug)]
pub(crate) struct Kernels {
    now: RwLock<Arc<KernelSet>>,
}

/// Copy kernels of each GPU.
#[derive(Clone, Debug)]
pub(crate) struct KernelSet {
    targets: Each,
    relays: Each,
}

/// Indexed by device.
type Each = Box<[Option<Arc<Gather>>]>;

impl Kernels {
    pub(crate) fn new(devices: usize) -> Kernels {
        let each = || (0..devices).map(|_| None).collect();
        Kernels { now: RwLock::new(Arc::new(KernelSet { targets: each(), relays: each() })) }
    }

    /// Returns the set for new copies.
    pub(crate) fn now(&self) -> Arc<KernelSet> {
        self.now.read().clone()
    }

    /// Creates the kernels of a target, with `lists` bytes of pinned memory for block lists, unless they exist.
    pub(crate) fn make_target(
        &self,
        completion_events: &Arc<CompletionEvents>,
        device: DeviceId,
        lists: Bytes,
    ) -> Result<()> {
        if self.now().target(device).is_none() {
            let made = Arc::new(Gather::new(completion_events, device, lists)?);
            self.change(|set| put(&mut set.targets, device, Some(made)));
        }
        Ok(())
    }

    /// Creates the kernels of a relay in GLake's own contexts, unless they exist.
    pub(crate) fn make_relay(
        &self,
        own: &Arc<CompletionEvents>,
        device: DeviceId,
        lists: Bytes,
    ) -> Result<()> {
        if self.now().relay(device).is_none() {
            let made = Arc::new(Gather::new(own, device, lists)?);
            self.change(|set| put(&mut set.relays, device, Some(made)));
        }
        Ok(())
    }

    /// Removes the kernels of a relay from new copies.
    pub(crate) fn take_relay(&self, device: DeviceId) -> Option<Arc<Gather>> {
        self.change(|set| put(&mut set.relays, device, None))
    }

    fn change<T>(&self, change: impl FnOnce(&mut KernelSet) -> T) -> T {
        let mut next = KernelSet::clone(&self.now());
        let changed = change(&mut next);
        *self.now.write() = Arc::new(next);
        changed
    }
}

impl KernelSet {
    /// Returns the kernels of a target.
    pub(crate) fn target(&self, device: DeviceId) -> Option<&Gather> {
        get(&self.targets, device)
    }

    /// Returns the kernels of a relay.
    pub(crate) fn relay(&self, device: DeviceId) -> Option<&Gather> {
        get(&self.relays, device)
    }

    /// Returns the pinned host memory for block lists.
    pub(crate) fn pinned(&self) -> Bytes {
        self.targets.iter().chain(&self.relays).flatten().map(|gather| gather.pinned()).sum()
    }

    /// Returns the relays whose kernels can access all of `sides`.
    pub(crate) fn relays_reaching(&self, sides: impl Iterator<Item = Side> + Clone) -> DeviceSet {
        let reaching = |gather: &&Arc<Gather>| sides.clone().all(|side| gather.reaches(side));
        self.relays.iter().flatten().filter(reaching).map(|gather| gather.device()).collect()
    }
}

fn get(each: &Each, device: DeviceId) -> Option<&Gather> {
    each.get(usize::try_from(device.0).ok()?)?.as_deref()
}

/// Replaces the kernels of a device and returns the previous ones.
fn put(each: &mut Each, device: DeviceId, gather: Option<Arc<Gather>>) -> Option<Arc<Gather>> {
    let place = usize::try_from(device.0).ok().and_then(|index| each.get_mut(index))?;
    std::mem::replace(place, gather)
}

/// Number of streams that can capture split copies at a time. Copies of further streams become single nodes.
const STREAMS: usize = 2;

/// Branches of all relays.
#[derive(Debug)]
pub(crate) struct Branches {
    all: [StreamBranches; STREAMS],
}

/// Branches of one capturing stream.
#[derive(Debug)]
struct StreamBranches {
    state: Mutex<CaptureBranches>,
}

#[derive(Debug)]
pub(crate) struct CaptureBranches {
    each: Box<[Option<Branch>]>,
    /// Fork events for captured program streams, by device, in its primary context.
    pub(crate) forks: FxHashMap<DeviceId, OwnedEvent>,
    owner: Owner,
}

/// Last user of the branches: capture and stream.
type Owner = Option<(u64, StreamId)>;

/// Stream of a GPU for captures only.
#[derive(Debug)]
pub(crate) struct Branch {
    pub(crate) stream: OwnedStream,
    pub(crate) join: OwnedEvent,
}

impl Branches {
    pub(crate) fn new(devices: usize) -> Branches {
        let branches = |()| {
            let each = (0..devices).map(|_| None).collect();
            StreamBranches {
                state: Mutex::new(CaptureBranches { each, forks: FxHashMap::default(), owner: None }),
            }
        };
        Branches { all: [(); STREAMS].map(branches) }
    }

    /// Creates the events for capturing streams of a GPU, unless they exist.
    pub(crate) fn open_target(&self, driver: &Arc<dyn Driver>, device: DeviceId) -> Result<()> {
        for branches in &self.all {
            // Only the engine's thread makes them; none is made under the lock.
            let is_there = branches.state.lock().forks.contains_key(&device);
            if !is_there {
                let fork = OwnedEvent::new(driver, device, EventKind::Plain)?;
                branches.state.lock().forks.insert(device, fork);
            }
        }
        Ok(())
    }

    /// Creates the branches of a relay in GLake's own contexts, unless they exist.
    pub(crate) fn open_relay(&self, driver: &Arc<dyn Driver>, device: DeviceId) -> Result<()> {
        for branches in &self.all {
            if branches.state.lock().get(device).is_some() {
                continue;
            }
            let join = OwnedEvent::new(driver, device, EventKind::Plain)?;
            let branch = Branch { stream: OwnedStream::new(driver, device)?, join };
            // Only the engine's thread makes them.
            branches.state.lock().put(device, Some(branch));
        }
        Ok(())
    }

    /// Releases the branches of a GPU. Returns `false` while one is in a capture or its state is unknown.
    pub(crate) fn close(&self, device: DeviceId) -> bool {
        self.all.iter().all(|branches| {
            let Some(mut state) = branches.state.try_lock() else { return false };
            let free = state.get(device).is_none_or(Branch::is_free);
            let closed = if free { state.put(device, None) } else { None };
            drop(state);
            drop(closed);
            free
        })
    }

    /// Returns the branches of a capturing stream; `None` if all are in other captures.
    pub(crate) fn of(&self, capture: u64, stream: StreamId) -> Option<MutexGuard<'_, CaptureBranches>> {
        let owner = Some((capture, stream));
        let tried = || self.all.iter().filter_map(|branches| branches.state.try_lock());
        if let Some(own) = tried().find(|state| state.owner == owner) {
            return Some(own);
        }
        let mut state = tried().find(|state| state.is_free())?;
        state.owner = owner;
        Some(state)
    }
}

impl CaptureBranches {
    /// Returns whether no capture records any of the branches.
    fn is_free(&self) -> bool {
        self.each.iter().flatten().all(Branch::is_free)
    }

    pub(crate) fn get(&self, device: DeviceId) -> Option<&Branch> {
        self.each.get(usize::try_from(device.0).ok()?)?.as_ref()
    }

    /// Replaces a branch and returns the previous one.
    fn put(&mut self, device: DeviceId, branch: Option<Branch>) -> Option<Branch> {
        let place = usize::try_from(device.0).ok().and_then(|index| self.each.get_mut(index))?;
        std::mem::replace(place, branch)
    }
}

impl Branch {
    fn is_free(&self) -> bool {
        matches!(self.stream.capture_state(), Ok(CaptureState::None))
    }
}
