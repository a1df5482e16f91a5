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

use glake_device::owned::{DeviceSet, Gather, RecordedPoint};
use glake_device::{DeviceId, DriverError, Living};
use glake_units::Bytes;
use parking_lot::{Condvar, Mutex};

use super::Links;
use super::lane_set::LaneSet;
use super::relays::Relays;
use crate::RelayCost;
use crate::kinds::foreign::slots::Ring;
use crate::kinds::pageable::StagingStream;
use crate::kinds::resources::Resources;

/// Interval at which incomplete steps are retried.
pub(crate) const PAUSE: Duration = Duration::from_millis(1);
/// Maximum attempts to release a context that other users keep, such as concurrent calls, polled completion points or queried handles.
const TRIES: u32 = 50;

/// Relay whose context still exists after its suspension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnsuspendedRelay {
    /// Relay GPU.
    pub relay: DeviceId,
    /// Memory of its context, as in [`crate::RelayCost`].
    pub context: Bytes,
    /// Reason why the context still exists.
    pub why: WhyUnsuspended,
}

/// Reasons why a relay's context still exists.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WhyUnsuspended {
    /// Copies, or work of the program on that GPU, have not completed. The context is released afterwards.
    #[error("work on it is not done yet")]
    UnderWay,
    /// A captured graph launches GLake's kernels there.
    #[error("a captured graph has kernels on it")]
    Graph,
    /// Another object of GLake's is alive there.
    #[error("it holds {0} that are in use")]
    InUse(Living),
    /// The relay was lost and stays as it is.
    #[error("the GPU was lost")]
    Lost,
    /// The driver refused to release it.
    #[error("the driver did not give it back")]
    Refused,
}

/// Results of suspensions.
#[derive(Debug, Default)]
pub(crate) struct Suspensions {
    state: Mutex<State>,
    over: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Number of requests, and number of completed ones.
    asked: u64,
    over: u64,
    stayed: Vec<UnsuspendedRelay>,
}

/// State of a suspension on the engine's thread.
#[derive(Debug, Default)]
pub(crate) struct Suspension {
    /// Relays being released.
    going: DeviceSet,
    /// Relays whose resources are in these lists and may have work in flight.
    stripped: DeviceSet,
    /// Relays whose result is known.
    told: DeviceSet,
    lane_sets: Vec<Arc<LaneSet>>,
    kernels: Vec<Arc<Gather>>,
    gates: Vec<Arc<StagingStream>>,
    rings: Vec<Ring>,
    /// Completion point after all work of the stripped resources.
    done: Option<RecordedPoint>,
    tries: u32,
    /// Number of the most recent request.
    asked: u64,
}

impl Suspensions {
    /// Records a request and returns its number.
    pub(crate) fn ask(&self) -> u64 {
        let mut state = self.state.lock();
        state.asked += 1;
        state.asked
    }

    /// Returns the suspended relays whose contexts still exist, with the reason, after all requests have completed or `timeout` has
    /// elapsed.
    pub(crate) fn unsuspended(&self, relays: &Relays, timeout: Duration) -> Vec<UnsuspendedRelay> {
        let until = Instant::now() + timeout;
        let mut state = self.state.lock();
        let asked = state.asked;
        while state.over < asked && !self.over.wait_until(&mut state, until).timed_out() {}
        let suspended = relays.suspended();
        let mut stayed: Vec<UnsuspendedRelay> =
            state.stayed.iter().filter(|stayed| suspended.contains(stayed.relay)).copied().collect();
        if state.over < asked {
            let known: DeviceSet = stayed.iter().map(|stayed| stayed.relay).collect();
            let costs = suspended.without(known).iter().filter_map(|relay| relays.cost(relay));
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

    pub(crate) fn note_unsuspended(&self, stayed: UnsuspendedRelay) {
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

impl Suspension {
    /// Takes over request number `asked`. A new request retries relays whose contexts were not released.
    pub(crate) fn ask(&mut self, asked: u64) {
        if asked > self.asked {
            (self.asked, self.told, self.tries) = (asked, DeviceSet::EMPTY, 0);
        }
    }

    /// Advances as far as possible without blocking. Returns whether there is more to do.
    pub(crate) fn step(&mut self, links: &Links, resources: &Resources) -> bool {
        let more = self.go_on(links, resources);
        if !more {
            links.suspensions.end(self.asked);
        }
        more
    }

    fn go_on(&mut self, links: &Links, resources: &Resources) -> bool {
        let suspended = links.relays.suspended();
        self.told = self.told.intersection(suspended);
        // What was resumed meanwhile is made ready by what is missing there; what then was suspended again begins anew.
        self.going = self.going.intersection(suspended);
        self.begin(links, resources, suspended.without(self.told));
        if !links.lane_sets.retire(self.going, &mut self.lane_sets) {
            return true;
        }
        if !self.strip(links, resources) {
            return true;
        }
        if !self.drop_all(links) {
            return true;
        }
        self.give_back(links)
    }

    fn begin(&mut self, links: &Links, resources: &Resources, relays: DeviceSet) {
        let kernels = resources.kernels.now();
        for relay in relays.iter() {
            let graph = kernels.relay(relay).is_some_and(Gather::is_captured);
            if graph || links.relays.is_fenced(relay) {
                self.going = self.going.without(DeviceSet::of(relay));
                self.told = self.told.union(DeviceSet::of(relay));
                links.note_unsuspended(
                    relay,
                    if graph { WhyUnsuspended::Graph } else { WhyUnsuspended::Lost },
                );
                continue;
            }
            links.relays.remove_ready(relay);
            self.going = self.going.union(DeviceSet::of(relay));
        }
    }

    /// Takes the relays' resources out of use. Returns `false` if a capture uses some of them.
    fn strip(&mut self, links: &Links, resources: &Resources) -> bool {
        let mut all = true;
        for relay in self.going.iter() {
            let (kernels, gate) = resources.take_relay(relay);
            let rings = links.relays.take_rings(relay);
            // What is new here may have work that the last completion point does not cover.
            if kernels.is_some() || gate.is_some() || !rings.is_empty() {
                self.stripped = self.stripped.union(DeviceSet::of(relay));
                self.done = None;
            }
            self.kernels.extend(kernels);
            self.gates.extend(gate);
            self.rings.extend(rings);
            all &= resources.branches.close(relay);
        }
        all
    }

    /// Drops the resources that no copy holds any more. Returns whether that was all of them.
    fn drop_all(&mut self, links: &Links) -> bool {
        links.look_unjoined();
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
            empty => match links.contexts.own().record(self.stripped) {
                Ok(point) => empty.insert(point),
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

    /// Releases the contexts without remaining resources. Returns whether some must be retried.
    fn give_back(&mut self, links: &Links) -> bool {
        let last = self.tries >= TRIES;
        self.tries = self.tries.saturating_add(1);
        for relay in self.going.iter() {
            // Each takes a while.
            if !links.relays.suspended().contains(relay) {
                continue;
            }
            let released = links.contexts.own().release_context(relay);
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
                Some(why) => links.note_unsuspended(relay, why),
                None => {
                    links.relays.drop_cost(relay);
                    links.suspensions.forget(relay);
                    tracing::debug!(target: "glake::transfer", %relay, "a relay is suspended");
                }
            }
        }
        !self.going.is_empty()
    }
}
