//! What remains to be known of a split copy once it is enqueued: which relays carried what.

use std::sync::{Arc, Weak};

use glake_device::DeviceId;
use glake_device::owned::DeviceSet;

use crate::links::lane_set::LaneSet;
use crate::links::relays::Relays;
use crate::paths::Shares;
use crate::{Result, TransferError};

/// A split copy.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) relays: Arc<Relays>,
    /// Gone once its relays rest: all that was on its lanes had arrived, or was told of.
    pub(crate) lane_set: Weak<LaneSet>,
    /// The GPUs whose lanes have parts.
    pub(crate) used: DeviceSet,
    /// Which copy of its lane set it is.
    pub(crate) serial: u64,
    /// What each carried, of a copy between two spans.
    pub(crate) shares: Option<Shares>,
}

impl Parts {
    /// Asks relays whether they still work. To be asked once the copy's stream has come past the join: what a relay did
    /// before, and without an error until now, has arrived.
    ///
    /// # Errors
    /// The driver's, where a relay's answer says nothing.
    pub(crate) fn lost(&self, relays: DeviceSet) -> Result<DeviceSet> {
        let Some(lane_set) = self.lane_set.upgrade() else {
            return Ok(self.relays.fenced().intersection(relays));
        };
        let mut lost = DeviceSet::EMPTY;
        for relay in relays.iter() {
            let Some(lane) = lane_set.lane(relay) else { continue };
            // Of a later copy's event too: what is asked is the context's error.
            let asked = lane.done.is_passed().or_else(|error| match error.is_sticky() {
                true => Err(error),
                false => lane.done.is_passed(),
            });
            match asked {
                Ok(_) => {}
                Err(error) if error.is_sticky() => lost = lost.union(DeviceSet::of(relay)),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(lost)
    }

    /// Fails where a relay is lost.
    ///
    /// # Errors
    /// [`TransferError::Lost`]; as [`Parts::lost`].
    pub(crate) fn check(&self) -> Result<()> {
        let lost = self.lost(self.used)?;
        lost.iter().for_each(|relay| self.relays.fence(relay));
        let first: Option<DeviceId> = lost.iter().next();
        first.map_or(Ok(()), |relay| Err(TransferError::Lost { relay, copies: 1 }))
    }
}
