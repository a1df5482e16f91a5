//! Devices that are lost, or will be once a stream reaches failed work.
//!
//! Invariant: the event of a pending loss belongs to the wrapped driver and is destroyed once it has completed or is forgotten.

use parking_lot::Mutex;

use crate::{CaptureState, DeviceId, Driver, Event, EventKind, Stream};

#[derive(Debug, Default)]
pub(super) struct Losses {
    table: Mutex<Vec<Loss>>,
}

#[derive(Clone, Copy, Debug)]
struct Loss {
    device: DeviceId,
    code: u32,
    /// Event that completes when the device is lost; `None` once it is.
    at: Option<Event>,
}

impl Losses {
    /// Schedules the loss of a device for when one of its streams reaches its current end. Of several such points the first one reached
    /// counts.
    pub(super) fn lose(&self, driver: &dyn Driver, device: DeviceId, stream: Stream, code: u32) {
        self.add(Loss { device, code, at: mark(driver, device, stream) }, driver);
    }

    /// Discards work of a device that is about to be lost. Later waits report the loss, on whichever stream the failure is.
    pub(super) fn leave_out(&self, driver: &dyn Driver, device: DeviceId, stream: Stream) {
        if let Some(loss) = self.find(device) {
            self.lose(driver, device, stream, loss.code);
        }
    }

    /// Marks a device as lost immediately.
    pub(super) fn lose_now(&self, driver: &dyn Driver, device: DeviceId, code: u32) {
        self.add(Loss { device, code, at: None }, driver);
    }

    /// Returns the error number of a lost device.
    pub(super) fn lost(&self, device: DeviceId) -> Option<u32> {
        let of = |loss: &&Loss| loss.device == device && loss.at.is_none();
        self.table.lock().iter().find(of).map(|loss| loss.code)
    }

    /// Returns whether a device no longer executes work, reported or not.
    pub(super) fn is_doomed(&self, device: DeviceId) -> bool {
        self.find(device).is_some()
    }

    /// Promotes pending losses whose event has completed. Called by waits and by queries of past work, which may report them.
    pub(super) fn look(&self, driver: &dyn Driver) {
        let pending: Vec<Loss> = self.table.lock().iter().filter(|loss| loss.at.is_some()).copied().collect();
        for loss in pending {
            let Some(event) = loss.at else { continue };
            if matches!(driver.event_query(loss.device, event), Ok(false)) {
                continue;
            }
            let mut table = self.table.lock();
            let found = table.iter_mut().find(|other| other.at == Some(event));
            // Another thread may have handled this loss first.
            let Some(found) = found else { continue };
            found.at = None;
            drop(table);
            destroy(driver, loss.device, event);
        }
    }

    /// Makes every device usable again.
    pub(super) fn forget(&self, driver: &dyn Driver) {
        for loss in std::mem::take(&mut *self.table.lock()) {
            if let Some(event) = loss.at {
                destroy(driver, loss.device, event);
            }
        }
    }

    fn find(&self, device: DeviceId) -> Option<Loss> {
        self.table.lock().iter().find(|loss| loss.device == device).copied()
    }

    fn add(&self, loss: Loss, driver: &dyn Driver) {
        let mut table = self.table.lock();
        if !table.iter().any(|other| other.device == loss.device && other.at.is_none()) {
            table.push(loss);
            return;
        }
        drop(table);
        if let Some(event) = loss.at {
            destroy(driver, loss.device, event);
        }
    }
}

/// Returns an event that completes when a stream has done its work so far; `None` if it cannot be recorded.
fn mark(driver: &dyn Driver, device: DeviceId, stream: Stream) -> Option<Event> {
    if !matches!(driver.capture_state(device, stream), Ok(CaptureState::None)) {
        return None;
    }
    let event = driver.event_create(device, EventKind::Plain).ok()?;
    if driver.event_record(device, event, stream).is_err() {
        destroy(driver, device, event);
        return None;
    }
    Some(event)
}

fn destroy(driver: &dyn Driver, device: DeviceId, event: Event) {
    // SAFETY: created by `mark`, shared with no other code, and taken out of the table before. If this fails, the
    // driver keeps the event.
    let _ = unsafe { driver.event_destroy(device, event) };
}
