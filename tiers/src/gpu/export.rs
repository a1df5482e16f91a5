//! Export of blocks to other processes, as the physical memory that holds them.
//!
//! ```text
//! block              ▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀
//! extents     [   e1   |   e7   |   e8   ]     whole ones: an importer sees their other bytes too
//!             ^────────^ offset
//! ```
//!
//! An export ends with its block ([`BlockLife`]). Descriptors are created for a few extents at a time: a block may have thousands of
//! extents, and a process has a limited number of descriptors.

use std::ops::Range;
use std::os::fd::OwnedFd;

use glake_device::{Address, DriverError};
use glake_stitch::ExtentState;
use glake_units::Bytes;

use super::core::Core;
use super::growth::Growth;
use super::lives::BlockLife;
use super::retry::retry;
use super::{PoolError, Result};

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
