//! Copies that are waited for: what a lost relay did not bring is copied again, and on demand the bytes are compared.

use std::sync::Arc;

use glake_device::owned::{self, DeviceSet, Pages, Registration, Span};
use glake_units::Bytes;
use parking_lot::Mutex;

use super::parts::Parts;
use super::{CopyOptions, Engine, Priority, UserStream};
use crate::{Result, TransferError};

/// Pinned memory that two sides are compared in, made when first needed.
#[derive(Debug, Default)]
pub(super) struct Scratch(Mutex<Option<[Arc<Registration>; 2]>>);

/// What is compared at a time.
const PIECE: Bytes = Bytes::mib(4);

impl Engine {
    /// Copies, and returns when the bytes are there. With [`CopyOptions::verify`] both sides are compared; what differs is
    /// copied again over the user's stream.
    ///
    /// # Errors
    /// As [`Engine::copy`], but for this copy's own losses: those are made good. [`TransferError::Damaged`] where bytes differ
    /// still.
    pub fn copy_now(&self, to: &Span, from: &Span, on: UserStream, options: CopyOptions) -> Result<()> {
        let late = options.priority == Priority::Background && self.copy_late(to, from, on)?;
        let parts = if late { None } else { self.enqueue(to, from, on, options.priority)? };
        self.driver.stream_synchronize(on.device, on.raw)?;
        if let Some(parts) = parts {
            self.repair(&parts, to, from, on)?;
        }
        if options.verify {
            self.verify(to, from, on)?;
        }
        Ok(())
    }

    /// Copies again what lost relays carried.
    pub(super) fn repair(&self, parts: &Parts, to: &Span, from: &Span, on: UserStream) -> Result<()> {
        // Where it has become another stream's, all of this copy's work on it was seen done.
        let lease = parts.lease.upgrade().filter(|lease| lease.is_of_stream(on.id));
        let mut state = lease.as_ref().map(|lease| (lease, lease.state.lock()));
        let mut lost = self.relays.fenced().intersection(parts.used);
        let mut unknown = parts.used.without(lost);
        if let Some((lease, state)) = &mut state
            && state.owner == Some(on.id)
        {
            // Tells what else has arrived, too, so that the next copy need not ask.
            lost = lost.union(state.poll(self, lease, DeviceSet::EMPTY).intersection(parts.used));
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

    /// Compares both sides of a copy that has arrived.
    pub(super) fn verify(&self, to: &Span, from: &Span, on: UserStream) -> Result<()> {
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
        let (mut offset, mut damaged) = (Bytes::ZERO, Bytes::ZERO);
        while offset < to.size() {
            let size = PIECE.min(to.size().saturating_sub(offset));
            let (Some(to), Some(from)) = (to.part(offset, size), from.part(offset, size)) else { break };
            if !self.is_equal(sides, &to, &from, on)? {
                tracing::warn!(target: "glake::transfer", %offset, %size, "bytes of a copy differ: copied again");
                self.native(&to, &from, on)?;
                self.driver.stream_synchronize(on.device, on.raw)?;
                if !self.is_equal(sides, &to, &from, on)? {
                    damaged = damaged.saturating_add(size);
                }
            }
            offset = offset.saturating_add(size);
        }
        match damaged {
            Bytes::ZERO => Ok(()),
            bytes => Err(TransferError::Damaged { bytes, size: to.size() }),
        }
    }

    fn is_equal(
        &self,
        sides: &[Arc<Registration>; 2],
        to: &Span,
        from: &Span,
        on: UserStream,
    ) -> Result<bool> {
        let mut read = [false; 2];
        for (index, (side, span)) in sides.iter().zip([to, from]).enumerate() {
            let Some(into) = Span::pinned(side, Bytes::ZERO, span.size()) else { return Ok(false) };
            match span.device() {
                Some(_) => owned::copy(&*self.driver, on.device, on.raw, &into, span)?,
                None => span.copy_on_host(&into)?,
            }
            read[index] = true;
        }
        self.driver.stream_synchronize(on.device, on.raw)?;
        let length = usize::try_from(to.size().get()).unwrap_or(usize::MAX);
        let [a, b] = [&sides[0], &sides[1]].map(|side| side.as_slice().get(..length));
        Ok(read == [true; 2] && a.is_some() && a == b)
    }
}
