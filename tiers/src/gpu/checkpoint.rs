//! Checkpoints of a private pool: the set of live blocks, and its restoration.
//!
//! Programs that record several CUDA graphs into one pool replay some of them and then record another one after those. The blocks that were
//! live at the end of the last replay must first become live again, at the addresses that the graphs use.

use glake_device::Address;
use glake_stitch::{Claim, DomainId, Obstacle, StitchError};
use rustc_hash::FxHashSet;

use super::clock::CompletionClock;
use super::core::Core;
use super::growth::Growth;
use super::report::LiveBlock;
use super::{PoolError, Result};

/// Set of blocks that were live in a domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    base: Address,
    blocks: Vec<LiveBlock>,
    claims: Vec<Claim>,
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
        let core = self.core.lock();
        let claims = core.checkpoint(domain).map_err(|source| self.core.refused(source))?;
        let blocks = core.blocks().of(domain).into_iter().map(|block| self.live_block(block)).collect();
        Ok(Checkpoint { base: self.core.reservation().start(), blocks, claims })
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
        let (restored, uses) = {
            let mut core = self.core.lock();
            let restored = core.restore(domain, &checkpoint.claims);
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
