//! A copy's bytes in the memory of another GPU.

use std::sync::Arc;

use glake_device::owned::Span;
use glake_device::{Address, DeviceId};
use glake_stitch::HomeRange;
use glake_units::Bytes;

use crate::{GpuPool, PoolError};

/// A block of another GPU's pool. It goes back when it is dropped and no span of it lives; who gets it then gets it after all work that
/// was enqueued on it by then.
#[derive(Debug)]
pub(super) struct PeerBlock {
    pool: Arc<GpuPool>,
    address: Address,
    size: Bytes,
}

impl PeerBlock {
    /// Memory of `pool` that the work of `guest` may touch.
    pub(super) fn take(pool: &Arc<GpuPool>, guest: DeviceId, size: Bytes) -> Result<Arc<Self>, PoolError> {
        let block = pool.lodge(guest, size)?;
        Ok(Arc::new(PeerBlock { pool: pool.clone(), address: block.address, size }))
    }

    pub(super) fn pool(&self) -> &Arc<GpuPool> {
        &self.pool
    }

    /// All of it, for asynchronous work.
    pub(super) fn span(self: &Arc<Self>) -> Result<Span, PoolError> {
        let offset = Bytes::new(self.address.0.saturating_sub(self.pool.base().0));
        Ok(self.pool.span(HomeRange { offset, size: self.size })?.keeping(self))
    }
}

impl Drop for PeerBlock {
    fn drop(&mut self) {
        if let Err(error) = self.pool.dislodge(self.address) {
            tracing::warn!(target: "glake::region", peer = %self.pool.device(), %error, "a copy's memory could not be given back");
        }
    }
}
