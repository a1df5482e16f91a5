//! Memory of other processes that is mapped here, with a reference count by handle.
//!
//! Invariants: memory in `open` is mapped; a closed import waits in `closing` until it is unmapped, which a capture may delay. No other
//! process is contacted, and nothing is waited for, under the lock.

use std::collections::HashMap;
use std::sync::Arc;

use glake_device::owned::{CompletionEvents, DeviceSet};
use glake_device::{Address, DeviceId, DriverError};
use glake_tiers::Import;
use glake_units::Bytes;
use parking_lot::Mutex;

use super::ProcessError;
use crate::share;

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
    ) -> Result<Address, ProcessError> {
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
    pub(super) fn close(&self, base: Address) -> Result<(), ProcessError> {
        let mut state = self.state.lock();
        let opened = state.open.get_mut(&base).ok_or(ProcessError::NotOpen { base })?;
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
    pub(super) fn enable_peer(&self, device: DeviceId, peer: DeviceId) -> Result<(), ProcessError> {
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
