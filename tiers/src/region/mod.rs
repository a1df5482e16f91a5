//! Regions: GPU memory that is evicted when it is not needed and refilled at the same addresses.
//!
//! ```text
//! shrink:  drain ─► per extent:  evict ─► copy out ─► completion point ─► unmap everywhere, release      several at a time
//! refill:            per extent:  make ─► map everywhere, access ─► copy back ─► resident
//! demote:            per evicted extent:  its copy in host memory written to a file ─► the file is valid, host memory is free
//! decommit:          per extent of a live block:  completion point ─► unmap everywhere, release       commit: make ─► map
//! ```
//!
//! A region is a domain of a [`GpuPool`]. While parts of it are evicted, its blocks stay live and its addresses reserved. Free memory of
//! evicted extents is not handed out. A block can be freed while it is evicted; an extent's copy is dropped with its last block.
//!
//! Invariant: whatever fails, every extent has one valid copy ([`crate::Residency`]). One thread at a time moves a region's extents, and
//! either direction resumes after a failure.
//!
//! Regions do not prevent a program from using evicted memory: the caller of [`Region::shrink`] guarantees that the work is done, and that
//! none is enqueued until the refill has ended. A program that seals a region ([`Region::seal`]) guarantees that its bytes are not written.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clean::CleanCopies;
use glake_device::Address;
use glake_stitch::{DomainId, DomainOptions, ExtentState, ExtentView};
use glake_units::Bytes;
use parking_lot::Mutex;
use refill::Progress;

use crate::{Block, GpuPool, HostPool, Place, PoolStream, Residency};

pub use clean::{Clean, CleanCounts, Cleaned};
pub use error::RegionError;
pub use mover::{Mark, MoveError, Mover, Moving, NoWait, WaitPolicy};
pub use shrink::Demotion;

mod clean;
mod error;
mod mover;
mod refill;
mod shrink;
#[cfg(test)]
mod tests;

type Result<T> = std::result::Result<T, RegionError>;

/// Extents copied concurrently: while one is waited for, the others keep the links busy.
const CONCURRENT_EXTENTS: usize = 3;

/// Maximum number of extents being refilled at once. With the usual extents these are 3 GiB, or 15 ms on eight links, enqueued before the
/// first wait. The driver queues about 1,000 operations for each stream; copies through slots take 26 for an extent.
const MAX_EXTENTS_AHEAD: usize = 24;

/// Part of a GPU's memory that can be shrunk and refilled. Dropping a region releases its own domain: the memory is released once its
/// blocks are freed, and evicted extents stay evicted.
#[derive(Debug)]
pub struct Region {
    pool: Arc<GpuPool>,
    domain: DomainId,
    /// Whether the region owns its domain and releases it on drop.
    owned: bool,
    options: RegionOptions,
    sealed: AtomicBool,
    /// Whether writes to sealed memory fault.
    strict: AtomicBool,
    /// Held while the region's extents are moved.
    turn: Mutex<()>,
    /// Progress of refills, for threads that wait for them.
    progress: Progress,
    /// Clean copies of resident extents.
    clean: Arc<CleanCopies>,
}

impl Region {
    /// Creates a region without memory, in a domain of its own.
    pub fn new(pool: &Arc<GpuPool>, options: RegionOptions) -> Region {
        let domain = pool.add_domain(DomainOptions::region(options.extent), None);
        if options.closed {
            pool.peer_access().close_domain(domain);
        }
        Self::of(pool, domain, true, options)
    }

    /// Creates a region over an existing domain: the default one, or a graph's pool. The domain keeps its extent size, and dropping the
    /// region releases nothing. A domain has one region at most; after the domain's release, the region covers its remaining memory.
    pub fn over(pool: &Arc<GpuPool>, domain: DomainId, options: RegionOptions) -> Region {
        Self::of(pool, domain, false, options)
    }

    fn of(pool: &Arc<GpuPool>, domain: DomainId, owned: bool, options: RegionOptions) -> Region {
        let (sealed, strict, turn, progress, clean) = Default::default();
        Region { pool: pool.clone(), domain, owned, options, sealed, strict, turn, progress, clean }
    }

    /// Returns the options of the region.
    pub fn options(&self) -> &RegionOptions {
        &self.options
    }

    /// Returns the region's domain in its pool.
    pub fn domain(&self) -> DomainId {
        self.domain
    }

    /// Returns the pool of the region.
    pub fn pool(&self) -> &Arc<GpuPool> {
        &self.pool
    }

    /// Allocates a block of the region, in resident or new memory. [`GpuPool::free`] frees it.
    ///
    /// # Errors
    /// The same as [`GpuPool::malloc`]; refused while the region is sealed.
    pub fn malloc(&self, size: Bytes, stream: PoolStream) -> Result<Block> {
        Ok(self.pool.malloc_in(self.domain, size, stream)?)
    }

    /// Pins host memory for all bytes to be preserved, if the copy policy asks for it.
    ///
    /// # Errors
    /// The same as [`HostPool::prepare`].
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

    /// Returns the sizes of the copies that a shrink would make, if the copy policy asks for host memory ahead; else nothing.
    pub fn sizes_to_prepare(&self) -> Vec<Bytes> {
        if self.options.host_copy != CopyPolicy::Prepare {
            return Vec::new();
        }
        let standing = self.pool.records().standing(self.domain);
        let resident: Vec<ExtentView> = standing.iter().map(|(view, _)| *view).collect();
        self.copied_sizes(&standing, &resident)
    }

    /// Returns the resident bytes and the evicted bytes that can be refilled.
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

    /// Returns the locations of the evicted bytes with the extents' sizes, the largest first.
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

    /// Returns the memory that the program decommitted in live blocks ([`Region::decommit`]).
    pub fn decommitted(&self) -> Bytes {
        let standing = self.pool.records().standing(self.domain);
        let decommitted =
            standing.iter().filter(|(view, residency)| residency.is_decommitted() && !view.live.is_zero());
        decommitted.map(|(view, _)| view.size).sum()
    }

    /// Returns whether all of the region's memory is resident with its bytes: none is evicted or interrupted.
    pub fn is_whole(&self) -> bool {
        let standing = self.pool.records().standing(self.domain);
        standing.iter().all(is_here)
    }

    /// Returns whether all memory in use is resident. An evicted extent without live bytes does not count, unless a graph may still write
    /// to it; the next trim or refill forgets it.
    pub fn is_usable(&self) -> bool {
        let held = self.pool.domains().is_held(self.domain);
        let standing = self.pool.records().standing(self.domain);
        let is_nobodys = |view: &ExtentView| {
            view.state == glake_stitch::ExtentState::Evicted && view.live.is_zero() && !held
        };
        standing.iter().all(|extent| is_here(extent) || is_nobodys(&extent.0))
    }

    /// Returns the error of a shrink or refill that stopped halfway.
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

/// Returns whether an extent needs no refill. A decommitted extent needs none while its block lives; afterwards a refill forgets it.
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

/// Treatment of a region's bytes at a shrink.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Policy {
    /// Copies the bytes out and back.
    #[default]
    Keep,
    /// Like `Keep`; once the region is sealed, its bytes are not written, so that a retained copy stays valid for the next shrink.
    Sealed,
    /// Gives the bytes up: after a refill, blocks have their addresses but undefined contents.
    Discard,
}

/// Treatment of the copy after a refill, wherever it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CopyPolicy {
    /// Drops the copy after the refill.
    #[default]
    Drop,
    /// Keeps the copy while the region is sealed. An unsealed region drops it, because the program may write.
    Retain,
    /// Like `Drop`, with host memory pinned ahead by [`Region::prepare`].
    Prepare,
}

/// Options of a region at its creation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionOptions {
    /// Name given by the program.
    pub tag: String,
    /// Treatment of the bytes at a shrink.
    pub policy: Policy,
    /// Treatment of the copy after a refill.
    pub host_copy: CopyPolicy,
    /// Whether the region is copied to the host while it is idle ([`Region::clean`]).
    pub clean: bool,
    /// Extent size, a multiple of the granularity. Large, because each mapping has a cost; not larger, because copies of one extent overlap
    /// with mapping the next.
    pub extent: Bytes,
    /// Whether the region's own domain is closed to devices that the pool is lent to ([`crate::PeerAccess::close_domain`]).
    pub closed: bool,
}

impl RegionOptions {
    /// Returns the defaults: bytes kept, copies dropped, extents of 128 MiB, closed.
    pub fn of(tag: impl Into<String>) -> Self {
        let (policy, host_copy) = (Policy::default(), CopyPolicy::default());
        RegionOptions {
            tag: tag.into(),
            policy,
            host_copy,
            clean: false,
            extent: Bytes::mib(128),
            closed: true,
        }
    }
}

/// Memory account of a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionHolding {
    /// Bytes on the GPU.
    pub resident: Bytes,
    /// Evicted bytes that can be refilled.
    pub evicted: Bytes,
    /// Part of `evicted` whose copy is in files.
    pub in_files: Bytes,
    /// Part of `evicted` whose copy is on other GPUs.
    pub in_peers: Bytes,
    /// Part of `resident` that a shrink skips: fixed and exported extents.
    pub fixed: Bytes,
    /// Part of `resident` that moves without copying: discarded by the region's policy, or without live bytes.
    pub discardable: Bytes,
    /// Bytes to copy if all of the region left now.
    pub dirty: Bytes,
    /// Part of `resident` without live bytes that would have to be copied if it had any: an allocation may use it at any time.
    pub unused: Bytes,
    /// Pinned host memory of the region's copies.
    pub hosted: Bytes,
}

impl Region {
    /// Returns the current account. Does not wait for threads that move the region.
    pub fn holding(&self) -> RegionHolding {
        let standing = self.pool.records().standing(self.domain);
        let mut stays = self.pool.fixed().extents(self.domain);
        stays.extend(self.pool.evictions().exported(standing.iter().map(|(view, _)| view.extent)));
        let is_discarded = self.options.policy == Policy::Discard;
        let keeps_all = self.pool.domains().is_held(self.domain);
        let mut held = RegionHolding {
            hosted: self.pool.records().hosted(self.domain).saturating_add(self.clean.hosted()),
            ..RegionHolding::default()
        };
        let (mut leaving, mut kept) = (Vec::new(), Vec::new());
        for (view, residency) in standing.iter().filter(|(_, residency)| !residency.is_decommitted()) {
            if view.state == ExtentState::Evicted {
                held.evicted = held.evicted.saturating_add(view.size);
                match residency.authority() {
                    Place::File => held.in_files = held.in_files.saturating_add(view.size),
                    Place::Peer(_) => held.in_peers = held.in_peers.saturating_add(view.size),
                    Place::Gpu | Place::Host | Place::Nowhere => {}
                }
                continue;
            }
            held.resident = held.resident.saturating_add(view.size);
            if !is_discarded && !stays.contains(&view.extent) {
                kept.push(*view);
            }
            if stays.contains(&view.extent) {
                held.fixed = held.fixed.saturating_add(view.size);
            } else if is_discarded || view.live.is_zero() && !keeps_all {
                held.discardable = held.discardable.saturating_add(view.size);
            } else {
                leaving.push(*view);
            }
        }
        held.dirty = self.copied_sizes(&standing, &leaving).into_iter().sum();
        let uncopied: Bytes = self.uncopied(&standing, &kept).into_iter().map(|view| view.size).sum();
        held.unused = uncopied.saturating_sub(held.dirty);
        held
    }
}

/// Result of a shrink.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shrunk {
    /// GPU memory released to the driver.
    pub freed: Bytes,
    /// Bytes copied by this shrink.
    pub copied: Bytes,
    /// Bytes copied earlier, while the region was idle, and still identical.
    pub clean: Bytes,
    /// Bytes in blocks that were not copied, because the program declared them dead: undefined after a refill.
    pub undefined: Bytes,
    /// Bytes of the region still on the GPU.
    pub resident: Bytes,
    /// Extents that could not leave.
    pub skipped: Vec<Skipped>,
}

/// Extent that could not leave its GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Skipped {
    /// Home address of the extent.
    pub address: Address,
    /// Size of the extent.
    pub size: Bytes,
    /// Reason for the extent to stay.
    pub reason: SkipReason,
}

/// Reason for an extent to stay on its GPU.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SkipReason {
    /// A block in it is fixed.
    Fixed,
    /// Other processes may use it, and would not see new memory at the same addresses.
    Exported,
    /// Another process made it, and only that process can release it. Such memory is in no region; the owner of the import reports it.
    Imported,
    /// Other threads kept freeing blocks in it that several streams had used, despite repeated waits. The next shrink evicts it.
    Withheld,
}

/// Result of a refill.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refilled {
    /// GPU memory made and mapped.
    pub mapped: Bytes,
    /// Bytes copied to the GPU.
    pub copied: Bytes,
    /// Bytes of the region still evicted.
    pub evicted: Bytes,
}

impl Region {
    /// Seals the region: the caller guarantees that its bytes are not written until it is unsealed. Allocations are refused meanwhile. With
    /// `strict`, writes fault on every device that has access now, at all addresses; the call waits for the work of these devices, and so
    /// does each refill at its end.
    ///
    /// # Errors
    /// [`RegionError::NotSealable`] for a region with another policy. The driver's error: the region is sealed, but only partly protected;
    /// seal it again, or unseal it.
    pub fn seal(&self, strict: bool) -> Result<()> {
        if self.options.policy != Policy::Sealed {
            return Err(RegionError::NotSealable { tag: self.options.tag.clone() });
        }
        let _turn = self.turn.lock();
        self.pool.records().seal(self.domain, true);
        self.sealed.store(true, Ordering::Release);
        self.strict.store(strict, Ordering::Release);
        if strict {
            Ok(self.pool.protection().protect(self.domain)?)
        } else {
            Ok(self.pool.protection().open(self.domain)?)
        }
    }

    /// Unseals the region: its bytes may change again, and retained copies are dropped.
    ///
    /// # Errors
    /// The error of the pool; the region stays sealed.
    pub fn unseal(&self) -> Result<()> {
        let _turn = self.turn.lock();
        self.pool.protection().open(self.domain)?;
        self.pool.records().seal(self.domain, false);
        self.strict.store(false, Ordering::Release);
        self.sealed.store(false, Ordering::Release);
        Ok(())
    }

    /// Returns whether the region is sealed.
    pub fn is_sealed(&self) -> bool {
        self.sealed.load(Ordering::Acquire)
    }

    /// Restores a strict seal's protection after memory was mapped or opened for a copy.
    pub(super) fn protect(&self) -> Result<()> {
        if self.strict.load(Ordering::Acquire) {
            Ok(self.pool.protection().protect(self.domain)?)
        } else {
            Ok(())
        }
    }

    /// Keeps the extents of the live block at an address on their GPU until it is unfixed as many times: other components, such as a
    /// network card that they are registered with, know them by more than their addresses. Ends with the block, or applies to the next
    /// block at its address.
    ///
    /// # Errors
    /// [`crate::PoolError::UnknownAddress`] if no block of the region is there; [`crate::PoolError::Evicted`] if part of it is evicted.
    pub fn fix(&self, address: Address) -> Result<()> {
        Ok(self.pool.fixed().fix(self.domain, address)?)
    }

    /// Reverts one [`Region::fix`].
    ///
    /// # Errors
    /// [`crate::PoolError::UnknownAddress`] if nothing is fixed there.
    pub fn unfix(&self, address: Address) -> Result<()> {
        Ok(self.pool.fixed().unfix(self.domain, address)?)
    }
}
