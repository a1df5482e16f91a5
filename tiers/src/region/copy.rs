//! The bytes of one extent in host memory.
//!
//! ```text
//! extent   [ live ]      [ live ][ live ]     [live]
//! block    [ live ][ live ][ live ][live]              packed, in the order of addresses
//! ```

use std::sync::Arc;

use glake_device::owned::Span;
use glake_stitch::HomeRange;
use glake_units::Bytes;

use crate::pool::GpuPool;
use crate::{HostBlock, HostError, HostPool, PoolError};

/// A copy of what has to be kept of an extent.
#[derive(Debug)]
pub(crate) struct HostCopy {
    block: HostBlock,
    /// In the order of their addresses, and of their bytes in the block.
    ranges: Vec<HomeRange>,
}

impl HostCopy {
    /// Memory for the bytes of these ranges, which are not empty and lie in one extent.
    pub(super) fn take(host: &Arc<HostPool>, ranges: Vec<HomeRange>) -> Result<Self, HostError> {
        let size = ranges.iter().map(|range| range.size).sum();
        Ok(HostCopy { block: host.take(size)?, ranges })
    }

    pub(super) fn size(&self) -> Bytes {
        self.block.size()
    }

    /// It is kept though the bytes are on their GPU too.
    pub(crate) fn set_retained(&mut self) {
        self.block.set_retained(true);
    }

    /// The bytes are here only.
    pub(crate) fn set_needed(&mut self) {
        self.block.set_retained(false);
    }

    /// The copies that fill it, to and from.
    pub(super) fn out(&self, pool: &GpuPool) -> Result<Vec<(Span, Span)>, PoolError> {
        self.pairs(pool)
    }

    /// The copies that bring the bytes back, to and from.
    pub(crate) fn back(&self, pool: &GpuPool) -> Result<Vec<(Span, Span)>, PoolError> {
        let pairs = self.pairs(pool)?;
        Ok(pairs.into_iter().map(|(host, gpu)| (gpu, host)).collect())
    }

    /// Each range in host memory and at home.
    fn pairs(&self, pool: &GpuPool) -> Result<Vec<(Span, Span)>, PoolError> {
        let (Some(first), Some(last)) = (self.ranges.first(), self.ranges.last()) else {
            return Ok(Vec::new());
        };
        let end = last.offset.saturating_add(last.size);
        let hull = HomeRange { offset: first.offset, size: end.saturating_sub(first.offset) };
        let home = pool.span(hull)?;
        let mut at = Bytes::ZERO;
        let pair = |range: &HomeRange| {
            let gpu = home.part(range.offset.saturating_sub(hull.offset), range.size);
            let host = self.block.span(at, range.size);
            at = at.saturating_add(range.size);
            host.zip(gpu).ok_or_else(|| pool.unknown_offset(range.offset))
        };
        self.ranges.iter().map(pair).collect()
    }
}
