//! Copies made by the driver alone, on the stream of the request.

use std::sync::Arc;

use glake_device::PointerKind;
use glake_device::owned::{self, DeviceSet, OwnedStream, Piece, Span, StreamRef};

use crate::links::Contexts;
use crate::links::ledger::Ledger;
use crate::{Result, UserStream};

/// Number of blocks passed to the driver at a time.
const BATCH: usize = 256;

/// Copies that are not split, of one engine.
#[derive(Debug)]
pub(crate) struct NativeCopies {
    contexts: Arc<Contexts>,
    ledger: Arc<Ledger>,
}

impl NativeCopies {
    pub(crate) fn new(contexts: &Arc<Contexts>, ledger: &Arc<Ledger>) -> NativeCopies {
        NativeCopies { contexts: contexts.clone(), ledger: ledger.clone() }
    }

    /// Returns a stream of the program for driver calls.
    pub(crate) fn stream(&self, on: UserStream) -> StreamRef<'_> {
        on.of_driver(&**self.contexts.driver())
    }

    pub(crate) fn copy(&self, to: &Span, from: &Span, on: UserStream) -> Result<()> {
        owned::copy(&**self.contexts.driver(), on.device, on.raw, to, from)?;
        self.ledger.counters.native(to.size());
        Ok(())
    }

    /// Enqueues one copy, with one retry after a transient error. The caller counts it.
    pub(crate) fn copy_twice(&self, to: &Span, from: &Span, on: UserStream) -> Result<()> {
        let enqueue = || owned::copy(&**self.contexts.driver(), on.device, on.raw, to, from);
        match enqueue() {
            Err(error) if !error.is_sticky() => Ok(enqueue()?),
            outcome => Ok(outcome?),
        }
    }

    /// Enqueues pieces of blocks in batches.
    pub(crate) fn copy_pieces<'a>(
        &self,
        mut pieces: impl Iterator<Item = Piece<'a>>,
        on: UserStream,
    ) -> Result<()> {
        let mut batch: Vec<Piece<'_>> = Vec::new();
        loop {
            batch.clear();
            batch.extend(pieces.by_ref().take(BATCH));
            if batch.is_empty() {
                return Ok(());
            }
            let enqueue = || owned::copy_pieces(&**self.contexts.driver(), on.device, on.raw, &batch);
            match enqueue() {
                // Part of a batch may be enqueued: to do it twice does no harm.
                Err(error) if !error.is_sticky() => enqueue()?,
                outcome => outcome?,
            }
            batch.iter().for_each(|piece| self.ledger.counters.native(piece.size()));
        }
    }

    /// Enqueues one copy on a GPU that can access both ends: pool memory is accessible only to the GPUs it was opened to. If that is not
    /// the stream's GPU, blocks until the bytes have arrived.
    pub(crate) fn copy_anyhow(&self, to: &Span, from: &Span, on: UserStream) -> Result<()> {
        let reach = |span: &Span| match span.kind() {
            PointerKind::Device { mapped: true, .. } => span.reach(),
            _ => DeviceSet::ALL,
        };
        let may = reach(to).intersection(reach(from));
        match may.iter().next().filter(|_| !may.contains(on.device)) {
            None => self.copy(to, from, on),
            Some(device) => {
                let stream = OwnedStream::new(self.contexts.driver(), device)?;
                owned::copy(&**self.contexts.driver(), device, stream.id(), to, from)?;
                self.ledger.counters.native(to.size());
                Ok(stream.synchronize()?)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use glake_device::owned::{Buffer, CompletionEvents, Pages, Registration};
    use glake_device::{DeviceId, Driver};
    use glake_sim::{SimOptions, SimTopology, Simulator};
    use glake_units::Bytes;

    use super::*;
    use crate::links::relays::Relays;

    #[test]
    fn a_copy_of_memory_that_the_streams_gpu_may_not_touch_is_made_by_one_that_may() {
        let size = Bytes::mib(2);
        let topology = SimTopology::uniform(2, Bytes::mib(64));
        let sim = Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap();
        let driver: Arc<dyn Driver> = Arc::new(sim);
        let contexts = Contexts::new(CompletionEvents::new(driver.clone())).unwrap();
        let relays = Arc::new(Relays::new(2, DeviceSet::EMPTY, false));
        let ledger = Ledger::new(&relays, 2);
        let native = NativeCopies::new(&contexts, &ledger);
        let [own, other] = [0, 1].map(DeviceId);
        let stream = OwnedStream::new(&driver, own).unwrap();
        let on = UserStream::of(&*driver, own, stream.id()).unwrap();
        let mut memory = Registration::new(contexts.program(), Pages::new(size, 1).unwrap()).unwrap();
        memory.as_mut_slice().fill(7);
        let from = Span::pinned(&Arc::new(memory), Bytes::ZERO, size).unwrap();
        let back = Registration::new(contexts.program(), Pages::new(size, 1).unwrap()).unwrap();
        let back = Arc::new(back);
        let to = Span::pinned(&back, Bytes::ZERO, size).unwrap();
        for device in [own, other] {
            let buffer = Buffer::new(contexts.program(), device, size, DeviceSet::of(device)).unwrap();
            let there = Arc::new(buffer).span(Bytes::ZERO, size).unwrap();
            native.copy_anyhow(&there, &from, on).unwrap();
            native.copy_anyhow(&to, &there, on).unwrap();
            contexts.synchronize(on).unwrap();
            assert!(back.as_slice().iter().all(|byte| *byte == 7));
        }
        assert_eq!(ledger.statistics().native_copies, 4);
        // The caller counts these.
        native.copy_twice(&to, &from, on).unwrap();
        contexts.synchronize(on).unwrap();
        assert_eq!(ledger.statistics().native_copies, 4);
    }
}
