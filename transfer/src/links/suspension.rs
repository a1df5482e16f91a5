//! Suspended relays: their contexts, half a GiB each, go back to the driver, and are made again when they are resumed.
//!
//! ```text
//!   suspend ─► suspended ─► lane sets idle? ─► out of reach: lanes, rings, kernels, branches, staging streams, events
//!               ▲  │                               │ nobody has any of it, and their GPUs' work is done
//!      resume ──┘  └── no copy takes them          └─► dropped ─► context given back, or told why not
//!      resume ─► not suspended ─► made ready again, as at the start
//! ```
//!
//! Invariants:
//! - A copy owns what it stands on: its lane set, its set of kernels, its staging streams. Whatever is taken out of reach here is dropped by the
//!   engine's thread, and not before the last copy has put it down. So a copy that began before a suspension ends as it began, and the
//!   driver gives no context back of which a copy has anything.
//! - No copy that begins takes a suspended relay. Whether one is suspended is one word, so the last call decides: what is
//!   under way looks at it before each step, and each step can be taken again, or undone by making what is missing.
//! - The engine's thread never waits here: what is not over yet is looked at again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use glake_device::owned::{DeviceSet, Epoch, Gather};
use glake_device::{DeviceId, DriverError, Living};
use glake_units::Bytes;
use parking_lot::{Condvar, Mutex};

use crate::Result;
use crate::kinds::foreign::slots::Ring;
use crate::kinds::pageable::StagingStream;
use crate::links::lane_set::LaneSet;
use crate::{Engine, RelayCost};

/// How often what is not over yet is looked at again.
pub(crate) const PAUSE: Duration = Duration::from_millis(1);
/// How often a context is asked for that something else keeps: others' calls, epochs that are polled, handles that are asked.
const TRIES: u32 = 50;

/// A relay whose context is still there after a rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnsuspendedRelay {
    /// Which.
    pub relay: DeviceId,
    /// What it takes, as [`crate::RelayCost`] has it.
    pub context: Bytes,
    /// What keeps it.
    pub why: WhyUnsuspended,
}

/// What keeps a relay's context.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WhyUnsuspended {
    /// Copies, or work of the program on that GPU, are not done yet: it goes after them.
    #[error("work on it is not done yet")]
    UnderWay,
    /// A captured graph launches kernels of ours there.
    #[error("a captured graph has kernels on it")]
    Graph,
    /// Something else that GLake made there lives.
    #[error("it holds {0} that are in use")]
    InUse(Living),
    /// A relay that was lost stays as it is.
    #[error("the GPU was lost")]
    Lost,
    /// The driver did not give it back.
    #[error("the driver did not give it back")]
    Refused,
}

/// What suspensions have come to.
#[derive(Debug, Default)]
pub(crate) struct Suspensions {
    state: Mutex<State>,
    over: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// How many were asked for, and how many of these are over.
    asked: u64,
    over: u64,
    stayed: Vec<UnsuspendedRelay>,
}

/// What the engine's thread knows of a rest.
#[derive(Debug, Default)]
pub(crate) struct Suspension {
    /// Whose things are being given up.
    going: DeviceSet,
    /// Whose things are in these lists, and may have work under way.
    stripped: DeviceSet,
    /// What became of these is known.
    told: DeviceSet,
    lane_sets: Vec<Arc<LaneSet>>,
    kernels: Vec<Arc<Gather>>,
    gates: Vec<Arc<StagingStream>>,
    rings: Vec<Ring>,
    /// Recorded behind all work that what is out of reach may have.
    done: Option<Epoch>,
    tries: u32,
    /// The last suspension that was asked for.
    asked: u64,
}

impl Suspensions {
    fn note_unsuspended(&self, stayed: UnsuspendedRelay) {
        let mut state = self.state.lock();
        state.stayed.retain(|other| other.relay != stayed.relay);
        state.stayed.push(stayed);
    }

    fn forget(&self, relay: DeviceId) {
        self.state.lock().stayed.retain(|other| other.relay != relay);
    }

    fn end(&self, asked: u64) {
        let mut state = self.state.lock();
        state.over = state.over.max(asked);
        self.over.notify_all();
    }
}

impl Engine {
    /// No copy takes these relays from its beginning on; when nothing is under way on them, their contexts and all that the engine
    /// has there goes back, in the background. Those that are suspended already are tried again, if their contexts stayed. What cannot go
    /// stays, and is told by [`Engine::unsuspended`]. Nothing is done where relays were never started.
    pub fn suspend(&self, relays: DeviceSet) {
        if !self.worker.is_started() {
            return;
        }
        self.relays.suspend(relays);
        let asked = {
            let mut state = self.suspensions.state.lock();
            state.asked += 1;
            state.asked
        };
        self.worker.suspend(asked);
    }

    /// Makes suspended relays ready again, in the background; those of which nothing was given up yet are ready at once.
    /// `after` is called on that thread when they are, or cannot be; not at all where none is suspended.
    ///
    /// # Errors
    /// [`crate::TransferError::NoThread`].
    pub fn resume(self: &Arc<Self>, after: impl FnOnce(&Engine) + Send + 'static) -> Result<()> {
        if self.relays.suspended().is_empty() {
            return Ok(());
        }
        self.start_relays(after)
    }

    /// The relays that are suspended, or are to be.
    pub fn suspended(&self) -> DeviceSet {
        self.relays.suspended()
    }

    /// The suspended relays whose contexts are still there, and why, once all suspensions that were asked for are over, or so much time has
    /// passed.
    pub fn unsuspended(&self, timeout: Duration) -> Vec<UnsuspendedRelay> {
        let until = Instant::now() + timeout;
        let mut state = self.suspensions.state.lock();
        let asked = state.asked;
        while state.over < asked && !self.suspensions.over.wait_until(&mut state, until).timed_out() {}
        let suspended = self.relays.suspended();
        let mut stayed: Vec<UnsuspendedRelay> =
            state.stayed.iter().filter(|stayed| suspended.contains(stayed.relay)).copied().collect();
        if state.over < asked {
            let known: DeviceSet = stayed.iter().map(|stayed| stayed.relay).collect();
            let costs = suspended.without(known).iter().filter_map(|relay| self.relays.cost(relay));
            let under_way = |cost: RelayCost| UnsuspendedRelay {
                relay: cost.relay,
                context: cost.context,
                why: WhyUnsuspended::UnderWay,
            };
            stayed.extend(costs.map(under_way));
        }
        stayed.sort_by_key(|stayed| stayed.relay);
        stayed
    }

    fn note_unsuspended(&self, relay: DeviceId, why: WhyUnsuspended) {
        let context = self.relays.cost(relay).map_or(Bytes::ZERO, |cost| cost.context);
        tracing::info!(target: "glake::transfer", %relay, %context, %why, "the context of a relay stays");
        self.suspensions.note_unsuspended(UnsuspendedRelay { relay, context, why });
    }
}

impl Suspension {
    /// So many suspensions were asked for by now: after a further one, what stayed is tried again.
    pub(crate) fn ask(&mut self, asked: u64) {
        if asked > self.asked {
            (self.asked, self.told, self.tries) = (asked, DeviceSet::EMPTY, 0);
        }
    }

    /// Goes on as far as can be without waiting; whether there is more to do.
    pub(crate) fn step(&mut self, engine: &Engine) -> bool {
        let more = self.go_on(engine);
        if !more {
            engine.suspensions.end(self.asked);
        }
        more
    }

    fn go_on(&mut self, engine: &Engine) -> bool {
        let suspended = engine.relays.suspended();
        self.told = self.told.intersection(suspended);
        // What was resumed meanwhile is made ready by what is missing there; what then was suspended again begins anew.
        self.going = self.going.intersection(suspended);
        self.begin(engine, suspended.without(self.told));
        if !engine.lane_sets.retire(engine, self.going, &mut self.lane_sets) {
            return true;
        }
        if !self.strip(engine) {
            return true;
        }
        if !self.drop_all(engine) {
            return true;
        }
        self.give_back(engine)
    }

    fn begin(&mut self, engine: &Engine, relays: DeviceSet) {
        let kernels = engine.kernels.now();
        for relay in relays.iter() {
            let graph = kernels.relay(relay).is_some_and(Gather::is_captured);
            if graph || engine.relays.is_fenced(relay) {
                self.going = self.going.without(DeviceSet::of(relay));
                self.told = self.told.union(DeviceSet::of(relay));
                engine.note_unsuspended(
                    relay,
                    if graph { WhyUnsuspended::Graph } else { WhyUnsuspended::Lost },
                );
                continue;
            }
            engine.relays.remove_ready(relay);
            self.going = self.going.union(DeviceSet::of(relay));
        }
    }

    /// Takes what copies have on the relays out of reach; false where some of it is in use by a capture.
    fn strip(&mut self, engine: &Engine) -> bool {
        let mut all = true;
        for relay in self.going.iter() {
            let (kernels, gate) = (engine.kernels.take_relay(relay), engine.close_pageable(relay));
            let rings = engine.relays.take_rings(relay);
            // What is new here may have work that the last epoch does not cover.
            if kernels.is_some() || gate.is_some() || !rings.is_empty() {
                self.stripped = self.stripped.union(DeviceSet::of(relay));
                self.done = None;
            }
            self.kernels.extend(kernels);
            self.gates.extend(gate);
            self.rings.extend(rings);
            all &= engine.captures.close(relay);
        }
        all
    }

    /// Drops what nobody has any more; whether that is all.
    fn drop_all(&mut self, engine: &Engine) -> bool {
        self.lane_sets = std::mem::take(&mut self.lane_sets)
            .into_iter()
            // A handle that is asked meanwhile has it for a moment.
            .filter_map(|lane_set| Arc::try_unwrap(lane_set).err())
            .collect();
        let shared = |count: usize| count > 1;
        if !self.lane_sets.is_empty()
            || self.kernels.iter().any(|kernels| shared(Arc::strong_count(kernels)))
            || self.gates.iter().any(|gate| shared(Arc::strong_count(gate)))
        {
            return false;
        }
        if self.kernels.is_empty() && self.gates.is_empty() && self.rings.is_empty() {
            return true;
        }
        // Dropping these waits for their GPUs.
        let done = match &mut self.done {
            Some(done) => done,
            empty => match engine.own.record(self.stripped) {
                Ok(epoch) => empty.insert(epoch),
                Err(error) => {
                    tracing::debug!(target: "glake::transfer", %error, "relays do not rest yet");
                    return false;
                }
            },
        };
        if !matches!(done.poll(), Ok(Some(_))) {
            return false;
        }
        (self.done, self.stripped) = (None, DeviceSet::EMPTY);
        self.kernels.clear();
        self.gates.clear();
        self.rings.clear();
        true
    }

    /// Gives the contexts back of which nothing is left; whether some are to be asked for again.
    fn give_back(&mut self, engine: &Engine) -> bool {
        let last = self.tries >= TRIES;
        self.tries = self.tries.saturating_add(1);
        for relay in self.going.iter() {
            // Each takes a while.
            if !engine.relays.suspended().contains(relay) {
                continue;
            }
            let released = engine.own.release_context(relay);
            let why = match released {
                Ok(()) => None,
                Err(_) if !last => continue,
                Err(DriverError::ContextInUse { living, .. }) => Some(WhyUnsuspended::InUse(living)),
                Err(DriverError::NotReady { .. } | DriverError::Capturing { .. }) => {
                    Some(WhyUnsuspended::UnderWay)
                }
                Err(error) => {
                    tracing::warn!(target: "glake::transfer", %relay, %error, "the context of a relay was not given back");
                    Some(WhyUnsuspended::Refused)
                }
            };
            self.going = self.going.without(DeviceSet::of(relay));
            self.told = self.told.union(DeviceSet::of(relay));
            match why {
                Some(why) => engine.note_unsuspended(relay, why),
                None => {
                    engine.relays.drop_cost(relay);
                    engine.suspensions.forget(relay);
                    tracing::debug!(target: "glake::transfer", %relay, "a relay suspensions");
                }
            }
        }
        !self.going.is_empty()
    }
}
