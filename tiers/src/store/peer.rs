//! Copies in the memory of another GPU.
//!
//! ```text
//! copies   [ copy ][ copy ][  copy  ][ copy ]
//! blocks   [          |          |          ]      as large as the copies to come, or as the shared size; a copy may span two
//! ```

use std::sync::Arc;

use glake_device::owned::Span;
use glake_device::{Address, DeviceId};
use glake_stitch::HomeRange;
use glake_units::Bytes;

use crate::{GpuPool, PoolError};

/// Block of another GPU's pool, returned when no copy uses it and no span of it lives. The next owner gets it after all work enqueued on it
/// before.
#[derive(Debug)]
pub(super) struct PeerBlock {
    pool: Arc<GpuPool>,
    address: Address,
    size: Bytes,
}

/// Pieces of blocks that hold one copy, in the order of its bytes.
#[derive(Debug)]
pub(super) struct PeerPart {
    pool: Arc<GpuPool>,
    pieces: Vec<Piece>,
}

#[derive(Debug)]
struct Piece {
    block: Arc<PeerBlock>,
    /// Offset in the block.
    offset: Bytes,
    size: Bytes,
}

/// Spans of all pieces of a copy for asynchronous work.
pub(super) struct PeerSpans(Vec<Span>);

/// Allocator of blocks for the copies of one shrink, in order.
#[derive(Debug)]
pub(super) struct PeerRoom {
    /// Bytes of copies still to come.
    expected: Bytes,
    /// Last block, and the bytes of it that copies use.
    last: Option<(Arc<PeerBlock>, Bytes)>,
}

impl PeerRoom {
    pub(super) fn new(expected: Bytes) -> Self {
        PeerRoom { expected, last: None }
    }

    /// Allocates memory of `pool` for a copy; the work of `owner` may access it.
    pub(super) fn take(
        &mut self,
        pool: &Arc<GpuPool>,
        owner: DeviceId,
        size: Bytes,
    ) -> Result<PeerPart, PoolError> {
        let (mut pieces, mut missing) = (Vec::new(), size);
        while !missing.is_zero() {
            let (block, offset) = match self.last.take() {
                Some((block, used)) if used < block.size => (block, used),
                _ => (self.next(pool, owner, missing)?, Bytes::ZERO),
            };
            let size = missing.min(block.size.saturating_sub(offset));
            missing = missing.saturating_sub(size);
            self.expected = self.expected.saturating_sub(size);
            self.last = Some((block.clone(), offset.saturating_add(size)));
            pieces.push(Piece { block, offset, size });
        }
        Ok(PeerPart { pool: pool.clone(), pieces })
    }

    /// Allocates a block for this copy and for later ones; if there is too little memory, for the rest of this one only.
    fn next(&self, pool: &Arc<GpuPool>, owner: DeviceId, size: Bytes) -> Result<Arc<PeerBlock>, PoolError> {
        let large = self.expected.min(pool.peer_blocks().shared());
        if large > size {
            match PeerBlock::take(pool, owner, large) {
                Err(error) if error.is_out_of_memory() => {}
                taken => return taken,
            }
        }
        PeerBlock::take(pool, owner, size)
    }
}

impl PeerBlock {
    fn take(pool: &Arc<GpuPool>, owner: DeviceId, size: Bytes) -> Result<Arc<Self>, PoolError> {
        let block = pool.peer_blocks().alloc(owner, size)?;
        Ok(Arc::new(PeerBlock { pool: pool.clone(), address: block.address, size }))
    }
}

impl PeerPart {
    pub(super) fn pool(&self) -> &Arc<GpuPool> {
        &self.pool
    }

    /// Splits ranges, packed in this order, at the boundaries of pieces.
    pub(super) fn cut(&self, ranges: &[HomeRange]) -> Vec<HomeRange> {
        let mut cut = Vec::with_capacity(ranges.len() + self.pieces.len());
        let mut pieces = self.pieces.iter().map(|piece| piece.size);
        let mut room = Bytes::ZERO;
        for range in ranges {
            let mut rest = *range;
            while !rest.size.is_zero() {
                if room.is_zero() {
                    room = pieces.next().unwrap_or(rest.size);
                }
                let size = rest.size.min(room);
                cut.push(HomeRange { size, ..rest });
                room = room.saturating_sub(size);
                rest = HomeRange {
                    offset: rest.offset.saturating_add(size),
                    size: rest.size.saturating_sub(size),
                };
            }
        }
        cut
    }

    pub(super) fn spans(&self) -> Result<PeerSpans, PoolError> {
        self.pieces.iter().map(Piece::span).collect::<Result<_, _>>().map(PeerSpans)
    }
}

impl Piece {
    fn span(&self) -> Result<Span, PoolError> {
        let PeerBlock { pool, address, .. } = &*self.block;
        let at = address.0.saturating_add(self.offset.get());
        let offset = Bytes::new(at.saturating_sub(pool.base().0));
        Ok(pool.core().span(HomeRange { offset, size: self.size })?.keeping(&self.block))
    }
}

impl PeerSpans {
    /// Returns a span of `size` bytes at an offset of the copy; the bytes must lie in one piece.
    pub(super) fn part(&self, mut at: Bytes, size: Bytes) -> Option<Span> {
        for span in &self.0 {
            if at < span.size() {
                return span.part(at, size);
            }
            at = at.saturating_sub(span.size());
        }
        None
    }
}

impl Drop for PeerBlock {
    fn drop(&mut self) {
        if let Err(error) = self.pool.peer_blocks().free(self.address) {
            tracing::warn!(target: "glake::regions", peer = %self.pool.device(), %error, "a copy's memory could not be given back");
        }
    }
}
