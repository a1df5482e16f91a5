//! Blocks for other processes, as the physical memory that they lie in.
//!
//! ```text
//! block              ▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀
//! extents     [   e1   |   e7   |   e8   ]     whole ones: an importer sees their other bytes too
//!             ^────────^ offset
//! ```
//!
//! What is exported ends with its block ([`BlockLife`]). Descriptors are made of a few extents at a time: a process may have few left,
//! and a block thousands of extents.

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

/// What another process needs to map a block.
#[derive(Debug)]
pub struct Exported {
    /// Where the block begins here.
    pub base: Address,
    /// How long it is.
    pub size: Bytes,
    /// Where it begins, from the start of the first extent.
    pub offset: Bytes,
    /// Sizes of all extents, to be mapped side by side in this order. The driver does not tell an importer.
    pub sizes: Vec<Bytes>,
    /// Descriptors of the extents that were asked for, fewer where the process has none left. The memory lives while they are open anywhere,
    /// whatever the pool does.
    pub descriptors: Vec<OwnedFd>,
    /// Whether the block is still that one.
    pub life: BlockLife,
}

/// The memory of a pool, for other processes.
#[derive(Debug)]
pub(super) struct Exports<'a> {
    pub(super) core: &'a Core,
    pub(super) growth: &'a Growth,
    /// Whether the driver exports memory of the device at all.
    pub(super) supported: bool,
}

impl Exports<'_> {
    /// The physical memory of the live block that an address lies in, with descriptors of a part of its extents. All of them stay on their GPU
    /// from then on.
    pub(super) fn export(&self, address: Address, part: Range<usize>) -> Result<Exported> {
        let device = self.core.device();
        // What the block lies in stays while this is held.
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
