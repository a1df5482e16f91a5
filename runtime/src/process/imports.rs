//! Memory of other processes that is open here, counted by handle.
//!
//! Invariants: what is in `open` is mapped; what was closed waits in `closing` until that is done, which a capture may put off. Nothing is
//! asked of another process, and nothing waited for, under the lock.

use std::collections::HashMap;
use std::sync::Arc;

use glake_device::owned::{CompletionEvents, DeviceSet};
use glake_device::{Address, DeviceId, DriverError};
use glake_tiers::Import;
use glake_units::Bytes;
use parking_lot::Mutex;

use super::ProcessError;
use crate::share;

/// What is open, and what is about to be closed.
#[derive(Debug, Default)]
pub(super) struct Imports {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    open: HashMap<Address, Opened>,
    closing: Vec<Arc<Import>>,
}

/// Memory of another process, where it is mapped here.
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
    /// How often it was opened and not closed.
    count: u64,
}

impl Imports {
    /// Maps what a handle tells of, or counts one more user of it.
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

    /// One user less; the last one closes it, or a later call where a capture is open now.
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

    /// All that is mapped, in the order of devices and addresses.
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

    /// Closes what was closed while it could not be.
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

    /// Lets work of `device` touch all that is open of `peer`.
    pub(super) fn enable_peer(&self, device: DeviceId, peer: DeviceId) -> Result<(), ProcessError> {
        let state = self.state.lock();
        let of_peer = state.open.values().filter(|opened| opened.device == peer);
        of_peer.into_iter().try_for_each(|opened| Ok(opened.import.enable_peer(device)?))
    }
}

impl State {
    /// One more user of what a handle tells of, where that is mapped.
    fn count_in(&mut self, handle: &[u8], device: DeviceId) -> Option<Address> {
        let known = self.open.iter_mut().find(|(_, open)| *open.handle == *handle && open.device == device);
        known.map(|(base, opened)| {
            opened.count += 1;
            *base
        })
    }
}
