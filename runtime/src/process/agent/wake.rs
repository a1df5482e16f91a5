//! The wake of the agent's thread, by any thread that holds any lock.
//!
//! Invariants: no lock is taken here. Between two looks of the agent's thread at the holdings it is woken for them once, however often they
//! change.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use rustix::event::{EventfdFlags, eventfd};

/// Wakes the agent's thread.
#[derive(Debug, Default)]
pub(super) struct Wake {
    /// Made by the first join, and kept until the process ends: its number is nobody else's meanwhile.
    descriptor: OnceLock<Arc<OwnedFd>>,
    /// The holdings may be other than was said.
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

    /// Has the thread look.
    pub(super) fn wake(&self) {
        if let Some(descriptor) = self.descriptor.get() {
            // It is awake where the number is as large as it gets.
            let _ = rustix::io::write(descriptor.as_fd(), &1_u64.to_ne_bytes());
        }
    }

    /// Has the thread look at the holdings: one atomic operation, and a system call the first time since the last look.
    pub(super) fn holdings_moved(&self) {
        if !self.has_moved.swap(true, Ordering::AcqRel) {
            self.wake();
        }
    }

    /// Whether the holdings may be other than was said.
    pub(super) fn has_moved(&self) -> bool {
        self.has_moved.load(Ordering::Acquire)
    }

    /// Begins a look at the holdings: later changes wake the thread again.
    pub(super) fn begin_look(&self) {
        self.has_moved.store(false, Ordering::Release);
    }
}
