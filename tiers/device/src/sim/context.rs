//! Contexts: whose, which of a device's, and what goes with one.
//!
//! The first call that runs in a context makes it. Its memory is not simulated. What goes with a primary one is access to
//! peers' plain memory, with one of our own its default streams.
//!
//! Invariants:
//! - A context that a driver made something in which is still alive is there.
//! - What was made in a context is used in that one only, but for events, which streams of every context wait for.

use std::collections::HashSet;

use super::denial::{Checked, Denial};
use super::state::State;
use crate::owned::DeviceSet;
use crate::{DeviceId, Living};

/// One context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ContextId {
    pub(super) device: DeviceId,
    pub(super) kind: ContextKind,
}

/// Which of a device's contexts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum ContextKind {
    /// The primary one, which the program uses.
    Primary,
    /// One of a set of our own ([`crate::Driver::own_contexts`]), by the number of the set.
    Own(u32),
}

impl ContextKind {
    /// Whether the program knows nothing of it.
    pub(super) fn is_own(self) -> bool {
        matches!(self, ContextKind::Own(_))
    }
}

#[derive(Debug, Default)]
pub(super) struct Contexts {
    /// Those that a driver holds.
    made: HashSet<ContextId>,
    /// The devices whose primary ones the program holds besides.
    held: DeviceSet,
    /// How many sets of our own there are.
    sets: u32,
}

impl Contexts {
    pub(super) fn hold(&mut self, device: DeviceId) {
        self.held = self.held.union(DeviceSet::of(device));
    }

    /// A set of contexts of our own, none of which is made yet.
    pub(super) fn add_own(&mut self) -> ContextKind {
        self.sets += 1;
        ContextKind::Own(self.sets)
    }
}

impl State {
    /// A call runs in a context.
    pub(super) fn enter(&mut self, context: ContextId) -> Checked<()> {
        self.world.memory.device(context.device)?;
        self.contexts.made.insert(context);
        Ok(())
    }

    pub(super) fn has_context(&self, context: ContextId) -> Checked<bool> {
        let ContextId { device, kind } = context;
        self.world.memory.device(device)?;
        let of_program = || self.contexts.held.contains(device) || self.world.memory.has_plain(device);
        Ok(self.contexts.made.contains(&context) || kind == ContextKind::Primary && of_program())
    }

    /// Whether the driver's hold may go: nothing that it made there lives.
    pub(super) fn may_leave(&self, context: ContextId) -> Checked<()> {
        self.world.memory.device(context.device)?;
        let living = Living {
            streams: self.streams.made_in(context),
            events: self.world.events.made_in(context),
            modules: self.modules.made_in(context),
            extents: self.world.memory.made_in(context),
            // Simulated pinning is nobody's.
            registrations: 0,
        };
        if living.is_none() { Ok(()) } else { Err(Denial::ContextInUse(context.device, living)) }
    }

    /// The driver's hold goes.
    pub(super) fn leave(&mut self, context: ContextId) -> Checked<()> {
        self.may_leave(context)?;
        self.contexts.made.remove(&context);
        if context.kind != ContextKind::Primary {
            for lane in self.streams.forget(context) {
                self.timeline.close(lane);
            }
        } else if !self.has_context(context)? {
            self.world.memory.forget_peers(context.device);
        }
        Ok(())
    }
}
