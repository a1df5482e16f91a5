//! Work of ours that no stream of the program could be made to wait for: copies that come later wait for it.
//!
//! A copy that failed leaves it where the end of its work could neither be marked, nor waited for by a stream, nor by the host. Its end is
//! marked as soon as the driver does that, and once: an event that is recorded anew each time may never be seen to have passed. What runs
//! in a context that is lost is over.

use std::sync::Arc;

use glake_device::owned::{OwnedEvent, OwnedStream, StreamRef};
use parking_lot::Mutex;

use crate::engine::fork::twice;
use crate::engine::ledger::Ledger;
use crate::kinds::pageable::StagingStream;

/// What is known of the end of a stream's work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum End {
    /// Nothing.
    #[default]
    Open,
    /// An event is recorded behind the work.
    Marked,
    /// The work is done.
    Over,
}

impl End {
    /// Whether the work is over; a stream that is given waits for it, where it is not.
    ///
    /// # Errors
    /// The driver's: the end cannot be marked, or not waited for.
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

/// What pageable copies left: a slot of a stream of ours, which nobody else uses any more.
#[derive(Debug, Default)]
pub(crate) struct UnjoinedSlots {
    slots: Mutex<Vec<(Arc<StagingStream>, usize, End)>>,
}

impl UnjoinedSlots {
    /// One more.
    pub(crate) fn leave(&self, of: Arc<StagingStream>, slot: usize, ledger: &Ledger) {
        self.slots.lock().push((of, slot, End::Open));
        ledger.leave_unjoined();
    }

    /// Whether all are over; a stream that is given waits for those that are not.
    ///
    /// # Errors
    /// The driver's, of one of them; the others were asked too.
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
