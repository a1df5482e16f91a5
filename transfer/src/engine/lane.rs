//! A relay's streams, in a context of our own, for one stream of the program at a time.

use std::sync::Arc;

use glake_device::owned::{OwnedEvent, OwnedStream};
use glake_device::{DeviceId, Driver, EventKind};

use crate::Result;

/// What enqueues on one GPU.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) stream: OwnedStream,
    /// Recorded on `stream` after each copy's part: once it has passed, the lane is idle.
    pub(super) done: OwnedEvent,
    /// For what is passed on.
    pub(super) second: Second,
    /// Before and after a part that is timed.
    pub(super) clock: [OwnedEvent; 2],
}

/// The other stream.
#[derive(Debug)]
pub(super) struct Second {
    pub(super) stream: OwnedStream,
    /// Recorded there, and waited for by the first stream.
    pub(super) done: OwnedEvent,
}

impl Lane {
    /// By the driver of contexts of our own.
    pub(super) fn new(driver: &Arc<dyn Driver>, device: DeviceId) -> Result<Lane> {
        let event = |kind| OwnedEvent::new(driver, device, kind);
        Ok(Lane {
            stream: OwnedStream::new(driver, device)?,
            done: event(EventKind::Plain)?,
            second: Second { stream: OwnedStream::new(driver, device)?, done: event(EventKind::Plain)? },
            clock: [event(EventKind::Timed)?, event(EventKind::Timed)?],
        })
    }
}
