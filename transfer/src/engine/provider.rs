//! Creation of the resources for copies: contexts, lanes, events, slots. Copies create none.
//!
//! Invariant: only the engine's thread runs this code, so that nothing is created twice.

use std::sync::Arc;

use glake_device::owned::DeviceSet;
use glake_device::{DeviceId, MemoryInfo};
use glake_units::Bytes;

use super::RelayCost;
use crate::copies::shared::Shared;
use crate::links::lane::{Lane, Ring, TargetSide};
use crate::links::lane_set::{LaneSet, StreamMarks};
use crate::links::requests::Orders;
use crate::{Result, TransferError};

/// Number of lane sets created in advance.
const FIRST: usize = 2;

/// Resource factory of the engine's thread.
#[derive(Debug)]
pub(crate) struct Provider {
    pub(crate) shared: Arc<Shared>,
    /// Size of the slots on each relay.
    pub(crate) slots: Bytes,
}

impl Provider {
    /// Serves requests. `forks` are the devices whose streams copies fork from.
    pub(crate) fn provide(&self, orders: &Orders, forks: DeviceSet) {
        let (relays, lane_sets) = (self.shared.links.relays(), self.shared.links.lane_sets());
        if orders.prepare {
            self.make_relays(forks);
        }
        let suspended = relays.suspended();
        let targets = if orders.prepare { self.shared.resources.targets() } else { DeviceSet::EMPTY };
        targets.union(orders.resources).iter().for_each(|device| self.shared.resources.make_target(device));
        if orders.prepare {
            relays
                .ready()
                .without(suspended)
                .iter()
                .for_each(|relay| self.shared.resources.make_relay(relay));
        }
        if orders.more_lane_sets && lane_sets.is_short() && lane_sets.len() < self.shared.links.most() {
            self.add_lane_set(forks);
        }
        for lane_set in lane_sets.snapshot() {
            self.furnish(&lane_set, forks);
        }
    }

    /// Recreates the initial lane sets in advance if any relay is ready.
    pub(crate) fn restore_lane_sets(&self, forks: DeviceSet) {
        if !self.shared.links.relays().ready().is_empty() {
            self.make_lane_sets(forks);
        }
    }

    fn make_relays(&self, forks: DeviceSet) {
        let (relays, driver) = (self.shared.links.relays(), self.shared.contexts.driver());
        let ready = relays.ready().union(relays.suspended());
        let missing = relays.wanted().without(ready).without(self.shared.links.of_program()).iter();
        // Asked of all before any is made: what is made for one can need a context on another.
        let missing: Vec<_> = missing.map(|relay| (relay, driver.memory_info(relay))).collect();
        for (relay, before) in missing {
            let made = before.map_err(TransferError::from);
            if let Err(error) = made.and_then(|before| self.make_ready(relay, before, forks)) {
                tracing::warn!(target: "glake::transfer", %relay, %error, "a GPU cannot be a relay");
            }
        }
    }

    /// Turns a GPU into a relay. Creating its context can take half a second.
    fn make_ready(&self, relay: DeviceId, before: MemoryInfo, forks: DeviceSet) -> Result<()> {
        let relays = self.shared.links.relays();
        self.shared.traffic.prepare(self.shared.contexts.program());
        self.make_lane_sets(forks);
        for lane_set in self.shared.links.lane_sets().snapshot() {
            self.add_lane(&lane_set, relay)?;
        }
        // Where a suspension was given up, some of it is there still.
        let earlier = relays.cost(relay);
        let slots = match earlier {
            Some(RelayCost { slots, .. }) if !slots.is_zero() => slots,
            _ => self.add_slots(relay),
        };
        let after = self.shared.contexts.driver().memory_info(relay)?;
        let taken = before.free.saturating_sub(after.free).saturating_sub(slots);
        let context = earlier.map_or(taken, |earlier| earlier.context);
        relays.set_cost(RelayCost { relay, context, slots });
        relays.add_ready(relay);
        Ok(())
    }

    fn make_lane_sets(&self, forks: DeviceSet) {
        while self.shared.links.lane_sets().len() < FIRST.min(self.shared.links.most()) {
            self.add_lane_set(forks);
        }
    }

    /// Adds a lane set with a lane on every ready relay.
    fn add_lane_set(&self, forks: DeviceSet) {
        let lane_sets = self.shared.links.lane_sets();
        let lane_set = lane_sets.make(self.shared.contexts.devices());
        for relay in self.shared.links.relays().ready().iter() {
            if let Err(error) = self.add_lane(&lane_set, relay) {
                tracing::warn!(target: "glake::transfer", %relay, %error, "a stream's copies do without a relay");
            }
        }
        self.furnish(&lane_set, forks);
        lane_sets.add(lane_set);
    }

    fn add_lane(&self, lane_set: &LaneSet, relay: DeviceId) -> Result<()> {
        if lane_set.lane(relay).is_none() {
            lane_set.add_lane(relay, Lane::of_relay(self.shared.contexts.own_driver(), relay)?);
        }
        Ok(())
    }

    /// Adds the primary-context parts of a lane set: fork events, and a target's side of slots.
    fn furnish(&self, lane_set: &LaneSet, forks: DeviceSet) {
        let (relays, driver) = (self.shared.links.relays(), self.shared.contexts.driver());
        for device in forks.iter().filter(|device| lane_set.marks(*device).is_none()) {
            match StreamMarks::new(driver, device) {
                Ok(marks) => lane_set.add_marks(device, marks),
                Err(error) => {
                    tracing::warn!(target: "glake::transfer", %device, %error, "copies of its streams stay native");
                }
            }
        }
        let targets = self.shared.resources.targets();
        // Where the program has the GPU to itself: for copies that find their ways late.
        for target in targets.without(relays.ready()).iter().filter(|_| !relays.are_shared()) {
            if lane_set.lane(target).is_none()
                && let Ok(lane) = Lane::of_target(driver, target)
            {
                lane_set.add_lane(target, lane);
            }
        }
        for target in targets.iter() {
            for relay in relays.ready().without(DeviceSet::of(target)).iter() {
                self.add_side(lane_set, target, relay);
            }
        }
    }

    /// Adds a target's side of a relay's slots. A target that cannot access the slots gets none.
    fn add_side(&self, lane_set: &LaneSet, target: DeviceId, relay: DeviceId) {
        let driver = self.shared.contexts.driver();
        if lane_set.side(target, relay).is_some()
            || !matches!(driver.can_access_peer(target, relay), Ok(true))
        {
            return;
        }
        match TargetSide::new(driver, target) {
            Ok(side) => lane_set.add_side(target, relay, side),
            Err(error) => {
                tracing::warn!(target: "glake::transfer", %target, %relay, %error, "no slots for its memory");
            }
        }
    }

    /// Allocates slots on a relay, accessible to every GPU. Without slots, the relay serves GLake's own memory only.
    fn add_slots(&self, relay: DeviceId) -> Bytes {
        if self.slots.is_zero() {
            return Bytes::ZERO;
        }
        let reach = self.shared.contexts.reaching(relay);
        let rings = match Ring::all(self.shared.contexts.own(), relay, self.slots, reach) {
            Ok(rings) => rings,
            Err(error) => {
                tracing::warn!(target: "glake::transfer", %relay, %error, "a relay has no memory for slots");
                return Bytes::ZERO;
            }
        };
        let taken = rings.iter().map(Ring::size).sum();
        for ring in rings {
            self.shared.links.relays().give_ring(relay, ring);
        }
        taken
    }
}
