//! The worker's own activity page, while it has one.
//!
//! Invariants: nothing is written per use, but when the first begins to run and when the last ends or is parked. The lock here is held
//! under the gate's and a lease's, and none is taken under it.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use glake_device::DeviceId;
use glake_units::Bytes;
use glake_wire::{Activity, ActivityPage, PAGE_GPUS, PageError};
use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};

use super::wake::Wake;

/// Writes what the process does, where somebody may read it.
#[derive(Debug, Default)]
pub(in super::super) struct ActivityWriter {
    wake: Arc<Wake>,
    is_on: AtomicBool,
    /// What was written last.
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

    /// Whether there is a page: one relaxed load.
    #[inline]
    pub(in super::super) fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    /// Makes the page, if there is none. Whoever knows what is done says so after that.
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

    /// A descriptor of the page, to be sent.
    ///
    /// # Errors
    /// What the operating system answers where there are no more descriptors.
    pub(super) fn descriptor(&self) -> std::io::Result<Option<OwnedFd>> {
        let page = self.page.lock();
        page.page.as_ref().map(|page| page.as_fd().try_clone_to_owned()).transpose()
    }

    /// Gives the page up.
    pub(super) fn close(&self) {
        self.is_on.store(false, Ordering::Release);
        self.page.lock().page = None;
    }

    /// So many uses run now, and have begun so far. Called under the gate's lock, in the order in which it is so.
    pub(in super::super) fn uses(&self, running: u64, begun: u64) {
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

    /// Number of uses that have begun, as the page says it; none: one runs.
    pub(super) fn begun_if_idle(&self) -> Option<u64> {
        let activity = self.page.lock().activity;
        (activity.uses == 0).then_some(activity.begun)
    }

    /// Records that the program holds what it will, whether a use has begun or not.
    pub(super) fn has_loaded(&self) {
        self.write(|activity| activity.begun = activity.begun.max(1));
    }

    /// Whether uses run, as the page says.
    #[inline]
    pub(in super::super) fn says_busy(&self) -> bool {
        self.is_busy.load(Ordering::Relaxed)
    }

    /// A thread of a use has come to a safe point: one relaxed load, but for the first.
    #[inline]
    pub(in super::super) fn met_safe_point(&self) {
        if !self.has_met_safe_point.load(Ordering::Relaxed) {
            self.note_safe_point();
        }
    }

    #[cold]
    fn note_safe_point(&self) {
        self.has_met_safe_point.store(true, Ordering::Relaxed);
        self.write(|activity| activity.parks = true);
    }

    /// A capture may be open, or none is.
    pub(in super::super) fn captures(&self, captures: bool) {
        self.write(|activity| activity.captures = captures);
    }

    /// So much of a GPU's memory is made, or blocks are in what was made before. Any lock may be held, but none of this writer's.
    pub(in super::super) fn made(&self, device: DeviceId, bytes: Bytes) {
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

/// The monotonic clock, which both ends of a page read.
fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or_default();
    seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(now.tv_nsec).unwrap_or_default())
}
