//! Copies in full stream order over all links of the server.
//!
//! ```text
//!  user's stream ──work──┤fork├────own share────┤join├──work──      fork, join: events; no wait on the host
//!                          │ └─► lane of relay 1 ──share──┐│
//!                          ├───► lane of relay 2 ──share──┤│       lane set: the lanes assigned to one user's stream
//!                          └───► lane of relay 3 ──share──┘┘
//!
//!  Engine ─► copies ─► traffic, links     a copy consults traffic, takes its stream's lane set from links, forks and joins
//!     ├─► verify                          copies that the caller waits for
//!     └─► thread ─► provider, suspension  creates and releases contexts, lanes, events and slots on request
//! ```
//!
//! Invariants:
//! - A copy begins after all earlier work of its stream, and later work of the stream begins after the copy, for every part and path.
//! - No copy reports success for bytes that did not arrive.
//! - Relays work in GLake's own contexts. The program's contexts wait for them, and they for the program, only where the program's own
//!   stream order requires it. They access only GLake's GPU memory, and host memory only within one registration.
//! - No work waits for resources held by a copy that its stream has not reached.
//! - A copy owns the resources it uses until it ends. A relay is suspended, and its context destroyed, only when no copy owns anything
//!   there.
//! - A copy creates no resources except the thread for the first background copy. It takes its lane set's lock, and table locks briefly.
//!   No driver call happens under a table lock, except for the branches of captures and for work that could not be joined.
//!
//! The engine's thread sleeps while there are no requests and holds the engine weakly.

use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use glake_device::owned::{Blocks, CompletionEvents, DeviceSet, Span};
use glake_device::{DeviceId, StreamId};
use glake_tiers::Pinning;
use glake_units::Bytes;
use parking_lot::Mutex;
use provider::Provider;
use smallvec::SmallVec;
use verify::BlockingCopies;

use self::suspension::{PAUSE, Suspension};
use crate::copies::broadcast::BroadcastCopies;
use crate::copies::scattered::ScatteredCopies;
use crate::copies::shared::{Shared, check_sizes};
use crate::copies::span::SpanCopies;
use crate::links::relays::UnsuspendedRelay;
use crate::links::requests::{Call, Requests};
use crate::paths::{Direction, PathGraph};
use crate::{
    Benefit, CopyHandle, CopyOptions, EngineOptions, RelayCost, Result, Statistics, TransferError, UserStream,
};

mod provider;
mod suspension;
#[cfg(test)]
mod tests;
mod verify;

/// Engine for copies between host and GPUs.
#[derive(Debug)]
pub struct Engine {
    options: EngineOptions,
    shared: Arc<Shared>,
    spans: Arc<SpanCopies>,
    scattered: ScatteredCopies,
    broadcast: BroadcastCopies,
    blocking: BlockingCopies,
    provider: Provider,
    worker: Worker,
    /// The engine itself, for calls on its thread.
    this: Weak<Engine>,
}

impl Engine {
    /// Creates an engine. All copies are native until its relays are started. Creates no context.
    pub fn new(
        completion_events: Arc<CompletionEvents>,
        graph: PathGraph,
        options: EngineOptions,
    ) -> Result<Arc<Engine>> {
        let shared = Shared::new(completion_events, &options)?;
        let spans = Arc::new(SpanCopies::new(&shared, options.graphs));
        let engine = Arc::new_cyclic(|this| Engine {
            scattered: ScatteredCopies { shared: shared.clone() },
            broadcast: BroadcastCopies { shared: shared.clone(), spans: spans.clone() },
            blocking: BlockingCopies::new(&shared, &spans),
            provider: Provider { shared: shared.clone(), slots: options.slots },
            worker: Worker::new(&shared.requests),
            options,
            shared,
            spans,
            this: this.clone(),
        });
        engine.replace_graph(graph);
        Ok(engine)
    }

    /// Ignores the timings of copies that run while host memory is pinned. Called once, before the first copy.
    pub fn ignore_while_pinning(&self, pinning: &Arc<Pinning>) {
        self.shared.traffic.ignore_while_pinning(pinning);
    }

    /// Enqueues a copy on a stream of the program.
    ///
    /// # Errors
    /// [`crate::TransferError::Lost`] for lost parts of earlier copies, once; this copy may not have been enqueued. The driver's error if the copy
    /// was not
    /// enqueued completely.
    pub fn copy(&self, to: &Span, from: &Span, on: UserStream, options: CopyOptions) -> Result<CopyHandle> {
        let parts = self.spans.enqueue(to, from, on, options.priority);
        let memory = [to.device(), from.device()].into_iter().flatten().collect();
        let parts = self.shared.covered(parts, memory, on)?;
        self.shared.handle(on, options, parts)
    }

    /// Copies and blocks until the bytes have arrived. With [`CopyOptions::verify`] both sides are compared, and differing parts are copied
    /// again over the user's stream.
    ///
    /// # Errors
    /// Like [`Engine::copy`], except that lost parts of this copy are copied again. [`crate::TransferError::Damaged`] if bytes differ even then.
    pub fn copy_blocking(&self, to: &Span, from: &Span, on: UserStream, options: CopyOptions) -> Result<()> {
        self.blocking.copy(to, from, on, options)
    }

    /// Enqueues copies between pairs of spans (destination, source). Their order is undefined: no block may access bytes that another one
    /// writes.
    ///
    /// # Errors
    /// [`crate::TransferError::SizesDiffer`], or [`crate::TransferError::Lost`] for earlier copies: nothing was enqueued. The driver's error if not all
    /// blocks
    /// were enqueued.
    pub fn copy_list(
        &self,
        blocks: &[(Span, Span)],
        on: UserStream,
        options: CopyOptions,
    ) -> Result<CopyHandle> {
        blocks.iter().try_for_each(|(to, from)| check_sizes(to, from))?;
        let ranges: SmallVec<[(&Span, &Span); 8]> = blocks.iter().map(|(to, from)| (to, from)).collect();
        if let Some(job) = self.spans.as_one(&ranges, on, options.unordered) {
            let parts = self.spans.enqueue_as_one(job, options.priority);
            let parts = self.shared.covered(parts, DeviceSet::of(job.asked().0), on)?;
            return self.shared.handle(on, options, parts);
        }
        let lists: Vec<Blocks<'_>> = blocks.iter().filter_map(|(to, from)| Blocks::pair(to, from)).collect();
        self.copy_blocks(&lists, on, options)
    }

    /// Like [`Engine::copy_list`], for many small blocks in a compact form. All lists form one copy.
    ///
    /// # Errors
    /// [`crate::TransferError::Lost`] for earlier copies: nothing was enqueued. The driver's error if not all blocks were enqueued.
    pub fn copy_blocks(
        &self,
        blocks: &[Blocks<'_>],
        on: UserStream,
        options: CopyOptions,
    ) -> Result<CopyHandle> {
        self.scattered.copy(blocks, on, options)
    }

    /// Enqueues copies of one span to several spans that do not overlap.
    ///
    /// # Errors
    /// See [`Engine::copy`].
    pub fn copy_to_all(
        &self,
        to: &[Span],
        from: &Span,
        on: UserStream,
        options: CopyOptions,
    ) -> Result<CopyHandle> {
        self.broadcast.copy(to, from, on, options)
    }

    /// Compares both sides of completed copies, whatever paths they took, and copies differing parts again with the driver. Skips copies
    /// whose ends overlap: the source no longer exists.
    ///
    /// Both ends of a pair must have the same size and must not be accessed during the call. Blocks until all work of the stream has
    /// completed.
    ///
    /// # Errors
    /// [`crate::TransferError::SizesDiffer`]; [`crate::TransferError::Damaged`] if bytes differ after the second copy; the driver's errors.
    pub fn verify(&self, copies: &[(Span, Span)], on: UserStream) -> Result<()> {
        self.blocking.verify(copies, on)
    }

    /// Returns whether the engine can be faster for a copy between pool memory of a GPU and the host. Makes no driver call and holds no
    /// lock for long.
    pub fn benefit(&self, target: DeviceId, direction: Direction, size: Bytes) -> Benefit {
        self.shared.routes.benefit(target, direction, size)
    }

    /// Like [`Engine::benefit`], for GPU memory outside of a pool.
    pub fn benefit_of_other(&self, size: Bytes) -> Benefit {
        self.shared.routes.benefit_of_other(size)
    }

    /// Announces copies of a GPU's memory, so that the engine's thread creates their resources in advance.
    pub fn expect_copies_of(&self, device: DeviceId) {
        self.shared.resources.want(device);
    }

    /// Calls a function on the engine's thread. Returns `false` if there is no thread, as before relays were started.
    pub fn call_on_thread(&self, call: impl FnOnce(&Engine) + Send + 'static) -> bool {
        let is_served = self.shared.requests.is_served();
        if is_served {
            self.shared.requests.call(self.call(call));
        }
        is_served
    }

    /// Creates the contexts, streams, events and slots of the relays in the background, then calls `after` on that thread, also after a
    /// failure. Resumes suspended relays.
    ///
    /// # Errors
    /// [`crate::TransferError::NoThread`].
    pub fn start_relays(self: &Arc<Self>, after: impl FnOnce(&Engine) + Send + 'static) -> Result<()> {
        self.shared.links.relays().resume();
        self.worker.prepare(self, self.call(after))
    }

    /// Sets the GPUs that may serve as relays. If relays were started, new ones are set up in the background.
    pub fn set_relays(&self, relays: DeviceSet) {
        self.shared.links.relays().want(relays);
        self.shared.requests.prepare_again();
    }

    /// Returns the relays that copies currently use: wanted, ready and not lost.
    pub fn relays(&self) -> DeviceSet {
        self.shared.links.relays().usable()
    }

    /// Returns the memory cost of each relay.
    pub fn relay_cost(&self) -> Vec<RelayCost> {
        self.shared.links.relays().costs()
    }

    /// Excludes relays from new copies, and releases their contexts and all resources there in the background once their work has
    /// completed. Retries relays that are suspended but kept their contexts. Resources that cannot be released are reported by
    /// [`Engine::unsuspended`]. No effect if relays were never started.
    pub fn suspend(&self, relays: DeviceSet) {
        self.shared.links.suspend(relays);
    }

    /// Sets up suspended relays again in the background, then calls `after` on that thread, also after a failure. Relays whose resources
    /// still exist are ready immediately. `after` is not called if no relay is suspended.
    ///
    /// # Errors
    /// [`crate::TransferError::NoThread`].
    pub fn resume(self: &Arc<Self>, after: impl FnOnce(&Engine) + Send + 'static) -> Result<()> {
        if self.suspended().is_empty() {
            return Ok(());
        }
        self.start_relays(after)
    }

    /// Returns the relays that are suspended or being suspended.
    pub fn suspended(&self) -> DeviceSet {
        self.shared.links.relays().suspended()
    }

    /// Returns the suspended relays whose contexts still exist, with the reason, after all requested suspensions have ended or `timeout`
    /// has elapsed.
    pub fn unsuspended(&self, timeout: Duration) -> Vec<UnsuspendedRelay> {
        self.shared.links.unsuspended(timeout)
    }

    /// Excludes a GPU that the program uses from the relays, unless GPUs may be shared ([`EngineOptions::shared_gpus`]): its link serves
    /// its own copies only. Releases the engine's resources there in the background.
    pub fn leave_to_program(&self, device: DeviceId) {
        self.shared.links.leave_to_program(device);
    }

    /// Releases the resources assigned to a stream that is about to be destroyed.
    pub fn forget_stream(&self, id: StreamId) {
        self.shared.links.lane_sets().forget(id);
    }

    /// Returns the current path graph. An assumed graph is refined by the timings of copies.
    pub fn graph(&self) -> Arc<PathGraph> {
        self.shared.routes.graph()
    }

    /// Replaces the graph by which later copies are split.
    pub fn replace_graph(&self, graph: PathGraph) {
        self.shared.traffic.replace_graph(graph);
    }

    /// Returns whether the links were measured to differ by a fifth or more from a calibrated graph, until another calibrated graph is set.
    /// The stored calibration should then be deleted and repeated. Until then, the graph is treated as assumed and refined by timings.
    pub fn is_stale(&self) -> bool {
        self.shared.traffic.is_stale()
    }

    /// Registers a function that is called once, on the engine's thread, when [`Engine::is_stale`] becomes true.
    pub fn when_stale(&self, call: impl FnOnce(&Engine) + Send + 'static) {
        self.shared.requests.when_stale(self.call(call));
    }

    /// Returns whether copies in a direction are in flight on any link and not yet known to be complete. Makes no driver call.
    pub fn is_busy(&self, direction: Direction) -> bool {
        self.shared.ledger.is_loaded(direction)
    }

    /// Returns the totals since the engine was created.
    pub fn statistics(&self) -> Statistics {
        self.shared.ledger.statistics()
    }

    /// Returns the pinned host memory of the engine: slots for pageable memory and lists of blocks. Does not block.
    pub fn pinned(&self) -> Bytes {
        self.shared.resources.pinned()
    }

    /// Returns the options the engine was created with.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// Returns the completion clock of the program's contexts.
    pub fn completion_events(&self) -> &Arc<CompletionEvents> {
        self.shared.contexts.program()
    }

    /// Returns a function that calls `call` with this engine, unless the engine was dropped.
    fn call(&self, call: impl FnOnce(&Engine) + Send + 'static) -> Call {
        let engine = self.this.clone();
        Box::new(move || {
            if let Some(engine) = engine.upgrade() {
                call(&engine);
            }
        })
    }

    /// Stops the engine's threads. Later copies are native.
    pub fn stop(&self) {
        self.shared.links.relays().want(DeviceSet::EMPTY);
        self.worker.stop();
        self.spans.stop();
        self.shared.traffic.stop();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.worker.stop();
    }
}

/// Thread handle and its request queue.
#[derive(Debug)]
pub(crate) struct Worker {
    requests: Arc<Requests>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Worker {
    /// Creates a worker without a thread.
    pub(crate) fn new(requests: &Arc<Requests>) -> Worker {
        Worker { requests: requests.clone(), thread: Mutex::default() }
    }

    /// Requests the setup of the wanted relays, then a call of `after`. Starts the thread if necessary.
    ///
    /// # Errors
    /// [`TransferError::NoThread`].
    pub(crate) fn prepare(&self, engine: &Arc<Engine>, after: Call) -> Result<()> {
        let mut thread = self.thread.lock();
        if thread.is_none() {
            let (requests, engine) = (self.requests.clone(), Arc::downgrade(engine));
            let named = std::thread::Builder::new().name("glake-relays".into());
            let spawned = named.spawn(move || run(&requests, &engine));
            *thread = Some(spawned.map_err(TransferError::NoThread)?);
            self.requests.set_served(true);
        }
        self.requests.prepare(after);
        Ok(())
    }

    /// Stops the thread and waits for its end, unless called from that thread.
    pub(crate) fn stop(&self) {
        self.requests.stop();
        let thread = self.thread.lock().take();
        self.requests.set_served(false);
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != std::thread::current().id()) {
            // Its end is all that is waited for: a thread that panicked has ended too.
            let _ = thread.join();
        }
    }
}

fn run(requests: &Requests, engine: &Weak<Engine>) {
    let mut forks = DeviceSet::EMPTY;
    let (mut suspension, mut more) = (Suspension::default(), false);
    loop {
        let mut orders = requests.next(more.then_some(PAUSE));
        let Some(engine) = engine.upgrade() else { return };
        if orders.stop {
            return;
        }
        forks = forks.union(orders.forks);
        if orders.prepare {
            forks = forks.union(engine.shared.contexts.in_use());
        }
        engine.provider.provide(&orders, forks);
        for after in std::mem::take(&mut orders.after) {
            after();
        }
        if let Some(asked) = orders.suspend {
            suspension.ask(asked);
        }
        more = suspension.step(&engine.shared.links, &engine.shared.resources);
        // Those that were of suspended relays are gone.
        engine.provider.restore_lane_sets(forks);
    }
}
