//! Blocks for other processes, as the physical memory that they lie in.
//!
//! ```text
//! block              ▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀
//! extents     [   e1   |   e7   |   e8   ]     whole ones: an importer sees their other bytes too
//!             ^────────^ offset
//! ```
//!
//! What is exported ends with its block: the life of an export is ended under the core's lock, by a free and by a restore, so that
//! nobody else has the bytes before.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use glake_device::Address;
use glake_stitch::Residency;
use glake_units::Bytes;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use super::execute::retry;
use super::{GpuPool, PoolError, Result};

/// What another process needs to map a block.
#[derive(Debug)]
pub struct Exported {
    /// Where the block begins here.
    pub base: Address,
    /// How long it is.
    pub size: Bytes,
    /// Where it begins, from the start of the first extent.
    pub offset: Bytes,
    /// To be mapped side by side, in this order.
    pub extents: Vec<SharedExtent>,
    /// Whether the block is still that one.
    pub life: BlockLife,
}

/// The life of an exported block: the pool ends it when the block is freed, or goes by a restore.
#[derive(Clone, Debug, Default)]
pub struct BlockLife {
    ended: Arc<AtomicBool>,
}

impl BlockLife {
    /// Whether it is over: the bytes are others' now, or may be.
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }
}

/// The lives of exported blocks, by where they begin. Both change under the core's lock.
#[derive(Debug, Default)]
pub(super) struct Lives {
    /// Most pools export nothing, and ask at every free.
    count: AtomicUsize,
    by_block: Mutex<FxHashMap<Bytes, BlockLife>>,
}

impl Lives {
    fn of(&self, block: Bytes) -> BlockLife {
        let mut lives = self.by_block.lock();
        let life = lives.entry(block).or_default().clone();
        self.count.store(lives.len(), Ordering::Relaxed);
        life
    }

    /// The block that begins there is live no more.
    #[inline]
    pub(super) fn end(&self, block: Bytes) {
        if self.count.load(Ordering::Relaxed) > 0 {
            self.end_exported(block);
        }
    }

    #[cold]
    fn end_exported(&self, block: Bytes) {
        let mut lives = self.by_block.lock();
        if let Some(life) = lives.remove(&block) {
            life.ended.store(true, Ordering::Release);
        }
        self.count.store(lives.len(), Ordering::Relaxed);
    }
}

/// An extent that another process can import.
#[derive(Debug)]
pub struct SharedExtent {
    /// By this. The memory lives while it is open anywhere, whatever the pool does.
    pub fd: OwnedFd,
    /// Its size, which the driver does not tell an importer.
    pub size: Bytes,
}

impl GpuPool {
    /// The physical memory of the live block that an address lies in, for another process.
    ///
    /// The caller keeps the block until the other process is done with it; descriptors keep the memory, but not the bytes.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`]; [`PoolError::NotExportable`] where the domain was not made for it
    /// ([`super::PoolOptions::exportable`]); [`PoolError::NoDescriptors`]; [`PoolError::Evicted`] while some of it is elsewhere; what the driver answers.
    pub fn export(&self, address: Address) -> Result<Exported> {
        // What the block lies in stays while this is held.
        let held = self.growth()?;
        let unknown = || PoolError::UnknownAddress { device: self.device, address };
        let offset = self.offset(address)?;
        let (base, size, backing, life) = {
            let core = self.core.lock();
            let block = core.blocks().find(offset).ok_or_else(unknown)?;
            let backing = core.blocks().backing(block.offset).ok_or_else(unknown)?;
            if backing
                .extents
                .iter()
                .any(|&extent| core.extents().residency(extent) != Some(Residency::Resident))
            {
                return Err(PoolError::Evicted { device: self.device, address });
            }
            (block.offset, block.size, backing, self.lives.of(block.offset))
        };
        let mut extents = Vec::with_capacity(backing.extents.len());
        for id in &backing.extents {
            let extent = held.extents.get(id).ok_or_else(unknown)?;
            if !self.exports {
                return Err(PoolError::NoDescriptors { device: self.device, address });
            }
            if !extent.properties().exportable {
                return Err(PoolError::NotExportable { device: self.device, address });
            }
            let fd = retry(|| extent.export()).map_err(|error| self.failed(error))?;
            extents.push(SharedExtent { fd, size: extent.size() });
        }
        let offset = base.saturating_sub(backing.start);
        Ok(Exported { base: self.address(base), size, offset, extents, life })
    }
}
