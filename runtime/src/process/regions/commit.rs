//! Parts of live blocks without memory: a cache that grows and shrinks within one block.

use std::sync::Arc;

use glake_device::Address;
use glake_tiers::{LiveBlock, Region};
use glake_units::Bytes;

use super::super::{ProcessError, Result};
use super::Regions;
use super::tagged::Tagged;

impl Regions {
    /// Gives the memory back to the driver of all extents that lie wholly in these bytes of a live block; returns how much. The block keeps
    /// its addresses; the bytes are lost, and nothing may touch them until they are committed. Waits for all work of the GPUs. What is
    /// fixed, or shared with other processes, stays.
    ///
    /// The caller promises that no work on these bytes is enqueued from now on until they are committed.
    ///
    /// # Errors
    /// [`ProcessError::InNoBlock`]; [`ProcessError::Region`] where the bytes leave the block, its region is sealed, or a capture is open:
    /// nothing has changed then.
    pub fn decommit(&self, address: Address, size: Bytes) -> Result<Bytes> {
        let (tagged, region) = self.region_at(address)?;
        self.set.flags.set_decommitted();
        let decommitted = region.decommit(address, size);
        // Where it stopped halfway, its uses wait for the rest.
        tagged.settle(&self.set.flags, &self.set.gate);
        Ok(decommitted?.freed)
    }

    /// Makes memory for what was decommitted of these bytes of a live block, at its addresses; returns how much. The bytes have any value.
    /// Whatever else is evicted of its region comes back first.
    ///
    /// # Errors
    /// [`ProcessError::InNoBlock`]; [`ProcessError::Region`] where the bytes leave the block, or there is no memory: the same call goes on.
    pub fn commit(&self, address: Address, size: Bytes) -> Result<Bytes> {
        self.set.touched(address)?;
        let (tagged, region) = self.region_at(address)?;
        self.set.commit(&tagged, &region, address, size)
    }

    /// The region of the block that an address lies in.
    pub(super) fn region_at(&self, address: Address) -> Result<(Arc<Tagged>, Arc<Region>)> {
        self.set.table.cover(&self.set.registry.devices);
        let found = self.set.started_at(address).and_then(|started| {
            let LiveBlock { domain, .. } = started.pool.find(address)?;
            self.set.table.of_domain(started.pool.device(), domain)
        });
        found.ok_or(ProcessError::InNoBlock { address })
    }
}
