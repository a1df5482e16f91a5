//! Refills of memory that is about to be used, release of evicted memory that was freed, and the region in which a thread allocates.
//!
//! Invariant: the [`RegionFlags`] of a process count the entries of all its threads' stacks, so that one load shows whether any thread is
//! in a region. A thread's entries end with it.

use std::cell::RefCell;
use std::sync::Arc;

use glake_device::{Address, DeviceId};
use glake_stitch::{Allocator, DomainId};
use glake_tiers::{Block, LiveBlock, PoolError, PoolStream};
use glake_units::Bytes;

use super::super::device::{DeviceMemory, Started};
use super::super::{ProcessError, Result};
use super::RegionSet;
use super::table::{RegionFlags, Tagged};

/// Memory that serves an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Target {
    pub(in super::super) domain: DomainId,
    /// Whether the block has an address of the driver's own.
    plain: bool,
}

impl Target {
    /// Returns the target of threads that have entered nothing.
    pub(in super::super) fn of(domain: DomainId) -> Target {
        Target { domain, plain: false }
    }

    /// Allocates the block.
    #[inline]
    pub(in super::super) fn malloc(
        self,
        started: &Started,
        size: Bytes,
        stream: PoolStream,
    ) -> std::result::Result<Block, PoolError> {
        if self.plain {
            return started.pool.malloc_plain(self.domain, size, stream);
        }
        started.pool.malloc_in(self.domain, size, stream)
    }
}

impl RegionSet {
    /// Returns the target of an allocation that private pools leave in `routed`: what the thread entered last. A region applies outside of
    /// private pools, plain memory also to theirs. Refills evicted memory of the domain first.
    ///
    /// # Errors
    /// Errors of the refill.
    #[inline(never)]
    pub(in super::super) fn target_of(&self, started: &Started, routed: DomainId) -> Result<Target> {
        let entered = innermost(&self.flags);
        let plain = matches!(entered, Some(Entered::Plain));
        let domain = match entered {
            Some(Entered::Region(tagged)) if routed == Allocator::default_domain() => {
                tagged.domain(&started.pool, &self.table.clock).unwrap_or(routed)
            }
            _ => routed,
        };
        if !plain {
            self.touched_domain(started, domain)?;
        }
        Ok(Target { domain, plain })
    }

    /// Refills the evicted memory of a domain that is about to be used; one load if nothing is evicted.
    ///
    /// # Errors
    /// Errors of the refill.
    #[inline]
    pub(in super::super) fn touched_domain(&self, started: &Started, domain: DomainId) -> Result<()> {
        if self.flags.is_any_evicted() { self.touch(started, domain) } else { Ok(()) }
    }

    /// Returns the domain of a block that is about to be freed, if its evicted memory may then be unused.
    #[cold]
    pub(in super::super) fn domain_to_free(&self, address: Address) -> Option<(DeviceId, DomainId)> {
        let mut found = self.registry.devices.iter().filter_map(|memory| {
            let LiveBlock { domain, .. } = memory.started()?.pool.find(address)?;
            Some((memory.id(), domain))
        });
        found.next()
    }

    /// Updates the marks after a free; the domain is unknown if nothing was evicted before it.
    #[cold]
    pub(in super::super) fn freed(&self, domain: Option<(DeviceId, DomainId)>) {
        match domain {
            None => self.given_up(),
            Some((device, domain)) => {
                if let Some((tagged, _)) = self.table.of_domain(device, domain) {
                    self.settle(&[tagged]);
                }
            }
        }
    }

    /// Updates all marks, after blocks were freed or memory was released.
    pub(in super::super) fn given_up(&self) {
        if self.flags.is_any_evicted()
            && let Ok(tags) = self.table.named(None)
        {
            self.settle(&tags);
        }
    }

    /// Opens the gate for tags without evicted memory.
    pub(super) fn settle(&self, tags: &[Arc<Tagged>]) {
        for tagged in tags.iter().filter(|tagged| tagged.is_away()) {
            tagged.settle(&self.flags, &self.gate);
        }
    }

    /// Refills the evicted memory of a domain.
    #[cold]
    fn touch(&self, started: &Started, domain: DomainId) -> Result<()> {
        match self.table.of_domain(started.pool.device(), domain) {
            Some((tagged, region)) if tagged.is_away() => self.bring_back(&tagged, &region),
            _ => Ok(()),
        }
    }

    /// Refills the memory at an address that is about to be accessed; one load if nothing is evicted.
    ///
    /// # Errors
    /// Errors of the refill.
    #[inline]
    pub(in super::super) fn touched(&self, address: Address) -> Result<()> {
        if self.flags.is_any_evicted() { self.touch_address(address) } else { Ok(()) }
    }

    /// Refills like [`RegionSet::touched`] before a write, which also invalidates the copy of an idle region.
    ///
    /// # Errors
    /// Errors of the refill.
    #[inline]
    pub(in super::super) fn written(&self, address: Address) -> Result<()> {
        if self.flags.are_writes_told() { self.write_to(address) } else { Ok(()) }
    }

    #[cold]
    fn write_to(&self, address: Address) -> Result<()> {
        self.touched(address)?;
        if self.flags.is_any_cleaned()
            && let Some((started, domain)) = self.domain_at(address)
        {
            self.handed_out(started, domain, address);
        }
        Ok(())
    }

    /// Records that a block was allocated or is about to be written, so that a copy of its bytes is invalid.
    #[cold]
    pub(in super::super) fn handed_out(&self, started: &Started, domain: DomainId, address: Address) {
        if self.flags.is_any_cleaned()
            && let Some((tagged, region)) = self.table.of_domain(started.pool.device(), domain)
            && tagged.options.clean
        {
            region.void_block(address);
        }
    }

    /// Refills the region of the block that contains an address.
    #[cold]
    fn touch_address(&self, address: Address) -> Result<()> {
        self.domain_at(address).map_or(Ok(()), |(started, domain)| self.touch(started, domain))
    }

    /// Returns the device and domain of the block that contains an address.
    fn domain_at(&self, address: Address) -> Option<(&Started, DomainId)> {
        let started = self.started_at(address)?;
        Some((started, started.pool.find(address)?.domain))
    }

    /// Returns the error for memory that a caller wants to move or describe and that lies in no block at home: plain, or unknown.
    #[cold]
    pub(super) fn not_movable(&self, address: Address) -> ProcessError {
        let devices = self.registry.devices.iter().filter_map(DeviceMemory::started);
        match { devices }.find(|started| started.pool.is_plain(address)) {
            Some(started) => PoolError::Plain { device: started.pool.device(), address }.into(),
            None => ProcessError::InNoBlock { address },
        }
    }

    /// Returns the device whose pool contains an address.
    pub(super) fn started_at(&self, address: Address) -> Option<&Started> {
        let holds = |started: &&Started| {
            let (start, size) = started.pool.range();
            address.0.checked_sub(start.0).is_some_and(|offset| Bytes::new(offset) < size)
        };
        self.registry.devices.iter().filter_map(DeviceMemory::started).find(holds)
    }
}

/// Memory that a thread's allocations go to.
#[derive(Clone, Debug)]
pub(super) enum Entered {
    /// Memory of a region.
    Region(Arc<Tagged>),
    /// Plain memory.
    Plain,
}

/// Entry of a thread's stack.
#[derive(Debug)]
struct Entry {
    /// Flags of the process, which identify it: a test program has several processes.
    flags: Arc<RegionFlags>,
    entered: Entered,
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.flags.sub_thread();
    }
}

thread_local! {
    static STACK: RefCell<Vec<Entry>> = const { RefCell::new(Vec::new()) };
}

/// Sends the calling thread's allocations to a region, or to plain memory.
pub(super) fn push(flags: &Arc<RegionFlags>, entered: Entered) {
    flags.add_thread();
    let entry = Entry { flags: flags.clone(), entered };
    // A thread at its end allocates in no region.
    let _ = STACK.try_with(|stack| stack.borrow_mut().push(entry));
}

/// Reverts the last [`push`] of the kind that `is` accepts; returns `false` if there was none.
pub(super) fn pop(flags: &Arc<RegionFlags>, is: impl Fn(&Entered) -> bool) -> bool {
    let popped = STACK.try_with(|stack| {
        let mut stack = stack.borrow_mut();
        let at = stack.iter().rposition(|entry| Arc::ptr_eq(&entry.flags, flags) && is(&entry.entered))?;
        Some(stack.remove(at))
    });
    popped.ok().flatten().is_some()
}

/// Returns the entry that applies to the thread's allocations; `None` if there is none.
fn innermost(flags: &Arc<RegionFlags>) -> Option<Entered> {
    let found = STACK.try_with(|stack| {
        let stack = stack.borrow();
        let entry = stack.iter().rev().find(|entry| Arc::ptr_eq(&entry.flags, flags))?;
        Some(entry.entered.clone())
    });
    found.ok().flatten()
}
