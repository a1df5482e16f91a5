//! The copy kernels of each GPU, made in the background.

use std::sync::{Arc, OnceLock};

use glake_device::DeviceId;
use glake_device::owned::{DeviceSet, Epochs, Gather, Side};
use glake_units::Bytes;

use crate::Result;

#[derive(Debug)]
pub(super) struct Kernels {
    each: Box<[OnceLock<Gather>]>,
}

impl Kernels {
    pub(super) fn new(devices: usize) -> Kernels {
        Kernels { each: (0..devices).map(|_| OnceLock::new()).collect() }
    }

    /// Makes those of a GPU, with so much pinned memory for lists of blocks, if they are not made.
    pub(super) fn make(&self, epochs: &Arc<Epochs>, device: DeviceId, lists: Bytes) -> Result<()> {
        if let Some(place) = self.place(device).filter(|place| place.get().is_none()) {
            let _ = place.set(Gather::new(epochs, device, lists)?);
        }
        Ok(())
    }

    /// Opens GPUs' plain memory to the kernels of `device`; those that cannot be opened stay closed.
    pub(super) fn open(&self, device: DeviceId, peers: DeviceSet) {
        let Some(gather) = self.get(device) else { return };
        for peer in peers.without(DeviceSet::of(device)).iter() {
            if let Err(error) = gather.open_peer(peer) {
                tracing::debug!(target: "glake::transfer", %device, %peer, %error, "no peer access");
            }
        }
    }

    pub(super) fn get(&self, device: DeviceId) -> Option<&Gather> {
        self.place(device)?.get()
    }

    /// Host memory that is pinned for lists of blocks.
    pub(super) fn pinned(&self) -> Bytes {
        self.each.iter().filter_map(OnceLock::get).map(Gather::pinned).sum()
    }

    /// The GPUs whose kernels may touch all of these.
    pub(super) fn reaching(&self, sides: impl Iterator<Item = Side> + Clone) -> DeviceSet {
        let reaching = |gather: &&Gather| sides.clone().all(|side| gather.reaches(side));
        self.each.iter().filter_map(OnceLock::get).filter(reaching).map(Gather::device).collect()
    }

    fn place(&self, device: DeviceId) -> Option<&OnceLock<Gather>> {
        self.each.get(usize::try_from(device.0).ok()?)
    }
}
