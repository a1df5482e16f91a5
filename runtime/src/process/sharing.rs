//! Memory shared with other devices and other processes.

use std::sync::Arc;

use glake_device::Address;
use glake_tiers::PoolError;
use glake_units::Bytes;

use super::device_registry::DeviceRegistry;
use super::imports::Imports;
use super::{Found, ProcessError, Result};
use crate::share::Exporter;

/// Exported blocks and opened imports of this process.
#[derive(Debug)]
pub struct Sharing {
    registry: Arc<DeviceRegistry>,
    exporter: Exporter,
    imports: Arc<Imports>,
}

impl Sharing {
    pub(super) fn new(registry: &Arc<DeviceRegistry>, imports: &Arc<Imports>) -> Sharing {
        Sharing { registry: registry.clone(), exporter: Exporter::new(), imports: imports.clone() }
    }

    /// Grants a device access to the current and future pool memory of another; repeating it is no error.
    ///
    /// # Errors
    /// [`ProcessError::NoSuchDevice`]; the driver's error, in particular without a path between the devices.
    pub fn enable_peer(&self, device: i64, peer: i64) -> Result<()> {
        let (device, memory) = (self.registry.device(device)?.id(), self.registry.device(peer)?);
        self.registry.started(memory)?.pool.enable_peer(device)?;
        self.imports.enable_peer(device, memory.id())
    }

    /// Shares the live block that contains an address with other processes of the same user, until it is freed. Returns a handle for
    /// [`Sharing::open`] and the offset of the address in the opened memory.
    ///
    /// # Errors
    /// [`ProcessError::InNoBlock`]; [`ProcessError::Share`], in particular if `pool.exportable` is off.
    pub fn share(&self, address: Address) -> Result<(Arc<[u8]>, Bytes)> {
        let found = self.registry.find(address).ok_or(ProcessError::InNoBlock { address })?;
        let started = self.registry.started(self.registry.device(found.device.0.into())?)?;
        // A weak reference, so that the exporter does not keep the pool alive.
        let (pool, Found { device, address: block, .. }) = (Arc::downgrade(&started.pool), found);
        let unknown = move || PoolError::UnknownAddress { device, address: block };
        let export = move |part| match pool.upgrade().ok_or_else(unknown)?.export(block, part)? {
            exported if exported.base == block => Ok(exported),
            // The block was freed since, and the address lies in another one now.
            _ => Err(unknown()),
        };
        let shared = self.exporter.share(block, export)?;
        Ok((shared.handle, shared.offset.saturating_add(Bytes::new(address.0 - found.address.0))))
    }

    /// Maps a block that another process shared, for a device and the devices that may access its pool. Opening the same handle again
    /// returns the same address.
    ///
    /// # Errors
    /// [`ProcessError::Share`]; the driver's error.
    pub fn open(&self, handle: &[u8], device: i64) -> Result<Address> {
        let memory = self.registry.device(device)?;
        let pool = &self.registry.started(memory)?.pool;
        let peers = pool.peers();
        let base = self.imports.open(handle, &self.registry.completion_events, memory.id(), peers)?;
        // Devices that got access during the exchange with the other process get it here too.
        for peer in pool.peers().without(peers).iter() {
            self.imports.enable_peer(peer, memory.id())?;
        }
        Ok(base)
    }

    /// Releases one use of the memory that [`Sharing::open`] mapped. The last release unmaps it after waiting for all work enqueued before;
    /// during a capture, a later call unmaps it.
    ///
    /// # Errors
    /// [`ProcessError::NotOpen`].
    pub fn close(&self, base: Address) -> Result<()> {
        self.imports.close(base)
    }

    /// Ends the sharing of a block that is about to be freed. Cheap if nothing is shared.
    #[inline]
    pub(super) fn forget_block(&self, block: Address) {
        self.exporter.forget_block(block);
    }

    /// Ends the sharing of all blocks that are no longer live.
    pub(super) fn forget_ended(&self) {
        self.exporter.forget_ended();
    }

    /// Closes imports whose close was requested while they could not be unmapped.
    pub(super) fn settle(&self) {
        self.imports.settle();
    }

    /// Ends all sharing.
    pub(super) fn stop(&self) {
        self.exporter.stop();
    }

    /// Returns the number of shared blocks.
    #[cfg(test)]
    #[cfg(not(schedules))]
    pub(super) fn exports(&self) -> usize {
        self.exporter.exports()
    }
}

#[cfg(test)]
#[cfg(not(schedules))]
mod tests {
    use super::super::fixture::Parts;
    use super::*;

    #[test]
    fn a_block_is_shared_once_and_forgotten_when_it_goes() {
        let parts = Parts::new();
        let block = parts.block(0, Bytes::mib(20));
        let (handle, offset) = parts.sharing.share(block).unwrap();
        let (same, inside) = parts.sharing.share(Address(block.0 + 5)).unwrap();
        assert_eq!((same, inside), (handle.clone(), offset.saturating_add(Bytes::new(5))));
        assert_eq!(parts.sharing.exports(), 1);
        let base = parts.sharing.open(&handle, 1).unwrap();
        parts.sharing.close(base).unwrap();
        assert!(matches!(parts.sharing.close(base), Err(ProcessError::NotOpen { .. })));
        parts.sharing.forget_block(block);
        assert_eq!(parts.sharing.exports(), 0);
        assert!(matches!(parts.sharing.share(Address(1)), Err(ProcessError::InNoBlock { .. })));
        parts.sharing.stop();
    }

    #[test]
    fn a_peer_is_a_device_that_there_is() {
        let Parts { sharing, registry, .. } = Parts::new();
        sharing.enable_peer(0, 1).unwrap();
        let started = registry.device(1).unwrap().started().unwrap();
        assert!(started.pool.peers().contains(glake_device::DeviceId(0)));
        assert!(sharing.enable_peer(0, 2).is_err() && sharing.enable_peer(-1, 0).is_err());
    }
}
