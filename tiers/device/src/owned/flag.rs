//! Words of pinned memory through which the host and streams of every device signal each other.
//!
//! CUDA does not see the order that flags impose. So no work may wait for a flag whose setting is enqueued later, unless the host is
//! certain to set it eventually: a driver call that waits for the device blocks later enqueues, and two streams may share a hardware queue.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use glake_units::Bytes;

use super::{CompletionEvents, Pages, Registration, StreamRef};
use crate::{Address, Compare, Result};

/// Distance between flags in bytes, so that writing one does not disturb readers of another.
const LINE: u64 = 128;

/// A 32-bit flag. Its memory is freed only once all work of all devices is done, so nothing may still wait for it when its last clone is
/// dropped.
#[derive(Clone, Debug)]
pub struct Flag {
    /// Keeps the memory of the word alive.
    _memory: Arc<Registration>,
    address: Address,
}

impl Flag {
    /// Allocates `count` flags, all 0, in pinned memory of their own.
    ///
    /// # Errors
    /// Any error of pinning the memory.
    pub fn several(completion_events: &Arc<CompletionEvents>, count: u32) -> Result<Vec<Flag>> {
        let size = Bytes::new(LINE * u64::from(count.max(1)));
        let memory = Arc::new(Registration::new(completion_events, Pages::new(size, 1)?)?);
        let flag = |index| Flag {
            _memory: memory.clone(),
            address: Address(memory.start().0 + LINE * u64::from(index)),
        };
        Ok((0..count).map(flag).collect())
    }

    /// Returns the current value.
    pub fn get(&self) -> u32 {
        self.word().load(Ordering::Acquire)
    }

    /// Sets the flag from the host, without a driver call.
    pub fn set(&self, value: u32) {
        self.word().store(value, Ordering::Release);
    }

    /// Makes a stream wait until the comparison is true.
    pub fn await_on(&self, on: StreamRef<'_>, value: u32, compare: Compare) -> Result<()> {
        // SAFETY: the word is pinned memory, which lives until all work of all devices is done.
        unsafe { on.driver().stream_wait_value(on.device(), on.id(), self.address, value, compare) }
    }

    /// Sets the flag once a stream has done its earlier work.
    pub fn set_on(&self, on: StreamRef<'_>, value: u32) -> Result<()> {
        // SAFETY: as above.
        unsafe { on.driver().stream_write_value(on.device(), on.id(), self.address, value) }
    }

    fn word(&self) -> &AtomicU32 {
        let word = std::ptr::with_exposed_provenance_mut(usize::try_from(self.address.0).unwrap_or(0));
        // SAFETY: an aligned word of memory that `_memory` keeps, which is accessed only through flags and streams.
        unsafe { AtomicU32::from_ptr(word) }
    }
}
