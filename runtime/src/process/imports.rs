//! Memory of other processes that is open here, counted by handle.
//!
//! Invariant: what is in `open` is mapped; what was closed while a capture was open waits in `closing` for its end.

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
    closing: Vec<Import>,
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
    import: Import,
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
        let mut state = self.state.lock();
        state.close_due();
        let known = state.open.iter_mut().find(|(_, open)| *open.handle == *handle && open.device == device);
        if let Some((base, opened)) = known {
            opened.count += 1;
            return Ok(*base);
        }
        let import = Import::open(completion_events, device, peers, share::open(handle)?)?;
        let base = import.base();
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
        state.close_due();
        Ok(())
    }

    /// All that is mapped, in the order of devices and addresses.
    pub(super) fn mapped(&self) -> Vec<Imported> {
        let state = self.state.lock();
        let imports = state.open.values().map(|opened| &opened.import).chain(&state.closing);
        let imported = |import: &Import| Imported {
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
        self.state.lock().close_due();
    }

    /// Lets work of `device` touch all that is open of `peer`.
    pub(super) fn enable_peer(&self, device: DeviceId, peer: DeviceId) -> Result<(), ProcessError> {
        let state = self.state.lock();
        let of_peer = state.open.values().filter(|opened| opened.device == peer);
        of_peer.into_iter().try_for_each(|opened| Ok(opened.import.enable_peer(device)?))
    }
}

impl State {
    fn close_due(&mut self) {
        self.closing.retain(|import| match import.close() {
            Ok(()) => false,
            Err(DriverError::Capturing { .. }) => true,
            Err(error) => {
                tracing::warn!(target: "glake::share", %error, "memory of another process stays mapped for now");
                true
            }
        });
    }
}
