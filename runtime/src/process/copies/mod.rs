//! Copies of the program's bytes.
//!
//! ```text
//! Lent, CopyAsk ─► decide: who makes it ─┬─► Engine: over several links ──────────────┬─► pending, until somebody has waited
//!                    ▲                   └─► native: the driver's own, for one link ──┘
//!                    endpoints: what memory is, and who may touch it
//! ```
//!
//! Invariants: `decide` is the only place that says who makes a copy and which are refused. Memory that is evicted comes back before
//! anything is asked of it.

mod ask;
mod decide;
mod endpoints;
mod native;
mod opening;
mod pending;
mod pinned;
mod statistics;

use std::sync::Arc;

use glake_device::owned::{Lent, LentCopy, OwnedEvent, Span};
use glake_device::{Address, CopyRequest, DeviceId, EventKind, Stream};
use glake_transfer::paths::Direction;
use glake_transfer::{CopyHandle, CopyOptions, Engine, UserStream};
use glake_units::Bytes;

use super::device::DeviceMemory;
use super::device_registry::DeviceRegistry;
use super::regions::RegionSet;
use super::streams::Streams;
use super::{ProcessError, Result};
pub use ask::{CopyAsk, Form};
use decide::{Maker, is_early};
#[cfg(test)]
#[cfg(not(schedules))]
pub(super) use endpoints::Endpoint;
use endpoints::{Endpoints, Ends};
use native::NativeCount;
use opening::Opening;
use pending::{Pending, PendingCopies};

/// The copies of a process's program.
#[derive(Debug)]
pub struct Copies {
    registry: Arc<DeviceRegistry>,
    streams: Arc<Streams>,
    /// What is evicted comes back before a copy touches it.
    regions: Arc<RegionSet>,
    pub(super) ends: Endpoints,
    pub(super) pending: PendingCopies,
    native: NativeCount,
    opening: Opening,
}

impl Copies {
    pub(super) fn new(
        registry: &Arc<DeviceRegistry>,
        streams: &Arc<Streams>,
        regions: &Arc<RegionSet>,
    ) -> Copies {
        Copies {
            registry: registry.clone(),
            streams: streams.clone(),
            regions: regions.clone(),
            ends: Endpoints::new(registry, streams),
            pending: PendingCopies::default(),
            native: NativeCount::default(),
            opening: Opening::default(),
        }
    }

    /// Lets copies use the links of other GPUs, or no longer. They are made ready in the background: a copy takes one link
    /// until then, and no copy waits for it.
    ///
    /// # Errors
    /// [`super::ProcessError::NoRelays`]; [`super::ProcessError::Transfer`] where there is no thread.
    pub fn multi_path(&self, on: bool) -> Result<()> {
        self.registry.multi_path(on)
    }

    /// Makes or enqueues copies, each by whoever makes it best; the handle of one that is to be waited for, or 0.
    ///
    /// # Errors
    /// [`super::ProcessError::Transfer`], also for an earlier copy that failed: then nothing was done.
    /// [`super::ProcessError::Captured`], [`super::ProcessError::ForeignContext`]: nobody can wait for it. What bringing memory back
    /// meets; what the driver answers.
    pub fn copy(&self, lent: Lent<'_>, form: Form, ask: &CopyAsk) -> Result<u64> {
        self.streams.with_default_of(ask.device, || {
            lent.requests().iter().try_for_each(|request| self.bring_back(request))?;
            match self.decide(lent, form, ask)? {
                Maker::Native => self.make_native(lent, ask),
                Maker::Engine(copy, ends) => self.split_one(copy, ends, ask),
                Maker::Blocks { blocks, rest } => {
                    self.enqueue_native(&rest, ask)?;
                    let options = ask.options(ask.waited || ask.blocking);
                    let copy = |engine: &Engine, on, options| engine.copy_blocks(&blocks, on, options);
                    let handle = self.enqueue(ask.stream, options, copy)?;
                    self.ended(handle, lent, ask)
                }
                Maker::ToAll(copies) => {
                    let pairs: Vec<(Span, Span)> = copies.into_iter().map(spans).collect();
                    let Some(from) = pairs.first().map(|(_, from)| from.clone()) else { return Ok(0) };
                    let to: Vec<Span> = pairs.into_iter().map(|(to, _)| to).collect();
                    let options = ask.options(ask.waited || ask.blocking);
                    let copy = |engine: &Engine, on, options| engine.copy_to_all(&to, &from, on, options);
                    let handle = self.enqueue(ask.stream, options, copy)?;
                    self.ended(handle, lent, ask)
                }
            }
        })?
    }

    /// Whether a copy may be one for the engine, for those who would make it themselves else; what is evicted of it comes back first.
    ///
    /// # Errors
    /// What bringing memory back meets.
    pub fn is_worth_trying(&self, request: &CopyRequest) -> Result<bool> {
        self.bring_back(request)?;
        self.may_split(request.size)
    }

    /// Makes or enqueues a copy where it is one for the engine, and goes the way that is asked for; whether it was. What is refused before
    /// anything was enqueued is none for it.
    ///
    /// # Errors
    /// As [`Copies::copy`], of what was enqueued.
    pub fn attempt(&self, lent: Lent<'_>, ask: &CopyAsk, way: Option<Direction>) -> Result<bool> {
        match self.split_tried(lent, ask, way) {
            Err(error) if is_early(&error) => Ok(false),
            taken => taken,
        }
    }

    /// The device whose memory is at an address; `None`: the host's, or memory that moves as it is touched.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn device_of(&self, at: Address) -> Result<Option<DeviceId>> {
        Ok(self.ends.end_of(at, Bytes::new(1))?.and_then(|end| end.kind.device()))
    }

    /// Waits on the host until the bytes of a copy are there, and ends its handle; 0 is that of a copy which is done.
    ///
    /// # Errors
    /// [`super::ProcessError::UnknownCopy`]; why the bytes are not there.
    pub fn wait(&self, handle: u64) -> Result<()> {
        if handle == 0 { Ok(()) } else { self.pending.wait(handle) }
    }

    /// Ends the handle of a copy without waiting for it; 0 is that of a copy which is done.
    ///
    /// # Errors
    /// [`super::ProcessError::UnknownCopy`].
    pub fn drop(&self, handle: u64) -> Result<()> {
        if handle == 0 { Ok(()) } else { self.pending.drop(handle) }
    }

    /// Whether the bytes of a copy are there; its handle stays.
    ///
    /// # Errors
    /// As [`Copies::wait`].
    pub fn is_done(&self, handle: u64) -> Result<bool> {
        if handle == 0 { Ok(true) } else { self.pending.is_done(handle) }
    }

    /// Smaller copies are the driver's own: nothing is asked about their ends.
    #[inline]
    pub(super) fn least_split(&self) -> Bytes {
        self.registry.engine.least()
    }

    /// Whether any GPU's link is lent to others' copies now; starts the relays where they are on and were not started.
    ///
    /// # Errors
    /// [`super::ProcessError::Transfer`].
    #[inline]
    pub(super) fn has_relays(&self) -> Result<bool> {
        Ok(self.registry.engine.is_on() && !self.registry.engine()?.relays().is_empty())
    }

    /// A handle for all work that is on a stream now.
    ///
    /// # Errors
    /// What the driver answers.
    pub(super) fn mark(&self, raw: Stream) -> Result<u64> {
        let on = self.streams.user(raw)?;
        if self.streams.is_captured(on)? {
            return Ok(self.pending.keep(Pending::Captured(on)));
        }
        let event = OwnedEvent::new(self.registry.completion_events.driver(), on.device, EventKind::Plain)?;
        event.record(raw)?;
        Ok(self.pending.keep(Pending::Native(event)))
    }

    /// Evicted memory comes back before a copy touches it; a copy of what was decommitted is refused.
    #[inline]
    fn bring_back(&self, request: &CopyRequest) -> Result<()> {
        self.regions.written(request.to)?;
        self.regions.touched(request.from)?;
        if self.regions.flags().is_any_decommitted() { self.check_committed(request) } else { Ok(()) }
    }

    #[cold]
    fn check_committed(&self, request: &CopyRequest) -> Result<()> {
        let &CopyRequest { to, from, size, .. } = request;
        let is_missing = |address: &Address| {
            let mut started = self.registry.devices.iter().filter_map(DeviceMemory::started);
            started.any(|started| started.pool.is_decommitted(*address, size))
        };
        let missing = [to, from].into_iter().find(is_missing);
        missing.map_or(Ok(()), |address| Err(ProcessError::Decommitted { address, size }))
    }

    fn split_tried(&self, lent: Lent<'_>, ask: &CopyAsk, way: Option<Direction>) -> Result<bool> {
        // Also so that what such a context is of is left to the program.
        if self.streams.primary_of(ask.stream)?.is_none() {
            return Ok(false);
        }
        self.streams.with_default_of(ask.device, || {
            let Some(copy) = lent.each().next() else { return Ok(false) };
            match self.decide_try(&copy.request(), ask, way)? {
                Some(ends) => self.split_one(copy, ends, ask).map(|_| true),
                None => Ok(false),
            }
        })?
    }

    /// Gives one copy to the engine; its handle.
    fn split_one(&self, copy: LentCopy, ends: Ends, ask: &CopyAsk) -> Result<u64> {
        let (to, from) = spans((copy, ends));
        if !ask.blocking {
            let copy = |engine: &Engine, on, options| engine.copy(&to, &from, on, options);
            return self.enqueue(ask.stream, ask.options(ask.waited), copy);
        }
        let on = self.streams.user(ask.stream)?;
        // It compares itself.
        let options = CopyOptions { verify: self.verifies(ask), ..ask.options(false) };
        self.registry.engine()?.copy_blocking(&to, &from, on, options)?;
        Ok(0)
    }

    /// Enqueues with the engine; the handle, where somebody waits for it.
    fn enqueue(
        &self,
        raw: Stream,
        options: CopyOptions,
        copy: impl FnOnce(&Engine, UserStream, CopyOptions) -> glake_transfer::Result<CopyHandle>,
    ) -> Result<u64> {
        let on = self.streams.user(raw)?;
        let captured = options.waited && self.streams.is_captured(on)?;
        let options = CopyOptions { waited: options.waited && !captured, ..options };
        let handle = copy(self.registry.engine()?, on, options)?;
        Ok(match (captured, options.waited) {
            (true, _) => self.pending.keep(Pending::Captured(on)),
            (false, true) => self.pending.keep(Pending::Engine(Box::new(handle))),
            (false, false) => 0,
        })
    }

    /// Waits for what was enqueued where the call is to; else its handle.
    fn ended(&self, handle: u64, lent: Lent<'_>, ask: &CopyAsk) -> Result<u64> {
        if !ask.blocking {
            return Ok(handle);
        }
        self.wait(handle)?;
        self.compare(lent, ask)?;
        Ok(0)
    }

    /// Compares both sides of copies that have arrived, where that is asked for, and copies again what differs: every way that a copy
    /// can take ends here, but for [`Engine::copy_blocking`], which compares itself.
    ///
    /// # Errors
    /// [`super::ProcessError::Transfer`]: bytes differ after the second copy too; what the driver answers.
    fn compare(&self, lent: Lent<'_>, ask: &CopyAsk) -> Result<()> {
        if !self.verifies(ask) {
            return Ok(());
        }
        let (mut ends, mut copies) = (self.ends.many(), Vec::with_capacity(lent.requests().len()));
        for copy in lent.each() {
            copies.extend(ends.parts(copy)?.into_iter().map(spans));
        }
        let on = self.streams.user(ask.stream)?;
        Ok(self.registry.engine()?.verify(&copies, on)?)
    }
}

fn spans((copy, (to, from)): (LentCopy, Ends)) -> (Span, Span) {
    copy.spans(to.side(), from.side())
}
