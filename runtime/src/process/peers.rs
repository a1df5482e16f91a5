//! Memory that other devices and other processes touch.

use std::sync::Arc;

use glake_device::Address;
use glake_tiers::PoolError;
use glake_units::Bytes;

use super::{Found, Process, ProcessError, Result};

impl Process {
    /// Lets work of a device touch another's pool memory, what there is and what comes; twice is no error.
    ///
    /// # Errors
    /// [`ProcessError::NoSuchDevice`]; what the driver answers, above all where the two cannot reach each other.
    pub fn enable_peer(&self, device: i64, peer: i64) -> Result<()> {
        let (device, memory) = (self.device(device)?.id(), self.device(peer)?);
        self.started(memory)?.pool.enable_peer(device)?;
        self.imports.enable_peer(device, memory.id())
    }

    /// Makes the live block that an address lies in available to other processes of the same user, until it is freed: a
    /// handle for [`Process::open_shared`] there, and where the address lies in what that opens.
    ///
    /// # Errors
    /// [`ProcessError::InNoBlock`]; [`ProcessError::Share`], above all where `pool.exportable` is off.
    pub fn share(&self, address: Address) -> Result<(Arc<[u8]>, Bytes)> {
        let found = self.find(address).ok_or(ProcessError::InNoBlock { address })?;
        let started = self.started(self.device(found.device.0.into())?)?;
        // Not to keep the pool: a process that ends shares nothing.
        let (pool, Found { device, address: block, .. }) = (Arc::downgrade(&started.pool), found);
        let unknown = move || PoolError::UnknownAddress { device, address: block };
        let export = move || match pool.upgrade().ok_or_else(unknown)?.export(block)? {
            exported if exported.base == block => Ok(exported),
            // The block was freed since, and lies in another one now.
            _ => Err(unknown()),
        };
        let shared = self.exporter.share(block, export)?;
        Ok((shared.handle, shared.offset.saturating_add(Bytes::new(address.0 - found.address.0))))
    }

    /// Maps what another process shared, for work of a device and of those that may touch its pool. The same handle opened
    /// again gives the same address.
    ///
    /// # Errors
    /// [`ProcessError::Share`]; what the driver answers.
    pub fn open_shared(&self, handle: &[u8], device: i64) -> Result<Address> {
        let memory = self.device(device)?;
        let peers = self.started(memory)?.pool.peers();
        self.imports.open(handle, &self.epochs, memory.id(), peers)
    }

    /// Ends one use of what [`Process::open_shared`] mapped. With the last it is unmapped, once all work that was enqueued
    /// before is done, which is waited for; where a capture is open, at a later call.
    ///
    /// # Errors
    /// [`ProcessError::NotOpen`].
    pub fn close_shared(&self, base: Address) -> Result<()> {
        self.imports.close(base)
    }
}
