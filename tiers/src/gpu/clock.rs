//! Completion points of the allocator, implemented with events on the device.
//!
//! A completion point is closed in the allocator and then recorded on the device, so that its event covers every free in it. If recording
//! fails, no free is lost: the next event covers these frees too.
//!
//! A thread that waits on the host holds the lock of one event and no other lock, so that completion points of other threads proceed. The
//! clock's lock is taken before the allocator's. The driver is called under the clock's lock to record and to query completion points.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Thread, ThreadId};
use std::time::{Duration, Instant};

use glake_device::owned::{CaptureHold, CompletionEvents, CompletionProof, DeviceSet};
use glake_device::{DriverError, Stream};
use glake_stitch::PointNumber;
use parking_lot::Mutex;

use super::Result;
use super::core::Core;
use super::lag::{CompletionLag, Lags};
use super::point::{CompletionPoint, Done};
use super::reach::Reach;
use super::retry::retry;
use super::waits::WaitTimer;

type Event = Arc<Mutex<glake_device::owned::RecordedPoint>>;

#[derive(Debug)]
struct Recorded {
    point: PointNumber,
    event: Event,
    at: Instant,
}

/// Recorded completion points that have not passed, oldest first.
#[derive(Debug, Default)]
struct State {
    recorded: VecDeque<Recorded>,
    passed: Option<CompletionProof>,
    lags: Lags,
}

/// Clock of a pool: tracks when freed memory is no longer in use on the device.
#[derive(Debug)]
pub struct CompletionClock {
    core: Arc<Core>,
    reach: Arc<Reach>,
    completion_events: Arc<CompletionEvents>,
    /// Checked whenever the clock ticks.
    waits: Arc<WaitTimer>,
    state: Mutex<State>,
    /// Whether any memory was freed since the clock last looked.
    freed: AtomicBool,
    /// Threads of all tickers, woken by the first free after a pause.
    sleepers: Mutex<Vec<Thread>>,
}

impl CompletionClock {
    pub(super) fn new(
        core: Arc<Core>,
        reach: Arc<Reach>,
        completion_events: Arc<CompletionEvents>,
        waits: Arc<WaitTimer>,
    ) -> Self {
        let (state, freed, sleepers) = Default::default();
        CompletionClock { core, reach, completion_events, waits, state, freed, sleepers }
    }

    /// Advances the completion points: tells the allocator which have passed, and records one if memory was freed since the last. Must be
    /// called periodically ([`crate::Ticker`] does); a miss calls it too.
    ///
    /// # Errors
    /// The driver's error; no free is lost.
    pub fn tick(&self) -> Result<()> {
        self.core.usable()?;
        let mut state = self.state.lock();
        if self.freed.swap(false, Ordering::AcqRel) {
            match self.cover(&mut state) {
                Ok(()) | Err(DriverError::Capturing { .. }) => {}
                Err(error) => return Err(self.core.failed(error)),
            }
        }
        self.poll(&mut state).map_err(|error| self.core.failed(error))?;
        drop(state);
        self.waits.poll();
        let polled = self.core.poll_holds().and_then(|()| self.core.poll_uses());
        polled.map_err(|error| self.core.failed(error))
    }

    /// Blocks until all memory freed before this call is available to any stream.
    ///
    /// # Errors
    /// The driver's error; [`DriverError::Capturing`] while a capture is open and frees wait for its end.
    pub fn settle(&self) -> Result<()> {
        self.core.usable()?;
        let last = {
            let mut state = self.state.lock();
            self.cover(&mut state).map_err(|error| self.core.failed(error))?;
            state.recorded.back().map(|recorded| recorded.point)
        };
        last.map_or(Ok(()), |point| self.wait(point))
    }

    /// Returns whether frees are waiting to be covered or to pass, so that [`CompletionClock::tick`] has work to do.
    pub fn is_ticking(&self) -> bool {
        let waiting = self.freed.load(Ordering::Acquire) || !self.state.lock().recorded.is_empty();
        waiting && self.core.usable().is_ok()
    }

    /// Prevents completion points from being recorded while the returned guard lives. Held around a stream capture, which a recorded event
    /// would break.
    pub fn hold(&self) -> CaptureHold {
        self.completion_events.hold()
    }

    /// Returns the statistics of the GPU's lag behind the host at misses.
    pub fn lag(&self) -> CompletionLag {
        self.state.lock().lags.told()
    }

    /// Records the GPU's lag at a miss: the age of the oldest completion point that has not passed.
    pub(super) fn note_lag(&self) {
        let mut state = self.state.lock();
        let age = state.recorded.front().map_or(Duration::ZERO, |oldest| oldest.at.elapsed());
        state.lags.note(age);
    }

    pub(super) fn reset_lag(&self) {
        self.state.lock().lags = Lags::default();
    }

    pub(super) fn completion_events(&self) -> &Arc<CompletionEvents> {
        &self.completion_events
    }

    /// Registers a stream with work: every later completion point of its device covers it.
    pub(super) fn know(&self, stream: Stream) {
        self.completion_events.know(self.core.device(), stream);
    }

    /// Notes that a free needs a completion point, and wakes the tickers.
    #[inline]
    pub(super) fn note_freed(&self) {
        if !self.freed.load(Ordering::Relaxed) {
            self.freed.store(true, Ordering::Release);
            self.sleepers.lock().iter().for_each(Thread::unpark);
        }
    }

    /// Waits on the host until `point` has passed.
    pub(super) fn wait(&self, point: PointNumber) -> Result<()> {
        loop {
            let mut state = self.state.lock();
            if self.core.lock().passed() >= point {
                return Ok(());
            }
            let due = state.recorded.iter().find(|recorded| recorded.point >= point);
            let Some((next, event)) = due.map(|due| (due.point, due.event.clone())) else {
                self.record(&mut state).map_err(|error| self.core.failed(error))?;
                continue;
            };
            drop(state);
            let proof = retry(|| event.lock().wait()).map_err(|error| self.core.failed(error))?;
            self.pass(&mut self.state.lock(), next, proof);
        }
    }

    /// Returns the latest completion, for memory that the allocator reports as passed. Before the first one, the allocator only gives back
    /// memory that was never handed out.
    pub(super) fn proof(&self) -> CompletionProof {
        self.state.lock().passed.unwrap_or_else(|| self.completion_events.start())
    }

    /// Waits for all work enqueued up to now and returns the proof of its completion.
    pub(super) fn passed_now(&self) -> std::result::Result<CompletionProof, DriverError> {
        let mut point = retry(|| self.completion_events.record(self.reach.watched()))?;
        retry(|| point.wait())
    }

    /// Runs `change` while no completion point is recorded: earlier points do not cover its effect, later ones do.
    pub(super) fn between_points(&self, change: impl FnOnce()) {
        let _state = self.state.lock();
        change();
    }

    /// Records a point after which nothing uses the memory copied so far.
    pub(crate) fn completion_point(&self) -> Result<CompletionPoint> {
        self.core.usable()?;
        let mark = self.completion_events.mark();
        let point = retry(|| self.completion_events.record(self.reach.watched()));
        Ok(CompletionPoint::new(mark, point.map_err(|error| self.core.failed(error))?))
    }

    /// Waits until all work enqueued before a point has completed.
    pub(crate) fn passed(&self, point: CompletionPoint) -> Result<Done> {
        point.wait().map_err(|error| self.core.failed(error))
    }

    /// Records an event for all work of another device; it covers no frees of the allocator.
    pub(super) fn record_other(
        &self,
        devices: DeviceSet,
    ) -> std::result::Result<glake_device::owned::RecordedPoint, DriverError> {
        retry(|| self.completion_events.record(devices))
    }

    /// Registers a thread to wake when the clock has work again.
    pub(crate) fn wakes(&self, thread: Thread) {
        self.sleepers.lock().push(thread);
    }

    /// Removes a thread from those to wake.
    pub(crate) fn wakes_no_more(&self, thread: ThreadId) {
        self.sleepers.lock().retain(|sleeper| sleeper.id() != thread);
    }

    /// Records a completion point; refused while a capture is open.
    fn record(&self, state: &mut State) -> std::result::Result<(), DriverError> {
        let closed = self.core.lock().close_point();
        match retry(|| self.completion_events.record(self.reach.watched())) {
            Ok(event) => {
                let event = Arc::new(Mutex::new(event));
                state.recorded.push_back(Recorded { point: closed, event, at: Instant::now() });
                Ok(())
            }
            Err(error) => {
                self.core.lock().uncover();
                self.freed.store(true, Ordering::Release);
                Err(error)
            }
        }
    }

    /// Records a completion point if memory was freed since the last one.
    fn cover(&self, state: &mut State) -> std::result::Result<(), DriverError> {
        let uncovered = self.core.lock().uncovered();
        uncovered.map_or(Ok(()), |_| self.record(state))
    }

    /// Tells the allocator which points have passed. Skips an event that another thread waits for; that thread reports it.
    fn poll(&self, state: &mut State) -> std::result::Result<(), DriverError> {
        while let Some(Recorded { point, event, .. }) = state.recorded.front() {
            let Some(proof) = event.try_lock().map(|mut event| retry(|| event.poll())).transpose()? else {
                break;
            };
            let Some(proof) = proof else { break };
            let point = *point;
            self.pass(state, point, proof);
        }
        Ok(())
    }

    fn pass(&self, state: &mut State, point: PointNumber, proof: CompletionProof) {
        while state.recorded.pop_front_if(|recorded| recorded.point <= point).is_some() {}
        if state.passed.is_none_or(|before| before.sequence() < proof.sequence()) {
            state.passed = Some(proof);
        }
        self.core.lock().pass_point(point);
    }
}

#[cfg(test)]
mod tests {
    use glake_device::{Fault, Injected, Verb, When};
    use glake_units::Bytes;

    use super::super::fixture::Parts;
    use super::*;

    /// Creates a clock and an allocator with one freed block, without a pool or device memory.
    fn freed() -> (Parts, CompletionClock) {
        let parts = Parts::new();
        let clock = parts.clock();
        let offset = parts.grow(Bytes::mib(4));
        parts.core.free(offset).unwrap();
        clock.note_freed();
        (parts, clock)
    }

    #[test]
    fn a_free_passes_with_its_event() {
        let (parts, clock) = freed();
        let open = parts.core.lock().uncovered();
        assert!(open.is_some() && clock.is_ticking());
        clock.settle().unwrap();
        assert!(parts.core.lock().uncovered().is_none());
        clock.tick().unwrap();
        assert!(!clock.is_ticking());
    }

    #[test]
    fn a_failed_recording_loses_nothing() {
        let (parts, clock) = freed();
        let fail =
            Fault { verb: Some(Verb::EventRecordContext), when: When::Nth(1), error: Injected::Failed(1) };
        parts.faults.set(&[fail]);
        clock.tick().unwrap_err();
        assert!(clock.is_ticking() && parts.core.lock().uncovered().is_some());
        parts.faults.set(&[]);
        clock.settle().unwrap();
        assert!(parts.core.lock().uncovered().is_none());
    }

    #[test]
    fn while_it_is_held_nothing_is_recorded() {
        let (parts, clock) = freed();
        let held = clock.hold();
        clock.tick().unwrap();
        assert!(parts.core.lock().uncovered().is_some());
        clock.settle().unwrap_err();
        drop(held);
        clock.settle().unwrap();
    }

    #[test]
    fn a_miss_notes_how_far_the_gpu_is_behind() {
        let (_parts, clock) = freed();
        clock.note_lag();
        assert_eq!((clock.lag().misses, clock.lag().max), (1, Duration::ZERO), "nothing is recorded");
        clock.reset_lag();
        assert_eq!(clock.lag(), CompletionLag::default());
    }
}
