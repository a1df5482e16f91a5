//! A word of pinned memory by which streams of every device and the host signal each other.
//!
//! What streams order by it, CUDA does not see. So no work may wait for a flag whose setting is enqueued later, unless the
//! host sets it in the end whatever happens: a driver call that waits for the device keeps later work from being enqueued,
//! and two streams may share a queue of the hardware.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use glake_units::Bytes;

use super::{CompletionEvents, Pages, Registration, StreamRef};
use crate::{Address, Compare, Result};

/// Flags lie so far apart: writing one does not disturb those who look at another.
const LINE: u64 = 128;

/// 32 bits. Its memory lives until all work of all devices is done, so nothing may still wait for it when its last clone is
/// dropped.
#[derive(Clone, Debug)]
pub struct Flag {
    /// Keeps the word.
    _memory: Arc<Registration>,
    address: Address,
}

impl Flag {
    /// So many flags, all 0, in pinned memory of their own.
    ///
    /// # Errors
    /// What pinning answers.
    pub fn several(completion_events: &Arc<CompletionEvents>, count: u32) -> Result<Vec<Flag>> {
        let size = Bytes::new(LINE * u64::from(count.max(1)));
        let memory = Arc::new(Registration::new(completion_events, Pages::new(size, 1)?)?);
        let flag = |index| Flag {
            _memory: memory.clone(),
            address: Address(memory.start().0 + LINE * u64::from(index)),
        };
        Ok((0..count).map(flag).collect())
    }

    /// What it holds now.
    pub fn get(&self) -> u32 {
        self.word().load(Ordering::Acquire)
    }

    /// Sets it from the host, with no call of the driver.
    pub fn set(&self, value: u32) {
        self.word().store(value, Ordering::Release);
    }

    /// Makes a stream wait until it compares true.
    pub fn await_on(&self, on: StreamRef<'_>, value: u32, compare: Compare) -> Result<()> {
        // SAFETY: the word is pinned memory, which lives until all work of all devices is done.
        unsafe { on.driver().stream_wait_value(on.device(), on.id(), self.address, value, compare) }
    }

    /// Sets it once a stream has done its earlier work.
    pub fn set_on(&self, on: StreamRef<'_>, value: u32) -> Result<()> {
        // SAFETY: as above.
        unsafe { on.driver().stream_write_value(on.device(), on.id(), self.address, value) }
    }

    fn word(&self) -> &AtomicU32 {
        let word = std::ptr::with_exposed_provenance_mut(usize::try_from(self.address.0).unwrap_or(0));
        // SAFETY: an aligned word of memory that `_memory` keeps, which nobody reaches but through flags and streams.
        unsafe { AtomicU32::from_ptr(word) }
    }
}
