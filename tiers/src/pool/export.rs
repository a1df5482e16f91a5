//! Blocks for other processes, as the physical memory that they lie in.
//!
//! ```text
//! block              ▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀
//! extents     [   e1   |   e7   |   e8   ]     whole ones: an importer sees their other bytes too
//!             ^────────^ offset
//! ```

use std::os::fd::OwnedFd;

use glake_device::Address;
use glake_stitch::Presence;
use glake_units::Bytes;

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
    /// ([`super::PoolOptions::exportable`]); [`PoolError::Away`] while some of it is elsewhere; what the driver answers.
    pub fn export(&self, address: Address) -> Result<Exported> {
        // What the block lies in stays while this is held.
        let held = self.growth()?;
        let unknown = || PoolError::UnknownAddress { device: self.device, address };
        let offset = self.offset(address)?;
        let (base, size, backing) = {
            let core = self.core.lock();
            let block = core.find(offset).ok_or_else(unknown)?;
            let backing = core.backing(block.offset).ok_or_else(unknown)?;
            if backing.extents.iter().any(|&extent| core.presence(extent) != Some(Presence::Here)) {
                return Err(PoolError::Away { device: self.device, address });
            }
            (block.offset, block.size, backing)
        };
        let mut extents = Vec::with_capacity(backing.extents.len());
        for id in &backing.extents {
            let extent = held.extents.get(id).ok_or_else(unknown)?;
            if !extent.properties().exportable {
                return Err(PoolError::NotExportable { device: self.device, address });
            }
            let fd = retry(|| extent.export()).map_err(|error| self.failed(error))?;
            extents.push(SharedExtent { fd, size: extent.size() });
        }
        let offset = base.saturating_sub(backing.start);
        Ok(Exported { base: self.address(base), size, offset, extents })
    }
}
