//! Effects of work when it is due: bytes move, values change, events complete, memory is released.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::context::ContextId;
use super::event::Events;
use super::kernel::{Declared, DeclaredMemory};
use super::memory::Memory;
use super::request::Body;
use super::resolve::Hold;
use super::system;
use super::timeline::Effects;
use glake_device::{Address, Compare, Event};

/// CUDA's number for a kernel that accessed memory out of its reach.
const ILLEGAL_ADDRESS: u32 = 700;

/// A piece of resolved work.
pub(super) struct Work {
    /// Context whose loss prevents the work; `None` for work that only establishes order.
    pub(super) context: Option<ContextId>,
    pub(super) action: Action,
    /// Objects that the work keeps alive until it is done.
    pub(super) holds: Vec<Hold>,
}

/// Effect of a piece of work. Pointers are resolved when it is enqueued and stay valid while the work holds their objects.
pub(super) enum Action {
    Nothing,
    Copy(Vec<Segment>),
    /// A copy from pageable memory up to the point where its source has been read: the last segments wait in a buffer.
    Stage {
        first: Vec<Segment>,
        last: Vec<Segment>,
        into: Staging,
    },
    /// The remaining part of a staged copy.
    Land {
        last: Vec<Segment>,
        from: Staging,
    },
    /// Pointer and size of each piece.
    Fill(Vec<(u64, u64)>, u8),
    Store {
        pointer: u64,
        value: u32,
    },
    /// A kernel accesses memory out of its context's reach: the context is lost.
    Fault(ContextId),
    Kernel {
        context: ContextId,
        declared: Declared,
        body: Body,
    },
    Record {
        event: Event,
        record: u64,
    },
}

impl Action {
    /// Returns whether the action affects memory only.
    fn moves_bytes(&self) -> bool {
        match self {
            Action::Copy(_)
            | Action::Stage { .. }
            | Action::Land { .. }
            | Action::Fill(..)
            | Action::Kernel { .. } => true,
            Action::Nothing | Action::Store { .. } | Action::Fault(_) | Action::Record { .. } => false,
        }
    }
}

/// Bytes between the two halves of a staged copy, segment by segment.
pub(super) type Staging = Arc<Mutex<Vec<u8>>>;

/// Bytes that are contiguous at both ends.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment {
    pub(super) to: u64,
    pub(super) from: u64,
    pub(super) size: u64,
}

/// A comparison that a stream waits for.
#[derive(Debug)]
pub(super) struct Awaited {
    pub(super) context: ContextId,
    pub(super) pointer: u64,
    pub(super) value: u32,
    pub(super) compare: Compare,
}

impl Work {
    pub(super) fn nothing() -> Self {
        Work { context: None, action: Action::Nothing, holds: Vec::new() }
    }

    /// Builds the completion of an event, which happens even in a lost context.
    pub(super) fn record(event: Event, record: u64) -> Self {
        Work { context: None, action: Action::Record { event, record }, holds: Vec::new() }
    }
}

impl std::fmt::Debug for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Work").field("holds", &self.holds).finish_non_exhaustive()
    }
}

/// State that work acts on.
#[derive(Debug)]
pub(super) struct World {
    pub(super) memory: Memory,
    pub(super) events: Events,
    /// First stray access of a kernel in each context, until a caller waits for the context.
    pub(super) strays: Vec<(ContextId, Address)>,
    /// Lost contexts with their CUDA error numbers: none of their work reaches memory any more.
    pub(super) lost: HashMap<ContextId, u32>,
    /// Whether copies, fills and kernels leave memory unchanged.
    pub(super) times_only: bool,
}

fn move_all(segments: &[Segment]) {
    for Segment { to, from, size } in segments {
        // SAFETY: device memory and registered memory is held by the work, or by its second half; for pageable memory
        // the caller of the unsafe verb promised that it lives until now.
        unsafe { system::move_bytes(*to, *from, *size) };
    }
}

impl Effects for World {
    type Work = Work;
    type Value = Awaited;

    fn run(&mut self, work: Work, now: u64) {
        let lost = work.context.is_some_and(|context| self.lost.contains_key(&context));
        match work.action {
            _ if lost => {}
            _ if self.times_only && work.action.moves_bytes() => {}
            Action::Nothing => {}
            Action::Fault(context) => {
                self.lost.insert(context, ILLEGAL_ADDRESS);
            }
            Action::Copy(segments) => move_all(&segments),
            Action::Stage { first, last, into } => {
                move_all(&first);
                let mut staged = into.lock();
                for Segment { from, size, .. } in last {
                    let at = staged.len();
                    staged.resize(at + size as usize, 0);
                    // SAFETY: as for `move_all`; the buffer is ours.
                    unsafe { system::read_bytes(from, &mut staged[at..]) };
                }
            }
            Action::Land { last, from } => {
                let staged = from.lock();
                let mut rest = staged.as_slice();
                for Segment { to, size, .. } in last {
                    let (bytes, next) = rest.split_at(size as usize);
                    // SAFETY: as for `move_all`; the buffer is ours.
                    unsafe { system::write_bytes(to, bytes) };
                    rest = next;
                }
            }
            Action::Fill(pieces, byte) => {
                for (pointer, size) in pieces {
                    // SAFETY: as for copies; pageable memory is not filled.
                    unsafe { system::fill_bytes(pointer, byte, size) };
                }
            }
            Action::Store { pointer, value } => {
                // SAFETY: the word is held by the work, and its alignment was checked when it was enqueued.
                unsafe { system::store_word(pointer, value) };
            }
            Action::Kernel { context, declared, body } => {
                let mut memory = DeclaredMemory { declared: &declared, stray: None };
                body(&mut memory);
                self.strays.extend(memory.stray.map(|at| (context, at)));
            }
            Action::Record { event, record } => self.events.pass(event, record, now),
        }
        for hold in work.holds {
            self.memory.let_go(hold);
        }
    }

    fn holds(&self, awaited: &Awaited) -> bool {
        if self.lost.contains_key(&awaited.context) {
            return true;
        }
        // SAFETY: the word is held by the waiting work, and its alignment was checked when it was enqueued.
        let found = unsafe { system::load_word(awaited.pointer) };
        match awaited.compare {
            Compare::Equal => found == awaited.value,
            Compare::AtLeast => found.wrapping_sub(awaited.value).cast_signed() >= 0,
        }
    }
}
