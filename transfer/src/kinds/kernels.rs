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

/// Those of each GPU that are made.
#[derive(Clone, Debug)]
pub(crate) struct KernelSet {
    targets: Each,
    relays: Each,
}

/// By device.
type Each = Box<[Option<Arc<Gather>>]>;

impl Kernels {
    pub(crate) fn new(devices: usize) -> Kernels {
        let each = || (0..devices).map(|_| None).collect();
        Kernels { now: RwLock::new(Arc::new(KernelSet { targets: each(), relays: each() })) }
    }

    /// What a copy that begins has.
    pub(crate) fn now(&self) -> Arc<KernelSet> {
        self.now.read().clone()
    }

    /// Makes those of a GPU whose memory is copied, with so much pinned memory for lists of blocks, if they are not made.
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

    /// Makes those of a relay, likewise; the clock is that of contexts of our own.
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

    /// Takes those of a relay from copies that begin.
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
    /// Those of a GPU whose memory is copied.
    pub(crate) fn target(&self, device: DeviceId) -> Option<&Gather> {
        get(&self.targets, device)
    }

    /// Those of a relay.
    pub(crate) fn relay(&self, device: DeviceId) -> Option<&Gather> {
        get(&self.relays, device)
    }

    /// Host memory that is pinned for lists of blocks.
    pub(crate) fn pinned(&self) -> Bytes {
        self.targets.iter().chain(&self.relays).flatten().map(|gather| gather.pinned()).sum()
    }

    /// The relays whose kernels may touch all of these.
    pub(crate) fn relays_reaching(&self, sides: impl Iterator<Item = Side> + Clone) -> DeviceSet {
        let reaching = |gather: &&Arc<Gather>| sides.clone().all(|side| gather.reaches(side));
        self.relays.iter().flatten().filter(reaching).map(|gather| gather.device()).collect()
    }
}

fn get(each: &Each, device: DeviceId) -> Option<&Gather> {
    each.get(usize::try_from(device.0).ok()?)?.as_deref()
}

/// What was there before.
fn put(each: &mut Each, device: DeviceId, gather: Option<Arc<Gather>>) -> Option<Arc<Gather>> {
    let place = usize::try_from(device.0).ok().and_then(|index| each.get_mut(index))?;
    std::mem::replace(place, gather)
}
