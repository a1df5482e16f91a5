//! Completion points of the allocator, implemented with events on the device; statistics of lag and waits; the drain of all devices.
//!
//! ```text
//! free ─► allocator closes a point ─► event recorded on own device and watched peers ─► polled ─► passed: free for every stream
//! drain   the same point, and one on every other device with a context ─► all waited for ─► the first extent is unmapped
//! ```
//!
//! - `CompletionClock` records and polls the points. If recording fails, no free is lost: the next event covers these frees too.
//! - `Lags` is a histogram of the GPU's lag behind the host at misses: 4 buckets per power of two, from 1 us to 12 days. Each bucket ends a
//!   quarter above its beginning, which bounds the error of a quantile; the maximum is exact.
//! - `WaitTimer` times waits that streams make for lenders and holds, with a pair of events around each wait. Timing never fails a request:
//!   a wait that cannot be timed is counted only.
//! - `Drain` waits for all work of the process before memory leaves its GPU. Completion points cover only devices that the pool gave access
//!   to its memory, but a program can give access to others without telling the pool.
//!
//! Invariants:
//! - A point is closed in the allocator before it is recorded on the device, so that its event covers every free in it.
//! - The clock's lock is taken before the allocator's. The driver is called under it to record and to query completion points. A thread
//!   that waits on the host holds the lock of one event and no other lock, so that completion points of other threads proceed.
//! - Capturing streams neither lend nor borrow, so no event of a timed pair is recorded into a capture.
//! - A drain creates no context, and records everything before its first wait. While a capture is open the call is refused and has waited
//!   for frees at most. A lost device runs no work; if it is neither the pool's own nor a watched peer, its loss is no error of the pool.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Thread, ThreadId};
use std::time::{Duration, Instant};

use glake_device::owned::{
    CaptureHold, CompletionEvents, CompletionProof, DeviceSet, OwnedEvent, RecordedPoint, Sequence,
};
use glake_device::{DeviceId, Driver, DriverError, EventKind, Stream};
use glake_stitch::PointNumber;
use parking_lot::Mutex;

use super::core::Core;
use super::error::retry;
use super::reach::Reach;
use super::{PoolError, Result};

type Event = Arc<Mutex<glake_device::owned::RecordedPoint>>;

#[derive(Debug)]
struct PendingPoint {
    point: PointNumber,
    event: Event,
    at: Instant,
}

/// Recorded completion points that have not passed, oldest first.
#[derive(Debug, Default)]
struct State {
    recorded: VecDeque<PendingPoint>,
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
    pub(crate) fn passed(&self, point: CompletionPoint) -> Result<PointProof> {
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
                state.recorded.push_back(PendingPoint { point: closed, event, at: Instant::now() });
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
        while let Some(PendingPoint { point, event, .. }) = state.recorded.front() {
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

/// Point in time, with the event that tells when all earlier work has completed.
#[derive(Debug)]
pub(crate) struct CompletionPoint {
    mark: Sequence,
    point: RecordedPoint,
}

/// Proof that all work enqueued before a point has completed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PointProof {
    pub(super) mark: Sequence,
    pub(super) passed: CompletionProof,
}

impl CompletionPoint {
    /// Creates a point; the mark must have been taken before the event was recorded.
    pub(super) fn new(mark: Sequence, point: RecordedPoint) -> Self {
        CompletionPoint { mark, point }
    }

    /// Returns whether the work has completed. Never waits.
    pub(crate) fn has_passed(&mut self) -> glake_device::Result<bool> {
        Ok(self.point.poll()?.is_some())
    }

    /// Waits for the completion of the work.
    pub(super) fn wait(mut self) -> glake_device::Result<PointProof> {
        let passed = retry(|| self.point.wait())?;
        Ok(PointProof { mark: self.mark, passed })
    }
}

/// Buckets per power of two.
const BUCKETS_PER_POWER: u32 = 4;
const POWERS_OF_TWO: u32 = 40;
const BUCKETS: usize = 2 + (BUCKETS_PER_POWER * POWERS_OF_TWO) as usize;

/// Lag of the GPU behind the host over all misses: the age of the oldest event for frees that had not passed. The age is 0 if no frees are
/// pending.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompletionLag {
    /// Number of misses so far.
    pub misses: u64,
    /// Median of the lag, rounded up by at most a quarter.
    pub p50: Duration,
    /// 95th percentile of the lag, rounded up by at most a quarter.
    pub p95: Duration,
    /// Maximum of the lag, exact.
    pub max: Duration,
}

/// Counts of the buckets.
#[derive(Clone, Debug)]
pub(super) struct Lags {
    counts: [u64; BUCKETS],
    misses: u64,
    max: Duration,
}

impl Default for Lags {
    fn default() -> Self {
        Lags { counts: [0; BUCKETS], misses: 0, max: Duration::ZERO }
    }
}

#[allow(clippy::cast_possible_truncation)] // below 128 bits' logarithm
fn bucket_of(age: Duration) -> usize {
    let micros = age.as_micros();
    if micros == 0 {
        return 0;
    }
    let log = micros.ilog2();
    let quarter =
        if log < 2 { (micros << 2 >> log) as u32 } else { (micros >> (log - 2)) as u32 } % BUCKETS_PER_POWER;
    BUCKETS.min(2 + (BUCKETS_PER_POWER * log + quarter) as usize) - 1
}

/// Returns the upper bound of a bucket.
fn longest(bucket: usize) -> Duration {
    let Some(index) = bucket.checked_sub(1) else { return Duration::ZERO };
    let (log, quarter) = (index / BUCKETS_PER_POWER as usize, (index % BUCKETS_PER_POWER as usize) as u64);
    let next = ((u64::from(BUCKETS_PER_POWER) + quarter + 1) << log) / u64::from(BUCKETS_PER_POWER);
    Duration::from_micros(next)
}

impl Lags {
    /// Adds one miss to the histogram.
    pub(super) fn note(&mut self, age: Duration) {
        self.counts[bucket_of(age)] += 1;
        self.misses += 1;
        self.max = self.max.max(age);
    }

    pub(super) fn told(&self) -> CompletionLag {
        CompletionLag { misses: self.misses, p50: self.at(50), p95: self.at(95), max: self.max }
    }

    fn at(&self, percent: u64) -> Duration {
        let rank = self.misses.saturating_mul(percent).div_ceil(100).max(1);
        let mut seen = 0;
        let bucket = self.counts.iter().position(|count| {
            seen += count;
            seen >= rank
        });
        bucket.map_or(Duration::ZERO, longest).min(self.max)
    }
}

/// Maximum number of waits timed concurrently; further waits are counted only.
const MAX_TIMED_WAITS: usize = 256;
/// Number of finished waits that are logged individually.
const MAX_LOGGED_WAITS: usize = 4096;

/// Waits of streams for lenders and holds, up to the last poll.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuWaits {
    /// Number of waits, timed or not.
    pub count: u64,
    /// Number of waits finished and timed.
    pub timed: u64,
    /// Total GPU time of the timed waits.
    pub time: Duration,
}

/// Pair of timed events around the waits of one grant.
#[derive(Debug)]
pub(super) struct Pair {
    number: u64,
    stream: Stream,
    before: OwnedEvent,
    after: OwnedEvent,
}

/// Waits being timed, and results.
#[derive(Debug, Default)]
struct WaitTimes {
    idle: Vec<Pair>,
    open: Vec<Pair>,
    told: GpuWaits,
    /// Total number of waits, which is the number of the next one.
    made: u64,
    /// Finished waits with their numbers and streams.
    log: VecDeque<(u64, Stream, Duration)>,
}

impl WaitTimes {
    /// Collects the times of finished waits.
    fn poll(&mut self) {
        for pair in std::mem::take(&mut self.open) {
            match pair.after.is_passed() {
                Ok(false) => self.open.push(pair),
                Ok(true) => {
                    if let Ok(micros) = pair.after.since(&pair.before) {
                        let time = Duration::from_secs_f64(micros.max(0.0) / 1e6);
                        self.told.timed += 1;
                        self.told.time += time;
                        self.log.push_back((pair.number, pair.stream, time));
                        if self.log.len() > MAX_LOGGED_WAITS {
                            self.log.pop_front();
                        }
                    }
                    self.idle.push(pair);
                }
                // A lost context is reported by the next call that needs it.
                Err(_) => {}
            }
        }
    }
}

/// Timer of the waits of one pool's streams.
#[derive(Debug)]
pub(super) struct WaitTimer {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    times: Mutex<WaitTimes>,
}

impl WaitTimer {
    pub(super) fn new(driver: Arc<dyn Driver>, device: DeviceId) -> Self {
        WaitTimer { driver, device, times: Mutex::default() }
    }

    /// Returns the counts and times up to now.
    pub(super) fn told(&self) -> GpuWaits {
        let mut times = self.times.lock();
        times.poll();
        times.told
    }

    pub(super) fn poll(&self) {
        self.times.lock().poll();
    }

    /// Returns the total number of waits.
    pub(super) fn made(&self) -> u64 {
        self.times.lock().made
    }

    /// Returns how long a stream stood still in the logged waits with these numbers.
    pub(super) fn time_of(&self, stream: Stream, numbers: &Range<u64>) -> Duration {
        let mut times = self.times.lock();
        times.poll();
        let of = |(number, on, _): &&(u64, Stream, Duration)| *on == stream && numbers.contains(number);
        times.log.iter().filter(of).map(|(_, _, time)| *time).sum()
    }

    pub(super) fn reset(&self) {
        self.times.lock().told = GpuWaits::default();
    }

    /// Counts a wait that `stream` is about to make, and starts timing it.
    pub(super) fn begin(&self, stream: Stream) -> Option<Pair> {
        let (idle, number) = {
            let mut times = self.times.lock();
            times.told.count += 1;
            let number = times.made;
            times.made += 1;
            if times.open.len() >= MAX_TIMED_WAITS {
                times.poll();
            }
            if times.open.len() >= MAX_TIMED_WAITS {
                return None;
            }
            (times.idle.pop(), number)
        };
        let event = || OwnedEvent::new(&self.driver, self.device, EventKind::Timed);
        let pair = match idle {
            Some(pair) => Pair { number, stream, ..pair },
            None => Pair { number, stream, before: event().ok()?, after: event().ok()? },
        };
        retry(|| pair.before.record(stream)).ok().map(|()| pair)
    }

    /// Stops timing a wait that has been enqueued.
    pub(super) fn end(&self, pair: Option<Pair>, stream: Stream) {
        let Some(pair) = pair else { return };
        if retry(|| pair.after.record(stream)).is_ok() {
            self.times.lock().open.push(pair);
        }
    }
}

/// Wait for all devices of the process.
#[derive(Debug)]
pub(crate) struct Drain<'a> {
    pub(super) clock: &'a CompletionClock,
    pub(super) reach: &'a Reach,
    /// Devices visible to the driver.
    pub(super) devices: DeviceSet,
}

/// Work enqueued on any device of the process before a point in time.
#[derive(Debug)]
pub struct PendingWork {
    own: CompletionPoint,
    others: Vec<RecordedPoint>,
}

impl PendingWork {
    /// Returns whether the work has completed. Never waits.
    ///
    /// # Errors
    /// The driver's error.
    pub fn has_ended(&mut self) -> Result<bool> {
        while let Some(other) = self.others.last_mut() {
            if let Some(None) = unless_lost(other.poll())? {
                return Ok(false);
            }
            self.others.pop();
        }
        Ok(self.own.has_passed()?)
    }
}

impl Drain<'_> {
    /// Records all work enqueued so far on any device, in its primary context.
    pub(crate) fn begin(&self) -> Result<PendingWork> {
        let own = self.clock.completion_point()?;
        let others = self.devices.without(self.reach.watched());
        let record = |device| unless_lost(self.clock.record_other(DeviceSet::of(device)));
        let recorded = others.iter().map(record).collect::<Result<Vec<Option<RecordedPoint>>>>()?;
        Ok(PendingWork { own, others: recorded.into_iter().flatten().collect() })
    }

    /// Waits for all work enqueued so far on any device.
    pub(crate) fn wait(&self) -> Result<()> {
        self.clock.settle()?;
        let PendingWork { own, others } = self.begin()?;
        self.clock.passed(own)?;
        others.into_iter().try_for_each(|mut point| unless_lost(retry(|| point.wait())).map(|_| ()))
    }
}

fn unless_lost<T>(answer: std::result::Result<T, DriverError>) -> Result<Option<T>> {
    match answer {
        Ok(done) => Ok(Some(done)),
        Err(error) if error.is_sticky() => Ok(None),
        Err(error) => Err(PoolError::Driver(error)),
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

#[cfg(test)]
mod lag_tests {
    use super::*;

    #[test]
    fn every_age_lies_in_its_bucket() {
        let mut before = Duration::ZERO;
        for micros in (0..5000).chain((13..50).map(|power| (1u64 << power) + 7)) {
            let age = Duration::from_micros(micros);
            let bucket = bucket_of(age);
            assert!(bucket < BUCKETS && bucket_of(before) <= bucket, "{micros}");
            if bucket < BUCKETS - 1 {
                let (least, most) = (bucket.checked_sub(1).map(longest), longest(bucket));
                assert!(age <= most && least.is_none_or(|least| least <= age), "{micros}");
                assert!(most.as_micros() <= u128::from(micros + micros / 4 + 1), "{micros}");
            }
            before = age;
        }
    }

    #[test]
    fn quantiles_are_of_what_was_noted() {
        let mut lags = Lags::default();
        assert_eq!(lags.told(), CompletionLag::default());
        (0..90).for_each(|_| lags.note(Duration::ZERO));
        (0..8).for_each(|_| lags.note(Duration::from_micros(1000)));
        (0..2).for_each(|_| lags.note(Duration::from_millis(100)));
        let told = lags.told();
        assert_eq!((told.misses, told.p50, told.max), (100, Duration::ZERO, Duration::from_millis(100)));
        assert!((1000..=1280).contains(&told.p95.as_micros()), "{told:?}");
    }
}

#[cfg(test)]
mod waits_tests {
    use super::super::fixture::{OWN, Parts};
    use super::*;

    #[test]
    fn waits_are_timed_up_to_so_many_and_counted_beyond() {
        let parts = Parts::new();
        let timer = WaitTimer::new(parts.driver.clone(), OWN);
        let stream = &parts.stream;
        let time = Duration::from_millis(1);
        parts.sim.enqueue_kernel(OWN, stream.id(), &[], &[], time, |_| {}).unwrap();
        for _ in 0..=MAX_TIMED_WAITS {
            timer.end(timer.begin(stream.id()), stream.id());
        }
        assert_eq!((timer.told().count, timer.told().timed), (MAX_TIMED_WAITS as u64 + 1, 0), "none is over");
        stream.synchronize().unwrap();
        assert_eq!(timer.told().timed, MAX_TIMED_WAITS as u64);
        timer.reset();
        assert_eq!(timer.told(), GpuWaits::default());
    }

    #[test]
    fn a_wait_takes_as_long_as_what_is_between_its_events() {
        let parts = Parts::new();
        let timer = WaitTimer::new(parts.driver.clone(), OWN);
        let stream = &parts.stream;
        let pair = timer.begin(stream.id());
        let time = Duration::from_millis(3);
        parts.sim.enqueue_kernel(OWN, stream.id(), &[], &[], time, |_| {}).unwrap();
        timer.end(pair, stream.id());
        stream.synchronize().unwrap();
        let told = timer.told();
        assert!(told.timed == 1 && told.time >= time, "{told:?}");
        assert_eq!((timer.made(), timer.time_of(stream.id(), &(0..1))), (1, told.time));
        let none = [timer.time_of(stream.id(), &(1..2)), timer.time_of(Stream(7), &(0..1))];
        assert_eq!(none, [Duration::ZERO; 2]);
    }
}
