//! The streams of the simulated devices, and what is ordered before what they do next.
//!
//! A stream is a lane of the timeline. The legacy default stream waits for all work of its device's *blocking*
//! streams, and they wait for it; those made through the trait are not blocking, the per-thread default streams are.
//!
//! Invariant: ids are unique for the life of the process, over all simulators.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread::{self, ThreadId};

use super::denial::{Checked, refuse};
use super::order::{Epoch, Order, VectorClock};
use crate::{Address, DeviceId, Refusal, Stream};

/// One stream.
#[derive(Debug)]
pub(super) struct StreamState {
    pub(super) device: DeviceId,
    /// Whether it and the legacy stream wait for each other.
    pub(super) blocking: bool,
    /// What its next work is ordered after.
    pub(super) clock: VectorClock,
    /// What of that it is ordered after by completion, and not only by its own order.
    pub(super) edges: VectorClock,
    /// The capture that records it.
    pub(super) capture: Option<u64>,
    /// Whether it was destroyed, and only its work is left.
    retired: bool,
}

#[derive(Debug, Default)]
pub(super) struct Streams {
    table: HashMap<u64, StreamState>,
    /// The legacy default stream of each device.
    legacy: Vec<u64>,
    /// For each device, what its destroyed streams had.
    past: Vec<VectorClock>,
    per_thread: HashMap<(DeviceId, ThreadId), u64>,
    /// What the host has seen done.
    pub(super) seen: VectorClock,
    /// What is ordered before the values that streams wrote, by address.
    flags: HashMap<u64, VectorClock>,
}

/// After [`Stream::LEGACY`] and [`Stream::PER_THREAD`].
static NEXT: AtomicU64 = AtomicU64::new(16);

/// A number that no other lane of the process has.
pub(super) fn fresh_lane() -> u64 {
    NEXT.fetch_add(1, Relaxed)
}

impl Streams {
    /// Adds a stream; the lane is the caller's to open.
    pub(super) fn add(&mut self, device: DeviceId, blocking: bool) -> u64 {
        let lane = fresh_lane();
        let (clock, edges) = Default::default();
        let state = StreamState { device, blocking, clock, edges, capture: None, retired: false };
        self.table.insert(lane, state);
        lane
    }

    /// Adds the legacy default stream of the next device.
    pub(super) fn add_legacy(&mut self) -> u64 {
        let device = DeviceId(u32::try_from(self.legacy.len()).unwrap_or(u32::MAX));
        let lane = self.add(device, false);
        self.legacy.push(lane);
        self.past.push(VectorClock::default());
        lane
    }

    /// Takes a stream from the program; its work is still its device's.
    pub(super) fn retire(&mut self, lane: u64) {
        if let Some(state) = self.table.get_mut(&lane) {
            state.retired = true;
        }
    }

    /// Forgets retired streams whose work is done.
    pub(super) fn sweep(&mut self, done: impl Fn(u64) -> bool) {
        let past = &mut self.past;
        self.table.retain(|lane, state| {
            let goes = state.retired && done(*lane);
            if let Some(past) = past.get_mut(state.device.0 as usize).filter(|_| goes) {
                past.join(&state.clock);
            }
            !goes
        });
    }

    /// The lane of a stream of a device that exists; `None` for a per-thread default stream not used before.
    pub(super) fn lane(&self, device: DeviceId, stream: Stream) -> Checked<Option<u64>> {
        match stream {
            Stream(0) | Stream::LEGACY => Ok(self.legacy.get(device.0 as usize).copied()),
            Stream::PER_THREAD => Ok(self.per_thread.get(&(device, thread::current().id())).copied()),
            Stream(lane) => match self.table.get(&lane) {
                Some(state) if state.device == device && !state.retired && !self.is_default(lane) => {
                    Ok(Some(lane))
                }
                _ => refuse(Address(0), Refusal::UnknownHandle),
            },
        }
    }

    /// Whose stream a handle is; the simulator has no current device, so the default ones are the first's.
    pub(super) fn device(&self, stream: Stream) -> Checked<DeviceId> {
        match stream {
            Stream(0) | Stream::LEGACY | Stream::PER_THREAD => Ok(DeviceId(0)),
            Stream(lane) => match self.table.get(&lane) {
                Some(state) if !state.retired => Ok(state.device),
                _ => refuse(Address(0), Refusal::UnknownHandle),
            },
        }
    }

    /// Adds the calling thread's default stream; the lane is the caller's to open.
    pub(super) fn add_per_thread(&mut self, device: DeviceId) -> u64 {
        let lane = self.add(device, true);
        self.per_thread.insert((device, thread::current().id()), lane);
        lane
    }

    /// Whether the program may not destroy it.
    pub(super) fn is_default(&self, lane: u64) -> bool {
        self.legacy.contains(&lane) || self.per_thread.values().any(|other| *other == lane)
    }

    pub(super) fn get(&self, lane: u64) -> Option<&StreamState> {
        self.table.get(&lane)
    }

    pub(super) fn get_mut(&mut self, lane: u64) -> Option<&mut StreamState> {
        self.table.get_mut(&lane)
    }

    /// All lanes of a device that may have work.
    pub(super) fn of(&self, device: DeviceId) -> impl Iterator<Item = (u64, &StreamState)> {
        self.table.iter().filter(move |(_, state)| state.device == device).map(|(lane, state)| (*lane, state))
    }

    /// How many streams of a device were made and not destroyed.
    pub(super) fn made_on(&self, device: DeviceId) -> u64 {
        self.of(device).filter(|(lane, state)| !state.retired && !self.is_default(*lane)).count() as u64
    }

    pub(super) fn len(&self) -> usize {
        let alive = self.table.values().filter(|state| !state.retired).count();
        alive - self.legacy.len() - self.per_thread.len()
    }

    /// The lanes that work on this one waits for without being told to.
    pub(super) fn implied(&self, lane: u64) -> Vec<u64> {
        let Some(state) = self.table.get(&lane) else { return Vec::new() };
        let legacy = self.legacy.get(state.device.0 as usize).copied();
        if legacy == Some(lane) {
            return self.of(state.device).filter(|(_, other)| other.blocking).map(|(lane, _)| lane).collect();
        }
        legacy.into_iter().filter(|_| state.blocking).collect()
    }

    /// What work enqueued now on a lane is ordered after, the host's knowledge aside.
    pub(super) fn order(&self, lane: u64) -> Order {
        let Some(state) = self.table.get(&lane) else { return Order::default() };
        let mut order = Order { clock: state.clock.clone(), edges: state.edges.clone() };
        if let Some(device) = self.legacy.iter().position(|legacy| *legacy == lane) {
            order.completes(&self.past[device]);
        }
        for other in self.implied(lane) {
            if let Some(state) = self.table.get(&other) {
                order.completes(&state.clock);
            }
        }
        order
    }

    /// Notes that work was enqueued: what comes next on the lane is after it. What the host has seen done goes without
    /// saying, so that clocks stay as short as the work under way is wide.
    pub(super) fn enqueued(&mut self, epoch: Epoch, mut order: Order) {
        order.clock.forget(&self.seen);
        order.edges.forget(&self.seen);
        order.clock.see(epoch);
        if let Some(state) = self.table.get_mut(&epoch.lane) {
            state.clock = order.clock;
            state.edges = order.edges;
        }
    }

    /// What the streams of a device have in all.
    pub(super) fn clock_of(&self, device: DeviceId) -> VectorClock {
        let mut clock = self.past.get(device.0 as usize).cloned().unwrap_or_default();
        for (_, state) in self.of(device) {
            clock.join(&state.clock);
        }
        clock
    }

    /// Notes that the host has seen all of this done.
    pub(super) fn observe(&mut self, clock: &VectorClock) {
        self.seen.join(clock);
        if self.seen.loose {
            // It waited for a value, and so for whatever was before the writing of some value.
            for flag in self.flags.values() {
                self.seen.join(flag);
            }
            self.seen.loose = false;
        }
        for past in &mut self.past {
            past.forget(&self.seen);
        }
    }

    /// Notes that the host has seen all work of a stream done.
    pub(super) fn observe_lane(&mut self, lane: u64) {
        let clock = self.order(lane).clock;
        self.observe_on(lane, &clock);
    }

    /// Notes that the host has waited for a stream, and has seen this done.
    pub(super) fn observe_on(&mut self, lane: u64, clock: &VectorClock) {
        self.observe(clock);
        if let Some(state) = self.table.get_mut(&lane) {
            state.clock.loose = false;
            state.edges.loose = false;
        }
    }

    /// What is ordered before a value at this address, as far as is known.
    pub(super) fn flag(&self, address: u64) -> VectorClock {
        self.flags.get(&address).cloned().unwrap_or_else(VectorClock::unknown)
    }

    pub(super) fn raise(&mut self, address: u64, clock: &VectorClock) {
        self.flags.entry(address).or_default().join(clock);
    }
}
