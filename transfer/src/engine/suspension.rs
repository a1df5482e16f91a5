//! Suspension of relays on the engine's thread: their contexts, about half a GiB each, are released, and recreated on resume.
//!
//! ```text
//!   suspend ─► suspended ─► lane sets idle? ─► removed: lanes, rings, kernels, branches, staging streams, events
//!               ▲  │                               │ no copy holds any of them, and the work of their GPUs has completed
//!      resume ──┘  └── new copies skip it          └─► dropped ─► context released, or the reason reported
//!      resume ─► not suspended ─► set up again, as at the start
//! ```
//!
//! Invariants:
//! - A copy owns its lane set, its set of kernels and its staging streams. Removed resources are dropped by the engine's thread after the
//!   last copy has released them. A copy that began before a suspension is therefore not affected by it, and the driver releases no context
//!   in which a copy has resources.
//! - New copies do not use a suspended relay. The state is a single atomic word, so the last call decides. Each step of a suspension reads
//!   it first, and can be repeated, or undone by creating the missing resources.
//! - The engine's thread never blocks here: incomplete steps are polled.

use std::sync::Arc;
use std::time::Duration;

use glake_device::DriverError;
use glake_device::owned::{DeviceSet, Gather, RecordedPoint};

use crate::copies::resources::Resources;
use crate::links::Links;
use crate::links::lane::{Ring, StagingStream};
use crate::links::lane_set::LaneSet;
use crate::links::suspension::WhyUnsuspended;

/// Interval at which incomplete steps are retried.
pub(crate) const PAUSE: Duration = Duration::from_millis(1);
/// Maximum attempts to release a context that other users keep, such as concurrent calls, polled completion points or queried handles.
const TRIES: u32 = 50;

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
            links.suspensions().end(self.asked);
        }
        more
    }

    fn go_on(&mut self, links: &Links, resources: &Resources) -> bool {
        let suspended = links.relays().suspended();
        self.told = self.told.intersection(suspended);
        // What was resumed meanwhile is made ready by what is missing there; what then was suspended again begins anew.
        self.going = self.going.intersection(suspended);
        self.begin(links, resources, suspended.without(self.told));
        if !links.lane_sets().retire(self.going, &mut self.lane_sets) {
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
            if graph || links.relays().is_fenced(relay) {
                self.going = self.going.without(DeviceSet::of(relay));
                self.told = self.told.union(DeviceSet::of(relay));
                links.note_unsuspended(
                    relay,
                    if graph { WhyUnsuspended::Graph } else { WhyUnsuspended::Lost },
                );
                continue;
            }
            links.relays().remove_ready(relay);
            self.going = self.going.union(DeviceSet::of(relay));
        }
    }

    /// Takes the relays' resources out of use. Returns `false` if a capture uses some of them.
    fn strip(&mut self, links: &Links, resources: &Resources) -> bool {
        let mut all = true;
        for relay in self.going.iter() {
            let (kernels, gate) = resources.take_relay(relay);
            let rings = links.relays().take_rings(relay);
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
            empty => match links.contexts().own().record(self.stripped) {
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
            if !links.relays().suspended().contains(relay) {
                continue;
            }
            let released = links.contexts().own().release_context(relay);
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
                    links.relays().drop_cost(relay);
                    links.suspensions().forget(relay);
                    tracing::debug!(target: "glake::transfer", %relay, "a relay is suspended");
                }
            }
        }
        !self.going.is_empty()
    }
}
