//! Copies that somebody still waits for, by handle.
//!
//! Invariants: a handle is above 0 and never given twice; it is ended by one wait, or dropped. The table's lock is held for a look-up
//! only, a copy's own while its driver is asked.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use glake_device::owned::OwnedEvent;
use glake_transfer::{CopyHandle, UserStream};
use rustc_hash::FxHashMap;

use super::super::{ProcessError, Result};
use crate::sync::Mutex;

/// A copy that somebody waits for.
#[derive(Debug)]
pub(super) enum Pending {
    Engine(Box<CopyHandle>),
    /// One of the driver's own: what it is behind of.
    Native(OwnedEvent),
    /// It runs when a graph does, as often as that does: nobody can wait for it here.
    Captured(UserStream),
}

/// Those that were not waited for yet.
#[derive(Debug, Default)]
pub(in super::super) struct PendingCopies {
    last: AtomicU64,
    copies: Mutex<FxHashMap<u64, PendingCopy>>,
}

/// Empty once it was waited for.
type PendingCopy = Arc<Mutex<Option<Pending>>>;

impl PendingCopies {
    /// Its handle.
    pub(super) fn keep(&self, pending: Pending) -> u64 {
        let handle = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        self.copies.lock().insert(handle, Arc::new(Mutex::new(Some(pending))));
        handle
    }

    /// Waits for a copy, and ends its handle.
    pub(super) fn wait(&self, handle: u64) -> Result<()> {
        let copy = self.copies.lock().remove(&handle);
        // Another thread may be asking whether it is done.
        let pending = copy.and_then(|copy| copy.lock().take());
        match pending.ok_or(ProcessError::UnknownCopy { handle })? {
            Pending::Engine(copy) => Ok(copy.wait()?),
            Pending::Native(event) => Ok(event.synchronize()?),
            Pending::Captured(on) => Err(captured(on)),
        }
    }

    /// Ends the handle of a copy, which goes on.
    pub(super) fn drop(&self, handle: u64) -> Result<()> {
        let copy = self.copies.lock().remove(&handle);
        // Another thread may wait for it, or ask: it keeps what it has.
        copy.map(std::mem::drop).ok_or(ProcessError::UnknownCopy { handle })
    }

    /// How many handles there are.
    #[cfg(test)]
    pub(in super::super) fn len(&self) -> usize {
        self.copies.lock().len()
    }

    /// Whether a copy is done; its handle stays.
    pub(super) fn is_done(&self, handle: u64) -> Result<bool> {
        let copy = self.copies.lock().get(&handle).cloned();
        let copy = copy.ok_or(ProcessError::UnknownCopy { handle })?;
        let pending = copy.lock();
        match &*pending {
            Some(Pending::Engine(copy)) => Ok(copy.is_done()?),
            Some(Pending::Native(event)) => Ok(event.is_passed()?),
            Some(Pending::Captured(on)) => Err(captured(*on)),
            None => Err(ProcessError::UnknownCopy { handle }),
        }
    }
}

/// Why nobody can wait for it.
pub(super) fn captured(on: UserStream) -> ProcessError {
    ProcessError::Captured { device: on.device, stream: on.raw }
}

#[cfg(test)]
#[cfg(schedules)]
mod schedules {
    use glake_device::{DeviceId, Stream, StreamId};
    use shuttle::thread;

    use super::*;
    use crate::sync::schedules;

    /// A handle is ended once, by whoever comes first; who comes later is told that there is none.
    #[test]
    fn a_handle_is_ended_once() {
        schedules(|| {
            let copies = Arc::new(PendingCopies::default());
            let stream = UserStream { device: DeviceId(0), raw: Stream(5), id: StreamId(5) };
            let handles = [copies.keep(Pending::Captured(stream)), copies.keep(Pending::Captured(stream))];
            let threads: Vec<_> = (0..3)
                .map(|who| {
                    let copies = copies.clone();
                    thread::spawn(move || {
                        let ended = handles.map(|handle| match who {
                            0 => PendingCopies::drop(&copies, handle).is_ok(),
                            1 => matches!(copies.wait(handle), Err(ProcessError::Captured { .. })),
                            _ => {
                                assert!(copies.is_done(handle).is_err());
                                false
                            }
                        });
                        ended.map(u32::from)
                    })
                })
                .collect();
            let ended: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
            assert!((0..2).all(|handle| ended.iter().map(|who| who[handle]).sum::<u32>() == 1), "{ended:?}");
            assert_eq!(copies.len(), 0);
        });
    }
}
