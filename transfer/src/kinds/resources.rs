//! What copies use besides lanes, made by the engine's thread: kernels, lists, slots for pageable memory, branches of captures.
//!
//! Invariant: a copy asks for what is missing once, and goes another way until it is made.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use glake_device::DeviceId;
use glake_device::owned::{DeviceSet, Gather};
use glake_units::Bytes;

use super::captured::Branches;
use super::kernels::Kernels;
use super::pageable::Staging;
use super::pageable::StagingStream;
use crate::engine::contexts::Contexts;
use crate::engine::requests::Requests;

/// By GPU, in primary contexts for those whose memory is copied, and in contexts of our own for relays.
#[derive(Debug)]
pub(crate) struct Resources {
    contexts: Arc<Contexts>,
    requests: Arc<Requests>,
    /// GPUs that they were asked for.
    asked: AtomicU64,
    /// Pinned memory of each GPU for lists of blocks.
    lists: Bytes,
    /// What copies lists of blocks.
    pub(crate) kernels: Kernels,
    /// What captured copies are recorded on.
    pub(crate) branches: Branches,
    /// What pageable copies go through.
    pub(crate) staging: Arc<Staging>,
}

impl Resources {
    /// None yet; lists take so much pinned memory a GPU.
    pub(crate) fn new(
        contexts: &Arc<Contexts>,
        requests: &Arc<Requests>,
        staging: &Arc<Staging>,
        lists: Bytes,
    ) -> Arc<Resources> {
        Arc::new(Resources {
            contexts: contexts.clone(),
            requests: requests.clone(),
            asked: AtomicU64::new(0),
            lists,
            kernels: Kernels::new(contexts.devices()),
            branches: Branches::new(contexts.devices()),
            staging: staging.clone(),
        })
    }

    /// Copies of a GPU's memory could use what is not made yet: asked for once.
    pub(crate) fn want(&self, device: DeviceId) {
        let bit = DeviceSet::of(device).bits();
        if self.asked.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
            self.requests.resources(device);
        }
    }

    /// The GPUs whose memory copies asked it for.
    pub(crate) fn targets(&self) -> DeviceSet {
        DeviceSet::from_bits(self.asked.load(Ordering::Relaxed))
    }

    /// Makes what is missing for copies of a GPU's memory, in its primary context. Without any of it they are made another way.
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

    /// Makes what is missing on a relay, in a context of our own.
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

    /// Takes what is on a relay from copies that begin: those that use it have it until they end.
    pub(crate) fn take_relay(&self, relay: DeviceId) -> (Option<Arc<Gather>>, Option<Arc<StagingStream>>) {
        (self.kernels.take_relay(relay), self.staging.close_relay(relay))
    }

    /// Pinned host memory of all of this: slots for pageable memory, and lists of blocks.
    pub(crate) fn pinned(&self) -> Bytes {
        self.staging.pinned().saturating_add(self.kernels.now().pinned())
    }
}
