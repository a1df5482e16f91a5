//! An extent's bytes into a file: from its GPU, or from a copy in the host's memory.
//!
//! ```text
//! GPU      [ part 0 ][ part 1 ][ part 2 ]
//! file               [ part 0 ][ part 1 ][ part 2 ][ seal: header, fsync, rename ]
//! ```

use glake_device::owned::Span;
use glake_units::Bytes;

use super::slots::{Halt, Parts, between};
use crate::{FileError, FileTier, HostBlock, Mover, Ring, SealedFile};

/// How much of a copy is written before it is asked again whether that goes on.
const PIECE: usize = 16 << 20;

/// Why there is no file. Nothing is left of it.
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

/// Copies what these spans hold, side by side, to a file of their own.
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

/// Copies what a block holds to a file of its own, while it is to go on: asked before each piece, and after the last. `None`: it was not, and
/// nothing is left of the file.
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
    // What it takes to be on the disk is longer than a piece.
    if !keep_going() {
        return Ok(None);
    }
    Ok(Some(draft.seal()?))
}
