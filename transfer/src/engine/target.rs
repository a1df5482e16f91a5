//! The target's side of copies through a relay's slots: it fills or empties them in the target's primary context, where its memory is
//! what it is to the program.

use std::sync::Arc;

use glake_device::owned::{OwnedEvent, OwnedStream};
use glake_device::{DeviceId, Driver, EventKind};
use smallvec::SmallVec;

use super::slots::SLOTS;
use crate::Result;

/// What one lane set has on a target for the slots of one relay.
#[derive(Debug)]
pub(super) struct TargetSide {
    pub(super) stream: OwnedStream,
    /// By slot: recorded after the target's part of a chunk.
    pub(super) done: SmallVec<[OwnedEvent; SLOTS]>,
    /// Recorded behind all of a copy.
    pub(super) end: OwnedEvent,
}

impl TargetSide {
    /// In the target's primary context.
    pub(super) fn new(driver: &Arc<dyn Driver>, target: DeviceId) -> Result<TargetSide> {
        let event = |_| OwnedEvent::new(driver, target, EventKind::Plain);
        Ok(TargetSide {
            stream: OwnedStream::new(driver, target)?,
            done: (0..SLOTS).map(event).collect::<glake_device::Result<_>>()?,
            end: event(0)?,
        })
    }
}
