//! Memory of a GPU that leaves it when it is not needed and comes back to the same addresses.
//!
//! ```text
//! shrink:  drain ─► per extent:  evict ─► copy out ─► completion point ─► unmap everywhere, release      several at a time
//! refill:            per extent:  make ─► map everywhere, access ─► copy back ─► here
//! demote:            per evicted extent:  its copy in host memory written to a file ─► the file counts, host memory is free
//! decommit:          per extent of a live block:  completion point ─► unmap everywhere, release       commit: make ─► map, with any bytes
//! ```
//!
//! A region is a domain of a [`GpuPool`]. While some of it is evicted its blocks stay live and its addresses its own; what is free in
//! evicted extents is handed out to nobody; a block can be freed, and with the last one of an extent its copy goes.
//!
//! Invariant: every extent has one copy that counts ([`crate::Residency`]), whatever fails; one thread at a time moves a region's
//! extents, and both directions go on from where a failure stopped them.
//!
//! Nothing here keeps a program from using what is evicted: that its work is done, and that none is enqueued until the refill is
//! over, is the promise of who calls [`Region::shrink`].

mod choose;
mod clean;
mod commit;
mod demote;
mod error;
mod holding;
mod mover;
mod options;
mod refill;
mod report;
mod seal;
mod shrink;
#[cfg(test)]
mod tests;
mod wait;
mod wait_policy;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use glake_stitch::{DomainId, DomainOptions, ExtentView};
use glake_units::Bytes;
use parking_lot::Mutex;

pub use clean::{Clean, CleanCounts, Cleaned};
pub use demote::Demotion;
pub use error::RegionError;
pub use holding::RegionHolding;
pub use mover::{Mark, MoveError, Mover, Moving};
pub use options::{CopyPolicy, Policy, RegionOptions};
pub use report::{Refilled, Shrunk, SkipReason, Skipped};
pub use wait_policy::{NoWait, WaitPolicy};

use crate::{Block, GpuPool, HostPool, Place, PoolStream, Residency};
use clean::CleanCopies;
use wait::Progress;

type Result<T> = std::result::Result<T, RegionError>;

/// How many extents are copied at a time: while one is waited for, the others keep the links busy.
const AT_ONCE: usize = 3;

/// How many extents may be on their way in. So many copies are enqueued before the oldest is waited for: 3 GiB of the usual ones, 15 ms
/// of eight links. They fit into the driver's queues of some 1,000 operations: through slots one takes 26 of a stream.
const AHEAD: usize = 24;

/// A part of a GPU's memory that can be shrunk and refilled. Dropping one with a domain of its own gives that up: its memory goes
/// back once its blocks are freed, and what is evicted by then stays evicted.
#[derive(Debug)]
pub struct Region {
    pool: Arc<GpuPool>,
    domain: DomainId,
    /// Whether the domain goes with it.
    owned: bool,
    options: RegionOptions,
    sealed: AtomicBool,
    /// Whether a write to what is sealed faults.
    strict: AtomicBool,
    /// Who moves its extents.
    turn: Mutex<()>,
    /// Who brings them back.
    progress: Progress,
    /// Copies of what is on its GPU.
    clean: Arc<CleanCopies>,
}

impl Region {
    /// A region with no memory yet, and a domain of its own.
    pub fn new(pool: &Arc<GpuPool>, options: RegionOptions) -> Region {
        let domain = pool.add_domain(DomainOptions::region(options.extent), None);
        if options.closed {
            pool.close_domain(domain);
        }
        Self::of(pool, domain, true, options)
    }

    /// A domain that exists as a region: the default one, a graph's pool. Its extents stay as large as its domain makes them, and
    /// dropping the region releases nothing. A domain has one region at most. Released or gone, it is what is left of it.
    pub fn over(pool: &Arc<GpuPool>, domain: DomainId, options: RegionOptions) -> Region {
        Self::of(pool, domain, false, options)
    }

    fn of(pool: &Arc<GpuPool>, domain: DomainId, owned: bool, options: RegionOptions) -> Region {
        let (sealed, strict, turn, progress, clean) = Default::default();
        Region { pool: pool.clone(), domain, owned, options, sealed, strict, turn, progress, clean }
    }

    /// What it was made with.
    pub fn options(&self) -> &RegionOptions {
        &self.options
    }

    /// The domain of its pool that it is.
    pub fn domain(&self) -> DomainId {
        self.domain
    }

    /// The pool that it is of.
    pub fn pool(&self) -> &Arc<GpuPool> {
        &self.pool
    }

    /// Hands out a block of it: of what is on the GPU, or new memory. [`GpuPool::free`] takes it back.
    ///
    /// # Errors
    /// As [`GpuPool::malloc`]; while it is sealed that is refused.
    pub fn malloc(&self, size: Bytes, stream: PoolStream) -> Result<Block> {
        Ok(self.pool.malloc_in(self.domain, size, stream)?)
    }

    /// Pins memory of `host` for all bytes of it that are kept ahead, where its policy says so.
    ///
    /// # Errors
    /// As [`HostPool::prepare`].
    pub fn prepare(&self, host: &Arc<HostPool>) -> Result<()> {
        if self.options.host_copy != CopyPolicy::Prepare || self.options.policy == Policy::Discard {
            return Ok(());
        }
        let all = self.pool.domains().is_held(self.domain);
        let kept = |view: &ExtentView| if all { view.size } else { view.live };
        let standing = self.pool.records().standing(self.domain);
        let with_bytes = standing.iter().filter(|(_, residency)| !residency.is_decommitted());
        let kept = with_bytes.map(|(view, _)| kept(view)).sum();
        Ok(host.prepare(kept)?)
    }

    /// How large copies are that a shrink would make of it, where its policy asks for host memory ahead.
    pub fn sizes_to_prepare(&self) -> Vec<Bytes> {
        if self.options.host_copy != CopyPolicy::Prepare {
            return Vec::new();
        }
        let standing = self.pool.records().standing(self.domain);
        let resident: Vec<ExtentView> = standing.iter().map(|(view, _)| *view).collect();
        self.copied_sizes(&standing, &resident)
    }

    /// Its memory on the GPU, and what is evicted and can come back.
    pub fn sizes(&self) -> (Bytes, Bytes) {
        let standing = self.pool.records().standing(self.domain);
        let (mut resident, mut evicted) = (Bytes::ZERO, Bytes::ZERO);
        for (view, _) in standing.iter().filter(|(_, residency)| !residency.is_decommitted()) {
            let size = match view.state {
                glake_stitch::ExtentState::Evicted => &mut evicted,
                _ => &mut resident,
            };
            *size = size.saturating_add(view.size);
        }
        (resident, evicted)
    }

    /// Where the bytes of what is evicted are, and how much of its memory that stands for; where most is comes first.
    pub fn places(&self) -> Vec<(Place, Bytes)> {
        let mut places: Vec<(Place, Bytes)> = Vec::new();
        let standing = self.pool.records().standing(self.domain);
        let is_evicted = |(view, residency): &&(ExtentView, Residency)| {
            view.state == glake_stitch::ExtentState::Evicted && !residency.is_decommitted()
        };
        for (view, residency) in standing.iter().filter(is_evicted) {
            let place = residency.authority();
            match places.iter_mut().find(|(known, _)| *known == place) {
                Some((_, size)) => *size = size.saturating_add(view.size),
                None => places.push((place, view.size)),
            }
        }
        places.sort_by_key(|(place, size)| (std::cmp::Reverse(*size), *place));
        places
    }

    /// Memory that its program gave up within live blocks ([`Region::decommit`]).
    pub fn decommitted(&self) -> Bytes {
        let standing = self.pool.records().standing(self.domain);
        let decommitted =
            standing.iter().filter(|(view, residency)| residency.is_decommitted() && !view.live.is_zero());
        decommitted.map(|(view, _)| view.size).sum()
    }

    /// Whether all of its memory is on the GPU, with its bytes: nothing is evicted, and nothing is interrupted.
    pub fn is_whole(&self) -> bool {
        let standing = self.pool.records().standing(self.domain);
        standing.iter().all(is_here)
    }

    /// Whether all that is anybody's is on the GPU: an evicted extent with nothing live in it is nobody's, unless a graph may
    /// still write to it. It is forgotten by the next trim or refill.
    pub fn is_usable(&self) -> bool {
        let held = self.pool.domains().is_held(self.domain);
        let standing = self.pool.records().standing(self.domain);
        let is_nobodys = |view: &ExtentView| {
            view.state == glake_stitch::ExtentState::Evicted && view.live.is_zero() && !held
        };
        standing.iter().all(|extent| is_here(extent) || is_nobodys(&extent.0))
    }

    /// The error of a shrink or a refill that has begun.
    fn stopped(&self, moved: Bytes, copied: Bytes, source: RegionError) -> RegionError {
        RegionError::Stopped {
            tag: self.options.tag.clone(),
            moved,
            copied,
            resident: self.sizes().0,
            source: Box::new(source),
        }
    }
}

/// Whether nothing has to come back of it. What is decommitted is here while its block is: a refill forgets it after that.
fn is_here((view, residency): &(ExtentView, Residency)) -> bool {
    let is_decommitted = residency.authority() == Place::Nowhere && !view.live.is_zero();
    let is_interrupted = matches!(residency, Residency::Interrupted { .. });
    view.state == glake_stitch::ExtentState::Resident || is_decommitted && !is_interrupted
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.owned {
            let released = self.pool.release_domain(self.domain);
            debug_assert!(released.is_ok(), "its domain is its own");
        }
    }
}
