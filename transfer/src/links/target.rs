//! Target's side of staged copies. It fills or drains a relay's slots in the target's primary context, where its memory is accessible as
//! for the program.

use std::sync::Arc;

use glake_device::owned::{OwnedEvent, OwnedStream};
use glake_device::{DeviceId, Driver, EventKind};
use smallvec::SmallVec;

use crate::Result;
use crate::links::slots::SLOTS;

/// Streams and events of a lane set on a target, for the slots of one relay.
#[derive(Debug)]
pub(crate) struct TargetSide {
    pub(crate) stream: OwnedStream,
    /// Events by slot, recorded after the target's side of a chunk.
    pub(crate) done: SmallVec<[OwnedEvent; SLOTS]>,
    /// Event recorded after the whole copy.
    pub(crate) end: OwnedEvent,
}

impl TargetSide {
    /// Creates the side in the target's primary context.
    pub(crate) fn new(driver: &Arc<dyn Driver>, target: DeviceId) -> Result<TargetSide> {
        let event = |_| OwnedEvent::new(driver, target, EventKind::Plain);
        Ok(TargetSide {
            stream: OwnedStream::new(driver, target)?,
            done: (0..SLOTS).map(event).collect::<glake_device::Result<_>>()?,
            end: event(0)?,
        })
    }
}
