//! What copies of a GPU's memory use besides lanes, made by the engine's thread: kernels, lists, slots for pageable memory.

use std::sync::atomic::Ordering;

use glake_device::DeviceId;
use glake_device::owned::DeviceSet;

use super::Engine;

impl Engine {
    /// Copies of a GPU's memory could use what is not made yet: asked for once.
    pub(super) fn want_equipment(&self, device: DeviceId) {
        if self.equipped.fetch_or(DeviceSet::of(device).bits(), Ordering::Relaxed)
            & DeviceSet::of(device).bits()
            == 0
        {
            self.worker.equip(device);
        }
    }

    /// The GPUs that copies asked it for.
    pub(super) fn equipped(&self) -> DeviceSet {
        DeviceSet::from_bits(self.equipped.load(Ordering::Relaxed))
    }

    /// What was made for a GPU is given up: copies ask for it again.
    pub(super) fn unequip(&self, device: DeviceId) {
        self.equipped.fetch_and(!DeviceSet::of(device).bits(), Ordering::Relaxed);
    }

    /// Makes what is missing for a GPU. Without any of it copies are made another way.
    pub(super) fn equip(&self, device: DeviceId) {
        if let Err(error) = self.kernels.make(&self.epochs, device, self.options().lists) {
            tracing::warn!(target: "glake::transfer", %device, %error, "lists of blocks are copied one by one");
        }
        if let Err(error) = self.captures.open(&self.driver, device) {
            tracing::warn!(target: "glake::transfer", %device, %error, "copies in graphs take one link");
        }
        if let Err(error) = self.open_pageable(device) {
            tracing::warn!(target: "glake::transfer", %device, %error, "the driver copies pageable memory");
        }
    }
}
