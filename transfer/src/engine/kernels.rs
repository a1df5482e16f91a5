//! The copy kernels of each GPU, made in the background.
//!
//! Invariant: a copy has one set from its beginning to its end, and what it has is not dropped under it. Only the engine's thread
//! changes which set the next copy has.

use std::sync::Arc;

use glake_device::DeviceId;
use glake_device::owned::{DeviceSet, Epochs, Gather, Side};
use glake_units::Bytes;
use parking_lot::RwLock;

use crate::Result;

#[derive(Debug)]
pub(super) struct Kernels {
    now: RwLock<Arc<KernelSet>>,
}

/// Those of each GPU that are made.
#[derive(Clone, Debug)]
pub(super) struct KernelSet {
    each: Box<[Option<Arc<Gather>>]>,
}

impl Kernels {
    pub(super) fn new(devices: usize) -> Kernels {
        let each = (0..devices).map(|_| None).collect();
        Kernels { now: RwLock::new(Arc::new(KernelSet { each })) }
    }

    /// What a copy that begins has.
    pub(super) fn now(&self) -> Arc<KernelSet> {
        self.now.read().clone()
    }

    /// Makes those of a GPU, with so much pinned memory for lists of blocks, if they are not made.
    pub(super) fn make(&self, epochs: &Arc<Epochs>, device: DeviceId, lists: Bytes) -> Result<()> {
        if self.now().get(device).is_none() {
            let made = Arc::new(Gather::new(epochs, device, lists)?);
            self.set(device, Some(made));
        }
        Ok(())
    }

    /// Takes those of a GPU from copies that begin.
    pub(super) fn take(&self, device: DeviceId) -> Option<Arc<Gather>> {
        self.set(device, None)
    }

    /// What was there before.
    fn set(&self, device: DeviceId, gather: Option<Arc<Gather>>) -> Option<Arc<Gather>> {
        let mut next = KernelSet::clone(&self.now());
        let place = usize::try_from(device.0).ok().and_then(|index| next.each.get_mut(index))?;
        let before = std::mem::replace(place, gather);
        *self.now.write() = Arc::new(next);
        before
    }
}

impl KernelSet {
    pub(super) fn get(&self, device: DeviceId) -> Option<&Gather> {
        self.each.get(usize::try_from(device.0).ok()?)?.as_deref()
    }

    /// Host memory that is pinned for lists of blocks.
    pub(super) fn pinned(&self) -> Bytes {
        self.each.iter().flatten().map(|gather| gather.pinned()).sum()
    }

    /// The GPUs whose kernels may touch all of these.
    pub(super) fn reaching(&self, sides: impl Iterator<Item = Side> + Clone) -> DeviceSet {
        let reaching = |gather: &&Arc<Gather>| sides.clone().all(|side| gather.reaches(side));
        self.each.iter().flatten().filter(reaching).map(|gather| gather.device()).collect()
    }
}
