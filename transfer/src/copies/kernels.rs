//! The copy kernels of each GPU, made in the background.
//!
//! ```text
//!   targets   of a GPU whose memory is copied, in its primary context    launched on the program's own streams
//!   relays    of a relay, in the context of our own there                launched on lanes and branches
//! ```
//!
//! Invariant: a copy has one set from its beginning to its end, and what it has is not dropped under it. Only the engine's thread
//! changes which set the next copy has.

use std::sync::Arc;

use glake_device::DeviceId;
use glake_device::owned::{CompletionEvents, DeviceSet, Gather, Side};
use glake_units::Bytes;
use parking_lot::RwLock;

use crate::Result;

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
