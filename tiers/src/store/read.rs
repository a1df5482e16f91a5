//! An extent's bytes out of a file, every page checked.

use glake_device::owned::Span;
use glake_units::Bytes;

use super::slots::{Halt, Parts, between};
use super::write::Unwritten;
use crate::{Mover, Ring, RingSlot, SealedFile};

/// Copies a file's bytes to these spans, which are as many side by side. After a failure the spans hold anything.
pub(super) fn read(
    file: &SealedFile,
    ring: &Ring,
    mover: &dyn Mover,
    home: &[Span],
) -> Result<(), Unwritten> {
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

fn fill(file: &SealedFile, slot: &mut RingSlot, from: Bytes, size: Bytes) -> Result<(), Unwritten> {
    let length = usize::try_from(size.get()).unwrap_or(usize::MAX);
    let whole = Bytes::new(slot.as_slice().len() as u64);
    // A copy that is done holds no span, so the slot is this thread's alone.
    let bytes = slot.as_mut_slice().and_then(|bytes| bytes.get_mut(..length));
    let bytes = bytes.ok_or(Halt::Host(crate::HostError::Spent { slot: whole }))?;
    Ok(file.read(from, bytes)?)
}
