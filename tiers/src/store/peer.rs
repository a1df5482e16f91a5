//! Copies' bytes in the memory of another GPU.
//!
//! ```text
//! block   [ copy | copy | copy |   copy   | ]      as large as the copies to come, or as may lodge together: memory costs by the block
//! ```

use std::sync::Arc;

use glake_device::owned::Span;
use glake_device::{Address, DeviceId};
use glake_stitch::HomeRange;
use glake_units::Bytes;

use crate::{GpuPool, PoolError};

/// A block of another GPU's pool. It goes back when no copy has any of it and no span of it lives; who gets it then gets it after all
/// work that was enqueued on it by then.
#[derive(Debug)]
pub(super) struct PeerBlock {
    pool: Arc<GpuPool>,
    address: Address,
    size: Bytes,
}

/// What one copy has of a block.
#[derive(Debug)]
pub(super) struct PeerPart {
    block: Arc<PeerBlock>,
    offset: Bytes,
    size: Bytes,
}

/// The blocks for the copies of one shrink, one after the other.
#[derive(Debug)]
pub(super) struct PeerRoom {
    /// Bytes of copies that are to come.
    expected: Bytes,
    /// The last block, and how much of it copies have.
    last: Option<(Arc<PeerBlock>, Bytes)>,
}

impl PeerRoom {
    pub(super) fn new(expected: Bytes) -> Self {
        PeerRoom { expected, last: None }
    }

    /// Memory of `pool` for a copy, which the work of `guest` may touch.
    pub(super) fn take(
        &mut self,
        pool: &Arc<GpuPool>,
        guest: DeviceId,
        size: Bytes,
    ) -> Result<PeerPart, PoolError> {
        let (block, offset) = match self.last.take() {
            Some((block, used)) if size <= block.size.saturating_sub(used) => (block, used),
            _ => (self.next(pool, guest, size)?, Bytes::ZERO),
        };
        self.expected = self.expected.saturating_sub(size);
        self.last = Some((block.clone(), offset.saturating_add(size)));
        Ok(PeerPart { block, offset, size })
    }

    /// A block for this copy and for others to come; where there is none, for this one.
    fn next(&self, pool: &Arc<GpuPool>, guest: DeviceId, size: Bytes) -> Result<Arc<PeerBlock>, PoolError> {
        let large = self.expected.min(pool.shared_lodging());
        if large > size {
            match PeerBlock::take(pool, guest, large) {
                Err(error) if error.is_out_of_memory() => {}
                taken => return taken,
            }
        }
        PeerBlock::take(pool, guest, size)
    }
}

impl PeerBlock {
    fn take(pool: &Arc<GpuPool>, guest: DeviceId, size: Bytes) -> Result<Arc<Self>, PoolError> {
        let block = pool.lodge(guest, size)?;
        Ok(Arc::new(PeerBlock { pool: pool.clone(), address: block.address, size }))
    }
}

impl PeerPart {
    pub(super) fn pool(&self) -> &Arc<GpuPool> {
        &self.block.pool
    }

    /// All of it, for asynchronous work.
    pub(super) fn span(&self) -> Result<Span, PoolError> {
        let at = self.block.address.0.saturating_add(self.offset.get());
        let offset = Bytes::new(at.saturating_sub(self.pool().base().0));
        Ok(self.pool().span(HomeRange { offset, size: self.size })?.keeping(&self.block))
    }
}

impl Drop for PeerBlock {
    fn drop(&mut self) {
        if let Err(error) = self.pool.dislodge(self.address) {
            tracing::warn!(target: "glake::region", peer = %self.pool.device(), %error, "a copy's memory could not be given back");
        }
    }
}
