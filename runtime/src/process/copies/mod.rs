//! Copies of the program's bytes.
//!
//! ```text
//! Lent, CopyAsk ─► decide: driver or engine ─┬─► Engine: over several links ──────────────┬─► pending, until the caller has waited
//!                    ▲                       └─► native: the driver's own, for one link ──┘
//!                    endpoints: kind of the memory, devices that may access it
//! ```
//!
//! Invariants: only `decide` chooses the implementation of a copy and refuses copies. Evicted memory is refilled before it is queried.

use std::sync::Arc;

use decide::{Maker, is_early};
use endpoints::{Endpoints, Ends};
use glake_device::owned::{DeviceSet, Lent, LentCopy, OwnedEvent, Span};
use glake_device::{Address, CopyRequest, DeviceId, EventKind, Stream};
use glake_transfer::paths::Direction;
use glake_transfer::{CopyHandle, CopyOptions, Engine, UserStream};
use glake_units::Bytes;
use native::{NativeCount, Opening};
use pending::{Pending, PendingCopies};

use super::device::DeviceMemory;
use super::device_registry::DeviceRegistry;
use super::regions::RegionSet;
use super::streams::Streams;
use super::{ProcessError, Result};
use crate::metrics::CopyStats;

pub use decide::{CopyAsk, Form};
#[cfg(test)]
#[cfg(not(schedules))]
pub(super) use endpoints::Endpoint;

mod decide;
mod endpoints;
mod native;
mod pending;

/// Copies of a process's program.
#[derive(Debug)]
pub struct Copies {
    registry: Arc<DeviceRegistry>,
    streams: Arc<Streams>,
    /// Regions, which refill evicted memory before a copy accesses it.
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

    /// Enables or disables the links of other GPUs for copies. The relays start in the background; until they are ready a copy uses one
    /// link and does not wait.
    ///
    /// # Errors
    /// [`super::ProcessError::Refused`] if the configuration forbids it; [`super::ProcessError::Transfer`] where there is no thread.
    pub fn multi_path(&self, on: bool) -> Result<()> {
        self.registry.multi_path(on)
    }

    /// Makes or enqueues copies, each by the faster of driver and engine. Returns the handle of a copy that the caller will wait for, or 0.
    ///
    /// # Errors
    /// [`super::ProcessError::Transfer`], also for an earlier copy that failed: nothing was done then. [`super::ProcessError::Captured`]
    /// and [`super::ProcessError::ForeignContext`]: a wait for the copy would be impossible. Errors of refilling memory and of the driver.
    pub fn copy(&self, lent: Lent<'_>, form: Form, ask: &CopyAsk) -> Result<u64> {
        let copied = self.streams.with_default_of(ask.device, || {
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
        })?;
        copied.map_err(|error| self.ends.with_block(error, lent.requests()))
    }

    /// Returns whether a copy may suit the engine, for callers that would make it themselves otherwise. Refills its evicted memory first.
    ///
    /// # Errors
    /// Errors of refilling memory.
    pub fn is_worth_trying(&self, request: &CopyRequest) -> Result<bool> {
        self.bring_back(request)?;
        self.may_split(request.size)
    }

    /// Makes or enqueues a copy if it suits the engine and has the requested direction; returns whether it did. A copy refused before any
    /// enqueue does not suit it.
    ///
    /// # Errors
    /// As [`Copies::copy`], for an enqueued copy.
    pub fn attempt(&self, lent: Lent<'_>, ask: &CopyAsk, way: Option<Direction>) -> Result<bool> {
        match self.split_tried(lent, ask, way) {
            Err(error) if is_early(&error) => Ok(false),
            taken => taken,
        }
    }

    /// Returns the device whose memory is at an address; `None` for host and managed memory.
    ///
    /// # Errors
    /// The driver's error.
    pub fn device_of(&self, at: Address) -> Result<Option<DeviceId>> {
        Ok(self.ends.end_of(at, Bytes::new(1))?.and_then(|end| end.kind.device()))
    }

    /// Waits on the host until the bytes of a copy have arrived, and releases its handle; 0 is the handle of a finished copy.
    ///
    /// # Errors
    /// [`super::ProcessError::Refused`] if the handle is unknown; the error of the copy.
    pub fn wait(&self, handle: u64) -> Result<()> {
        if handle == 0 { Ok(()) } else { self.pending.wait(handle) }
    }

    /// Releases the handle of a copy without waiting; 0 is the handle of a finished copy.
    ///
    /// # Errors
    /// [`super::ProcessError::Refused`] if the handle is unknown.
    pub fn drop(&self, handle: u64) -> Result<()> {
        if handle == 0 { Ok(()) } else { self.pending.drop(handle) }
    }

    /// Returns whether the bytes of a copy have arrived; its handle stays valid.
    ///
    /// # Errors
    /// As [`Copies::wait`].
    pub fn is_done(&self, handle: u64) -> Result<bool> {
        if handle == 0 { Ok(true) } else { self.pending.is_done(handle) }
    }

    /// Returns the size below which the driver makes every copy, without a query of its ends.
    #[inline]
    pub(super) fn least_split(&self) -> Bytes {
        self.registry.engine.least()
    }

    /// Returns whether relays can serve copies now; starts the relays if they are enabled and were not started.
    ///
    /// # Errors
    /// [`super::ProcessError::Transfer`].
    #[inline]
    pub(super) fn has_relays(&self) -> Result<bool> {
        Ok(self.registry.engine.is_on() && !self.registry.engine()?.relays().is_empty())
    }

    /// Returns a handle for all work enqueued on a stream so far.
    ///
    /// # Errors
    /// The driver's error.
    pub(super) fn mark(&self, raw: Stream) -> Result<u64> {
        let on = self.streams.user(raw)?;
        if self.streams.is_captured(on)? {
            return Ok(self.pending.keep(Pending::Captured(on)));
        }
        let event = OwnedEvent::new(self.registry.completion_events.driver(), on.device, EventKind::Plain)?;
        event.record(raw)?;
        Ok(self.pending.keep(Pending::Native(event)))
    }

    /// Refills evicted memory before a copy accesses it; refuses a copy of decommitted memory.
    #[inline]
    fn bring_back(&self, request: &CopyRequest) -> Result<()> {
        self.regions.written(request.to)?;
        self.regions.touched(request.from)?;
        if self.regions.flags.is_any_decommitted() { self.check_committed(request) } else { Ok(()) }
    }

    #[cold]
    fn check_committed(&self, request: &CopyRequest) -> Result<()> {
        let &CopyRequest { to, from, size, .. } = request;
        let is_missing = |address: &Address| {
            let mut started = self.registry.devices.iter().filter_map(DeviceMemory::started);
            started.any(|started| started.pool.is_decommitted(*address, size))
        };
        let missing = [to, from].into_iter().find(is_missing);
        missing.map_or(Ok(()), |address| Err(ProcessError::decommitted(address, size)))
    }

    fn split_tried(&self, lent: Lent<'_>, ask: &CopyAsk, way: Option<Direction>) -> Result<bool> {
        // This also leaves memory of such a context to the program.
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

    /// Passes one copy to the engine and returns its handle.
    fn split_one(&self, copy: LentCopy, ends: Ends, ask: &CopyAsk) -> Result<u64> {
        let (to, from) = spans((copy, ends));
        if !ask.blocking {
            let copy = |engine: &Engine, on, options| engine.copy(&to, &from, on, options);
            return self.enqueue(ask.stream, ask.options(ask.waited), copy);
        }
        let on = self.streams.user(ask.stream)?;
        // The engine compares the bytes itself.
        let options = CopyOptions { verify: self.verifies(ask), ..ask.options(false) };
        self.registry.engine()?.copy_blocking(&to, &from, on, options)?;
        Ok(0)
    }

    /// Enqueues with the engine; returns the handle if the caller will wait for it.
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

    /// Waits for the enqueued copies if the call is blocking; otherwise returns their handle.
    fn ended(&self, handle: u64, lent: Lent<'_>, ask: &CopyAsk) -> Result<u64> {
        if !ask.blocking {
            return Ok(handle);
        }
        self.wait(handle)?;
        self.compare(lent, ask)?;
        Ok(0)
    }

    /// Compares both sides of finished copies if requested, and repeats copies that differ. Every path of a copy ends here, except
    /// [`Engine::copy_blocking`], which compares itself.
    ///
    /// # Errors
    /// [`super::ProcessError::Transfer`]: the bytes still differ after the second copy; the driver's error.
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

impl Copies {
    /// Returns the statistics of copies and the cost of their relays.
    pub fn statistics(&self) -> CopyStats {
        let engine = self.registry.engine.made();
        let done = engine.map(|engine| engine.statistics()).unwrap_or_default();
        let (native_copies, native_bytes) = self.native.get();
        let relays = engine.map_or(DeviceSet::EMPTY, |engine| engine.relays());
        let costs = engine.iter().flat_map(|engine| engine.relay_cost());
        CopyStats {
            multi_path: self.registry.engine.is_on(),
            relays: relays.iter().map(|relay| relay.0).collect(),
            ready: !relays.is_empty()
                && engine.is_some_and(|engine| !engine.graph().paths().links.is_empty()),
            relay_costs: costs.map(|cost| (&cost).into()).collect(),
            calibrated: engine.is_some_and(|engine| engine.graph().is_calibrated()),
            break_even: self.registry.engine.least().get(),
            native_copies: native_copies + done.native_copies,
            native_bytes: native_bytes + done.native_bytes.get(),
            split_copies: done.split_copies,
            lost_copies: done.lost_copies,
            paths: done.paths.iter().map(Into::into).collect(),
        }
    }
}
