//! Blocks for other processes, as the physical memory that they lie in.
//!
//! ```text
//! block              ▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀
//! extents     [   e1   |   e7   |   e8   ]     whole ones: an importer sees their other bytes too
//!             ^────────^ offset
//! ```
//!
//! What is exported ends with its block ([`BlockLife`]).

use std::os::fd::OwnedFd;

use glake_device::Address;
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
    /// To be mapped side by side, in this order.
    pub extents: Vec<SharedExtent>,
    /// Whether the block is still that one.
    pub life: BlockLife,
}

/// An extent that another process can import.
#[derive(Debug)]
pub struct SharedExtent {
    /// By this. The memory lives while it is open anywhere, whatever the pool does.
    pub fd: OwnedFd,
    /// Its size, which the driver does not tell an importer.
    pub size: Bytes,
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
    /// The physical memory of the live block that an address lies in.
    pub(super) fn export(&self, address: Address) -> Result<Exported> {
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
            let fd = retry(|| extent.export()).map_err(|error| self.core.failed(error))?;
            extents.push(SharedExtent { fd, size: extent.size() });
        }
        let offset = base.saturating_sub(backing.start);
        Ok(Exported { base: self.core.address(base), size, offset, extents, life })
    }
}
