//! A copy of what has to be kept of one extent.
//!
//! ```text
//! extent   [ live ]      [ live ][ live ]     [live]
//! copy     [ live ][ live ][ live ][live]              packed, in the order of addresses
//! ```

use std::sync::Arc;

use glake_device::owned::{Digest, Span};
use glake_stitch::HomeRange;
use glake_units::Bytes;

use super::peer::PeerPart;
use crate::gpu::Core;
use crate::{GpuPool, HostBlock, HostPool, Place, PoolError, SealedFile};

/// A whole copy.
#[derive(Debug)]
pub(crate) struct StoredCopy {
    pub(super) stored: Stored,
    /// In the order of their addresses, and of their bytes in the copy.
    pub(super) ranges: Vec<HomeRange>,
    /// Of all its bytes, where it was taken.
    pub(super) digest: Option<Digest>,
}

/// Where its bytes are.
#[derive(Debug)]
pub(super) enum Stored {
    /// Whoever writes it to a file has it too.
    Host(Arc<HostBlock>),
    Peer(PeerPart),
    /// And what they pass through on their way back.
    File(Arc<SealedFile>, Arc<HostPool>),
}

/// What a way back needs of a copy. The copy may go meanwhile: where nothing of its extent is live any more.
#[derive(Debug)]
pub(crate) struct Return {
    /// Where the bytes belong.
    pub(super) home: Vec<Span>,
    pub(super) origin: Origin,
    pub(super) digest: Option<Digest>,
    pub(super) place: Place,
    /// Whose memory it is.
    pub(super) peer: Option<Arc<GpuPool>>,
}

/// Where the bytes come from.
#[derive(Debug)]
pub(super) enum Origin {
    Memory(Vec<Span>),
    File(Arc<SealedFile>, Arc<HostPool>),
}

impl StoredCopy {
    /// It is kept though the bytes are on their GPU too.
    pub(crate) fn set_retained(&self) {
        self.count_retained(true);
    }

    /// The bytes are here only.
    pub(crate) fn set_needed(&self) {
        self.count_retained(false);
    }

    /// The pinned memory of the host that it takes, if it does.
    pub(crate) fn host_block(&self) -> Option<&Arc<HostBlock>> {
        match &self.stored {
            Stored::Host(block) => Some(block),
            Stored::Peer(_) | Stored::File(..) => None,
        }
    }

    /// Its bytes are those of a file from now on, and pass through memory of this pool on their way back. Returns the memory that had them.
    pub(crate) fn demote(&mut self, file: SealedFile, host: &Arc<HostPool>) -> impl Sized + use<> {
        std::mem::replace(&mut self.stored, Stored::File(Arc::new(file), host.clone()))
    }

    fn count_retained(&self, retained: bool) {
        if let Stored::Host(block) = &self.stored {
            block.set_retained(retained);
        }
    }

    /// What brings the bytes back to a pool in which their extent is mapped; `place` is where the extent's record has them.
    pub(crate) fn back(&self, core: &Core, place: Place) -> Result<Return, PoolError> {
        let (origin, peer) = match &self.stored {
            Stored::Host(block) => {
                let copies = packed(core, &self.ranges, |at, size| block.span(at, size))?;
                (Origin::Memory(copies), None)
            }
            Stored::Peer(part) => {
                let spans = part.spans()?;
                let copies = packed(core, &self.ranges, |at, size| spans.part(at, size))?;
                (Origin::Memory(copies), Some(part.pool().clone()))
            }
            Stored::File(file, host) => (Origin::File(file.clone(), host.clone()), None),
        };
        Ok(Return { home: home(core, &self.ranges)?, origin, digest: self.digest, place, peer })
    }
}

impl StoredCopy {
    /// Bytes in a block of the host's, with their digest.
    pub(super) fn of_block(block: HostBlock, ranges: Vec<HomeRange>, digest: Digest) -> StoredCopy {
        StoredCopy { stored: Stored::Host(Arc::new(block)), ranges, digest: Some(digest) }
    }

    /// What of its extent it holds.
    pub(crate) fn ranges(&self) -> &[HomeRange] {
        &self.ranges
    }

    /// How many bytes.
    pub(crate) fn size(&self) -> Bytes {
        self.ranges.iter().map(|range| range.size).sum()
    }

    /// Of its bytes, where it was taken.
    pub(crate) fn digest(&self) -> Option<Digest> {
        self.digest
    }
}

impl Return {
    /// How many bytes come back.
    pub(crate) fn size(&self) -> Bytes {
        self.home.iter().map(Span::size).sum()
    }
}

/// Each range in the packed copy.
pub(super) fn packed(
    core: &Core,
    ranges: &[HomeRange],
    span: impl Fn(Bytes, Bytes) -> Option<Span>,
) -> Result<Vec<Span>, PoolError> {
    let mut at = Bytes::ZERO;
    let each = |range: &HomeRange| {
        let found = span(at, range.size);
        at = at.saturating_add(range.size);
        found.ok_or_else(|| core.unknown_offset(range.offset))
    };
    ranges.iter().map(each).collect()
}

/// Each range, at home.
pub(crate) fn home(core: &Core, ranges: &[HomeRange]) -> Result<Vec<Span>, PoolError> {
    let (Some(first), Some(last)) = (ranges.first(), ranges.last()) else { return Ok(Vec::new()) };
    let end = last.offset.saturating_add(last.size);
    let hull = HomeRange { offset: first.offset, size: end.saturating_sub(first.offset) };
    let home = core.span(hull)?;
    let part = |range: &HomeRange| {
        let found = home.part(range.offset.saturating_sub(hull.offset), range.size);
        found.ok_or_else(|| core.unknown_offset(range.offset))
    };
    ranges.iter().map(part).collect()
}
