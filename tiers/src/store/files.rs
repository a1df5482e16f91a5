//! Transfer of an extent's bytes to a file and back, in parts that pass through slots of a ring. Reads check every page.
//!
//! ```text
//! GPU      [ part 0 ][ part 1 ][ part 2 ]
//! file               [ part 0 ][ part 1 ][ part 2 ][ seal: header, fsync, rename ]
//! ```
//!
//! Invariant: a slot returns to its ring when the copy through it has completed. If that is uncertain, the slot is removed from the ring.

use std::collections::VecDeque;
use std::sync::Arc;

use glake_device::owned::Span;
use glake_units::Bytes;

use crate::{
    FileError, FileTier, HostBlock, HostError, HostPool, MoveError, Mover, Moving, PAGE, Ring, RingSlot,
    SealedFile,
};

/// Preferred size of a slot: large enough for copies at full speed.
const MAX_SLOT_BYTES: Bytes = Bytes::mib(16);
/// Number of slots: two for each extent in transit.
const SLOTS: usize = 6;
/// Parts of an extent in transit: while one is written or read, another is copied.
const MAX_SLOTS_AHEAD: usize = 2;

/// Creates a ring of slots of whole pages, with smaller slots if there is too little memory.
pub(super) fn ring(host: &Arc<HostPool>) -> Result<Ring, HostError> {
    let mut slot = MAX_SLOT_BYTES;
    loop {
        match host.ring(slot, SLOTS) {
            Err(error) if error.is_shortage() && slot > PAGE => slot = Bytes::new(slot.get() / 2),
            answer => return answer,
        }
    }
}

/// Slot whose bytes are being copied.
#[derive(Debug)]
pub(super) struct Part {
    slot: RingSlot,
    size: Bytes,
    moving: Box<dyn Moving>,
}

/// Parts of one extent in transit, in the order of its bytes.
#[derive(Debug)]
pub(super) struct Parts<'a> {
    ring: &'a Ring,
    mover: &'a dyn Mover,
    begun: VecDeque<Part>,
}

/// Reason for a transfer to stop.
#[derive(Debug)]
pub(super) enum Halt {
    Host(HostError),
    Move(MoveError),
}

impl<'a> Parts<'a> {
    pub(super) fn new(ring: &'a Ring, mover: &'a dyn Mover) -> Self {
        Parts { ring, mover, begun: VecDeque::new() }
    }

    /// Returns a slot for the next part; `None`: finish a part first.
    pub(super) fn slot(&self) -> Result<Option<RingSlot>, Halt> {
        match self.begun.len() {
            // A thread waits for a slot only while it holds none, so that no deadlock is possible.
            0 => self.ring.next().map(Some).ok_or(Halt::Host(HostError::Spent { slot: self.ring.slot() })),
            MAX_SLOTS_AHEAD.. => Ok(None),
            _ => Ok(self.ring.try_next()),
        }
    }

    /// Begins to copy between a slot and spans at home of `size` bytes in total. `pair` arranges source and destination.
    pub(super) fn begin(
        &mut self,
        slot: RingSlot,
        home: Vec<Span>,
        pair: impl Fn(Span, Span) -> (Span, Span),
    ) -> Result<(), Halt> {
        let mut at = Bytes::ZERO;
        let pairs = home.into_iter().filter_map(|home| {
            let staged = slot.span(at, home.size());
            at = at.saturating_add(home.size());
            staged.map(|staged| pair(staged, home))
        });
        let pairs: Vec<(Span, Span)> = pairs.collect();
        match self.mover.enqueue(&pairs) {
            Ok(moving) => {
                self.begun.push_back(Part { slot, size: at, moving });
                Ok(())
            }
            Err(error) => {
                drop(pairs);
                slot.give_up();
                Err(Halt::Move(error))
            }
        }
    }

    /// Waits for the first part. Returns its slot and the number of its valid bytes; `None`: none is in transit.
    pub(super) fn finish(&mut self) -> Result<Option<(RingSlot, Bytes)>, Halt> {
        let Some(Part { slot, size, moving }) = self.begun.pop_front() else { return Ok(None) };
        match moving.wait() {
            Ok(()) => Ok(Some((slot, size))),
            Err(error) => {
                slot.give_up();
                Err(Halt::Move(error))
            }
        }
    }
}

impl Drop for Parts<'_> {
    fn drop(&mut self) {
        // Transfer given up: its slots return to the ring once their copies have completed.
        while !self.begun.is_empty() {
            let _ = self.finish();
        }
    }
}

/// Returns the spans between two offsets of adjacent spans.
pub(super) fn between(home: &[Span], from: Bytes, to: Bytes) -> Vec<Span> {
    let mut at = Bytes::ZERO;
    let part = |span: &Span| {
        let (begin, end) = (at, at.saturating_add(span.size()));
        at = end;
        let (first, last) = (begin.max(from), end.min(to));
        let size = last.checked_sub(first).filter(|size| !size.is_zero())?;
        span.part(first.saturating_sub(begin), size)
    };
    home.iter().filter_map(part).collect()
}

/// Copies a file's bytes to these spans, whose total size must match. After a failure the contents of the spans are undefined.
pub(super) fn read(
    file: &SealedFile,
    ring: &Ring,
    mover: &dyn Mover,
    home: &[Span],
) -> Result<(), WriteError> {
    let size = file.length();
    let (mut parts, mut at) = (Parts::new(ring, mover), Bytes::ZERO);
    loop {
        while at < size
            && let Some(mut slot) = parts.slot()?
        {
            let end = at.saturating_add(ring.slot()).min(size);
            fill(file, &mut slot, at, end.saturating_sub(at))?;
            parts.begin(slot, between(home, at, end), |staged, home| (home, staged))?;
            at = end;
        }
        if parts.finish()?.is_none() {
            return Ok(());
        }
    }
}

fn fill(file: &SealedFile, slot: &mut RingSlot, from: Bytes, size: Bytes) -> Result<(), WriteError> {
    let length = usize::try_from(size.get()).unwrap_or(usize::MAX);
    let whole = Bytes::new(slot.as_slice().len() as u64);
    // A completed copy holds no span, so that only this thread uses the slot.
    let bytes = slot.as_mut_slice().and_then(|bytes| bytes.get_mut(..length));
    let bytes = bytes.ok_or(Halt::Host(crate::HostError::Spent { slot: whole }))?;
    Ok(file.read(from, bytes)?)
}

/// Bytes of a copy written between two checks for cancellation.
const PIECE_BYTES: usize = 16 << 20;

/// Reason for a failed write. The file is removed.
#[derive(Debug)]
pub(super) enum WriteError {
    Halt(Halt),
    File(FileError),
}

impl From<Halt> for WriteError {
    fn from(halt: Halt) -> Self {
        WriteError::Halt(halt)
    }
}

impl From<FileError> for WriteError {
    fn from(error: FileError) -> Self {
        WriteError::File(error)
    }
}

/// Copies the contents of these spans, in order, to a new file.
pub(super) fn write(
    files: &FileTier,
    ring: &Ring,
    mover: &dyn Mover,
    home: &[Span],
) -> Result<SealedFile, WriteError> {
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
    for piece in block.as_slice().chunks(PIECE_BYTES) {
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
