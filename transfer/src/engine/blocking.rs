//! Copies that are waited for: what a lost relay did not bring is copied again, and on demand the bytes are compared.

use std::sync::Arc;

use glake_device::PointerKind;
use glake_device::owned::{self, DeviceSet, OwnedStream, Pages, Registration, Span};
use glake_units::Bytes;
use parking_lot::Mutex;

use crate::engine::parts::Parts;
use crate::{CopyOptions, Engine, Priority, UserStream};
use crate::{Result, TransferError};

/// Pinned memory that two sides are compared in, made when first needed.
#[derive(Debug, Default)]
pub(crate) struct Scratch(Mutex<Option<[Arc<Registration>; 2]>>);

/// What is compared at a time.
const PIECE: Bytes = Bytes::mib(4);

impl Engine {
    /// Copies, and returns when the bytes are there. With [`CopyOptions::verify`] both sides are compared; what differs is
    /// copied again over the user's stream.
    ///
    /// # Errors
    /// As [`Engine::copy`], but for this copy's own losses: those are made good. [`TransferError::Damaged`] where bytes differ
    /// still.
    pub fn copy_blocking(&self, to: &Span, from: &Span, on: UserStream, options: CopyOptions) -> Result<()> {
        let late = options.priority == Priority::Background && self.copy_deferred(to, from, on)?;
        let parts = if late { None } else { self.enqueue(to, from, on, options.priority)? };
        self.driver.stream_synchronize(on.device, on.raw)?;
        if let Some(parts) = parts {
            self.repair(&parts, to, from, on)?;
        }
        if options.verify {
            self.verify(&[(to.clone(), from.clone())], on)?;
        }
        Ok(())
    }

    /// Copies again what lost relays carried.
    pub(crate) fn repair(&self, parts: &Parts, to: &Span, from: &Span, on: UserStream) -> Result<()> {
        // Where it has become another stream's, all of this copy's work on it was seen done.
        let lane_set = parts.lane_set.upgrade().filter(|lane_set| lane_set.is_of_stream(on.id));
        let mut state = lane_set.as_ref().map(|lane_set| (lane_set, lane_set.state.lock()));
        let mut lost = self.relays.fenced().intersection(parts.used);
        let mut unknown = parts.used.without(lost);
        if let Some((lane_set, state)) = &mut state
            && state.owner == Some(on.id)
        {
            // Tells what else has arrived, too, so that the next copy need not ask.
            lost = lost.union(state.poll(self, lane_set, DeviceSet::EMPTY).intersection(parts.used));
            unknown = state.busy().intersection(parts.used).without(lost);
        }
        lost = lost.union(parts.lost(unknown)?);
        for relay in lost.iter() {
            if let Some((_, state)) = &mut state {
                state.make_good(self, relay, on.id, parts.serial);
            }
            self.relays.fence(relay);
        }
        drop(state);
        if lost.is_empty() {
            return Ok(());
        }
        for share in
            parts.shares.iter().flat_map(|shares| shares.iter()).filter(|share| lost.contains(share.relay))
        {
            let ends = (to.part(share.offset, share.size), from.part(share.offset, share.size));
            if let (Some(to), Some(from)) = ends {
                self.native(&to, &from, on)?;
            }
        }
        Ok(self.driver.stream_synchronize(on.device, on.raw)?)
    }

    /// Compares both sides of copies that have arrived, whatever way they went; what differs is copied again by the driver. A copy
    /// whose ends overlap is passed over: its source is no longer there.
    ///
    /// The ends of each pair are of one size, and nothing touches them meanwhile. Waits for all work of the stream.
    ///
    /// # Errors
    /// [`TransferError::SizesDiffer`]; [`TransferError::Damaged`] where bytes differ after the second copy too; what the driver answers.
    pub fn verify(&self, copies: &[(Span, Span)], on: UserStream) -> Result<()> {
        let differ = copies.iter().find(|(to, from)| to.size() != from.size());
        if let Some((to, from)) = differ {
            return Err(TransferError::SizesDiffer { to: to.size(), from: from.size() });
        }
        let mut scratch = self.scratch.0.lock();
        let sides = match &mut *scratch {
            Some(sides) => sides,
            empty => {
                let side = || -> Result<Arc<Registration>> {
                    Ok(Arc::new(Registration::new(&self.epochs, Pages::new(PIECE, 1)?)?))
                };
                empty.insert([side()?, side()?])
            }
        };
        let (mut batch, mut filled) = (Vec::new(), Bytes::ZERO);
        let (mut damaged, mut all) = (Bytes::ZERO, Bytes::ZERO);
        for (to, from) in copies.iter().filter(|(to, from)| !overlap(to, from)) {
            let (mut offset, whole) = (Bytes::ZERO, to.size());
            all = all.saturating_add(whole);
            while offset < whole {
                let size = PIECE.saturating_sub(filled).min(whole.saturating_sub(offset));
                let (Some(to), Some(from)) = (to.part(offset, size), from.part(offset, size)) else { break };
                batch.push((to, from));
                (offset, filled) = (offset.saturating_add(size), filled.saturating_add(size));
                if filled == PIECE {
                    damaged = damaged.saturating_add(self.made_equal(sides, &batch, on)?);
                    batch.clear();
                    filled = Bytes::ZERO;
                }
            }
        }
        damaged = damaged.saturating_add(self.made_equal(sides, &batch, on)?);
        match damaged {
            Bytes::ZERO => Ok(()),
            bytes => Err(TransferError::Damaged { bytes, size: all }),
        }
    }

    /// Copies what differs again; how many bytes lie in parts that differ still.
    fn made_equal(
        &self,
        sides: &[Arc<Registration>; 2],
        batch: &[(Span, Span)],
        on: UserStream,
    ) -> Result<Bytes> {
        let again = self.unequal(sides, batch, on)?;
        if again.is_empty() {
            return Ok(Bytes::ZERO);
        }
        for (to, from) in &again {
            tracing::warn!(
                target: "glake::transfer",
                to = %to.start(), from = %from.start(), size = %to.size(), "bytes of a copy differ: copied again"
            );
            self.copy_anyhow(to, from, on)?;
        }
        self.driver.stream_synchronize(on.device, on.raw)?;
        Ok(self.unequal(sides, &again, on)?.iter().map(|(to, _)| to.size()).sum())
    }

    /// Those of the pairs, which fit into the scratch together, that differ.
    fn unequal(
        &self,
        sides: &[Arc<Registration>; 2],
        batch: &[(Span, Span)],
        on: UserStream,
    ) -> Result<Vec<(Span, Span)>> {
        let mut offset = Bytes::ZERO;
        for (to, from) in batch {
            for (side, span) in sides.iter().zip([to, from]) {
                if let Some(into) = Span::pinned(side, offset, span.size()) {
                    match span.kind() {
                        PointerKind::Pinned | PointerKind::Pageable => span.copy_on_host(&into)?,
                        PointerKind::Device { .. } | PointerKind::Managed => {
                            self.copy_anyhow(&into, span, on)?;
                        }
                    }
                }
            }
            offset = offset.saturating_add(to.size());
        }
        self.driver.stream_synchronize(on.device, on.raw)?;
        let [to, from] = [&sides[0], &sides[1]].map(|side| side.as_slice());
        let mut start = 0;
        let mut differ = Vec::new();
        for pair in batch {
            let end = start + usize::try_from(pair.0.size().get()).unwrap_or(usize::MAX);
            let (to, from) = (to.get(start..end), from.get(start..end));
            if to.is_none() || to != from {
                differ.push(pair.clone());
            }
            start = end;
        }
        Ok(differ)
    }

    /// One copy of the driver's, by a GPU that may touch both ends: pool memory is touched by those that it was opened to alone. That of
    /// another GPU than the stream's is there when this returns.
    fn copy_anyhow(&self, to: &Span, from: &Span, on: UserStream) -> Result<()> {
        let reach = |span: &Span| match span.kind() {
            PointerKind::Device { mapped: true, .. } => span.reach(),
            _ => DeviceSet::ALL,
        };
        let may = reach(to).intersection(reach(from));
        match may.iter().next().filter(|_| !may.contains(on.device)) {
            None => self.native(to, from, on),
            Some(device) => {
                let stream = OwnedStream::new(&self.driver, device)?;
                owned::copy(&*self.driver, device, stream.id(), to, from)?;
                self.counters.native(to.size());
                Ok(stream.synchronize()?)
            }
        }
    }
}

/// Whether two ranges have bytes in common.
fn overlap(one: &Span, other: &Span) -> bool {
    one.start().0.abs_diff(other.start().0) < one.size().get()
}
