//! Holds on completion points during captures: an event for a whole context invalidates every capture in it.
//!
//! ```text
//!   expected ─► followed: seen on a stream ─► over: the stream captures nothing any more, or something else
//!      └ ends with its guard, or with the named owner
//! ```
//!
//! A capture that was seen owns its hold, because failed captures are not announced. The driver is asked whether it is over only by the
//! capturing thread, or once that thread has ended: CUDA crashes if another thread queries a stream whose capture is being ended.

use std::cell::LazyCell;
use std::fmt;
use std::sync::{Arc, Weak};

use parking_lot::RwLockReadGuard;

use super::CompletionEvents;
use crate::{CaptureState, DeviceId, DriverError, Result, Stream, Verb};

/// A capture seen on one of its streams. Not on a thread's default stream, whose handle means another stream on each thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeenCapture {
    /// Device of the stream.
    pub device: DeviceId,
    /// Stream that is captured.
    pub stream: Stream,
    /// The driver's id of the capture.
    pub id: u64,
}

/// Guard for a capture that may begin: while it lives, no completion point is recorded.
#[derive(Debug)]
pub struct CaptureHold {
    completion_events: Arc<CompletionEvents>,
    number: u64,
}

/// Everything that holds completion points back.
#[derive(Debug, Default)]
pub(super) struct Holds {
    last: u64,
    expected: Vec<Expected>,
    /// Captures that were seen, with their threads.
    seen: Vec<(SeenCapture, Weak<()>)>,
    watch: Option<Watch>,
}

/// Observer of the holds, with the value it was last notified of.
struct Watch {
    told: bool,
    tell: Box<dyn Fn(bool) + Send + Sync>,
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").field("told", &self.told).finish_non_exhaustive()
    }
}

thread_local! {
    /// Token that lives as long as its thread.
    static THREAD: LazyCell<Arc<()>> = const { LazyCell::new(Arc::default) };
}

/// Returns a token of the calling thread, which dangles once the thread has ended. During thread exit it dangles from the start.
pub fn this_thread() -> Weak<()> {
    THREAD.try_with(|thread| Arc::downgrade(thread)).unwrap_or_default()
}

/// Returns whether the calling thread may query the captures of `thread`.
pub fn may_ask(thread: &Weak<()>) -> bool {
    thread.strong_count() == 0 || thread.ptr_eq(&this_thread())
}

#[derive(Debug)]
struct Expected {
    number: u64,
    /// Owner whose end ends the hold; `None` if only the guard ends it.
    owner: Option<Weak<()>>,
}

impl Expected {
    fn is_alive(&self) -> bool {
        self.owner.as_ref().is_none_or(|owner| owner.strong_count() > 0)
    }
}

impl Holds {
    pub(super) fn is_any(&self) -> bool {
        !self.seen.is_empty() || self.is_expecting()
    }

    fn tell(&mut self) {
        let is_any = self.is_any();
        if let Some(watch) = self.watch.as_mut().filter(|watch| watch.told != is_any) {
            watch.told = is_any;
            (watch.tell)(is_any);
        }
    }

    fn is_expecting(&self) -> bool {
        self.expected.iter().any(Expected::is_alive)
    }
}

impl CompletionEvents {
    /// Holds completion points back. Call it before a capture begins; drop the hold after the capture has ended.
    pub fn hold(self: &Arc<Self>) -> CaptureHold {
        self.expect(None)
    }

    /// Like [`CompletionEvents::hold`], but the hold ends early if its owner is gone.
    pub fn hold_for(self: &Arc<Self>, owner: Weak<()>) -> CaptureHold {
        self.expect(Some(owner))
    }

    /// Sets the callback that is notified when the first hold begins and when the last one is known to have ended; replaces the previous
    /// one. It runs with a lock held and must not call back.
    pub fn watch_holds(&self, tell: impl Fn(bool) + Send + Sync + 'static) {
        self.change_holds(|holds| holds.watch = Some(Watch { told: false, tell: Box::new(tell) }));
    }

    fn change_holds<T>(&self, change: impl FnOnce(&mut Holds) -> T) -> T {
        let mut holds = self.holds.write();
        let changed = change(&mut holds);
        holds.tell();
        changed
    }

    fn expect(self: &Arc<Self>, owner: Option<Weak<()>>) -> CaptureHold {
        let number = self.change_holds(|holds| {
            holds.last += 1;
            let number = holds.last;
            holds.expected.push(Expected { number, owner });
            number
        });
        CaptureHold { completion_events: self.clone(), number }
    }

    /// Holds completion points back until a thread's capture is over, regardless of any guard.
    pub fn follow(&self, capture: SeenCapture, thread: Weak<()>) {
        let is_known = |holds: &Holds| holds.seen.iter().any(|(seen, _)| *seen == capture);
        if !is_known(&self.holds.read()) {
            self.change_holds(|holds| holds.seen.push((capture, thread)));
        }
    }

    /// Returns whether a capture has ended or failed; false if the driver does not answer. Call it only if [`may_ask`] allows it.
    pub fn is_over(&self, capture: &SeenCapture) -> bool {
        match self.driver.capture_state(capture.device, capture.stream) {
            Ok(CaptureState::Active(id)) => id != capture.id,
            Ok(CaptureState::None | CaptureState::Invalidated) => true,
            Err(error) => error.is_gone() || error.is_sticky(),
        }
    }

    /// Returns a guard that keeps holds from beginning. Fails if there are any.
    pub(super) fn unheld(&self, verb: Verb) -> Result<RwLockReadGuard<'_, Holds>> {
        if !self.holds.read().is_expecting() {
            self.sweep_holds();
        }
        let holds = self.holds.read();
        if holds.is_any() {
            return Err(DriverError::Capturing { verb, code: DriverError::CAPTURING });
        }
        Ok(holds)
    }

    /// Makes calls that the driver may not accept during a capture; `None`, without making them, while a hold lives.
    pub fn outside_captures<T>(&self, make: impl FnOnce() -> T) -> Option<T> {
        let _none = self.unheld(Verb::FreePlain).ok()?;
        Some(make())
    }

    /// Removes a capture that a query has found to be over.
    pub fn captured(&self, capture: SeenCapture) {
        self.change_holds(|holds| holds.seen.retain(|(seen, _)| *seen != capture));
    }

    /// Forgets finished captures, among those that the calling thread may query.
    pub fn sweep_holds(&self) {
        let seen: Vec<SeenCapture> = {
            let holds = self.holds.read();
            holds.seen.iter().filter(|(_, thread)| may_ask(thread)).map(|(capture, _)| *capture).collect()
        };
        // Without the lock, because this asks the driver. A finished capture never resumes.
        let over: Vec<SeenCapture> = seen.into_iter().filter(|capture| self.is_over(capture)).collect();
        if !over.is_empty() {
            self.change_holds(|holds| holds.seen.retain(|(capture, _)| !over.contains(capture)));
        }
    }
}

impl Drop for CaptureHold {
    fn drop(&mut self) {
        self.completion_events
            .change_holds(|holds| holds.expected.retain(|expected| expected.number != self.number));
    }
}
