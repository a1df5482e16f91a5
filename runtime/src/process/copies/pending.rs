//! Unfinished copies by handle.
//!
//! Invariants: a handle is above 0 and never reused; one wait or drop releases it. The table's lock is held for a lookup only; the copy's
//! own lock while its driver is queried.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use glake_device::owned::OwnedEvent;
use glake_transfer::{CopyHandle, UserStream};
use rustc_hash::FxHashMap;

use super::super::{ProcessError, Result};
use crate::sync::Mutex;

/// A copy that a caller may wait for.
#[derive(Debug)]
pub(super) enum Pending {
    Engine(Box<CopyHandle>),
    /// A driver copy: event recorded after it.
    Native(OwnedEvent),
    /// A captured copy, which runs each time its graph does: waiting is impossible.
    Captured(UserStream),
}

/// Table of copies without a completed wait.
#[derive(Debug, Default)]
pub(in super::super) struct PendingCopies {
    last: AtomicU64,
    copies: Mutex<FxHashMap<u64, PendingCopy>>,
}

/// Entry of a copy; empty after the wait.
type PendingCopy = Arc<Mutex<Option<Pending>>>;

impl PendingCopies {
    /// Stores a copy and returns its handle.
    pub(super) fn keep(&self, pending: Pending) -> u64 {
        let handle = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        self.copies.lock().insert(handle, Arc::new(Mutex::new(Some(pending))));
        handle
    }

    /// Waits for a copy and releases its handle.
    pub(super) fn wait(&self, handle: u64) -> Result<()> {
        let copy = self.copies.lock().remove(&handle);
        // Another thread may be asking whether it is done.
        let pending = copy.and_then(|copy| copy.lock().take());
        match pending.ok_or_else(|| ProcessError::unknown_copy(handle))? {
            Pending::Engine(copy) => Ok(copy.wait()?),
            Pending::Native(event) => Ok(event.synchronize()?),
            Pending::Captured(on) => Err(captured(on)),
        }
    }

    /// Releases the handle of a copy, which continues.
    pub(super) fn drop(&self, handle: u64) -> Result<()> {
        let copy = self.copies.lock().remove(&handle);
        // Another thread may be waiting or querying: it keeps its reference.
        copy.map(std::mem::drop).ok_or_else(|| ProcessError::unknown_copy(handle))
    }

    /// Returns the number of handles in use.
    #[cfg(test)]
    pub(in super::super) fn len(&self) -> usize {
        self.copies.lock().len()
    }

    /// Returns whether a copy is finished; its handle stays valid.
    pub(super) fn is_done(&self, handle: u64) -> Result<bool> {
        let copy = self.copies.lock().get(&handle).cloned();
        let copy = copy.ok_or_else(|| ProcessError::unknown_copy(handle))?;
        let pending = copy.lock();
        match &*pending {
            Some(Pending::Engine(copy)) => Ok(copy.is_done()?),
            Some(Pending::Native(event)) => Ok(event.is_passed()?),
            Some(Pending::Captured(on)) => Err(captured(*on)),
            None => Err(ProcessError::unknown_copy(handle)),
        }
    }
}

/// Returns the error of a wait for a captured copy.
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

    /// The first caller releases a handle; later callers get an error.
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
