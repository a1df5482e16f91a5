//! Copies in full stream order, over every link of the server.
//!
//! ```text
//!  user's stream ──work──┤fork├────own share────┤join├──work──      fork, join: events; nothing waits on the host
//!                          │ └─► lane of relay 1 ──share──┐│
//!                          ├───► lane of relay 2 ──share──┤│       a lane set: the lanes that one user's stream has
//!                          └───► lane of relay 3 ──share──┘┘
//!
//!  Engine ─► kinds ─► fork, native        a copy asks the traffic, takes its stream's lane set from links, forks and joins
//!     │        └─► routes, links, traffic
//!     └─► worker ─► provider              the thread that makes what copies use, as requests ask for it
//!
//!  contexts  both drivers, of the program's contexts and of ours       routes  what copies are split by
//!  ledger    what is under way and what was done                       waited, verify  what the caller waits for
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
//! - A copy creates nothing, but for the thread that the first background one starts. It takes no lock
//!   but its lane set's, and tables' for a moment; the driver is never called under a table's, but for the branches of captures and
//!   for work that could not be joined.

mod benefit;
pub(crate) mod completions;
pub(crate) mod contexts;
pub(crate) mod counters;
pub(crate) mod endpoints;
pub(crate) mod event_pool;
pub(crate) mod fork;
mod handle;
pub(crate) mod lane;
pub(crate) mod ledger;
pub(crate) mod native;
mod options;
pub(crate) mod parts;
mod provider;
pub(crate) mod requests;
pub(crate) mod routes;
mod statistics;
mod stream;
#[cfg(test)]
mod tests;
mod verify;
mod waited;
mod worker;

use std::sync::Arc;
use std::time::Duration;

use glake_device::owned::{Blocks, CompletionEvents, DeviceSet, Span};
use glake_device::{DeviceId, StreamId};
use glake_tiers::Pinning;
use glake_units::Bytes;
use smallvec::SmallVec;

pub use benefit::Benefit;
use completions::Completions;
use contexts::Contexts;
use event_pool::EventPool;
use fork::Forks;
pub use handle::CopyHandle;
use ledger::Ledger;
use native::NativeCopies;
pub use options::{CopyOptions, EngineOptions, Priority, RelayCost};
use provider::Provider;
use requests::Requests;
use routes::Routes;
pub use statistics::{PathStatistics, Statistics};
pub use stream::UserStream;
use verify::Verifier;
use waited::WaitedCopies;
use worker::Worker;

use crate::kinds::broadcast::BroadcastCopies;
use crate::kinds::captured::CapturedCopies;
use crate::kinds::pageable::{PageableCopies, Staging};
use crate::kinds::pinned::PinnedCopies;
use crate::kinds::resources::Resources;
use crate::kinds::scattered::ScatteredCopies;
use crate::kinds::span::SpanCopies;
use crate::links::Links;
use crate::links::lane_sets::LaneSets;
use crate::links::relays::Relays;
use crate::links::suspension::UnsuspendedRelay;
use crate::paths::{Direction, Load, PathGraph};
use crate::traffic::Traffic;
use crate::{Result, TransferError};

/// Copies bytes between host and GPUs.
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
}

impl Engine {
    /// An engine that makes every copy native until its relays are started. Makes no context.
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
        let lane_sets = LaneSets::new(&ledger, &traffic);
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
        let engine = Engine {
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
        };
        engine.replace_graph(graph);
        Ok(Arc::new(engine))
    }

    /// Has the engine learn nothing of links from copies that run while host memory is pinned; to be told once, before them.
    pub fn ignore_while_pinning(&self, pinning: &Arc<Pinning>) {
        self.traffic.ignore_while_pinning(pinning);
    }

    /// Enqueues a copy on a stream of the program.
    ///
    /// # Errors
    /// [`TransferError::Lost`] of earlier copies, once: this one may not have been enqueued. The driver's answer where it
    /// was not, or not wholly, enqueued.
    pub fn copy(&self, to: &Span, from: &Span, on: UserStream, options: CopyOptions) -> Result<CopyHandle> {
        let parts = self.spans.enqueue(to, from, on, options.priority);
        let memory = [to.device(), from.device()].into_iter().flatten().collect();
        let parts = self.completions.covered(parts, memory, on)?;
        self.completions.handle(on, options, parts)
    }

    /// Copies, and returns when the bytes are there. With [`CopyOptions::verify`] both sides are compared; what differs is
    /// copied again over the user's stream.
    ///
    /// # Errors
    /// As [`Engine::copy`], but for this copy's own losses: those are made good. [`TransferError::Damaged`] where bytes differ
    /// still.
    pub fn copy_blocking(&self, to: &Span, from: &Span, on: UserStream, options: CopyOptions) -> Result<()> {
        self.waited.copy(to, from, on, options)
    }

    /// Enqueues copies between pairs of spans, to and from, in no order among themselves: no block may touch bytes that another
    /// one writes.
    ///
    /// # Errors
    /// [`TransferError::SizesDiffer`], and [`TransferError::Lost`] of earlier copies: nothing was enqueued. The driver's answer
    /// where not all blocks were.
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

    /// As [`Engine::copy_list`], for many small blocks: what they have in common is said once. All lists are one.
    ///
    /// # Errors
    /// [`TransferError::Lost`] of earlier copies: nothing was enqueued. The driver's answer where not all blocks were.
    pub fn copy_blocks(
        &self,
        blocks: &[Blocks<'_>],
        on: UserStream,
        options: CopyOptions,
    ) -> Result<CopyHandle> {
        self.scattered.copy(blocks, on, options)
    }

    /// Enqueues copies of one span to several, which do not overlap.
    ///
    /// # Errors
    /// As [`Engine::copy`].
    pub fn copy_to_all(
        &self,
        to: &[Span],
        from: &Span,
        on: UserStream,
        options: CopyOptions,
    ) -> Result<CopyHandle> {
        self.broadcast.copy(to, from, on, options)
    }

    /// Compares both sides of copies that have arrived, whatever way they went; what differs is copied again by the driver. A copy
    /// whose ends overlap is passed over: its source is no longer there.
    ///
    /// The ends of each pair are of one size, and nothing touches them meanwhile. Waits for all work of the stream.
    ///
    /// # Errors
    /// [`TransferError::SizesDiffer`]; [`TransferError::Damaged`] where bytes differ after the second copy too; what the driver answers.
    pub fn verify(&self, copies: &[(Span, Span)], on: UserStream) -> Result<()> {
        self.verifier.verify(copies, on)
    }

    /// What a copy between pool memory of a GPU and the host gains by. Takes no lock that is held for long, and asks no driver.
    pub fn benefit(&self, target: DeviceId, direction: Direction, size: Bytes) -> Benefit {
        self.routes.benefit(target, direction, size)
    }

    /// What a copy of memory that is no pool's gains by.
    pub fn benefit_of_other(&self, size: Bytes) -> Benefit {
        self.routes.benefit_of_other(size)
    }

    /// Copies of a GPU's memory are to come: what they use is made ahead, on the engine's thread.
    pub fn expect_copies_of(&self, device: DeviceId) {
        self.resources.want(device);
    }

    /// Has something called on the engine's thread; false where there is none, as before relays were started.
    pub fn call_on_thread(&self, call: impl FnOnce(&Engine) + Send + 'static) -> bool {
        let is_served = self.requests.is_served();
        if is_served {
            self.requests.call(Box::new(call));
        }
        is_served
    }

    /// Makes the relays ready in the background: contexts, streams, events, slots. `after` is called on that
    /// thread when they are, or cannot be. None is suspended any more.
    ///
    /// # Errors
    /// [`TransferError::NoThread`].
    pub fn start_relays(self: &Arc<Self>, after: impl FnOnce(&Engine) + Send + 'static) -> Result<()> {
        self.links.relays().resume();
        self.worker.prepare(self, Box::new(after))
    }

    /// Which GPUs may be relays from now on. Those that are not ready yet are made so, if relays were started.
    pub fn set_relays(&self, relays: DeviceSet) {
        self.links.relays().want(relays);
        self.requests.prepare_again();
    }

    /// The relays that copies take now: wanted, ready and not lost.
    pub fn relays(&self) -> DeviceSet {
        self.links.relays().usable()
    }

    /// What the relays cost.
    pub fn relay_cost(&self) -> Vec<RelayCost> {
        self.links.relays().costs()
    }

    /// No copy takes these relays from its beginning on; when nothing is under way on them, their contexts and all that the engine
    /// has there goes back, in the background. Those that are suspended already are tried again, if their contexts stayed. What cannot go
    /// stays, and is told by [`Engine::unsuspended`]. Nothing is done where relays were never started.
    pub fn suspend(&self, relays: DeviceSet) {
        self.links.suspend(relays);
    }

    /// Makes suspended relays ready again, in the background; those of which nothing was given up yet are ready at once.
    /// `after` is called on that thread when they are, or cannot be; not at all where none is suspended.
    ///
    /// # Errors
    /// [`TransferError::NoThread`].
    pub fn resume(self: &Arc<Self>, after: impl FnOnce(&Engine) + Send + 'static) -> Result<()> {
        if self.suspended().is_empty() {
            return Ok(());
        }
        self.start_relays(after)
    }

    /// The relays that are suspended, or are to be.
    pub fn suspended(&self) -> DeviceSet {
        self.links.relays().suspended()
    }

    /// The suspended relays whose contexts are still there, and why, once all suspensions that were asked for are over, or so much time has
    /// passed.
    pub fn unsuspended(&self, timeout: Duration) -> Vec<UnsuspendedRelay> {
        self.links.unsuspended(timeout)
    }

    /// The program uses a GPU: its link serves its own copies only, unless GPUs may be shared ([`EngineOptions::shared_gpus`]). What
    /// the engine has there is given up in the background.
    pub fn leave_to_program(&self, device: DeviceId) {
        self.links.leave_to_program(device);
    }

    /// A stream of the program is about to be destroyed: what was kept for it can serve another.
    pub fn forget_stream(&self, id: StreamId) {
        self.links.lane_sets().forget(id);
    }

    /// What copies are split by; one that was assumed is refined by what they take.
    pub fn graph(&self) -> Arc<PathGraph> {
        self.routes.graph()
    }

    /// Splits copies by another graph from now on.
    pub fn replace_graph(&self, graph: PathGraph) {
        self.traffic.replace_graph(graph);
    }

    /// Whether the links were seen to give a fifth more or less than a calibrated graph says, until another calibrated one is
    /// given: what is kept of it should be dropped, and the server calibrated again. Meanwhile copies go by it as if it were
    /// assumed, refined by what they take.
    pub fn is_stale(&self) -> bool {
        self.traffic.is_stale()
    }

    /// Calls `call`, once, on the thread that makes relays ready, when [`Engine::is_stale`] becomes true: to drop what is kept.
    pub fn when_stale(&self, call: impl FnOnce(&Engine) + Send + 'static) {
        self.requests.when_stale(Box::new(call));
    }

    /// Whether copies that way are in flight over any link, as far as their end was not seen yet. Asks no driver.
    pub fn is_busy(&self, direction: Direction) -> bool {
        self.ledger.is_loaded(direction)
    }

    /// What was done so far.
    pub fn statistics(&self) -> Statistics {
        self.ledger.statistics()
    }

    /// Pinned host memory of its own: slots for pageable memory, and lists of blocks. Waits for nothing.
    pub fn pinned(&self) -> Bytes {
        self.resources.pinned()
    }

    /// What it was made with.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// The clock of the driver's completions.
    pub fn completion_events(&self) -> &Arc<CompletionEvents> {
        self.contexts.program()
    }

    /// Ends the engine's threads. Copies are native from now on.
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
