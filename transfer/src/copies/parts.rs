//! Bookkeeping of an enqueued split copy: the share of each relay.

use std::sync::{Arc, Weak};

use glake_device::DeviceId;
use glake_device::owned::DeviceSet;

use crate::links::lane_set::LaneSet;
use crate::links::relays::Relays;
use crate::paths::Shares;
use crate::{Result, TransferError};

/// Parts of a split copy.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) relays: Arc<Relays>,
    /// Lane set of the copy; dropped once its relays are idle and all of its results were reported.
    pub(crate) lane_set: Weak<LaneSet>,
    /// GPUs whose lanes carry parts.
    pub(crate) used: DeviceSet,
    /// Serial number of the copy within its lane set.
    pub(crate) serial: u64,
    /// Share of each path, for a copy between two spans.
    pub(crate) shares: Option<Shares>,
}

impl Parts {
    /// Returns which of `relays` are lost. Valid once the copy's stream has passed the join: earlier work of a relay without an error has
    /// arrived.
    ///
    /// # Errors
    /// The driver's, if a relay's answer is inconclusive.
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

    /// Returns an error if a relay of the copy is lost.
    ///
    /// # Errors
    /// [`TransferError::Lost`]; see [`Parts::lost`].
    pub(crate) fn check(&self) -> Result<()> {
        let lost = self.lost(self.used)?;
        lost.iter().for_each(|relay| self.relays.fence(relay));
        let first: Option<DeviceId> = lost.iter().next();
        first.map_or(Ok(()), |relay| Err(TransferError::Lost { relay, copies: 1 }))
    }
}
