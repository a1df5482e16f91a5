//! Streams of the simulated devices, and the order of their next work.
//!
//! A stream is a lane of the timeline. The legacy default stream waits for all work of its context's *blocking* streams, and they wait for
//! it. Streams created through the trait are not blocking, per-thread default streams are. Each context has default streams of its own,
//! created at first use.
//!
//! Invariant: ids are unique for the life of the process, across all simulators.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread::{self, ThreadId};

use super::context::ContextId;
use super::denial::{Checked, refuse};
use super::order::{Order, Position, VectorClock};
use glake_device::{Address, Refusal, Stream};

/// State of a stream.
#[derive(Debug)]
pub(super) struct StreamState {
    pub(super) context: ContextId,
    /// Whether the stream and the legacy stream wait for each other.
    pub(super) blocking: bool,
    /// Work that its next operation is ordered after.
    pub(super) clock: VectorClock,
    /// The part of `clock` that is ordered by completion, not only by stream order.
    pub(super) edges: VectorClock,
    /// Capture that records the stream, if any.
    pub(super) capture: Option<u64>,
    /// Whether it is a default stream, which the program may not destroy.
    default: bool,
    /// Whether it was destroyed, so that only its work remains.
    retired: bool,
}

/// State common to the streams of a context.
#[derive(Debug, Default)]
struct Common {
    /// Lane of the legacy default stream, if used.
    legacy: Option<u64>,
    /// Work of destroyed streams.
    past: VectorClock,
    /// First of its hardware queues, and the number of streams assigned to them.
    queues: Option<u64>,
    dealt: u64,
}

#[derive(Debug, Default)]
pub(super) struct Streams {
    table: HashMap<u64, StreamState>,
    contexts: HashMap<ContextId, Common>,
    per_thread: HashMap<(ContextId, ThreadId), u64>,
    /// Number of hardware queues in total.
    queues: u64,
    /// Work that the host has observed to be done.
    pub(super) seen: VectorClock,
    /// Work ordered before the values that streams wrote, by address.
    flags: HashMap<u64, VectorClock>,
}

/// First number after [`Stream::LEGACY`] and [`Stream::PER_THREAD`].
static NEXT: AtomicU64 = AtomicU64::new(16);

/// Returns a lane number unique in the process.
pub(super) fn fresh_lane() -> u64 {
    NEXT.fetch_add(1, Relaxed)
}

impl Streams {
    /// Adds a stream; the caller must open its lane.
    pub(super) fn add(&mut self, context: ContextId, blocking: bool) -> u64 {
        let lane = fresh_lane();
        let (clock, edges) = Default::default();
        let state =
            StreamState { context, blocking, clock, edges, capture: None, default: false, retired: false };
        self.table.insert(lane, state);
        lane
    }

    /// Adds a default stream at its first use: the legacy one or the calling thread's own. The caller must open its lane.
    pub(super) fn add_default(&mut self, context: ContextId, stream: Stream) -> u64 {
        let own = stream == Stream::PER_THREAD;
        let lane = self.add(context, own);
        if own {
            self.per_thread.insert((context, thread::current().id()), lane);
        } else {
            self.contexts.entry(context).or_default().legacy = Some(lane);
        }
        if let Some(state) = self.table.get_mut(&lane) {
            state.default = true;
        }
        lane
    }

    /// Assigns a stream of a context to one of its `count` hardware queues, and returns the queue.
    pub(super) fn deal(&mut self, context: ContextId, count: u32) -> u64 {
        let (count, fresh) = (u64::from(count), self.queues);
        let common = self.contexts.entry(context).or_default();
        let first = *common.queues.get_or_insert(fresh);
        if first == fresh {
            self.queues = fresh + count;
        }
        common.dealt += 1;
        first + (common.dealt - 1) % count
    }

    /// Forgets a context with its default streams, whose work is done; returns their lanes.
    pub(super) fn forget(&mut self, context: ContextId) -> Vec<u64> {
        self.contexts.remove(&context);
        self.per_thread.retain(|(of, _), _| *of != context);
        let lanes: Vec<u64> = self.of(context).map(|(lane, _)| lane).collect();
        self.table.retain(|_, state| state.context != context);
        lanes
    }

    /// Marks a stream as destroyed; its work still belongs to its context.
    pub(super) fn retire(&mut self, lane: u64) {
        if let Some(state) = self.table.get_mut(&lane) {
            state.retired = true;
        }
    }

    /// Forgets destroyed streams whose work is done.
    pub(super) fn sweep(&mut self, done: impl Fn(u64) -> bool) {
        let contexts = &mut self.contexts;
        self.table.retain(|lane, state| {
            let goes = state.retired && done(*lane);
            if goes {
                contexts.entry(state.context).or_default().past.join(&state.clock);
            }
            !goes
        });
    }

    /// Returns the lane of a stream of a context; `None` for a default stream that was never used.
    pub(super) fn lane(&self, context: ContextId, stream: Stream) -> Checked<Option<u64>> {
        match stream {
            Stream(0) | Stream::LEGACY => Ok(self.legacy(context)),
            Stream::PER_THREAD => Ok(self.per_thread.get(&(context, thread::current().id())).copied()),
            Stream(lane) => match self.table.get(&lane) {
                Some(state) if state.context == context && !state.retired && !state.default => Ok(Some(lane)),
                _ => refuse(Address(0), Refusal::UnknownHandle),
            },
        }
    }

    /// Returns the context of a stream handle; default handles belong to `current`.
    pub(super) fn context(&self, stream: Stream, current: ContextId) -> Checked<ContextId> {
        match stream {
            Stream(0) | Stream::LEGACY | Stream::PER_THREAD => Ok(current),
            Stream(lane) => match self.table.get(&lane) {
                Some(state) if !state.retired => Ok(state.context),
                _ => refuse(Address(0), Refusal::UnknownHandle),
            },
        }
    }

    /// Returns whether it is a default stream, which the program may not destroy.
    pub(super) fn is_default(&self, lane: u64) -> bool {
        self.table.get(&lane).is_some_and(|state| state.default)
    }

    fn legacy(&self, context: ContextId) -> Option<u64> {
        self.contexts.get(&context).and_then(|common| common.legacy)
    }

    pub(super) fn get(&self, lane: u64) -> Option<&StreamState> {
        self.table.get(&lane)
    }

    pub(super) fn get_mut(&mut self, lane: u64) -> Option<&mut StreamState> {
        self.table.get_mut(&lane)
    }

    /// Returns all lanes of a context that may have work.
    pub(super) fn of(&self, context: ContextId) -> impl Iterator<Item = (u64, &StreamState)> {
        self.table
            .iter()
            .filter(move |(_, state)| state.context == context)
            .map(|(lane, state)| (*lane, state))
    }

    /// Returns the number of streams created in a context and not destroyed.
    pub(super) fn made_in(&self, context: ContextId) -> u64 {
        self.of(context).filter(|(_, state)| !state.retired && !state.default).count() as u64
    }

    pub(super) fn len(&self) -> usize {
        self.table.values().filter(|state| !state.retired && !state.default).count()
    }

    /// Returns the lanes that work on this one waits for implicitly.
    pub(super) fn implied(&self, lane: u64) -> Vec<u64> {
        let Some(state) = self.table.get(&lane) else { return Vec::new() };
        let legacy = self.legacy(state.context);
        if legacy == Some(lane) {
            return self
                .of(state.context)
                .filter(|(_, other)| other.blocking)
                .map(|(lane, _)| lane)
                .collect();
        }
        legacy.into_iter().filter(|_| state.blocking).collect()
    }

    /// Returns the order of work enqueued now on a lane, without the host's knowledge.
    pub(super) fn order(&self, lane: u64) -> Order {
        let Some(state) = self.table.get(&lane) else { return Order::default() };
        let mut order = Order { clock: state.clock.clone(), edges: state.edges.clone() };
        if let Some(common) = self.contexts.get(&state.context).filter(|common| common.legacy == Some(lane)) {
            order.completes(&common.past);
        }
        for other in self.implied(lane) {
            if let Some(state) = self.table.get(&other) {
                order.completes(&state.clock);
            }
        }
        order
    }

    /// Records enqueued work, which precedes later work on the lane. Work that the host has observed is left out, so that clocks grow only
    /// with the concurrency of unfinished work.
    pub(super) fn enqueued(&mut self, position: Position, mut order: Order) {
        order.clock.forget(&self.seen);
        order.edges.forget(&self.seen);
        order.clock.see(position);
        if let Some(state) = self.table.get_mut(&position.lane) {
            state.clock = order.clock;
            state.edges = order.edges;
        }
    }

    /// Returns the joined clock of all streams of a context.
    pub(super) fn clock_of(&self, context: ContextId) -> VectorClock {
        let mut clock = self.contexts.get(&context).map(|common| common.past.clone()).unwrap_or_default();
        for (_, state) in self.of(context) {
            clock.join(&state.clock);
        }
        clock
    }

    /// Records that the host has observed all of this work as done.
    pub(super) fn observe(&mut self, clock: &VectorClock) {
        self.seen.join(clock);
        if self.seen.loose {
            // The wait was for a value, so everything before the write of some value is done.
            for flag in self.flags.values() {
                self.seen.join(flag);
            }
            self.seen.loose = false;
        }
        for common in self.contexts.values_mut() {
            common.past.forget(&self.seen);
        }
    }

    /// Records that the host has observed all work of a stream as done.
    pub(super) fn observe_lane(&mut self, lane: u64) {
        let clock = self.order(lane).clock;
        self.observe_on(lane, &clock);
    }

    /// Records that the host has waited for a stream and observed this work as done.
    pub(super) fn observe_on(&mut self, lane: u64, clock: &VectorClock) {
        self.observe(clock);
        if let Some(state) = self.table.get_mut(&lane) {
            state.clock.loose = false;
            state.edges.loose = false;
        }
    }

    /// Returns the work ordered before the value at this address, as far as known.
    pub(super) fn flag(&self, address: u64) -> VectorClock {
        self.flags.get(&address).cloned().unwrap_or_else(VectorClock::unknown)
    }

    pub(super) fn raise(&mut self, address: u64, clock: &VectorClock) {
        self.flags.entry(address).or_default().join(clock);
    }
}
