//! Points in time at which everything enqueued before, on any stream of a context, is known to be done.
//!
//! Every epoch has a sequence number, drawn before its events are recorded. Whoever marks a moment draws the
//! number that the next epoch will get: an epoch of at least that number covers all work enqueued before the mark.
//! Both draws are read-modify-writes of one atomic, so that a mark not covered is never taken for covered.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};

use super::{DeviceSet, OwnedEvent};
use crate::{CaptureState, DeviceId, Driver, DriverError, EventKind, Result, Stream, Verb};

/// The order of epochs and marks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sequence(u64);

/// Proof that all work enqueued on some devices before some moment is done. It stays true for ever.
#[derive(Clone, Copy, Debug)]
pub struct Passed {
    source: u64,
    sequence: Sequence,
    devices: DeviceSet,
}

/// The clock of a driver's completions; one for all who share memory.
#[derive(Debug)]
pub struct Epochs {
    driver: Arc<dyn Driver>,
    source: u64,
    sequence: AtomicU64,
    /// Events for the next epochs: none is made or destroyed in steady state.
    idle: Mutex<HashMap<DeviceId, Vec<OwnedEvent>>>,
    /// How many captures are open. Held for reading while events are recorded: a capture that began in between
    /// would be invalidated by them.
    captures: RwLock<u32>,
    /// Whether the driver has an event for a whole context.
    whole: AtomicBool,
    known: Mutex<HashMap<DeviceId, Vec<Stream>>>,
}

/// A recorded point; dropping it gives its events back.
#[derive(Debug)]
pub struct Epoch {
    epochs: Arc<Epochs>,
    sequence: Sequence,
    devices: DeviceSet,
    pending: Vec<OwnedEvent>,
}

/// While it lives, no epoch is recorded: an event for a whole context invalidates any capture in it.
#[derive(Debug)]
pub struct CaptureHold {
    epochs: Arc<Epochs>,
}

impl Sequence {
    /// Before everything: covered by any epoch.
    pub const START: Sequence = Sequence(0);

    /// The number, for those who keep it among their own.
    pub fn get(self) -> u64 {
        self.0
    }
}

impl Passed {
    /// All that was marked with this or less is done.
    pub fn sequence(&self) -> Sequence {
        self.sequence
    }

    /// On these devices.
    pub fn devices(&self) -> DeviceSet {
        self.devices
    }

    /// Whether all that `devices` were given before the mark is done.
    pub fn covers(&self, mark: Sequence, devices: DeviceSet) -> bool {
        mark <= self.sequence && devices.is_subset(self.devices)
    }
}

impl Epochs {
    /// The clock of a driver. Two clocks of one driver do not take each other's proofs.
    pub fn new(driver: Arc<dyn Driver>) -> Arc<Self> {
        static SOURCES: AtomicU64 = AtomicU64::new(0);
        Arc::new(Epochs {
            driver,
            source: SOURCES.fetch_add(1, Ordering::Relaxed),
            sequence: AtomicU64::new(0),
            idle: Mutex::default(),
            captures: RwLock::default(),
            whole: AtomicBool::new(true),
            known: Mutex::default(),
        })
    }

    /// The driver.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// Now: what is enqueued before this call is done once an epoch of this number has passed.
    pub fn mark(&self) -> Sequence {
        // Not a load: see the module.
        Sequence(self.sequence.fetch_add(0, Ordering::AcqRel) + 1)
    }

    /// Records an epoch on every one of `devices`: 0.14 us each on an H200.
    ///
    /// # Errors
    /// [`DriverError::Capturing`] while a [`CaptureHold`] lives, with no call of the driver.
    pub fn record(self: &Arc<Self>, devices: DeviceSet) -> Result<Epoch> {
        let captures = self.captures.read();
        if *captures > 0 {
            return Err(DriverError::Capturing { verb: Verb::EventRecordContext });
        }
        let sequence = self.advance();
        let mut epoch = Epoch { epochs: self.clone(), sequence, devices, pending: Vec::new() };
        for device in devices.iter() {
            self.record_on(device, &mut epoch.pending)?;
        }
        Ok(epoch)
    }

    /// Waits for all work of the devices: an epoch without events, allowed (to the driver's liking) at any time.
    pub fn synchronize(&self, devices: DeviceSet) -> Result<Passed> {
        let sequence = self.advance();
        for device in devices.iter() {
            self.driver.context_synchronize(device)?;
        }
        Ok(Passed { source: self.source, sequence, devices })
    }

    /// The proof of what needs none: everything that was marked [`Sequence::START`] is done, on every device.
    pub fn start(&self) -> Passed {
        Passed { source: self.source, sequence: Sequence::START, devices: DeviceSet::ALL }
    }

    /// Holds epochs back. To be called before a capture begins; the hold is dropped after it has ended.
    pub fn hold(self: &Arc<Self>) -> CaptureHold {
        *self.captures.write() += 1;
        CaptureHold { epochs: self.clone() }
    }

    /// Tells of a stream. Where the driver has no event for a whole context (before CUDA 12.5), an epoch is an
    /// event on each known stream and on the legacy one, and the work of others is not covered.
    pub fn know(&self, device: DeviceId, stream: Stream) {
        let mut known = self.known.lock();
        let streams = known.entry(device).or_default();
        if !streams.contains(&stream) {
            streams.push(stream);
        }
    }

    /// A known stream is about to be destroyed.
    pub fn forget(&self, device: DeviceId, stream: Stream) {
        if let Some(streams) = self.known.lock().get_mut(&device) {
            streams.retain(|known| *known != stream);
        }
    }

    /// Whether a proof is of this clock.
    pub(super) fn gave(&self, passed: &Passed) -> bool {
        passed.source == self.source
    }

    fn advance(&self) -> Sequence {
        Sequence(self.sequence.fetch_add(1, Ordering::AcqRel) + 1)
    }

    fn record_on(&self, device: DeviceId, pending: &mut Vec<OwnedEvent>) -> Result<()> {
        if self.whole.load(Ordering::Relaxed) {
            let event = self.event(device)?;
            match event.record_context() {
                Err(DriverError::Unsupported { .. }) => {
                    self.give_back(event);
                    self.whole.store(false, Ordering::Relaxed);
                }
                Ok(()) => {
                    pending.push(event);
                    return Ok(());
                }
                Err(error) => {
                    self.give_back(event);
                    return Err(error);
                }
            }
        }
        let mut streams = self.known.lock().get(&device).cloned().unwrap_or_default();
        streams.push(Stream::LEGACY);
        for stream in streams {
            if self.driver.capture_state(device, stream)? != CaptureState::None {
                return Err(DriverError::Capturing { verb: Verb::EventRecord });
            }
            let event = self.event(device)?;
            let recorded = event.record(stream);
            pending.push(event);
            recorded?;
        }
        Ok(())
    }

    fn event(&self, device: DeviceId) -> Result<OwnedEvent> {
        let idle = self.idle.lock().get_mut(&device).and_then(Vec::pop);
        match idle {
            Some(event) => Ok(event),
            None => OwnedEvent::new(&self.driver, device, EventKind::Plain),
        }
    }

    fn give_back(&self, event: OwnedEvent) {
        self.idle.lock().entry(event.device()).or_default().push(event);
    }
}

impl Epoch {
    /// Its number.
    pub fn sequence(&self) -> Sequence {
        self.sequence
    }

    /// The proof, if it has passed. Never waits.
    pub fn poll(&mut self) -> Result<Option<Passed>> {
        while let Some(event) = self.pending.last() {
            if !event.is_passed()? {
                return Ok(None);
            }
            self.pop();
        }
        Ok(Some(self.passed()))
    }

    /// Waits on the host for the proof.
    pub fn wait(&mut self) -> Result<Passed> {
        while let Some(event) = self.pending.last() {
            event.synchronize()?;
            self.pop();
        }
        Ok(self.passed())
    }

    fn passed(&self) -> Passed {
        Passed { source: self.epochs.source, sequence: self.sequence, devices: self.devices }
    }

    fn pop(&mut self) {
        if let Some(event) = self.pending.pop() {
            self.epochs.give_back(event);
        }
    }
}

impl Drop for Epoch {
    fn drop(&mut self) {
        while !self.pending.is_empty() {
            self.pop();
        }
    }
}

impl Drop for CaptureHold {
    fn drop(&mut self) {
        let mut captures = self.epochs.captures.write();
        *captures = captures.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;
    use crate::stub::Stub;
    use crate::{Fault, Faults, Injected, Recorder, When};

    const BOTH: [DeviceId; 2] = [DeviceId(0), DeviceId(1)];

    #[test]
    fn an_epoch_covers_marks_before_it_and_no_later_ones() {
        let stub = Stub::new();
        let epochs = Epochs::new(stub.clone());
        let both: DeviceSet = BOTH.into_iter().collect();
        let before = epochs.mark();
        let mut epoch = epochs.record(both).unwrap();
        let after = epochs.mark();
        stub.pending.store(true, Relaxed);
        assert!(epoch.poll().unwrap().is_none());
        stub.pending.store(false, Relaxed);
        let passed = epoch.poll().unwrap().unwrap();
        assert!(passed.covers(before, both) && !passed.covers(after, both));
        assert!(!passed.covers(before, DeviceSet::of(DeviceId(2))));
        assert!(epochs.synchronize(both).unwrap().covers(after, both));
    }

    #[test]
    fn events_are_used_again() {
        let stub = Stub::new();
        let epochs = Epochs::new(stub.clone());
        for _ in 0..100 {
            let mut kept = epochs.record(DeviceSet::of(DeviceId(0))).unwrap();
            drop(epochs.record(DeviceSet::of(DeviceId(0))).unwrap());
            kept.wait().unwrap();
        }
        assert_eq!(stub.events.load(Relaxed), 2);
        drop(epochs);
        assert_eq!(stub.events.load(Relaxed), 0);
    }

    #[test]
    fn a_capture_holds_epochs_back() {
        let recorder = Arc::new(Recorder::measured(Stub::new()));
        let epochs = Epochs::new(recorder.clone());
        let hold = epochs.hold();
        let refused = epochs.record(DeviceSet::of(DeviceId(0)));
        assert!(matches!(refused, Err(DriverError::Capturing { .. })));
        assert_eq!(recorder.counters().calls(), 0);
        drop(hold);
        epochs.record(DeviceSet::of(DeviceId(0))).unwrap();
    }

    #[test]
    fn without_context_events_every_known_stream_gets_one() {
        let faults = Arc::new(Faults::new(Stub::new()));
        faults.set(&[Fault {
            verb: Some(Verb::EventRecordContext),
            when: When::From(1),
            error: Injected::Unsupported,
        }]);
        let recorder = Arc::new(Recorder::measured(faults));
        let epochs = Epochs::new(recorder.clone());
        epochs.know(DeviceId(0), Stream(7));
        epochs.know(DeviceId(0), Stream(7));
        for _ in 0..2 {
            epochs.record(DeviceSet::of(DeviceId(0))).unwrap().wait().unwrap();
        }
        let counters = recorder.counters();
        assert_eq!(counters.of(Verb::EventRecordContext).calls, 1);
        assert_eq!(counters.of(Verb::EventRecord).calls, 4);
        assert_eq!(counters.of(Verb::EventCreate).calls, 2);
    }
}
