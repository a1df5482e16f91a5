//! Marks of our own work on a device's memory that its context does not wait for.
//!
//! A mark is shared by the completion points that wait for it, and nothing is locked while one does: what is waited for may be enqueued by whoever
//! records the next completion point.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::owned::OwnedEvent;
use crate::{DeviceId, DriverError, Result};

/// So many marks more than were left are looked through: seldom enough to cost next to nothing.
const MORE: usize = 32;

/// By the device whose memory it is.
#[derive(Debug, Default)]
pub(super) struct Outside(Mutex<HashMap<DeviceId, DeviceMarks>>);

#[derive(Debug, Default)]
struct DeviceMarks {
    all: Vec<Mark>,
    /// How many were not done when they were looked through last.
    left: usize,
}

/// Where work on the memory of another device ends.
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

    /// The marks that are not known to be done; the others are forgotten.
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

    /// Forgets what is done.
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

/// Whether no more work runs in the context of a mark: it is lost, or went away with the mark.
fn is_over(error: &DriverError) -> bool {
    error.is_sticky() || error.is_gone()
}
