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
//!     └─► worker ─► provider, suspension  thread that creates and releases contexts, lanes, events and slots on request
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

mod provider;
mod suspension;
#[cfg(test)]
mod tests;
mod verify;
mod worker;

use std::sync::{Arc, Weak};
use std::time::Duration;

use glake_device::owned::{Blocks, CompletionEvents, DeviceSet, Span};
use glake_device::{DeviceId, StreamId};
use glake_tiers::Pinning;
use glake_units::Bytes;
use smallvec::SmallVec;

use crate::copies::broadcast::BroadcastCopies;
use crate::copies::captured::CapturedCopies;
use crate::copies::fork::Forks;
use crate::copies::handle::{Completions, EventPool};
use crate::copies::native::NativeCopies;
use crate::copies::pageable::{PageableCopies, Staging};
use crate::copies::pinned::PinnedCopies;
use crate::copies::resources::Resources;
use crate::copies::scattered::ScatteredCopies;
use crate::copies::span::SpanCopies;
use crate::links::Links;
use crate::links::contexts::Contexts;
use crate::links::lane_sets::LaneSets;
use crate::links::ledger::Ledger;
use crate::links::relays::Relays;
use crate::links::requests::{Call, Requests};
use crate::links::suspension::UnsuspendedRelay;
use crate::paths::{Direction, Load, PathGraph};
use crate::traffic::Traffic;
use crate::traffic::routes::Routes;
use crate::{
    Benefit, CopyHandle, CopyOptions, EngineOptions, RelayCost, Result, Statistics, TransferError, UserStream,
};
use provider::Provider;
use verify::{Verifier, WaitedCopies};
use worker::Worker;

/// Engine for copies between host and GPUs.
#[derive(Debug)]
pub struct Engine {
    options: EngineOptions,
    contexts: Arc<Contexts>,
    ledger: Arc<Ledger>,
    routes: Arc<Routes>,
    links: Arc<Links>,
    traffic: Arc<Traffic>,
    resources: Arc<Resources>,
    completions: Arc<Completions>,
    spans: Arc<SpanCopies>,
    scattered: ScatteredCopies,
    broadcast: BroadcastCopies,
    waited: WaitedCopies,
    verifier: Arc<Verifier>,
    requests: Arc<Requests>,
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
        let contexts = Contexts::new(completion_events)?;
        let devices = contexts.devices();
        let requests = Arc::new(Requests::default());
        let relays = Arc::new(Relays::new(devices, options.relays, options.shared_gpus));
        let ledger = Ledger::new(&relays, devices);
        let routes = Routes::new(&relays, options.break_even);
        let traffic = Traffic::new(&ledger, &routes, &requests, devices);
        let lane_sets = LaneSets::new(&ledger, traffic.clone());
        let links = Links::new(&contexts, &relays, lane_sets, &ledger, &requests, options.streams);
        let native = NativeCopies::new(&contexts, &ledger);
        let forks = Forks::new(&contexts, &ledger, &traffic);
        let marks = EventPool::new(contexts.driver().clone());
        let completions = Completions::new(&contexts, &marks);
        let staging = Staging::new(&contexts, options.pageable_threads, options.pageable_slots);
        let resources = Resources::new(&contexts, &requests, &staging, options.lists);
        let verifier = Verifier::new(&contexts, &native);
        let pinned = PinnedCopies {
            routes: routes.clone(),
            links: links.clone(),
            ledger: ledger.clone(),
            native: native.clone(),
            forks: forks.clone(),
            traffic: traffic.clone(),
            resources: resources.clone(),
            marks,
        };
        let captured = options.graphs.then(|| CapturedCopies {
            contexts: contexts.clone(),
            routes: routes.clone(),
            ledger: ledger.clone(),
            native: native.clone(),
            resources: resources.clone(),
            idle: Load::new(),
        });
        let spans = Arc::new(SpanCopies {
            contexts: contexts.clone(),
            routes: routes.clone(),
            links: links.clone(),
            traffic: traffic.clone(),
            native: native.clone(),
            pageable: PageableCopies::beside(&pinned, &contexts),
            pinned,
            captured,
        });
        let engine = Arc::new_cyclic(|this| Engine {
            scattered: ScatteredCopies {
                contexts: contexts.clone(),
                routes: routes.clone(),
                links: links.clone(),
                ledger: ledger.clone(),
                native: native.clone(),
                forks: forks.clone(),
                traffic: traffic.clone(),
                resources: resources.clone(),
                completions: completions.clone(),
            },
            broadcast: BroadcastCopies {
                contexts: contexts.clone(),
                routes: routes.clone(),
                links: links.clone(),
                ledger: ledger.clone(),
                native: native.clone(),
                forks,
                traffic: traffic.clone(),
                spans: spans.clone(),
                completions: completions.clone(),
            },
            waited: WaitedCopies {
                contexts: contexts.clone(),
                relays,
                native,
                traffic: traffic.clone(),
                spans: spans.clone(),
                verifier: verifier.clone(),
            },
            provider: Provider {
                contexts: contexts.clone(),
                links: links.clone(),
                resources: resources.clone(),
                traffic: traffic.clone(),
                slots: options.slots,
            },
            worker: Worker::new(&requests),
            options,
            contexts,
            ledger,
            routes,
            links,
            traffic,
            resources,
            completions,
            spans,
            verifier,
            requests,
            this: this.clone(),
        });
        engine.replace_graph(graph);
        Ok(engine)
    }

    /// Ignores the timings of copies that run while host memory is pinned. Called once, before the first copy.
    pub fn ignore_while_pinning(&self, pinning: &Arc<Pinning>) {
        self.traffic.ignore_while_pinning(pinning);
    }

    /// Enqueues a copy on a stream of the program.
    ///
    /// # Errors
    /// [`TransferError::Lost`] for lost parts of earlier copies, once; this copy may not have been enqueued. The driver's error if the copy
    /// was not
    /// enqueued completely.
    pub fn copy(&self, to: &Span, from: &Span, on: UserStream, options: CopyOptions) -> Result<CopyHandle> {
        let parts = self.spans.enqueue(to, from, on, options.priority);
        let memory = [to.device(), from.device()].into_iter().flatten().collect();
        let parts = self.completions.covered(parts, memory, on)?;
        self.completions.handle(on, options, parts)
    }

    /// Copies and blocks until the bytes have arrived. With [`CopyOptions::verify`] both sides are compared, and differing parts are copied
    /// again over the user's stream.
    ///
    /// # Errors
    /// Like [`Engine::copy`], except that lost parts of this copy are copied again. [`TransferError::Damaged`] if bytes differ even then.
    pub fn copy_blocking(&self, to: &Span, from: &Span, on: UserStream, options: CopyOptions) -> Result<()> {
        self.waited.copy(to, from, on, options)
    }

    /// Enqueues copies between pairs of spans (destination, source). Their order is undefined: no block may access bytes that another one
    /// writes.
    ///
    /// # Errors
    /// [`TransferError::SizesDiffer`], or [`TransferError::Lost`] for earlier copies: nothing was enqueued. The driver's error if not all
    /// blocks
    /// were enqueued.
    pub fn copy_list(
        &self,
        blocks: &[(Span, Span)],
        on: UserStream,
        options: CopyOptions,
    ) -> Result<CopyHandle> {
        let pair = |(to, from): &'_ (Span, Span)| (to.size(), from.size());
        if let Some((to, from)) = blocks.iter().map(pair).find(|(to, from)| to != from) {
            return Err(TransferError::SizesDiffer { to, from });
        }
        let ranges: SmallVec<[(&Span, &Span); 8]> = blocks.iter().map(|(to, from)| (to, from)).collect();
        if let Some(job) = self.spans.as_one(&ranges, on, options.unordered) {
            let parts = self.spans.enqueue_as_one(job, options.priority);
            let parts = self.completions.covered(parts, DeviceSet::of(job.asked().0), on)?;
            return self.completions.handle(on, options, parts);
        }
        let lists: Vec<Blocks<'_>> = blocks.iter().filter_map(|(to, from)| Blocks::pair(to, from)).collect();
        self.copy_blocks(&lists, on, options)
    }

    /// Like [`Engine::copy_list`], for many small blocks in a compact form. All lists form one copy.
    ///
    /// # Errors
    /// [`TransferError::Lost`] for earlier copies: nothing was enqueued. The driver's error if not all blocks were enqueued.
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
    /// [`TransferError::SizesDiffer`]; [`TransferError::Damaged`] if bytes differ after the second copy; the driver's errors.
    pub fn verify(&self, copies: &[(Span, Span)], on: UserStream) -> Result<()> {
        self.verifier.verify(copies, on)
    }

    /// Returns whether the engine can be faster for a copy between pool memory of a GPU and the host. Makes no driver call and holds no
    /// lock for long.
    pub fn benefit(&self, target: DeviceId, direction: Direction, size: Bytes) -> Benefit {
        self.routes.benefit(target, direction, size)
    }

    /// Like [`Engine::benefit`], for GPU memory outside of a pool.
    pub fn benefit_of_other(&self, size: Bytes) -> Benefit {
        self.routes.benefit_of_other(size)
    }

    /// Announces copies of a GPU's memory, so that the engine's thread creates their resources in advance.
    pub fn expect_copies_of(&self, device: DeviceId) {
        self.resources.want(device);
    }

    /// Calls a function on the engine's thread. Returns `false` if there is no thread, as before relays were started.
    pub fn call_on_thread(&self, call: impl FnOnce(&Engine) + Send + 'static) -> bool {
        let is_served = self.requests.is_served();
        if is_served {
            self.requests.call(self.call(call));
        }
        is_served
    }

    /// Creates the contexts, streams, events and slots of the relays in the background, then calls `after` on that thread, also after a
    /// failure. Resumes suspended relays.
    ///
    /// # Errors
    /// [`TransferError::NoThread`].
    pub fn start_relays(self: &Arc<Self>, after: impl FnOnce(&Engine) + Send + 'static) -> Result<()> {
        self.links.relays().resume();
        self.worker.prepare(self, self.call(after))
    }

    /// Sets the GPUs that may serve as relays. If relays were started, new ones are set up in the background.
    pub fn set_relays(&self, relays: DeviceSet) {
        self.links.relays().want(relays);
        self.requests.prepare_again();
    }

    /// Returns the relays that copies currently use: wanted, ready and not lost.
    pub fn relays(&self) -> DeviceSet {
        self.links.relays().usable()
    }

    /// Returns the memory cost of each relay.
    pub fn relay_cost(&self) -> Vec<RelayCost> {
        self.links.relays().costs()
    }

    /// Excludes relays from new copies, and releases their contexts and all resources there in the background once their work has
    /// completed. Retries relays that are suspended but kept their contexts. Resources that cannot be released are reported by
    /// [`Engine::unsuspended`]. No effect if relays were never started.
    pub fn suspend(&self, relays: DeviceSet) {
        self.links.suspend(relays);
    }

    /// Sets up suspended relays again in the background, then calls `after` on that thread, also after a failure. Relays whose resources
    /// still exist are ready immediately. `after` is not called if no relay is suspended.
    ///
    /// # Errors
    /// [`TransferError::NoThread`].
    pub fn resume(self: &Arc<Self>, after: impl FnOnce(&Engine) + Send + 'static) -> Result<()> {
        if self.suspended().is_empty() {
            return Ok(());
        }
        self.start_relays(after)
    }

    /// Returns the relays that are suspended or being suspended.
    pub fn suspended(&self) -> DeviceSet {
        self.links.relays().suspended()
    }

    /// Returns the suspended relays whose contexts still exist, with the reason, after all requested suspensions have ended or `timeout`
    /// has elapsed.
    pub fn unsuspended(&self, timeout: Duration) -> Vec<UnsuspendedRelay> {
        self.links.unsuspended(timeout)
    }

    /// Excludes a GPU that the program uses from the relays, unless GPUs may be shared ([`EngineOptions::shared_gpus`]): its link serves
    /// its own copies only. Releases the engine's resources there in the background.
    pub fn leave_to_program(&self, device: DeviceId) {
        self.links.leave_to_program(device);
    }

    /// Releases the resources assigned to a stream that is about to be destroyed.
    pub fn forget_stream(&self, id: StreamId) {
        self.links.lane_sets().forget(id);
    }

    /// Returns the current path graph. An assumed graph is refined by the timings of copies.
    pub fn graph(&self) -> Arc<PathGraph> {
        self.routes.graph()
    }

    /// Replaces the graph by which later copies are split.
    pub fn replace_graph(&self, graph: PathGraph) {
        self.traffic.replace_graph(graph);
    }

    /// Returns whether the links were measured to differ by a fifth or more from a calibrated graph, until another calibrated graph is set.
    /// The stored calibration should then be deleted and repeated. Until then, the graph is treated as assumed and refined by timings.
    pub fn is_stale(&self) -> bool {
        self.traffic.is_stale()
    }

    /// Registers a function that is called once, on the engine's thread, when [`Engine::is_stale`] becomes true.
    pub fn when_stale(&self, call: impl FnOnce(&Engine) + Send + 'static) {
        self.requests.when_stale(self.call(call));
    }

    /// Returns whether copies in a direction are in flight on any link and not yet known to be complete. Makes no driver call.
    pub fn is_busy(&self, direction: Direction) -> bool {
        self.ledger.is_loaded(direction)
    }

    /// Returns the totals since the engine was created.
    pub fn statistics(&self) -> Statistics {
        self.ledger.statistics()
    }

    /// Returns the pinned host memory of the engine: slots for pageable memory and lists of blocks. Does not block.
    pub fn pinned(&self) -> Bytes {
        self.resources.pinned()
    }

    /// Returns the options the engine was created with.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// Returns the completion clock of the program's contexts.
    pub fn completion_events(&self) -> &Arc<CompletionEvents> {
        self.contexts.program()
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
        self.links.relays().want(DeviceSet::EMPTY);
        self.worker.stop();
        self.spans.stop();
        self.traffic.stop();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.worker.stop();
    }
}
