//! What copies use besides lanes, made by the engine's thread: kernels, lists, slots for pageable memory, branches of captures.

use std::sync::atomic::Ordering;

use glake_device::DeviceId;
use glake_device::owned::DeviceSet;

use crate::Engine;

impl Engine {
    /// Copies of a GPU's memory could use what is not made yet: asked for once.
    pub(crate) fn want_resources(&self, device: DeviceId) {
        if self.with_resources.fetch_or(DeviceSet::of(device).bits(), Ordering::Relaxed)
            & DeviceSet::of(device).bits()
            == 0
        {
            self.worker.make_resources(device);
        }
    }

    /// The GPUs whose memory copies asked it for.
    pub(crate) fn with_resources(&self) -> DeviceSet {
        DeviceSet::from_bits(self.with_resources.load(Ordering::Relaxed))
    }

    /// Makes what is missing for copies of a GPU's memory, in its primary context. Without any of it they are made another way.
    pub(crate) fn make_resources(&self, device: DeviceId) {
        if let Err(error) = self.kernels.make_target(&self.epochs, device, self.options().lists) {
            tracing::warn!(target: "glake::transfer", %device, %error, "lists of blocks are copied one by one");
        }
        if let Err(error) = self.captures.open_target(&self.driver, device) {
            tracing::warn!(target: "glake::transfer", %device, %error, "copies in graphs take one link");
        }
        if let Err(error) = self.open_pageable(device) {
            tracing::warn!(target: "glake::transfer", %device, %error, "the driver copies pageable memory");
        }
    }

    /// Makes what is missing on a relay, in a context of our own.
    pub(crate) fn make_relay_resources(&self, relay: DeviceId) {
        if let Err(error) = self.kernels.make_relay(&self.own, relay, self.options().lists) {
            tracing::warn!(target: "glake::transfer", %relay, %error, "lists of blocks do without this relay");
        }
        if let Err(error) = self.captures.open_relay(self.relay_driver(), relay) {
            tracing::warn!(target: "glake::transfer", %relay, %error, "copies in graphs do without this relay");
        }
        if let Err(error) = self.open_pageable_relay(relay) {
            tracing::warn!(target: "glake::transfer", %relay, %error, "pageable copies do without this relay");
        }
    }
}
