//! Domains of a pool, the owners of its extents: their free memory, their checkpoints, and export of their blocks.
//!
//! ```text
//! block              ▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀
//! extents     [   e1   |   e7   |   e8   ]     exported as a whole: an importer sees their other bytes too
//!             ^────────^ offset
//! ```
//!
//! - `Domains` adds and releases domains, and makes a domain keep its addresses for captured graphs.
//! - `FreeMemory` releases free memory: of the pool, of one domain, or to lower the lease.
//! - `Checkpoints` record and restore the live blocks of a private pool. Programs that record several CUDA graphs into one pool replay some
//!   of them and then record another one after those. The blocks that were live at the end of the last replay must first become live again,
//!   at the addresses that the graphs use.
//! - `Exports` give the physical memory of blocks to other processes. An export ends with its block ([`BlockLife`]). Descriptors are
//!   created for a few extents at a time: a block may have thousands of extents, and a process has a limited number of descriptors.

use std::ops::Range;
use std::os::fd::OwnedFd;

use glake_device::{Address, DriverError, ExtentProperties};
use glake_stitch::{Claim, DomainId, DomainOptions, ExtentState, Obstacle, Plan, StitchError, StreamKey};
use glake_units::Bytes;
use rustc_hash::FxHashSet;

use super::clock::CompletionClock;
use super::core::{BlockLife, Core};
use super::error::retry;
use super::growth::{Growth, GrowthGuard};
use super::records::ExtentRecords;
use super::{LiveBlock, PoolError, Result};

/// Domain operations of a pool.
#[derive(Debug)]
pub(crate) struct Domains<'a> {
    pub(super) core: &'a Core,
    pub(super) clock: &'a CompletionClock,
    pub(super) growth: &'a Growth,
    pub(super) records: &'a ExtentRecords,
}

impl Domains<'_> {
    /// Adds a domain with its own extent properties; `None`: those of the default domain.
    pub(super) fn add(&self, options: DomainOptions, properties: Option<ExtentProperties>) -> DomainId {
        let properties = properties.unwrap_or(self.growth.properties());
        self.add_under(&mut self.growth.quiet(), options, properties)
    }

    /// Adds a domain while the caller holds the growth lock.
    pub(super) fn add_under(
        &self,
        growing: &mut GrowthGuard<'_>,
        options: DomainOptions,
        properties: ExtentProperties,
    ) -> DomainId {
        let domain = self.core.lock().add_domain(options);
        growing.set_properties(domain, properties);
        domain
    }

    /// Releases a domain: its memory is freed once its blocks are.
    pub(super) fn release(&self, domain: DomainId) -> Result<()> {
        let (released, emptied) = {
            let mut core = self.core.lock();
            (core.release_domain(domain), core.take_emptied())
        };
        if !emptied.is_empty() {
            self.records.drop_emptied(&emptied);
        }
        released.map_err(|source| self.core.refused(source))?;
        self.clock.note_freed();
        // Not made while its domain lives: released with it, or never made.
        self.core.plain().twin(domain).map_or(Ok(()), |twin| self.release(twin))
    }

    /// Returns whether the domain or its plain twin exists.
    pub(super) fn has(&self, domain: DomainId) -> bool {
        let twin = self.core.plain().twin(domain);
        let core = self.core.lock();
        core.has_domain(domain) || twin.is_some_and(|twin| core.has_domain(twin))
    }

    /// Returns the domain of plain memory that keeps and lends its memory like `domain`, added on first use.
    ///
    /// # Errors
    /// [`PoolError::Refused`] if there is no such domain.
    pub(super) fn plain(&self, domain: DomainId) -> Result<DomainId> {
        let of = self.core.lock().domain_options(domain);
        let unknown = || self.core.refused(StitchError::UnknownDomain { domain });
        let options = of.ok_or_else(unknown)?;
        if let Some(twin) = self.core.plain().twin(domain) {
            let mut core = self.core.lock();
            if options.is_private() && core.domain_options(twin).is_some_and(|twin| !twin.is_private()) {
                core.keep_addresses(twin);
            }
            return Ok(twin);
        }
        Ok(self.core.plain().twin_or(domain, options.plain(), &mut self.core.lock()))
    }

    /// Keeps the domain's memory at its addresses from now on.
    pub(super) fn keep_addresses(&self, domain: DomainId) {
        let twin = self.core.plain().twin(domain);
        let mut core = self.core.lock();
        [Some(domain), twin].into_iter().flatten().for_each(|domain| core.keep_addresses(domain));
    }

    /// Returns whether all memory of a domain must be kept, even without live blocks: a graph's pool, whose graph uses its addresses.
    pub(crate) fn is_held(&self, domain: DomainId) -> bool {
        self.core.lock().extents().is_held(domain)
    }
}

/// Free memory of a pool. Freed memory that may still be in use does not count and stays.
#[derive(Debug)]
pub(crate) struct FreeMemory<'a> {
    pub(super) core: &'a Core,
    pub(super) clock: &'a CompletionClock,
    pub(super) growth: &'a Growth,
}

impl FreeMemory<'_> {
    /// Releases free memory until at most `keep` is reserved. Returns the number of bytes released.
    pub(super) fn trim(&self, keep: Bytes) -> Result<Bytes> {
        self.clock.tick()?;
        let mut growing = self.growth.lock()?;
        growing.free_plain();
        let before = self.core.lock().reserved_bytes();
        let plan = self.core.lock().plan_trim(keep);
        self.release(&mut growing, plan, before)
    }

    /// Releases all free memory of one domain and its plain twin. Returns the number of bytes released.
    pub(super) fn trim_domain(&self, domain: DomainId) -> Result<Bytes> {
        self.clock.tick()?;
        let mut growing = self.growth.lock()?;
        growing.free_plain();
        let twin = self.core.plain().twin(domain);
        let trims = [Some(domain), twin].into_iter().flatten().map(|domain| {
            let before = self.core.lock().reserved_bytes();
            let plan = self.core.lock().plan_trim_domain(domain);
            self.release(&mut growing, plan, before)
        });
        trims.sum()
    }

    /// Releases the free memory of a domain for a shrink, which also lowers the lease by it.
    pub(crate) fn give_back_domain(&self, domain: DomainId) -> Result<Bytes> {
        let released = self.trim_domain(domain)?;
        self.growth.lease().give_back(released);
        self.growth.lease().tell_returned(false);
        Ok(released)
    }

    /// Lowers the lease by unused and by free memory, which is released, at most `most` in total. Returns the number of bytes taken from
    /// the lease.
    pub(super) fn take_lease(&self, most: Bytes) -> Result<Bytes> {
        let lease = self.growth.lease();
        let unused = lease.take_unused(most);
        let rest = most.saturating_sub(unused);
        if rest.is_zero() || lease.view().leased.is_none() {
            return Ok(unused);
        }
        let keep = self.core.lock().reserved_bytes().saturating_sub(rest);
        let trimmed = self.trim(keep);
        let taken = unused.saturating_add(lease.take_unused(rest));
        // Reports the bytes taken, even if the driver failed.
        trimmed.map(|_| taken).or_else(|error| if taken.is_zero() { Err(error) } else { Ok(taken) })
    }

    /// Forgets evicted extents of a domain that hold no live bytes.
    pub(crate) fn forget_emptied(&self, domain: DomainId) -> Result<()> {
        self.clock.tick()?;
        let mut growing = self.growth.lock()?;
        let plan = self.core.lock().plan_forget(domain);
        plan.map_or(Ok(()), |plan| growing.carry_out(&plan, StreamKey::default()).map(|_| ()))
    }

    fn release(&self, growing: &mut GrowthGuard<'_>, plan: Option<Plan>, before: Bytes) -> Result<Bytes> {
        if let Some(plan) = plan {
            growing.carry_out(&plan, StreamKey::default())?;
        }
        Ok(before.saturating_sub(self.core.lock().reserved_bytes()))
    }
}

/// Set of blocks that were live in a domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    base: Address,
    blocks: Vec<LiveBlock>,
    claims: Vec<Claim>,
    /// Claims of the domain's plain twin.
    plain: Vec<Claim>,
}

impl Checkpoint {
    /// Returns the blocks in address order.
    pub fn blocks(&self) -> &[LiveBlock] {
        &self.blocks
    }
}

/// Changes made by a restore. A block that is live before and after keeps its memory and is in both lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// Blocks that were live before the restore.
    pub freed: Vec<LiveBlock>,
    /// Blocks that are live after the restore.
    pub claimed: Vec<LiveBlock>,
}

/// Checkpoint operations of a pool.
#[derive(Debug)]
pub(super) struct Checkpoints<'a> {
    pub(super) core: &'a Core,
    pub(super) clock: &'a CompletionClock,
    pub(super) growth: &'a Growth,
}

impl Checkpoints<'_> {
    /// Records the live blocks of a domain.
    pub(super) fn take(&self, domain: DomainId) -> Result<Checkpoint> {
        let twin = self.core.plain().twin(domain);
        let core = self.core.lock();
        let claims_of = |domain| core.checkpoint(domain).map_err(|source| self.core.refused(source));
        let (claims, plain) = (claims_of(domain)?, twin.map_or(Ok(Vec::new()), claims_of)?);
        let domains = [Some(domain), twin].into_iter().flatten();
        let mut blocks: Vec<_> =
            domains.flat_map(|domain| core.blocks().of(domain)).map(|block| self.live_block(block)).collect();
        blocks.sort_unstable_by_key(|block| block.address);
        Ok(Checkpoint { base: self.core.reservation().start(), blocks, claims, plain })
    }

    /// Makes exactly the checkpoint's blocks live in a domain. Waits for pending frees once if necessary.
    pub(super) fn restore(&self, domain: DomainId, checkpoint: &Checkpoint) -> Result<Restored> {
        if checkpoint.base != self.core.reservation().start() {
            return Err(PoolError::UnknownAddress { device: self.core.device(), address: checkpoint.base });
        }
        match self.try_restore(domain, checkpoint) {
            Err(PoolError::Refused {
                source: StitchError::NotClaimable { obstacle: Obstacle::Pending, .. },
                ..
            }) => {
                self.clock.settle()?;
                self.try_restore(domain, checkpoint)
            }
            answer => answer,
        }
    }

    fn try_restore(&self, domain: DomainId, checkpoint: &Checkpoint) -> Result<Restored> {
        // Prevents plans from holding memory of the domain meanwhile.
        let _quiet = self.growth.lock()?;
        let twin = self.core.plain().twin(domain);
        let (restored, uses) = {
            let mut core = self.core.lock();
            let mut checkpoints = vec![(domain, &*checkpoint.claims)];
            checkpoints.extend(twin.map(|twin| (twin, &*checkpoint.plain)));
            let restored = match twin {
                // Released with its domain since.
                None if !checkpoint.plain.is_empty() => Err(StitchError::UnknownDomain { domain }),
                _ => core.restore(&checkpoints),
            };
            if let Ok(glake_stitch::Restored { freed, claimed }) = &restored {
                // A block that stays live keeps its exports.
                let stays: FxHashSet<_> = claimed.iter().map(|block| (block.offset, block.size)).collect();
                let gone = freed.iter().filter(|block| !stays.contains(&(block.offset, block.size)));
                gone.for_each(|block| self.core.end_block(block.offset));
            }
            (restored, core.take_uses())
        };
        self.core.mark_uses(&uses);
        self.clock.note_freed();
        let restored = restored.map_err(|source| self.core.refused(source))?;
        let told = |blocks: Vec<_>| blocks.into_iter().map(|block| self.live_block(block)).collect();
        Ok(Restored { freed: told(restored.freed), claimed: told(restored.claimed) })
    }

    fn live_block(&self, block: glake_stitch::LiveBlock) -> LiveBlock {
        LiveBlock::of(self.core, block)
    }
}

/// Data that another process needs to map a block.
#[derive(Debug)]
pub struct Exported {
    /// Address of the block in this process.
    pub base: Address,
    /// Size of the block.
    pub size: Bytes,
    /// Offset of the block from the start of its first extent.
    pub offset: Bytes,
    /// Sizes of all extents, which the importer maps side by side in this order. An importer cannot query them from the driver.
    pub sizes: Vec<Bytes>,
    /// Descriptors of the requested extents, fewer if the process runs out of descriptors. The memory lives while any process holds them
    /// open, independent of the pool.
    pub descriptors: Vec<OwnedFd>,
    /// Life of the block: tells whether the address still holds the same block.
    pub life: BlockLife,
}

/// Export operations of a pool.
#[derive(Debug)]
pub(super) struct Exports<'a> {
    pub(super) core: &'a Core,
    pub(super) growth: &'a Growth,
    /// Whether the driver can export memory of this device.
    pub(super) supported: bool,
}

impl Exports<'_> {
    /// Exports the physical memory of the live block at an address, with descriptors for a part of its extents. All its extents stay on
    /// their GPU from then on.
    pub(super) fn export(&self, address: Address, part: Range<usize>) -> Result<Exported> {
        let device = self.core.device();
        // The block's extents stay while this lock is held.
        let growing = self.growth.lock()?;
        let unknown = || PoolError::UnknownAddress { device, address };
        let offset = self.core.offset(address)?;
        let (base, size, backing, life) = {
            let core = self.core.lock();
            let block = core.blocks().find(offset).ok_or_else(unknown)?;
            let backing = core.blocks().backing(block.offset).ok_or_else(unknown)?;
            if backing
                .extents
                .iter()
                .any(|&extent| core.extents().state(extent) != Some(ExtentState::Resident))
            {
                return Err(PoolError::Evicted { device, address });
            }
            (block.offset, block.size, backing, self.core.lives().of(block.offset))
        };
        let mut extents = Vec::with_capacity(backing.extents.len());
        if self.core.plain().holds(offset) {
            return Err(PoolError::Plain { device, address });
        }
        for id in &backing.extents {
            let extent = growing.extent(*id).ok_or_else(unknown)?;
            if !self.supported {
                return Err(PoolError::NoDescriptors { device, address });
            }
            if !extent.properties().exportable {
                return Err(PoolError::NotExportable { device, address });
            }
            extents.push(extent);
        }
        let mut descriptors = Vec::with_capacity(part.len().min(extents.len()));
        for extent in extents.iter().skip(part.start).take(part.len()) {
            match retry(|| extent.export()) {
                Ok(descriptor) => descriptors.push(descriptor),
                Err(DriverError::TooManyFiles { .. }) if !descriptors.is_empty() => break,
                Err(error) => return Err(self.core.failed(error)),
            }
        }
        extents.iter().for_each(|extent| extent.mark_exported());
        let sizes = extents.iter().map(|extent| extent.size()).collect();
        let offset = base.saturating_sub(backing.start);
        Ok(Exported { base: self.core.address(base), size, offset, sizes, descriptors, life })
    }
}
