//! Marks of internal work on a device's memory that its own context does not wait for.
//!
//! A mark is shared by the completion points that wait for it. No lock is held during such a wait: the thread that records the next
//! completion point may have to enqueue the awaited work.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::owned::OwnedEvent;
use crate::{DeviceId, DriverError, Result};

/// Number of new marks after which finished ones are swept: rarely enough to cost next to nothing.
const MORE: usize = 32;

/// Marks by the device that owns the memory.
#[derive(Debug, Default)]
pub(super) struct Outside(Mutex<HashMap<DeviceId, DeviceMarks>>);

#[derive(Debug, Default)]
struct DeviceMarks {
    all: Vec<Mark>,
    /// Marks that were pending after the last sweep.
    left: usize,
}

/// End of work on the memory of another device.
#[derive(Clone, Debug)]
pub(super) struct Mark(Arc<OwnedEvent>);

impl Outside {
    /// Adds the end of work on a device's memory.
    pub(super) fn add(&self, memory: DeviceId, end: OwnedEvent) {
        let is_long = {
            let mut table = self.0.lock();
            let marks = table.entry(memory).or_default();
            marks.all.push(Mark(Arc::new(end)));
            marks.all.len() > 2 * marks.left + MORE
        };
        if is_long {
            drop(self.pending(memory));
        }
    }

    /// Returns the marks not known to be done and forgets the others.
    pub(super) fn pending(&self, memory: DeviceId) -> Vec<Mark> {
        let Some(marks) = self.0.lock().get(&memory).map(|marks| marks.all.clone()) else {
            return Vec::new();
        };
        let is_done = |mark: &Mark| mark.is_done().unwrap_or(false);
        let (done, left): (Vec<_>, Vec<_>) = marks.into_iter().partition(is_done);
        if let Some(marks) = self.0.lock().get_mut(&memory) {
            marks.all.retain(|mark| !done.iter().any(|done| Arc::ptr_eq(&done.0, &mark.0)));
            marks.left = left.len();
        }
        left
    }

    /// Forgets marks whose work is done.
    pub(super) fn sweep(&self) {
        let devices: Vec<DeviceId> = self.0.lock().keys().copied().collect();
        devices.into_iter().for_each(|device| drop(self.pending(device)));
    }
}

impl Mark {
    pub(super) fn is_done(&self) -> Result<bool> {
        self.0.is_passed().or_else(|error| is_over(&error).then_some(true).ok_or(error))
    }

    pub(super) fn wait(&self) -> Result<()> {
        self.0.synchronize().or_else(|error| is_over(&error).then_some(()).ok_or(error))
    }
}

/// Returns whether the context of a mark is lost or gone, so that none of its work runs any more.
fn is_over(error: &DriverError) -> bool {
    error.is_sticky() || error.is_gone()
}
