//! The target's side of copies through a relay's slots: it fills or empties them in the target's primary context, where its memory is
//! what it is to the program.

use std::sync::Arc;

use glake_device::owned::{OwnedEvent, OwnedStream};
use glake_device::{DeviceId, Driver, EventKind};
use smallvec::SmallVec;

use crate::Result;
use crate::kinds::foreign::slots::SLOTS;

/// What one lane set has on a target for the slots of one relay.
#[derive(Debug)]
pub(crate) struct TargetSide {
    pub(crate) stream: OwnedStream,
    /// By slot: recorded after the target's part of a chunk.
    pub(crate) done: SmallVec<[OwnedEvent; SLOTS]>,
    /// Recorded behind all of a copy.
    pub(crate) end: OwnedEvent,
}

impl TargetSide {
    /// In the target's primary context.
    pub(crate) fn new(driver: &Arc<dyn Driver>, target: DeviceId) -> Result<TargetSide> {
        let event = |_| OwnedEvent::new(driver, target, EventKind::Plain);
        Ok(TargetSide {
            stream: OwnedStream::new(driver, target)?,
            done: (0..SLOTS).map(event).collect::<glake_device::Result<_>>()?,
            end: event(0)?,
        })
    }
}
