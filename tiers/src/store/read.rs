//! Reading of an extent's bytes from a file, with every page checked.

use glake_device::owned::Span;
use glake_units::Bytes;

use super::slots::{Halt, Parts, between};
use super::write::Unwritten;
use crate::{Mover, Ring, RingSlot, SealedFile};

/// Copies a file's bytes to these spans, whose total size must match. After a failure the contents of the spans are undefined.
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
    // A completed copy holds no span, so that only this thread uses the slot.
    let bytes = slot.as_mut_slice().and_then(|bytes| bytes.get_mut(..length));
    let bytes = bytes.ok_or(Halt::Host(crate::HostError::Spent { slot: whole }))?;
    Ok(file.read(from, bytes)?)
}
