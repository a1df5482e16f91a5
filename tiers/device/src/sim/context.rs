//! Which devices have a context: the first call that runs in one makes it.
//!
//! Its memory is not simulated. What goes with it is: access to peers' plain memory.
//!
//! Invariant: a device that this driver made something on which is still alive has a context.

use super::denial::{Checked, Denial};
use super::state::State;
use crate::owned::DeviceSet;
use crate::{DeviceId, Living};

#[derive(Debug, Default)]
pub(super) struct Contexts {
    /// Those that the driver holds.
    made: DeviceSet,
    /// Those that the program holds besides.
    held: DeviceSet,
}

impl Contexts {
    pub(super) fn hold(&mut self, device: DeviceId) {
        self.held = self.held.union(DeviceSet::of(device));
    }
}

impl State {
    /// A call runs in the context of a device.
    pub(super) fn enter(&mut self, device: DeviceId) -> Checked<()> {
        self.world.memory.device(device)?;
        self.contexts.made = self.contexts.made.union(DeviceSet::of(device));
        Ok(())
    }

    pub(super) fn has_context(&self, device: DeviceId) -> Checked<bool> {
        self.world.memory.device(device)?;
        let ours = self.contexts.made.contains(device);
        Ok(ours || self.contexts.held.contains(device) || self.world.memory.has_plain(device))
    }

    /// Whether the driver's hold may go: nothing that it made there lives.
    pub(super) fn may_leave(&self, device: DeviceId) -> Checked<()> {
        self.world.memory.device(device)?;
        let living = Living {
            streams: self.streams.made_on(device),
            events: self.world.events.made_on(device),
            modules: self.modules.made_on(device),
            extents: self.world.memory.made_on(device),
            // Simulated pinning is nobody's.
            registrations: 0,
        };
        if living.is_none() { Ok(()) } else { Err(Denial::ContextInUse(device, living)) }
    }

    /// The driver's hold goes.
    pub(super) fn leave(&mut self, device: DeviceId) -> Checked<()> {
        self.may_leave(device)?;
        self.contexts.made = self.contexts.made.without(DeviceSet::of(device));
        if !self.has_context(device)? {
            self.world.memory.forget_peers(device);
        }
        Ok(())
    }
}
