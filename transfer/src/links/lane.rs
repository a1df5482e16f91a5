//! Lane: streams on one GPU that serve the copies of one program stream at a time. A relay's lane is in GLake's own context, the target's
//! in its primary context.

use std::sync::Arc;

use glake_device::owned::{OwnedEvent, OwnedStream};
use glake_device::{DeviceId, Driver, EventKind};

use crate::Result;

/// Streams and events on one GPU.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) stream: OwnedStream,
    /// Event recorded on `stream` after each copy's part. The lane is idle once it has passed.
    pub(crate) done: OwnedEvent,
    /// Stream that forwards staged bytes.
    pub(crate) second: Second,
    /// Timed events before and after a part.
    pub(crate) clock: [OwnedEvent; 2],
    /// Whether the lane is in the primary context, where the program's own default stream waits for its work.
    pub(crate) is_primary: bool,
}

/// Second stream of a lane.
#[derive(Debug)]
pub(crate) struct Second {
    pub(crate) stream: OwnedStream,
    /// Event recorded on the second stream; the first stream waits for it.
    pub(crate) done: OwnedEvent,
}

/// Stream of a GPU for copies between slots and GPU memory.
#[derive(Debug)]
pub(crate) struct StagingStream {
    pub(crate) stream: OwnedStream,
    /// Events by slot, recorded after the slot's copy.
    pub(crate) done: Vec<OwnedEvent>,
}

impl Lane {
    /// Creates a lane of a relay, in GLake's own context.
    pub(crate) fn of_relay(own: &Arc<dyn Driver>, device: DeviceId) -> Result<Lane> {
        Lane::new(own, device, false)
    }

    /// Creates a lane of a target that is not a relay, in its primary context: for copies in the order of its own streams.
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
