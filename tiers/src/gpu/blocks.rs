//! Allocation and release of blocks: hits, misses, the ordering of streams, and the budget.
//!
//! ```text
//! malloc ─► core.take ──hit───────────────────────────────────────────► block     one short lock, no driver
//!             └ miss ─► growth lock ─► core.plan ─► execute on driver ─► commit ─► block
//!                                         ▲              └ failed ─► undo ─► abort ─► error
//! free ───► core.free                     └── completion points: recorded, polled, passed to the core
//! ```
//!
//! - `Miss` serves a request that no free list can serve: plans, executes, or refuses it.
//! - `StreamOrder` makes a stream wait for the last use of its new bytes: its own earlier work if the address changes, the work of lending
//!   streams, and read holds.
//! - `Budget` is a soft upper bound of reserved memory, below the hard limit. The pool treats it like a limit: it releases free memory of
//!   other domains and makes streams wait for copies that still read freed memory. Only a request that this does not serve exceeds the
//!   budget, up to the limit.
//!
//! Invariants:
//! - A hit that needs no ordering between streams takes only the allocator's lock, makes no driver call and allocates no host memory. The
//!   same holds for a free, with these exceptions: the first free after a pause wakes the tickers; exported, evicted or recorded blocks
//!   need more work; and a new maximum of free pieces of one size allocates.
//! - A block whose stream could not be ordered is withheld from all streams, its own included, until its completion point has passed.

use std::sync::Arc;

use glake_device::owned::OwnedEvent;
use glake_device::{Address, CaptureState, DriverError, EventKind, Stream};
use glake_stitch::{
    DomainId, Grant, HoldId, Outcome, Plan, PointNumber, Request, StitchError, StreamKey, Wait,
};
use glake_units::Bytes;
use parking_lot::Mutex;

use super::clock::{CompletionClock, WaitTimer};
use super::core::Core;
use super::error::retry;
use super::growth::{Growth, GrowthGuard};
use super::lease::LeaseShort;
use super::records::ExtentRecords;
use super::{PoolError, PoolStream, Result};

/// Block handed out by a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Address of the first byte, in the GPU's address space.
    pub address: Address,
    /// Size of the block: the request rounded up to 512 bytes.
    pub size: Bytes,
}

/// Allocator front end of a pool.
#[derive(Debug)]
pub(super) struct Blocks {
    core: Arc<Core>,
    clock: Arc<CompletionClock>,
    records: Arc<ExtentRecords>,
    order: StreamOrder,
    growth: Arc<Growth>,
    budget: Budget,
}

impl Blocks {
    pub(super) fn new(
        core: Arc<Core>,
        clock: Arc<CompletionClock>,
        records: Arc<ExtentRecords>,
        order: StreamOrder,
        growth: Arc<Growth>,
    ) -> Self {
        let budget = Budget::new(&core);
        Blocks { core, clock, records, order, growth, budget }
    }

    /// Returns the pool's budget for reserved memory.
    pub(super) fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Allocates a block in a domain.
    #[inline]
    pub(super) fn malloc(&self, domain: DomainId, size: Bytes, stream: PoolStream) -> Result<Block> {
        self.core.usable()?;
        let request = Request { size, stream: stream.key, domain };
        match self.core.take(&request) {
            Some(grant) if !grant.edge && grant.waits.is_empty() => Ok(self.handed_out(&grant)),
            hit => self.malloc_in_order(&request, stream, hit),
        }
    }

    /// Allocates a block after a miss, or after a hit whose stream first has to wait for other work.
    #[inline(never)]
    fn malloc_in_order(
        &self,
        request: &Request,
        stream: PoolStream,
        mut hit: Option<Grant>,
    ) -> Result<Block> {
        let Blocks { core, clock, growth, .. } = self;
        loop {
            let grant = match hit {
                Some(grant) => grant,
                None => {
                    let serve = || Miss { core, clock, growth, request, stream }.serve();
                    match serve() {
                        Err(error @ (PoolError::Refused { .. } | PoolError::CaptureOpen { .. })) => {
                            self.budget.beyond(serve).ok_or(error)??
                        }
                        served => served?,
                    }
                }
            };
            if self.order.order(&grant, stream)? {
                return Ok(self.handed_out(&grant));
            }
            hit = core.take(request);
        }
    }

    /// Frees a block and returns its size.
    #[inline]
    pub(super) fn free(&self, address: Address) -> Result<Bytes> {
        let offset = self.core.offset(address)?;
        let freed = self.core.free(offset);
        let freed = freed.map_err(|_| PoolError::UnknownAddress { device: self.core.device(), address })?;
        if !freed.emptied.is_empty() {
            self.records.drop_emptied(&freed.emptied);
        }
        if !freed.uses.is_empty() {
            self.core.mark_uses(&freed.uses);
        }
        self.clock.note_freed();
        Ok(freed.size)
    }

    /// Records that work on another stream uses a block.
    pub(super) fn record_stream(&self, address: Address, stream: PoolStream) -> bool {
        let Ok(offset) = self.core.offset(address) else { return false };
        let is_block = self.core.lock().record_stream(offset, stream.key);
        if is_block && self.core.uses().know(stream) {
            self.clock.know(stream.raw);
        }
        is_block
    }

    fn handed_out(&self, grant: &Grant) -> Block {
        Block { address: self.core.address(grant.offset), size: grant.size }
    }
}

/// Allocation request that missed.
#[derive(Debug)]
pub(super) struct Miss<'a> {
    pub(super) core: &'a Core,
    pub(super) clock: &'a CompletionClock,
    pub(super) growth: &'a Growth,
    pub(super) request: &'a Request,
    pub(super) stream: PoolStream,
}

impl Miss<'_> {
    /// Finds or makes memory for the request. Waits are made without the growth lock.
    pub(super) fn serve(&self) -> Result<Grant> {
        self.clock.know(self.stream.raw);
        self.clock.tick()?;
        self.clock.note_lag();
        let mut growing = self.growth.lock()?;
        growing.know(self.stream.key, self.stream.raw);
        let (mut grow, mut short) = (true, None);
        let mut asking = self.growth.lease().asking();
        let waits = self.can_wait();
        loop {
            let outcome = self.core.plan(self.request, grow, waits);
            match outcome.map_err(|source| self.out_of_memory(source, grow, short))? {
                Outcome::Ready(grant) => return Ok(grant),
                Outcome::Work(plan) => match growing.carry_out(&plan, self.request.stream) {
                    Ok(Some(grant)) => {
                        self.report_stitch(&plan);
                        self.collect(&mut growing);
                        return Ok(grant);
                    }
                    Ok(None) => grow = true,
                    Err(PoolError::Driver(error)) if error.is_out_of_memory() && grow => {
                        (grow, short) = (false, None);
                    }
                    // The grantor may need memory of this process first.
                    Err(PoolError::Leased { short: refused, .. }) if grow => {
                        drop(growing);
                        grow = asking.ask(refused);
                        short = asking.short();
                        growing = self.growth.lock()?;
                    }
                    Err(error) => return Err(error),
                },
                // The work waited for may need memory that another thread has to allocate first.
                Outcome::Wait(point) => {
                    drop(growing);
                    match self.wait(point) {
                        Err(PoolError::Driver(DriverError::Capturing { .. })) => {
                            if let Some(short) = short.filter(|_| !grow) {
                                let device = self.core.device();
                                return Err(PoolError::Leased { device, short, in_capture: true });
                            }
                            let refusal = self.core.lock().refuse(self.request.size);
                            return Err(PoolError::CaptureOpen { device: self.core.device(), refusal });
                        }
                        waited => waited?,
                    }
                    growing = self.growth.lock()?;
                }
            }
        }
    }

    /// Waits on the host for a completion point, or only for one use of the stream's own bytes if that suffices: the point may also cover
    /// unrelated work.
    fn wait(&self, point: PointNumber) -> Result<()> {
        match self.core.first_use(self.request, point) {
            Some(used) => self.core.wait_use(used).map_err(|error| self.core.failed(error)),
            None => self.clock.wait(point),
        }
    }

    /// Returns whether the stream may wait for bytes withheld by holds: not during its capture. Queries the driver only if there are holds.
    fn can_wait(&self) -> bool {
        let is_any_held = !self.core.lock().held_bytes().is_zero();
        let state = || self.core.driver().capture_state(self.core.device(), self.stream.raw);
        !is_any_held || matches!(retry(state), Ok(CaptureState::None))
    }

    /// Unmaps idle aliases above their limit. A failure does not affect the block that was just allocated; the aliases stay until the next
    /// attempt.
    fn collect(&self, growing: &mut GrowthGuard<'_>) {
        let plan = self.core.lock().plan_due_collection();
        let done = plan.map_or(Ok(None), |plan| growing.carry_out(&plan, self.request.stream));
        if let Err(error) = done {
            tracing::warn!(target: "glake::stitch", %error, "idle aliases could not be unmapped");
        }
    }

    fn report_stitch(&self, plan: &Plan) {
        if let Some(stitch) = &plan.stitch {
            tracing::info!(
                target: "glake::stitch",
                device = self.core.device().0,
                stream = self.request.stream.0,
                wanted = stitch.wanted.get(),
                ranges = stitch.ranges,
                extents = stitch.extents,
                grown = stitch.grown.get(),
                "stitched"
            );
        }
    }

    fn out_of_memory(&self, refusal: StitchError, grow: bool, short: Option<LeaseShort>) -> PoolError {
        let device = self.core.device();
        match (grow, short) {
            (false, Some(short)) => PoolError::Leased { device, short, in_capture: false },
            (false, None) => PoolError::DeviceFull { device, refusal },
            (true, _) => self.core.refused(refusal),
        }
    }
}

fn lender(wait: &Wait) -> Option<StreamKey> {
    if let Wait::Stream(stream) = wait { Some(*stream) } else { None }
}

fn hold(wait: &Wait) -> Option<HoldId> {
    if let Wait::Hold(hold) = wait { Some(*hold) } else { None }
}

/// Makes streams wait for other work on their GPU.
#[derive(Debug)]
pub(super) struct StreamOrder {
    core: Arc<Core>,
    clock: Arc<CompletionClock>,
    growth: Arc<Growth>,
    waits: Arc<WaitTimer>,
    /// Event that is recorded and waited for in one critical section.
    event: Mutex<OwnedEvent>,
}

impl StreamOrder {
    pub(super) fn new(
        core: Arc<Core>,
        clock: Arc<CompletionClock>,
        growth: Arc<Growth>,
        waits: Arc<WaitTimer>,
    ) -> glake_device::Result<Self> {
        let event = Mutex::new(OwnedEvent::new(core.driver(), core.device(), EventKind::Plain)?);
        Ok(StreamOrder { core, clock, growth, waits, event })
    }

    /// Makes a stream wait, on the device, for the last use of its new block's bytes. Capturing streams neither lend nor borrow: for these
    /// it returns false, and the block is withheld until its completion point, so that another is found.
    pub(super) fn order(&self, grant: &Grant, stream: PoolStream) -> Result<bool> {
        let ordered = self.wait_for_all(grant, stream);
        if !matches!(ordered, Ok(true)) {
            self.withhold(grant);
        }
        ordered.map_err(|error| self.core.failed(error))
    }

    fn wait_for_all(&self, grant: &Grant, stream: PoolStream) -> std::result::Result<bool, DriverError> {
        if grant.edge {
            self.wait_for(stream.raw, stream)?;
            self.core.owed().made(stream.key);
        }
        if grant.waits.is_empty() {
            return Ok(true);
        }
        let keys: Vec<StreamKey> = grant.waits.iter().filter_map(lender).collect();
        let held = grant.waits.iter().filter_map(hold);
        let lenders = self.growth.streams(&keys);
        for &party in lenders.iter().chain([&stream.raw]) {
            match retry(|| self.core.driver().capture_state(self.core.device(), party)) {
                // Its work may still be running; only a completion point tells when it has completed.
                Err(error) if error.is_gone() && party != stream.raw => return Ok(false),
                state => {
                    if state? != CaptureState::None {
                        return Ok(false);
                    }
                }
            }
        }
        let timed = self.waits.begin(stream.raw);
        for lender in lenders {
            match self.wait_for(lender, stream) {
                Err(error) if error.is_gone() => return Ok(false),
                waits => waits?,
            }
        }
        for event in held.filter_map(|hold| self.core.holds().event(hold)) {
            retry(|| self.core.driver().stream_wait_event(self.core.device(), stream.raw, event.id()))?;
        }
        self.waits.end(timed, stream.raw);
        Ok(true)
    }

    fn wait_for(&self, source: Stream, stream: PoolStream) -> std::result::Result<(), DriverError> {
        let event = self.event.lock();
        retry(|| event.record(source))?;
        retry(|| self.core.driver().stream_wait_event(self.core.device(), stream.raw, event.id()))
    }

    /// Frees a block that could not be ordered: no stream, its own included, may reuse the bytes before their completion point.
    fn withhold(&self, grant: &Grant) {
        let mut core = self.core.lock();
        core.record_stream(grant.offset, StreamKey::UNKNOWN);
        let freed = core.free(grant.offset);
        drop(core);
        debug_assert!(freed.is_ok(), "it was just handed out");
        self.clock.note_freed();
    }
}

/// Budget and limit of a pool.
#[derive(Debug)]
pub(super) struct Budget {
    core: Arc<Core>,
    state: Mutex<State>,
}

#[derive(Clone, Copy, Debug)]
struct State {
    limit: Bytes,
    budget: Option<Bytes>,
    passed: u64,
}

impl Budget {
    /// Creates the state of a pool without a budget, with the limit of its settings.
    pub(super) fn new(core: &Arc<Core>) -> Self {
        let limit = core.lock().settings().limit;
        Budget { core: core.clone(), state: Mutex::new(State { limit, budget: None, passed: 0 }) }
    }

    /// Sets the limit in bytes.
    pub(super) fn set_limit(&self, limit: Bytes) {
        let mut state = self.state.lock();
        state.limit = limit;
        let mut core = self.core.lock();
        core.set_limit(limit);
        core.set_budget(state.most());
    }

    /// Returns the limit in bytes.
    pub(super) fn limit(&self) -> Bytes {
        self.state.lock().limit
    }

    /// Sets or removes the budget.
    pub(super) fn set(&self, budget: Option<Bytes>) {
        let mut state = self.state.lock();
        if state.budget != budget {
            state.budget = budget;
            self.core.lock().set_budget(state.most());
        }
    }

    /// Returns the budget and the number of requests that exceeded it.
    pub(super) fn told(&self) -> (Option<Bytes>, u64) {
        let state = self.state.lock();
        (state.budget, state.passed)
    }

    /// Retries a request that the budget did not allow, with the hard limit in force. Returns `None` if the limit allows no more than the
    /// budget.
    pub(super) fn beyond<T>(&self, serve: impl FnOnce() -> T) -> Option<T> {
        {
            let mut state = self.state.lock();
            if state.most() >= state.limit {
                return None;
            }
            state.passed += 1;
            self.core.lock().set_budget(state.limit);
        }
        let served = serve();
        let state = self.state.lock();
        self.core.lock().set_budget(state.most());
        Some(served)
    }
}

impl State {
    fn most(&self) -> Bytes {
        self.budget.map_or(self.limit, |budget| budget.min(self.limit))
    }
}

#[cfg(test)]
mod budget_tests {
    use glake_device::DeviceId;
    use glake_sim::{SimOptions, SimTopology, Simulator};

    use super::super::{GpuPool, PoolOptions, PoolStream};
    use super::*;

    #[test]
    fn requests_stay_below_it_where_they_can_and_the_limit_is_as_ever() {
        let topology = SimTopology::uniform(1, Bytes::mib(64));
        let sim = Arc::new(Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap());
        let stream = PoolStream::of(&*sim, DeviceId(0), glake_device::Stream(0)).unwrap();
        let pool = GpuPool::new(sim, DeviceId(0), PoolOptions::default()).unwrap();
        pool.set_budget(Some(Bytes::mib(8)));
        let blocks = [(); 3].map(|()| pool.malloc(Bytes::mib(2), stream).unwrap());
        assert!(pool.reserved() <= Bytes::mib(8) && pool.budget() == (Some(Bytes::mib(8)), 0));
        assert_eq!(pool.report().take_most(), (Bytes::mib(6), Bytes::mib(6)));
        let above = pool.malloc(Bytes::mib(8), stream).unwrap();
        assert_eq!(pool.budget().1, 1);
        pool.free(above.address).unwrap();
        assert_eq!(pool.report().take_most(), (Bytes::mib(6), Bytes::mib(14)));
        pool.set_memory_fraction(0.25);
        assert!((pool.memory_fraction() - 0.25).abs() < 1e-9);
        pool.settle().unwrap();
        pool.trim(Bytes::mib(8)).unwrap();
        assert!(pool.malloc(Bytes::mib(32), stream).is_err(), "above the limit");
        assert_eq!(pool.budget().1, 2);
        blocks.iter().for_each(|block| drop(pool.free(block.address)));
    }
}
