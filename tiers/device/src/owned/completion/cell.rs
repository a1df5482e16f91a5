//! Events of a device. They are destroyed when the device's context is released, even if completion points still hold their cells.
//!
//! ```text
//!   RecordedPoint ─► Cell ◄─ all, idle             a cell holds its event until the device's context is released;
//!            [event]                          a completion point that finds its cell empty has completed there
//! ```

use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;

use super::CompletionEvents;
use crate::owned::{DeviceSet, OwnedEvent};
use crate::{DeviceId, DriverError, Result, Verb};

/// Events of one device, in use or idle.
#[derive(Debug, Default)]
pub(super) struct Events {
    pub(super) all: Vec<Arc<Cell>>,
    /// Cells available for the next completion points.
    pub(super) idle: Vec<Arc<Cell>>,
}

/// Slot of an event, emptied when its context is released.
#[derive(Debug)]
pub(super) struct Cell {
    pub(super) device: DeviceId,
    pub(super) event: Mutex<Option<OwnedEvent>>,
}

impl Cell {
    pub(super) fn with(&self, mark: impl FnOnce(&OwnedEvent) -> Result<()>) -> Result<()> {
        match &*self.event.lock() {
            Some(event) => mark(event),
            None => Err(DriverError::NotReady { verb: Verb::EventRecord }),
        }
    }

    /// Returns whether the event has completed; true if its context was released.
    pub(super) fn is_passed(&self) -> Result<bool> {
        self.event.lock().as_ref().map_or(Ok(true), OwnedEvent::is_passed)
    }

    pub(super) fn wait(&self) -> Result<()> {
        self.event.lock().as_ref().map_or(Ok(()), OwnedEvent::synchronize)
    }

    /// Destroys the completed event. Returns false while another thread queries it.
    pub(super) fn empty(&self) -> bool {
        match self.event.try_lock() {
            Some(mut event) => {
                *event = None;
                true
            }
            None => false,
        }
    }
}

/// Guard during which no event is created or recorded on a device.
#[derive(Debug)]
pub(super) struct Quiet<'a> {
    completion_events: &'a CompletionEvents,
    device: DeviceId,
}

impl<'a> Quiet<'a> {
    pub(super) fn begin(completion_events: &'a CompletionEvents, device: DeviceId) -> Result<Quiet<'a>> {
        let verb = Verb::ReleaseContext;
        completion_events.sweep_holds();
        // The write lock waits for threads that are recording.
        let holds = completion_events.holds.write();
        let bit = DeviceSet::of(device).bits();
        if holds.is_any() {
            return Err(DriverError::Capturing { verb, code: DriverError::CAPTURING });
        }
        match completion_events.quiet.fetch_or(bit, Ordering::Relaxed) & bit {
            0 => Ok(Quiet { completion_events, device }),
            _ => Err(DriverError::NotReady { verb }),
        }
    }
}

impl Drop for Quiet<'_> {
    fn drop(&mut self) {
        self.completion_events.quiet.fetch_and(!DeviceSet::of(self.device).bits(), Ordering::Relaxed);
    }
}
