//! The worker's activity page, shared memory in which the agent reads whether uses run, and the wake-up of the agent thread.
//!
//! Invariants: a use writes only when the first one begins and when the last one ends or is parked. The lock here is taken under the gate's
//! and a lease's lock; no lock is taken under it.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use glake_device::DeviceId;
use glake_units::Bytes;
use glake_wire::{Activity, ActivityPage, PAGE_GPUS, PageError};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use rustix::time::{ClockId, clock_gettime};

/// Writes the activity of this process to a page that the agent maps.
#[derive(Debug, Default)]
pub(super) struct ActivityWriter {
    wake: Arc<Wake>,
    is_on: AtomicBool,
    /// Activity of the most recent write.
    is_busy: AtomicBool,
    has_met_safe_point: AtomicBool,
    page: Mutex<Page>,
}

#[derive(Debug, Default)]
struct Page {
    page: Option<ActivityPage>,
    activity: Activity,
}

impl ActivityWriter {
    pub(super) fn new(wake: Arc<Wake>) -> ActivityWriter {
        ActivityWriter { wake, ..ActivityWriter::default() }
    }

    /// Returns whether a page is open (one relaxed load).
    #[inline]
    pub(super) fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    /// Creates the page unless one exists. The caller writes the current activity afterwards.
    ///
    /// # Errors
    /// [`PageError::Os`].
    pub(super) fn open(&self) -> Result<(), PageError> {
        let mut page = self.page.lock();
        if page.page.is_none() {
            let made = ActivityPage::new()?;
            page.activity.parks = self.has_met_safe_point.load(Ordering::Relaxed);
            made.write(page.activity)?;
            page.page = Some(made);
        }
        self.is_on.store(true, Ordering::Release);
        Ok(())
    }

    /// Returns a duplicate of the page's descriptor, to send to the agent.
    ///
    /// # Errors
    /// The operating system's error if no descriptors are left.
    pub(super) fn descriptor(&self) -> std::io::Result<Option<OwnedFd>> {
        let page = self.page.lock();
        page.page.as_ref().map(|page| page.as_fd().try_clone_to_owned()).transpose()
    }

    /// Closes the page.
    pub(super) fn close(&self) {
        self.is_on.store(false, Ordering::Release);
        self.page.lock().page = None;
    }

    /// Records the number of running uses and of uses begun so far. Called under the gate's lock, so that writes have the order of the
    /// changes.
    pub(super) fn uses(&self, running: u64, begun: u64) {
        self.is_busy.store(running > 0, Ordering::Relaxed);
        let mut idles = false;
        self.write(|activity| {
            idles = activity.uses > 0 && running == 0;
            (activity.uses, activity.begun) = (running, activity.begun.max(begun));
            if idles {
                activity.idle_since_ns = now_ns();
            }
        });
        if idles && self.is_on() {
            self.wake.holdings_moved();
        }
    }

    /// Returns the number of uses begun according to the page; `None` while a use runs.
    pub(super) fn begun_if_idle(&self) -> Option<u64> {
        let activity = self.page.lock().activity;
        (activity.uses == 0).then_some(activity.begun)
    }

    /// Records that the program has loaded its memory, whether or not a use has begun.
    pub(super) fn has_loaded(&self) {
        self.write(|activity| activity.begun = activity.begun.max(1));
    }

    /// Returns whether uses run according to the page.
    #[inline]
    pub(super) fn says_busy(&self) -> bool {
        self.is_busy.load(Ordering::Relaxed)
    }

    /// Records that a thread of a use reached a safe point (one relaxed load, except the first time).
    #[inline]
    pub(super) fn met_safe_point(&self) {
        if !self.has_met_safe_point.load(Ordering::Relaxed) {
            self.note_safe_point();
        }
    }

    #[cold]
    fn note_safe_point(&self) {
        self.has_met_safe_point.store(true, Ordering::Relaxed);
        self.write(|activity| activity.parks = true);
    }

    /// Records whether a capture may be open.
    pub(super) fn captures(&self, captures: bool) {
        self.write(|activity| activity.captures = captures);
    }

    /// Records the bytes of physical memory created on a GPU, or that memory created earlier was reused. The caller may hold any lock
    /// except this writer's.
    pub(super) fn made(&self, device: DeviceId, bytes: Bytes) {
        if !self.is_on() {
            return;
        }
        let place = usize::try_from(device.0).unwrap_or(PAGE_GPUS);
        self.write(|activity| {
            if let Some(made) = activity.made.get_mut(place) {
                *made = bytes.get();
            }
        });
        self.wake.holdings_moved();
    }

    fn write(&self, change: impl FnOnce(&mut Activity)) {
        let mut page = self.page.lock();
        let before = page.activity;
        change(&mut page.activity);
        if page.activity == before {
            return;
        }
        if let Some(of) = &page.page
            && let Err(error) = of.write(page.activity)
        {
            tracing::debug!(target: "glake::agent", %error, "the activity page was not written");
        }
    }
}

/// Eventfd that wakes the agent thread. Callable while holding any lock: none is taken here. Changes of the holdings wake the thread once
/// between two of its looks at them.
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
    /// The operating system's error if no descriptors are left.
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

/// Returns the monotonic clock, which both ends of a page read.
pub(super) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or_default();
    seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(now.tv_nsec).unwrap_or_default())
}
