//! Copies in full stream order, over every link of the server.
//!
//! ```text
//!  user's stream ──work──┤fork├────own share────┤join├──work──      fork, join: events; nothing waits on the host
//!                          │ └─► lane of relay 1 ──share──┐│
//!                          ├───► lane of relay 2 ──share──┤│       a lane set: the lanes that one user's stream has
//!                          └───► lane of relay 3 ──share──┘┘
//!
//!  copy, blocking, deferred    what a caller asks          lane_sets ─► lane_set ─► lane, slots   what a stream has
//!    └─► fork, staged          how a copy is enqueued      prioritized ─► barriers                who gives way to whom
//!          └─► parts, handle   how it is waited for        drift                                  whether the graph holds
//!  urgent_calls                who enqueues first          relays                                 who serves, who is lost
//!  suspension                  when relays are not used    worker                                 who makes all of these
//! ```
//!
//! Invariants:
//! - A copy begins after all work that was on its stream before, and all work enqueued on it later begins after the copy:
//!   whatever part took whichever way.
//! - No success is told of bytes that did not arrive.
//! - Relays work in contexts of our own: no work of the program's contexts waits for theirs, nor they for it, but through what the
//!   program's own stream orders. They touch GPU memory of ours only, and of host memory ranges inside one registration.
//! - Nothing waits for what is held by a copy whose stream has not come to it.
//! - A copy owns what it stands on until it ends; a relay is suspended, and its context goes, only when nobody owns anything there.
//! - A copy creates nothing, but for the thread that the first background one starts and the events of `deferred`. It takes no lock
//!   but its lane set's, and tables' for a moment; the driver is never called under a table's.

mod benefit;
mod blocking;
pub(crate) mod counters;
pub(crate) mod endpoints;
pub(crate) mod event_pool;
pub(crate) mod fork;
mod handle;
pub(crate) mod lane;
mod options;
pub(crate) mod parts;
mod pinned;
mod resources;
mod statistics;
mod stream;
#[cfg(test)]
mod tests;
pub(crate) mod worker;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use glake_device::owned::{DeviceSet, Epochs};
use glake_device::{DeviceId, Driver, StreamId};
use glake_units::Bytes;
use parking_lot::RwLock;

use crate::kinds::captured::Captures;
use crate::kinds::kernels::Kernels;
use crate::kinds::pageable::Pageable;
use crate::links::lane_sets::LaneSets;
use crate::links::relays::Relays;
use crate::links::suspension::Suspensions;
use crate::schedule::barriers::Barriers;
use crate::schedule::contention::Contention;
use crate::schedule::drift::Drift;
pub use benefit::Benefit;
use blocking::Scratch;
use counters::Counters;
use event_pool::EventPool;
pub use handle::CopyHandle;
pub use options::{CopyOptions, EngineOptions, Priority, RelayCost};
pub use statistics::{PathStatistics, Statistics};
pub use stream::UserStream;
use worker::Worker;

use crate::Result;
use crate::paths::{Load, PathGraph};

/// Copies bytes between host and GPUs.
#[derive(Debug)]
pub struct Engine {
    pub(crate) epochs: Arc<Epochs>,
    pub(crate) driver: Arc<dyn Driver>,
    /// The clock of contexts of our own, in which relays work.
    pub(crate) own: Arc<Epochs>,
    pub(crate) options: EngineOptions,
    /// How many the driver shows.
    pub(crate) devices: usize,
    pub(crate) graph: RwLock<Arc<PathGraph>>,
    /// Smaller copies are native, whatever their target.
    pub(crate) floor: AtomicU64,
    pub(crate) load: Load,
    pub(crate) contention: Contention,
    pub(crate) relays: Arc<Relays>,
    pub(crate) suspensions: Suspensions,
    pub(crate) lane_sets: LaneSets,
    pub(crate) marks: Arc<EventPool>,
    pub(crate) counters: Counters,
    pub(crate) scratch: Scratch,
    pub(crate) kernels: Kernels,
    pub(crate) captures: Captures,
    pub(crate) pageable: Pageable,
    /// GPUs that kernels and slots were asked for.
    pub(crate) with_resources: AtomicU64,
    /// How many copies were bound late.
    pub(crate) late: AtomicU64,
    /// Made with the first relay.
    pub(crate) barriers: OnceLock<Barriers>,
    pub(crate) drift: Drift,
    pub(crate) worker: Worker,
}

impl Engine {
    /// An engine that makes every copy native until its relays are started. Makes no context.
    pub fn new(epochs: Arc<Epochs>, graph: PathGraph, options: EngineOptions) -> Result<Arc<Engine>> {
        let driver = epochs.driver().clone();
        let devices = driver.devices()?.len();
        let own = Epochs::new(driver.own_contexts()?);
        let engine = Engine {
            marks: EventPool::new(driver.clone()),
            relays: Arc::new(Relays::new(devices, options.relays, options.shared_gpus)),
            suspensions: Suspensions::default(),
            counters: Counters::new(devices),
            floor: AtomicU64::new(0),
            graph: RwLock::new(Arc::new(PathGraph::empty())),
            load: Load::new(),
            contention: Contention::new(),
            lane_sets: LaneSets::default(),
            scratch: Scratch::default(),
            kernels: Kernels::new(devices),
            captures: Captures::new(devices),
            with_resources: AtomicU64::new(0),
            pageable: Pageable::new(options.pageable_threads),
            late: AtomicU64::new(0),
            barriers: OnceLock::new(),
            drift: Drift::default(),
            worker: Worker::default(),
            devices,
            epochs,
            driver,
            own,
            options,
        };
        engine.replace_graph(graph);
        Ok(Arc::new(engine))
    }

    /// Makes the relays ready in the background: contexts, streams, events, slots. `after` is called on that
    /// thread when they are, or cannot be. None is suspended any more.
    ///
    /// # Errors
    /// [`crate::TransferError::NoThread`].
    pub fn start_relays(self: &Arc<Self>, after: impl FnOnce(&Engine) + Send + 'static) -> Result<()> {
        self.relays.resume();
        self.worker.prepare(self, Box::new(after))
    }

    /// Which GPUs may be relays from now on. Those that are not ready yet are made so, if relays were started.
    pub fn set_relays(&self, relays: DeviceSet) {
        self.relays.want(relays);
        self.worker.again();
    }

    /// The relays that copies take now: wanted, ready and not lost.
    pub fn relays(&self) -> DeviceSet {
        self.relays.usable()
    }

    /// What the relays cost.
    pub fn relay_cost(&self) -> Vec<RelayCost> {
        self.relays.costs()
    }

    /// Splits copies by another graph from now on.
    pub fn replace_graph(&self, graph: PathGraph) {
        self.drift.replace(graph, |graph| self.set_graph(graph));
    }

    pub(crate) fn set_graph(&self, graph: PathGraph) {
        let least = graph.paths().links.iter().map(|link| link.break_even).min();
        let floor = self.options.break_even.or(least).unwrap_or(Bytes::MAX);
        *self.graph.write() = Arc::new(graph);
        self.floor.store(floor.get(), Ordering::Relaxed);
    }

    /// Whether the links were seen to give a fifth more or less than a calibrated graph says, until another calibrated one is
    /// given: what is kept of it should be dropped, and the server calibrated again. Meanwhile copies go by it as if it were
    /// assumed, refined by what they take.
    pub fn is_stale(&self) -> bool {
        self.drift.is_stale()
    }

    /// Calls `call`, once, on the thread that makes relays ready, when [`Engine::is_stale`] becomes true: to drop what is kept.
    pub fn when_stale(&self, call: impl FnOnce(&Engine) + Send + 'static) {
        self.worker.when_stale(Box::new(call));
    }

    /// What copies are split by; one that was assumed is refined by what they take.
    pub fn graph(&self) -> Arc<PathGraph> {
        self.graph.read().clone()
    }

    /// What was done so far.
    pub fn statistics(&self) -> Statistics {
        self.counters.report(&self.relays)
    }

    /// A stream of the program is about to be destroyed: what was kept for it can serve another.
    pub fn forget_stream(&self, id: StreamId) {
        self.lane_sets.forget(id);
    }

    /// Ends the engine's threads. Copies are native from now on.
    pub fn stop(&self) {
        self.relays.want(DeviceSet::EMPTY);
        self.worker.stop();
        self.pageable.stop();
        if let Some(barriers) = self.barriers.get() {
            barriers.stop();
        }
    }

    /// What it was made with.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// The clock of the driver's completions.
    pub fn epochs(&self) -> &Arc<Epochs> {
        &self.epochs
    }

    /// The driver of the contexts that relays work in.
    pub(crate) fn relay_driver(&self) -> &Arc<dyn Driver> {
        self.own.driver()
    }

    /// The program uses a GPU: its link serves its own copies only, unless GPUs may be shared ([`EngineOptions::shared_gpus`]). What
    /// the engine has there is given up in the background.
    pub fn leave_to_program(&self, device: DeviceId) {
        if self.relays.leave_to_program(device) {
            tracing::info!(target: "glake::transfer", gpu = %device, "the program uses this GPU: copies of other GPUs' memory no longer take its link");
            self.suspend(DeviceSet::of(device));
        }
    }

    /// Looks which relays the program has begun to use: those whose primary context somebody made.
    pub(crate) fn look_around(&self) {
        if self.options.shared_gpus {
            return;
        }
        for relay in self.relays.usable().iter() {
            // Asked again by the next copy where the answer says nothing: what it is left to is for ever.
            if matches!(self.driver.has_context(relay), Ok(true)) {
                self.leave_to_program(relay);
            }
        }
    }

    pub(crate) fn floor(&self) -> Bytes {
        Bytes::new(self.floor.load(Ordering::Relaxed))
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.worker.stop();
    }
}
