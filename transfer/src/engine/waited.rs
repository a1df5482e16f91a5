//! Copies that the caller waits for. Parts lost with a relay are copied again, and the bytes are compared on request.

use std::sync::Arc;

use glake_device::owned::{DeviceSet, Span};

use super::verify::Verifier;
use super::{CopyOptions, UserStream};
use crate::Result;
use crate::copies::native::NativeCopies;
use crate::copies::parts::Parts;
use crate::copies::span::SpanCopies;
use crate::links::contexts::Contexts;
use crate::links::relays::Relays;
use crate::traffic::Traffic;

/// Blocking copies of one engine.
#[derive(Debug)]
pub(crate) struct WaitedCopies {
    pub(crate) contexts: Arc<Contexts>,
    pub(crate) relays: Arc<Relays>,
    pub(crate) native: Arc<NativeCopies>,
    pub(crate) traffic: Arc<Traffic>,
    pub(crate) spans: Arc<SpanCopies>,
    pub(crate) verifier: Arc<Verifier>,
}

impl WaitedCopies {
    /// Copies and blocks until the bytes have arrived.
    ///
    /// # Errors
    /// As [`crate::Engine::copy_blocking`].
    pub(crate) fn copy(&self, to: &Span, from: &Span, on: UserStream, options: CopyOptions) -> Result<()> {
        let parts = self.spans.enqueue(to, from, on, options.priority)?;
        self.contexts.synchronize(on)?;
        if let Some(parts) = parts {
            self.repair(&parts, to, from, on)?;
        }
        if options.verify {
            self.verifier.verify(&[(to.clone(), from.clone())], on)?;
        }
        Ok(())
    }

    /// Copies the parts of lost relays again.
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
            lost =
                lost.union(state.poll(lane_set, DeviceSet::EMPTY, &*self.traffic).intersection(parts.used));
            unknown = state.busy().intersection(parts.used).without(lost);
        }
        lost = lost.union(parts.lost(unknown)?);
        for relay in lost.iter() {
            if let Some((_, state)) = &mut state {
                state.make_good(relay, on.id, parts.serial);
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
                self.native.copy(&to, &from, on)?;
            }
        }
        self.contexts.synchronize(on)
    }
}
