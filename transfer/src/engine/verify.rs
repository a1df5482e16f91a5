//! Copies that the caller waits for, and verification of completed copies: lost parts are copied again, and on request both sides are compared
//! and differing parts copied again.

use std::sync::Arc;

use glake_device::PointerKind;
use glake_device::owned::{DeviceSet, Pages, Registration, Span};
use glake_units::Bytes;
use parking_lot::Mutex;

use crate::copies::handle::Parts;
use crate::copies::shared::{Shared, check_sizes};
use crate::copies::span::SpanCopies;
use crate::{CopyOptions, Result, TransferError, UserStream};

/// Bytes compared at a time.
const PIECE: Bytes = Bytes::mib(4);

/// Blocking copies of one engine.
#[derive(Debug)]
pub(crate) struct BlockingCopies {
    shared: Arc<Shared>,
    spans: Arc<SpanCopies>,
    /// Pinned buffers for the two sides of a comparison, allocated on first use.
    scratch: Mutex<Option<[Arc<Registration>; 2]>>,
}

impl BlockingCopies {
    pub(crate) fn new(shared: &Arc<Shared>, spans: &Arc<SpanCopies>) -> BlockingCopies {
        BlockingCopies { shared: shared.clone(), spans: spans.clone(), scratch: Mutex::default() }
    }

    /// Copies and blocks until the bytes have arrived.
    ///
    /// # Errors
    /// As [`crate::Engine::copy_blocking`].
    pub(crate) fn copy(&self, to: &Span, from: &Span, on: UserStream, options: CopyOptions) -> Result<()> {
        let parts = self.spans.enqueue(to, from, on, options.priority)?;
        self.shared.contexts.synchronize(on)?;
        if let Some(parts) = parts {
            self.repair(&parts, to, from, on)?;
        }
        if options.verify {
            self.verify(&[(to.clone(), from.clone())], on)?;
        }
        Ok(())
    }

    /// Copies the parts of lost relays again.
    pub(crate) fn repair(&self, parts: &Parts, to: &Span, from: &Span, on: UserStream) -> Result<()> {
        // Where it has become another stream's, all of this copy's work on it was seen done.
        let lane_set = parts.lane_set.upgrade().filter(|lane_set| lane_set.is_of_stream(on.id));
        let mut state = lane_set.as_ref().map(|lane_set| (lane_set, lane_set.state.lock()));
        let mut lost = self.shared.links.relays().fenced().intersection(parts.used);
        let mut unknown = parts.used.without(lost);
        if let Some((lane_set, state)) = &mut state
            && state.owner == Some(on.id)
        {
            // Tells what else has arrived, too, so that the next copy need not ask.
            lost = lost.union(
                state.poll(lane_set, DeviceSet::EMPTY, &*self.shared.traffic).intersection(parts.used),
            );
            unknown = state.busy().intersection(parts.used).without(lost);
        }
        lost = lost.union(parts.lost(unknown)?);
        for relay in lost.iter() {
            if let Some((_, state)) = &mut state {
                state.make_good(relay, on.id, parts.serial);
            }
            self.shared.links.relays().fence(relay);
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
                self.shared.native.copy(&to, &from, on)?;
            }
        }
        self.shared.contexts.synchronize(on)
    }

    /// Compares both sides of completed copies, whatever paths they took, and copies differing parts again with the driver. Skips copies
    /// whose ends overlap: the source no longer exists.
    ///
    /// Both ends of a pair must have the same size and must not be accessed during the call. Blocks until all work of the stream has
    /// completed.
    ///
    /// # Errors
    /// [`TransferError::SizesDiffer`]; [`TransferError::Damaged`] if bytes differ after the second copy; the driver's errors.
    pub(crate) fn verify(&self, copies: &[(Span, Span)], on: UserStream) -> Result<()> {
        copies.iter().try_for_each(|(to, from)| check_sizes(to, from))?;
        let mut scratch = self.scratch.lock();
        let sides = match &mut *scratch {
            Some(sides) => sides,
            empty => {
                let side = || -> Result<Arc<Registration>> {
                    Ok(Arc::new(Registration::new(self.shared.contexts.program(), Pages::new(PIECE, 1)?)?))
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

    /// Copies differing parts again. Returns the number of bytes in parts that still differ.
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
            self.shared.native.copy_anyhow(to, from, on)?;
        }
        self.shared.contexts.synchronize(on)?;
        Ok(self.unequal(sides, &again, on)?.iter().map(|(to, _)| to.size()).sum())
    }

    /// Returns the pairs of a batch that differ. The batch must fit into the scratch buffers.
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
                            self.shared.native.copy_anyhow(&into, span, on)?;
                        }
                    }
                }
            }
            offset = offset.saturating_add(to.size());
        }
        self.shared.contexts.synchronize(on)?;
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
}

/// Returns whether two spans overlap.
fn overlap(one: &Span, other: &Span) -> bool {
    one.start().0.abs_diff(other.start().0) < one.size().get()
}

#[cfg(test)]
mod tests {
    use glake_device::owned::{CompletionEvents, OwnedStream};
    use glake_device::{DeviceId, Driver};
    use glake_sim::{SimOptions, SimTopology, Simulator};

    use super::*;
    use crate::EngineOptions;

    #[test]
    fn what_differs_is_copied_again_and_what_overlaps_is_passed_over() {
        let size = Bytes::mib(10);
        let topology = SimTopology::uniform(1, Bytes::mib(64));
        let sim = Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap();
        let driver: Arc<dyn Driver> = Arc::new(sim);
        let shared = Shared::new(CompletionEvents::new(driver.clone()), &EngineOptions::default()).unwrap();
        let (contexts, ledger) = (&shared.contexts, &shared.ledger);
        let verifier = BlockingCopies::new(&shared, &Arc::new(SpanCopies::new(&shared, false)));
        let stream = OwnedStream::new(&driver, DeviceId(0)).unwrap();
        let on = UserStream::of(&*driver, DeviceId(0), stream.id()).unwrap();
        let memory = |byte| {
            let pages = Pages::new(size, 1).unwrap();
            let mut memory = Registration::new(contexts.program(), pages).unwrap();
            memory.as_mut_slice().fill(byte);
            Arc::new(memory)
        };
        let (source, target) = (memory(1), memory(2));
        let whole = |of: &Arc<Registration>| Span::pinned(of, Bytes::ZERO, size).unwrap();
        verifier.verify(&[(whole(&target), whole(&source))], on).unwrap();
        assert!(target.as_slice().iter().all(|byte| *byte == 1));
        let copied = ledger.statistics().native_bytes;
        assert_eq!(copied, size);
        verifier.verify(&[(whole(&target), whole(&source))], on).unwrap();
        assert_eq!(ledger.statistics().native_bytes, copied, "nothing differed");
        let half = Bytes::mib(4);
        let pair = |at| whole(&target).part(at, half).unwrap();
        verifier.verify(&[(pair(Bytes::ZERO), pair(Bytes::mib(1)))], on).unwrap();
        let differ = verifier.verify(&[(pair(Bytes::ZERO), whole(&source))], on);
        assert!(matches!(differ, Err(TransferError::SizesDiffer { .. })));
    }
}
