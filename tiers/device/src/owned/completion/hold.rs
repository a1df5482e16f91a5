//! What holds completion points back: an event for a whole context invalidates every capture with streams of it.
//!
//! ```text
//!   expected ─► followed: seen on a stream ─► over: the stream captures nothing any more, or something else
//!      └ ends with its guard, or with the owner that was named
//! ```
//!
//! A capture that was seen owns its hold, because nobody tells of one that failed. Whether it is over is asked of the driver, and only
//! by the thread that captures, or once that has ended: CUDA crashes where another thread asks of a stream whose capture is being ended.

use std::cell::LazyCell;
use std::fmt;
use std::sync::{Arc, Weak};

use parking_lot::RwLockReadGuard;

use super::CompletionEvents;
use crate::{CaptureState, DeviceId, DriverError, Result, Stream, Verb};

/// A capture that was seen, on one of its streams. Not that of a thread's default stream, whose handle means another on each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeenCapture {
    /// Whose stream.
    pub device: DeviceId,
    /// The stream.
    pub stream: Stream,
    /// The driver's number for the capture.
    pub id: u64,
}

/// While it lives, no completion point is recorded: a capture may begin.
#[derive(Debug)]
pub struct CaptureHold {
    completion_events: Arc<CompletionEvents>,
    number: u64,
}

/// All that holds completion points back.
#[derive(Debug, Default)]
pub(super) struct Holds {
    last: u64,
    expected: Vec<Expected>,
    /// With the threads that capture.
    seen: Vec<(SeenCapture, Weak<()>)>,
    watch: Option<Watch>,
}

/// Who is told whether anything holds points back, and what it was told last.
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
    /// Lives as long as its thread.
    static THREAD: LazyCell<Arc<()>> = const { LazyCell::new(Arc::default) };
}

/// The calling thread, which is gone once this has no owner; at its very end nobody.
pub fn this_thread() -> Weak<()> {
    THREAD.try_with(|thread| Arc::downgrade(thread)).unwrap_or_default()
}

/// Whether the calling thread may ask the driver of what a thread captures.
pub fn may_ask(thread: &Weak<()>) -> bool {
    thread.strong_count() == 0 || thread.ptr_eq(&this_thread())
}

#[derive(Debug)]
struct Expected {
    number: u64,
    /// `None`: the guard alone says how long.
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
    /// Holds completion points back. To be called before a capture begins; the hold is dropped after it has ended.
    pub fn hold(self: &Arc<Self>) -> CaptureHold {
        self.expect(None)
    }

    /// As [`CompletionEvents::hold`]; it holds nothing back any more once its owner is gone.
    pub fn hold_for(self: &Arc<Self>, owner: Weak<()>) -> CaptureHold {
        self.expect(Some(owner))
    }

    /// Who is told whenever something begins to hold points back, and when nothing does any more, by what is known then; replaces who was
    /// told before. Called with a lock held: it must ask nothing of this.
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

    /// Holds completion points back until a capture of a thread is over, whoever drops what.
    pub fn follow(&self, capture: SeenCapture, thread: Weak<()>) {
        let is_known = |holds: &Holds| holds.seen.iter().any(|(seen, _)| *seen == capture);
        if !is_known(&self.holds.read()) {
            self.change_holds(|holds| holds.seen.push((capture, thread)));
        }
    }

    /// Whether a capture has ended or failed. Where the driver does not say, it has not. To be asked where [`may_ask`] allows it.
    pub fn is_over(&self, capture: &SeenCapture) -> bool {
        match self.driver.capture_state(capture.device, capture.stream) {
            Ok(CaptureState::Active(id)) => id != capture.id,
            Ok(CaptureState::None | CaptureState::Invalidated) => true,
            Err(error) => error.is_gone() || error.is_sticky(),
        }
    }

    /// The holds, of which there are none, and come none while this lives.
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

    /// A capture is over: somebody has asked the driver.
    pub fn captured(&self, capture: SeenCapture) {
        self.change_holds(|holds| holds.seen.retain(|(seen, _)| *seen != capture));
    }

    /// Forgets captures that are over, of those that the calling thread may ask of.
    pub fn sweep_holds(&self) {
        let seen: Vec<SeenCapture> = {
            let holds = self.holds.read();
            holds.seen.iter().filter(|(_, thread)| may_ask(thread)).map(|(capture, _)| *capture).collect()
        };
        // Not under the lock: it asks the driver. A capture that is over does not begin again.
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
