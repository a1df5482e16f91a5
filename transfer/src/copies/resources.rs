//! Resources of copies other than lanes, created by the engine's thread: kernels, block lists, slots for pageable memory, branches of
//! captures.
//!
//! Invariant: a copy requests a missing resource once, and takes another path until it exists.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use glake_device::DeviceId;
use glake_device::owned::{DeviceSet, Gather};
use glake_units::Bytes;

use crate::copies::captured::Branches;
use crate::copies::kernels::Kernels;
use crate::copies::pageable::Staging;
use crate::links::contexts::Contexts;
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
    pub(crate) staging: Arc<Staging>,
}

impl Resources {
    /// Creates an empty set; `lists` is the pinned memory per GPU for block lists.
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
