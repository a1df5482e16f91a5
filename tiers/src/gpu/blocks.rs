//! Allocation and release of blocks.
//!
//! ```text
//! malloc ─► core.take ──hit───────────────────────────────────────────► block     one short lock, no driver
//!             └ miss ─► growth lock ─► core.plan ─► execute on driver ─► commit ─► block
//!                                         ▲              └ failed ─► undo ─► abort ─► error
//! free ───► core.free                     └── completion points: recorded, polled, passed to the core
//! ```
//!
//! Invariant: a hit that needs no ordering between streams takes only the allocator's lock, makes no driver call and allocates no host
//! memory. The same holds for a free, with these exceptions: the first free after a pause wakes the tickers; exported, evicted or recorded
//! blocks need more work; and a new maximum of free pieces of one size allocates.

use std::sync::Arc;

use glake_device::Address;
use glake_stitch::{DomainId, Grant, Request};
use glake_units::Bytes;

use super::budget::Budget;
use super::clock::CompletionClock;
use super::core::Core;
use super::growth::Growth;
use super::miss::Miss;
use super::order::StreamOrder;
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
