//! Writing of an extent's bytes to a file: from its GPU, or from a copy in host memory.
//!
//! ```text
//! GPU      [ part 0 ][ part 1 ][ part 2 ]
//! file               [ part 0 ][ part 1 ][ part 2 ][ seal: header, fsync, rename ]
//! ```

use glake_device::owned::Span;
use glake_units::Bytes;

use super::slots::{Halt, Parts, between};
use crate::{FileError, FileTier, HostBlock, Mover, Ring, SealedFile};

/// Bytes of a copy written between two checks for cancellation.
const PIECE: usize = 16 << 20;

/// Reason for a failed write. The file is removed.
#[derive(Debug)]
pub(super) enum Unwritten {
    Halt(Halt),
    File(FileError),
}

impl From<Halt> for Unwritten {
    fn from(halt: Halt) -> Self {
        Unwritten::Halt(halt)
    }
}

impl From<FileError> for Unwritten {
    fn from(error: FileError) -> Self {
        Unwritten::File(error)
    }
}

/// Copies the contents of these spans, in order, to a new file.
pub(super) fn write(
    files: &FileTier,
    ring: &Ring,
    mover: &dyn Mover,
    home: &[Span],
) -> Result<SealedFile, Unwritten> {
    let size = home.iter().map(Span::size).sum();
    let mut draft = files.create(size)?;
    let (mut parts, mut at) = (Parts::new(ring, mover), Bytes::ZERO);
    loop {
        while at < size
            && let Some(slot) = parts.slot()?
        {
            let end = at.saturating_add(ring.slot()).min(size);
            parts.begin(slot, between(home, at, end), |staged, home| (staged, home))?;
            at = end;
        }
        let Some((slot, size)) = parts.finish()? else { break };
        let length = usize::try_from(size.get()).unwrap_or(usize::MAX);
        draft.write(slot.as_slice().get(..length).unwrap_or(&[]))?;
    }
    Ok(draft.seal()?)
}

/// Copies the contents of a block to a new file while `keep_going` returns true: called before each piece, and after the last. Returns
/// `None` if cancelled; the file is removed.
pub(crate) fn write_block(
    files: &FileTier,
    block: &HostBlock,
    keep_going: &dyn Fn() -> bool,
) -> Result<Option<SealedFile>, FileError> {
    let mut draft = files.create(block.size())?;
    for piece in block.as_slice().chunks(PIECE) {
        if !keep_going() {
            return Ok(None);
        }
        draft.write(piece)?;
    }
    // Flushing takes longer than writing a piece.
    if !keep_going() {
        return Ok(None);
    }
    Ok(Some(draft.seal()?))
}
