//! Parts of live blocks without memory: a cache that grows and shrinks within one block.

use std::sync::Arc;

use glake_device::Address;
use glake_tiers::{LiveBlock, Region};
use glake_units::Bytes;

use super::super::{ProcessError, Result};
use super::Regions;
use super::tagged::Tagged;

impl Regions {
    /// Releases the physical memory of all extents that lie entirely in this range of a live block; returns the bytes. The block keeps its
    /// addresses; the bytes are lost and must not be accessed until they are committed. Waits for all GPU work. Memory that is fixed or
    /// shared with other processes stays.
    ///
    /// The caller promises to enqueue no work on this range until it is committed.
    ///
    /// # Errors
    /// [`ProcessError::InNoBlock`]; [`ProcessError::Region`] if the range exceeds the block, its region is sealed, or a capture is open:
    /// nothing has changed then.
    pub fn decommit(&self, address: Address, size: Bytes) -> Result<Bytes> {
        let (tagged, region) = self.region_at(address)?;
        self.set.flags.set_decommitted();
        let decommitted = region.decommit(address, size);
        // After a partial failure the uses of the region wait for the rest.
        tagged.settle(&self.set.flags, &self.set.gate);
        Ok(decommitted?.freed)
    }

    /// Creates physical memory for the decommitted parts of this range of a live block, at the same addresses; returns the bytes. The
    /// contents are undefined. Refills other evicted memory of its region first.
    ///
    /// # Errors
    /// [`ProcessError::InNoBlock`]; [`ProcessError::Region`] if the range exceeds the block, or there is no memory: the same call
    /// continues.
    pub fn commit(&self, address: Address, size: Bytes) -> Result<Bytes> {
        self.set.touched(address)?;
        let (tagged, region) = self.region_at(address)?;
        self.set.commit(&tagged, &region, address, size)
    }

    /// Returns the region of the block that contains an address.
    pub(super) fn region_at(&self, address: Address) -> Result<(Arc<Tagged>, Arc<Region>)> {
        self.set.table.cover(&self.set.registry.devices);
        let found = self.set.started_at(address).and_then(|started| {
            let LiveBlock { domain, .. } = started.pool.find(address)?;
            self.set.table.of_domain(started.pool.device(), domain)
        });
        found.ok_or(ProcessError::InNoBlock { address })
    }
}
