//! Wake-up of the agent thread, callable while holding any lock.
//!
//! Invariants: no lock is taken here. Changes of the holdings wake the thread once between two of its looks at them.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use rustix::event::{EventfdFlags, eventfd};

/// Wakes the agent's thread.
#[derive(Debug, Default)]
pub(super) struct Wake {
    /// Created by the first join and kept until the process ends, so that its number is never reused.
    descriptor: OnceLock<Arc<OwnedFd>>,
    /// Whether the holdings may differ from the last report.
    has_moved: AtomicBool,
}

impl Wake {
    /// Returns the descriptor that the agent's thread waits for.
    ///
    /// # Errors
    /// The operating system's error where it has no more descriptors.
    pub(super) fn open(&self) -> std::io::Result<Arc<OwnedFd>> {
        if let Some(descriptor) = self.descriptor.get() {
            return Ok(descriptor.clone());
        }
        let made = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        Ok(self.descriptor.get_or_init(|| made).clone())
    }

    /// Wakes the thread that waits for the descriptor.
    pub(super) fn wake(&self) {
        if let Some(descriptor) = self.descriptor.get() {
            // A write to a full counter fails; the thread is awake then.
            let _ = rustix::io::write(descriptor.as_fd(), &1_u64.to_ne_bytes());
        }
    }

    /// Wakes the thread to look at the holdings: one atomic operation, plus a system call the first time since the last look.
    pub(super) fn holdings_moved(&self) {
        if !self.has_moved.swap(true, Ordering::AcqRel) {
            self.wake();
        }
    }

    /// Returns whether the holdings may differ from the last report.
    pub(super) fn has_moved(&self) -> bool {
        self.has_moved.load(Ordering::Acquire)
    }

    /// Begins a look at the holdings; later changes wake the thread again.
    pub(super) fn begin_look(&self) {
        self.has_moved.store(false, Ordering::Release);
    }
}
