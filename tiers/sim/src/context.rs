//! Contexts: whose, which of a device's, and what goes with one.
//!
//! The first call that runs in a context makes it. Its memory is not simulated. What goes with a primary one is access
//! to peers' plain memory, with one of our own its default streams.
//!
//! Invariants:
//! - A context that a driver made something in which is still alive is there.
//! - What was made in a context is used in that one only, but for events, which streams of every context wait for.

use std::collections::{HashMap, HashSet};
use std::thread::{self, ThreadId};

use super::denial::{Checked, Denial, refuse};
use super::state::State;
use glake_device::owned::DeviceSet;
use glake_device::{Address, DeviceId, Living, Refusal};

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
    /// One of a set of our own ([`glake_device::Driver::own_contexts`]), by the number of the set.
    Own(u32),
    /// One that the program made besides, by its number.
    Made(u32),
}

/// A context that the program made besides the primary ones, as `cuCtxCreate` does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SimContext {
    device: DeviceId,
    number: u32,
}

impl SimContext {
    /// Whose it is.
    pub fn device(self) -> DeviceId {
        self.device
    }

    pub(super) fn kind(self) -> ContextKind {
        ContextKind::Made(self.number)
    }
}

/// The context that a thread of the program is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Current {
    /// A device's primary one.
    Primary(DeviceId),
    /// One that it made.
    Made(SimContext),
}

impl Current {
    pub(super) fn context(self) -> ContextId {
        match self {
            Current::Primary(device) => ContextId { device, kind: ContextKind::Primary },
            Current::Made(made) => ContextId { device: made.device, kind: made.kind() },
        }
    }
}

/// CUDA's numbers.
const OUT_OF_MEMORY: u32 = 2;
const INVALID_DEVICE: u32 = 101;
const PEER_ACCESS_ALREADY_ENABLED: u32 = 704;
const PEER_ACCESS_NOT_ENABLED: u32 = 705;

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
    /// Those that the program made besides the primary ones.
    of_program: HashSet<ContextId>,
    /// Those whose memory is counted.
    charged: HashSet<ContextId>,
    /// The context that each thread is in.
    current: HashMap<ThreadId, ContextId>,
    /// How many sets of our own, and contexts that the program made, there were.
    numbered: u32,
}

impl Contexts {
    fn hold(&mut self, device: DeviceId) {
        self.held = self.held.union(DeviceSet::of(device));
    }

    /// A set of contexts of our own, none of which is made yet.
    pub(super) fn add_own(&mut self) -> ContextKind {
        self.numbered += 1;
        ContextKind::Own(self.numbered)
    }

    /// The program makes a context.
    fn add_made(&mut self, device: DeviceId) -> SimContext {
        self.numbered += 1;
        let made = SimContext { device, number: self.numbered };
        self.of_program.insert(Current::Made(made).context());
        made
    }

    /// Whether there can be such a context.
    fn is_there(&self, context: ContextId) -> bool {
        !matches!(context.kind, ContextKind::Made(_)) || self.of_program.contains(&context)
    }
}

impl State {
    /// A call runs in a context.
    pub(super) fn use_context(&mut self, context: ContextId) -> Checked<()> {
        self.world.memory.device(context.device)?;
        self.alive(context)?;
        if !self.contexts.is_there(context) {
            return refuse(Address(0), Refusal::UnknownHandle);
        }
        self.charge_context(context)?;
        self.contexts.made.insert(context);
        Ok(())
    }

    /// A context's memory is taken, where it is not yet.
    pub(super) fn charge_context(&mut self, context: ContextId) -> Checked<()> {
        if !self.contexts.charged.contains(&context) {
            self.world.memory.charge_context(context.device)?;
            self.contexts.charged.insert(context);
        }
        Ok(())
    }

    /// The program makes a context besides the primary one.
    pub(super) fn make_context(&mut self, device: DeviceId) -> Checked<SimContext> {
        self.world.memory.device(device)?;
        let made = self.contexts.add_made(device);
        let context = Current::Made(made).context();
        self.charge_context(context).inspect_err(|_| {
            self.contexts.of_program.remove(&context);
        })?;
        Ok(made)
    }

    /// The program holds a device's primary context besides.
    pub(super) fn hold_context(&mut self, device: DeviceId) -> Checked<()> {
        self.charge_context(ContextId { device, kind: ContextKind::Primary })?;
        self.contexts.hold(device);
        Ok(())
    }

    /// A call asks about what is in a context.
    pub(super) fn alive(&self, context: ContextId) -> Checked<()> {
        match self.world.lost.get(&context) {
            Some(code) => Err(Denial::Lost(*code)),
            None => Ok(()),
        }
    }

    /// The context that the calling thread is in: the first device's primary one where it is in none.
    pub(super) fn current(&self) -> ContextId {
        let first = ContextId { device: DeviceId(0), kind: ContextKind::Primary };
        self.contexts.current.get(&thread::current().id()).copied().unwrap_or(first)
    }

    /// Changes the context that the calling thread is in.
    pub(super) fn set_current(&mut self, current: Option<ContextId>) -> Checked<()> {
        let thread = thread::current().id();
        match current {
            None => {
                self.contexts.current.remove(&thread);
            }
            Some(context) => {
                self.world.memory.device(context.device)?;
                if !self.contexts.is_there(context) {
                    return refuse(Address(0), Refusal::UnknownHandle);
                }
                self.contexts.current.insert(thread, context);
            }
        }
        Ok(())
    }

    /// The program lets a device into a peer's plain memory: CUDA's number.
    pub(super) fn program_enable_peer(&mut self, device: DeviceId, peer: DeviceId) -> u32 {
        let context = ContextId { device, kind: ContextKind::Primary };
        if self.world.memory.is_enabled(device, peer) {
            return PEER_ACCESS_ALREADY_ENABLED;
        }
        match self.world.memory.enable_peer_access(context, peer) {
            Err(_) => INVALID_DEVICE,
            Ok(()) => match self.hold_context(device).and_then(|()| self.hold_context(peer)) {
                Ok(()) => 0,
                Err(_) => OUT_OF_MEMORY,
            },
        }
    }

    /// The program takes a device out of a peer's plain memory: CUDA's number.
    pub(super) fn program_disable_peer(&mut self, device: DeviceId, peer: DeviceId) -> u32 {
        if !self.world.memory.is_enabled(device, peer) {
            return PEER_ACCESS_NOT_ENABLED;
        }
        self.world.memory.disable_peer_access(device, peer);
        0
    }

    pub(super) fn has_context(&self, context: ContextId) -> Checked<bool> {
        let ContextId { device, kind } = context;
        self.world.memory.device(device)?;
        let of_program = || self.contexts.held.contains(device) || self.world.memory.has_plain(device);
        Ok(match kind {
            ContextKind::Primary => self.contexts.made.contains(&context) || of_program(),
            ContextKind::Own(_) => self.contexts.made.contains(&context),
            ContextKind::Made(_) => self.contexts.is_there(context),
        })
    }

    /// Whether the driver's hold may go: nothing that it made there lives.
    pub(super) fn may_release(&self, context: ContextId) -> Checked<()> {
        self.world.memory.device(context.device)?;
        self.alive(context)?;
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
    pub(super) fn release_context(&mut self, context: ContextId) -> Checked<()> {
        self.may_release(context)?;
        self.contexts.made.remove(&context);
        if context.kind != ContextKind::Primary {
            for lane in self.streams.forget(context) {
                self.timeline.close(lane);
            }
        } else if !self.has_context(context)? {
            self.world.memory.forget_peers(context.device);
        }
        if !self.has_context(context)? && self.contexts.charged.remove(&context) {
            self.world.memory.credit_context(context.device);
        }
        Ok(())
    }
}
