//! Contexts: their owners, kinds and the state that is lost with them.
//!
//! The first call that runs in a context creates it. Its memory is not simulated. Releasing a primary context also removes access to peers'
//! plain memory; releasing a private one removes its default streams.
//!
//! Invariants:
//! - A context exists while any object that a driver created in it is alive.
//! - Objects are used only in the context that they were created in, except for events, which streams of every context may wait for.

use std::collections::{HashMap, HashSet};
use std::thread::{self, ThreadId};

use super::denial::{Checked, Denial, refuse};
use super::state::State;
use glake_device::owned::DeviceSet;
use glake_device::{Address, DeviceId, Living, Refusal};

/// Identity of a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ContextId {
    pub(super) device: DeviceId,
    pub(super) kind: ContextKind,
}

/// Kind of a device's context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum ContextKind {
    /// The primary context, which the program uses.
    Primary,
    /// A context of a private set ([`glake_device::Driver::own_contexts`]), by the number of the set.
    Own(u32),
    /// A further context created by the program, by its number.
    Made(u32),
}

/// A context that the program created besides the primary ones, as with `cuCtxCreate`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SimContext {
    device: DeviceId,
    number: u32,
}

impl SimContext {
    /// Returns the device of the context.
    pub fn device(self) -> DeviceId {
        self.device
    }

    pub(super) fn kind(self) -> ContextKind {
        ContextKind::Made(self.number)
    }
}

/// Current context of a program's thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Current {
    /// The primary context of a device.
    Primary(DeviceId),
    /// A context that the program created.
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

/// CUDA's error numbers for the program's calls.
const OUT_OF_MEMORY: u32 = 2;
const INVALID_DEVICE: u32 = 101;
const PEER_ACCESS_ALREADY_ENABLED: u32 = 704;
const PEER_ACCESS_NOT_ENABLED: u32 = 705;

impl ContextKind {
    /// Returns whether the context is private, so that the program cannot see it.
    pub(super) fn is_own(self) -> bool {
        matches!(self, ContextKind::Own(_))
    }
}

#[derive(Debug, Default)]
pub(super) struct Contexts {
    /// Contexts that a driver holds.
    made: HashSet<ContextId>,
    /// Devices whose primary contexts the program holds too.
    held: DeviceSet,
    /// Contexts that the program created besides the primary ones.
    of_program: HashSet<ContextId>,
    /// Contexts whose memory is accounted for.
    charged: HashSet<ContextId>,
    /// Current context of each thread.
    current: HashMap<ThreadId, ContextId>,
    /// Number of private sets and program-created contexts so far.
    numbered: u32,
}

impl Contexts {
    fn hold(&mut self, device: DeviceId) {
        self.held = self.held.union(DeviceSet::of(device));
    }

    /// Registers a private set, none of whose contexts exists yet.
    pub(super) fn add_own(&mut self) -> ContextKind {
        self.numbered += 1;
        ContextKind::Own(self.numbered)
    }

    /// Registers a context that the program creates.
    fn add_made(&mut self, device: DeviceId) -> SimContext {
        self.numbered += 1;
        let made = SimContext { device, number: self.numbered };
        self.of_program.insert(Current::Made(made).context());
        made
    }

    /// Returns whether such a context can exist.
    fn is_there(&self, context: ContextId) -> bool {
        !matches!(context.kind, ContextKind::Made(_)) || self.of_program.contains(&context)
    }
}

impl State {
    /// Creates a context if necessary, for a call that runs in it.
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

    /// Accounts for a context's memory unless that was done.
    pub(super) fn charge_context(&mut self, context: ContextId) -> Checked<()> {
        if !self.contexts.charged.contains(&context) {
            self.world.memory.charge_context(context.device)?;
            self.contexts.charged.insert(context);
        }
        Ok(())
    }

    /// Creates a context for the program besides the primary one.
    pub(super) fn make_context(&mut self, device: DeviceId) -> Checked<SimContext> {
        self.world.memory.device(device)?;
        let made = self.contexts.add_made(device);
        let context = Current::Made(made).context();
        self.charge_context(context).inspect_err(|_| {
            self.contexts.of_program.remove(&context);
        })?;
        Ok(made)
    }

    /// Gives the program its own hold on a device's primary context.
    pub(super) fn hold_context(&mut self, device: DeviceId) -> Checked<()> {
        self.charge_context(ContextId { device, kind: ContextKind::Primary })?;
        self.contexts.hold(device);
        Ok(())
    }

    /// Checks that a context is not lost, for a call that queries it.
    pub(super) fn alive(&self, context: ContextId) -> Checked<()> {
        match self.world.lost.get(&context) {
            Some(code) => Err(Denial::Lost(*code)),
            None => Ok(()),
        }
    }

    /// Returns the calling thread's current context; the first device's primary one if it has none.
    pub(super) fn current(&self) -> ContextId {
        let first = ContextId { device: DeviceId(0), kind: ContextKind::Primary };
        self.contexts.current.get(&thread::current().id()).copied().unwrap_or(first)
    }

    /// Sets or clears the calling thread's current context.
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

    /// Gives a device access to a peer's plain memory, on behalf of the program. Returns CUDA's error number.
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

    /// Revokes a device's access to a peer's plain memory, on behalf of the program. Returns CUDA's error number.
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

    /// Checks that the driver may release the context: no object that it created there is alive.
    pub(super) fn may_release(&self, context: ContextId) -> Checked<()> {
        self.world.memory.device(context.device)?;
        self.alive(context)?;
        let living = Living {
            streams: self.streams.made_in(context),
            events: self.world.events.made_in(context),
            modules: self.modules.made_in(context),
            extents: self.world.memory.made_in(context),
            // Simulated pinned memory belongs to no context.
            registrations: 0,
        };
        if living.is_none() { Ok(()) } else { Err(Denial::ContextInUse(context.device, living)) }
    }

    /// Releases the driver's hold on a context.
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
