//! Streams on a GPU for the copies of one stream of the program at a time: a relay's, in a context of our own, or the target's, in its
//! primary context.

use std::sync::Arc;

use glake_device::owned::{OwnedEvent, OwnedStream};
use glake_device::{DeviceId, Driver, EventKind};

use crate::Result;

/// What enqueues on one GPU.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) stream: OwnedStream,
    /// Recorded on `stream` after each copy's part: once it has passed, the lane is idle.
    pub(crate) done: OwnedEvent,
    /// For what is passed on.
    pub(crate) second: Second,
    /// Before and after a part that is timed.
    pub(crate) clock: [OwnedEvent; 2],
    /// Whether it is in the primary context, in which the program's own work waits for what waits there: the default stream does.
    pub(crate) is_primary: bool,
}

/// The other stream.
#[derive(Debug)]
pub(crate) struct Second {
    pub(crate) stream: OwnedStream,
    /// Recorded there, and waited for by the first stream.
    pub(crate) done: OwnedEvent,
}

impl Lane {
    /// On a relay, by the driver of contexts of our own.
    pub(crate) fn of_relay(own: &Arc<dyn Driver>, device: DeviceId) -> Result<Lane> {
        Lane::new(own, device, false)
    }

    /// On a target that is no relay, in its primary context: for copies in the order of its own streams.
    pub(crate) fn of_target(driver: &Arc<dyn Driver>, device: DeviceId) -> Result<Lane> {
        Lane::new(driver, device, true)
    }

    fn new(driver: &Arc<dyn Driver>, device: DeviceId, is_primary: bool) -> Result<Lane> {
        let event = |kind| OwnedEvent::new(driver, device, kind);
        Ok(Lane {
            stream: OwnedStream::new(driver, device)?,
            done: event(EventKind::Plain)?,
            second: Second { stream: OwnedStream::new(driver, device)?, done: event(EventKind::Plain)? },
            clock: [event(EventKind::Timed)?, event(EventKind::Timed)?],
            is_primary,
        })
    }
}
