//! Copy of the bytes to preserve of one extent.
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

/// Complete copy of an extent's bytes.
#[derive(Debug)]
pub(crate) struct StoredCopy {
    pub(super) stored: CopyStorage,
    /// Home ranges of the bytes, in address order and in the order of the copy.
    pub(super) ranges: Vec<HomeRange>,
    /// Digest of all bytes, if checks were enabled.
    pub(super) digest: Option<Digest>,
}

/// Storage of a copy.
#[derive(Debug)]
pub(super) enum CopyStorage {
    /// Block of pinned host memory, shared with a demotion that writes it to a file.
    Host(Arc<HostBlock>),
    Peer(PeerPart),
    /// File, and the host pool for its bytes in transit.
    File(Arc<SealedFile>, Arc<HostPool>),
}

/// Data for copying an extent's bytes back. The copy itself may be dropped meanwhile, if no live bytes of the extent are left.
#[derive(Debug)]
pub(crate) struct Return {
    /// Destination spans at home.
    pub(super) home: Vec<Span>,
    pub(super) origin: Origin,
    pub(super) digest: Option<Digest>,
    pub(super) place: Place,
    /// Pool of the peer GPU that holds the copy, if any.
    pub(super) peer: Option<Arc<GpuPool>>,
}

/// Source of the bytes.
#[derive(Debug)]
pub(super) enum Origin {
    Memory(Vec<Span>),
    File(Arc<SealedFile>, Arc<HostPool>),
}

impl StoredCopy {
    /// Marks the copy as retained: the bytes are on their GPU too.
    pub(crate) fn set_retained(&self) {
        self.count_retained(true);
    }

    /// Marks the copy as needed: the bytes are nowhere else.
    pub(crate) fn set_needed(&self) {
        self.count_retained(false);
    }

    /// Returns the pinned host memory of the copy, if it is there.
    pub(crate) fn host_block(&self) -> Option<&Arc<HostBlock>> {
        match &self.stored {
            CopyStorage::Host(block) => Some(block),
            CopyStorage::Peer(_) | CopyStorage::File(..) => None,
        }
    }

    /// Moves the copy to a file, read back through memory of `host`. Returns the previous storage.
    pub(crate) fn demote(&mut self, file: SealedFile, host: &Arc<HostPool>) -> impl Sized + use<> {
        std::mem::replace(&mut self.stored, CopyStorage::File(Arc::new(file), host.clone()))
    }

    fn count_retained(&self, retained: bool) {
        if let CopyStorage::Host(block) = &self.stored {
            block.set_retained(retained);
        }
    }

    /// Returns the data for copying the bytes back to a pool in which their extent is mapped; `place` is the location in the extent's
    /// record.
    pub(crate) fn back(&self, core: &Core, place: Place) -> Result<Return, PoolError> {
        let (origin, peer) = match &self.stored {
            CopyStorage::Host(block) => {
                let copies = packed(core, &self.ranges, |at, size| block.span(at, size))?;
                (Origin::Memory(copies), None)
            }
            CopyStorage::Peer(part) => {
                let spans = part.spans()?;
                let copies = packed(core, &self.ranges, |at, size| spans.part(at, size))?;
                (Origin::Memory(copies), Some(part.pool().clone()))
            }
            CopyStorage::File(file, host) => (Origin::File(file.clone(), host.clone()), None),
        };
        Ok(Return { home: home(core, &self.ranges)?, origin, digest: self.digest, place, peer })
    }
}

impl StoredCopy {
    /// Creates a copy from bytes in a host block and their digest.
    pub(super) fn of_block(block: HostBlock, ranges: Vec<HomeRange>, digest: Digest) -> StoredCopy {
        StoredCopy { stored: CopyStorage::Host(Arc::new(block)), ranges, digest: Some(digest) }
    }

    /// Appends the parts of the copy that hold bytes of a home range, which is `at` bytes from the reader's start. `None` if the copy is
    /// not in host memory.
    pub(crate) fn host_parts(&self, wanted: HomeRange, at: Bytes, parts: &mut Vec<HostPart>) -> Option<()> {
        let block = self.host_block()?;
        let (wanted_end, mut packed) = (wanted.offset.saturating_add(wanted.size), Bytes::ZERO);
        for range in &self.ranges {
            let start = range.offset.max(wanted.offset);
            let end = range.offset.saturating_add(range.size).min(wanted_end);
            if start < end {
                parts.push(HostPart {
                    block: block.clone(),
                    from: packed.saturating_add(start.saturating_sub(range.offset)),
                    to: at.saturating_add(start.saturating_sub(wanted.offset)),
                    size: end.saturating_sub(start),
                });
            }
            packed = packed.saturating_add(range.size);
        }
        Some(())
    }

    /// Returns the home ranges of the copy.
    pub(crate) fn ranges(&self) -> &[HomeRange] {
        &self.ranges
    }

    /// Returns the size of the copy.
    pub(crate) fn size(&self) -> Bytes {
        self.ranges.iter().map(|range| range.size).sum()
    }

    /// Returns the digest of the bytes, if one was taken.
    pub(crate) fn digest(&self) -> Option<Digest> {
        self.digest
    }
}

/// Consecutive bytes of a copy in host memory, and their place in a reader's buffer. It keeps the memory of the copy.
#[derive(Debug)]
pub(crate) struct HostPart {
    block: Arc<HostBlock>,
    from: Bytes,
    to: Bytes,
    size: Bytes,
}

impl HostPart {
    /// Copies the bytes into the reader's buffer; `None` beyond its end.
    pub(crate) fn read(&self, into: &mut [u8]) -> Option<()> {
        let range = |start: Bytes| {
            let start = usize::try_from(start.get()).ok()?;
            Some(start..start.checked_add(usize::try_from(self.size.get()).ok()?)?)
        };
        into.get_mut(range(self.to)?)?.copy_from_slice(self.block.as_slice().get(range(self.from)?)?);
        Some(())
    }
}

impl Return {
    /// Returns the number of bytes to copy back.
    pub(crate) fn size(&self) -> Bytes {
        self.home.iter().map(Span::size).sum()
    }
}

/// Pairs each home range with its span in the packed copy.
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

/// Returns the home span of each range.
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
