//! Work of GLake's streams that no program stream could be made to wait for. Later copies wait for it.
//!
//! A failed copy leaves such work if its end could neither be recorded, nor be waited for by a stream or by the host. The end is recorded
//! once, as soon as the driver accepts it: an event that is recorded repeatedly may never be found complete. Work in a lost context is
//! complete.

use std::sync::Arc;

use glake_device::owned::{OwnedEvent, OwnedStream, StreamRef};
use parking_lot::Mutex;

use crate::links::lane::StagingStream;
use crate::links::ledger::Ledger;

/// Knowledge of the end of a stream's work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum End {
    /// Not recorded.
    #[default]
    Open,
    /// Recorded by an event behind the work.
    Marked,
    /// Complete.
    Over,
}

impl End {
    /// Returns whether the work has completed. If a stream is given, makes it wait for the work otherwise.
    ///
    /// # Errors
    /// The driver's: the end cannot be recorded or waited for.
    pub(crate) fn settle(
        &mut self,
        stream: &OwnedStream,
        event: &OwnedEvent,
        on: Option<StreamRef<'_>>,
    ) -> glake_device::Result<bool> {
        if *self == End::Open {
            *self = match twice(|| event.record(stream.id())) {
                Ok(()) => End::Marked,
                Err(error) if error.is_sticky() => End::Over,
                Err(error) => return Err(error),
            };
        }
        if *self == End::Marked {
            match event.is_passed() {
                Ok(true) => *self = End::Over,
                Err(error) if error.is_sticky() => *self = End::Over,
                // An answer that says nothing is asked for again.
                Ok(false) | Err(_) => on.map_or(Ok(()), |on| twice(|| on.wait_for(event.id())))?,
            }
        }
        Ok(*self == End::Over)
    }
}

/// Slots that failed pageable copies left with unjoined work. They are not used again.
#[derive(Debug, Default)]
pub(crate) struct UnjoinedSlots {
    slots: Mutex<Vec<(Arc<StagingStream>, usize, End)>>,
}

impl UnjoinedSlots {
    pub(crate) fn leave(&self, of: Arc<StagingStream>, slot: usize, ledger: &Ledger) {
        self.slots.lock().push((of, slot, End::Open));
        ledger.leave_unjoined();
    }

    /// Returns whether all work has completed. If a stream is given, makes it wait for the rest.
    ///
    /// # Errors
    /// The driver's, for one of the slots; the others are processed too.
    pub(crate) fn settle(&self, ledger: &Ledger, on: Option<StreamRef<'_>>) -> glake_device::Result<bool> {
        let mut slots = self.slots.lock();
        let mut outcome = Ok(());
        slots.retain_mut(|(of, slot, end)| {
            let settled = of.done.get(*slot).map_or(Ok(true), |event| end.settle(&of.stream, event, on));
            if matches!(settled, Ok(true)) {
                ledger.end_unjoined();
                return false;
            }
            if let Err(error) = settled {
                outcome = Err(error);
            }
            true
        });
        outcome.map(|()| slots.is_empty())
    }
}

/// Retries an operation once if its error may be transient.
pub(crate) fn twice(mut ask: impl FnMut() -> glake_device::Result<()>) -> glake_device::Result<()> {
    match ask() {
        Err(error) if !error.is_sticky() => ask(),
        answer => answer,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use glake_device::{DeviceId, Driver, EventKind, Recorder, Verb};
    use glake_sim::{SimOptions, SimTopology, Simulator};
    use glake_units::Bytes;

    use super::*;

    #[test]
    fn an_end_is_marked_once_however_often_it_is_asked_for() {
        let topology = SimTopology::uniform(1, Bytes::mib(8));
        let sim = Arc::new(Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap());
        let recorder = Arc::new(Recorder::measured(sim.clone()));
        let driver: Arc<dyn Driver> = recorder.clone();
        let device = DeviceId(0);
        let [stream, other] = [(); 2].map(|()| OwnedStream::new(&driver, device).unwrap());
        let event = OwnedEvent::new(&driver, device, EventKind::Plain).unwrap();
        sim.enqueue_kernel(device, stream.id(), &[], &[], Duration::from_millis(1), |_| {}).unwrap();
        let mut end = End::default();
        for _ in 0..20 {
            assert!(!end.settle(&stream, &event, Some(other.of())).unwrap());
        }
        assert_eq!(recorder.counters().of(Verb::EventRecord).calls, 1);
        stream.synchronize().unwrap();
        assert!(end.settle(&stream, &event, None).unwrap());
        assert!(end.settle(&stream, &event, None).unwrap());
        assert_eq!(recorder.counters().of(Verb::EventRecord).calls, 1);
    }
}
