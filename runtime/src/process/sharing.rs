//! Memory shared with other devices and other processes, and memory of other processes that is mapped here, with a reference count by
//! handle.
//!
//! Invariants: memory in `open` is mapped; a closed import waits in `closing` until it is unmapped, which a capture may delay. No other
//! process is contacted, and nothing is waited for, under the lock.

use std::collections::HashMap;
use std::sync::Arc;

use glake_device::owned::{CompletionEvents, DeviceSet};
use glake_device::{Address, DeviceId, DriverError};
use glake_tiers::{Import, PoolError};
use glake_units::Bytes;
use parking_lot::Mutex;

use super::device_registry::DeviceRegistry;
use super::{Found, ProcessError, Result};
use crate::share;
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
        self.registry.started(memory)?.pool.peer_access().enable(device)?;
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
        let peers = pool.peer_access().devices();
        let base = self.imports.open(handle, &self.registry.completion_events, memory.id(), peers)?;
        // Devices that got access during the exchange with the other process get it here too.
        for peer in pool.peer_access().devices().without(peers).iter() {
            self.imports.enable_peer(peer, memory.id())?;
        }
        Ok(base)
    }

    /// Releases one use of the memory that [`Sharing::open`] mapped. The last release unmaps it after waiting for all work enqueued before;
    /// during a capture, a later call unmaps it.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if nothing is open there.
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
        assert!(
            matches!(parts.sharing.close(base), Err(ref error) if error.says("no memory of another process is open"))
        );
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
        assert!(started.pool.peer_access().devices().contains(glake_device::DeviceId(0)));
        assert!(sharing.enable_peer(0, 2).is_err() && sharing.enable_peer(-1, 0).is_err());
    }
}

/// Open imports and imports about to be closed.
#[derive(Debug, Default)]
pub(super) struct Imports {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    open: HashMap<Address, Opened>,
    closing: Vec<Arc<Import>>,
}

/// Mapping of another process's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Imported {
    pub(super) device: DeviceId,
    pub(super) address: Address,
    pub(super) size: Bytes,
}

#[derive(Debug)]
struct Opened {
    handle: Arc<[u8]>,
    device: DeviceId,
    import: Arc<Import>,
    /// Reference count: opens minus closes.
    count: u64,
}

impl Imports {
    /// Maps the memory of a handle, or adds a user to an existing mapping.
    pub(super) fn open(
        &self,
        handle: &[u8],
        completion_events: &Arc<CompletionEvents>,
        device: DeviceId,
        peers: DeviceSet,
    ) -> Result<Address> {
        self.settle();
        if let Some(base) = self.state.lock().count_in(handle, device) {
            return Ok(base);
        }
        let share::Opened { sizes, mut descriptors } = share::open(handle)?;
        let receive = |from| Ok::<_, ProcessError>(descriptors.receive(from)?);
        let import = Arc::new(Import::open(completion_events, device, peers, &sizes, receive)?);
        let base = import.base();
        let mut state = self.state.lock();
        // Another thread may have opened it meanwhile.
        if let Some(base) = state.count_in(handle, device) {
            state.closing.push(import);
            drop(state);
            self.settle();
            return Ok(base);
        }
        state.open.insert(base, Opened { handle: handle.into(), device, import, count: 1 });
        Ok(base)
    }

    /// Removes a user. The last one unmaps the memory, or a later call does if a capture is open now.
    pub(super) fn close(&self, base: Address) -> Result<()> {
        let mut state = self.state.lock();
        let opened = state.open.get_mut(&base).ok_or_else(|| {
            ProcessError::invalid(format!(
                "no memory of another process is open at {base}: it was closed as often as it was opened"
            ))
        })?;
        opened.count -= 1;
        if opened.count == 0
            && let Some(opened) = state.open.remove(&base)
        {
            state.closing.push(opened.import);
        }
        drop(state);
        self.settle();
        Ok(())
    }

    /// Returns all mappings, ordered by device and address.
    pub(super) fn mapped(&self) -> Vec<Imported> {
        let state = self.state.lock();
        let imports = state.open.values().map(|opened| &opened.import).chain(&state.closing);
        let imported = |import: &Arc<Import>| Imported {
            device: import.device(),
            address: import.base(),
            size: import.size(),
        };
        let mut mapped: Vec<Imported> = imports.map(imported).collect();
        mapped.sort_unstable_by_key(|imported| (imported.device, imported.address));
        mapped
    }

    /// Closes imports whose close was requested while they could not be unmapped.
    pub(super) fn settle(&self) {
        let closing = self.state.lock().closing.clone();
        for import in closing {
            match import.close() {
                Ok(()) => self.state.lock().closing.retain(|other| !Arc::ptr_eq(other, &import)),
                Err(DriverError::Capturing { .. }) => {}
                Err(error) => {
                    tracing::warn!(target: "glake::share", %error, "memory of another process stays mapped for now");
                }
            }
        }
    }

    /// Grants `device` access to all imported memory of `peer`.
    pub(super) fn enable_peer(&self, device: DeviceId, peer: DeviceId) -> Result<()> {
        let state = self.state.lock();
        let of_peer = state.open.values().filter(|opened| opened.device == peer);
        of_peer.into_iter().try_for_each(|opened| Ok(opened.import.enable_peer(device)?))
    }
}

impl State {
    /// Adds a user to an existing mapping of the handle and returns its address.
    fn count_in(&mut self, handle: &[u8], device: DeviceId) -> Option<Address> {
        let known = self.open.iter_mut().find(|(_, open)| *open.handle == *handle && open.device == device);
        known.map(|(base, opened)| {
            opened.count += 1;
            *base
        })
    }
}
