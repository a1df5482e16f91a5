//! Barriers in front of the slices of background copies. Other copies close them while they run.
//!
//! ```text
//!   background  ──fork──┤barrier│slice├┤barrier│slice├┤barrier ················· │slice├──join──
//!   another                           ──fork──┤shut│ its share │open├──join──
//! ```
//!
//! A barrier is a word of pinned memory for a link and a direction, [`OPEN`] or closed. All slices of a background copy are enqueued by its
//! call, because the user's stream waits for them: enqueuing them later from a thread could be blocked indefinitely by a driver call that
//! waits for the device while it holds a lock, or by a hardware queue that two streams share.
//!
//! Invariants:
//! - Every closed barrier is opened by work enqueued together with the work that closed it. If that work is stuck behind a waiting slice in
//!   a shared queue, the watch thread opens it.
//! - The watch makes no driver call, so that it cannot be blocked. It sleeps while no background copy is in flight and every closed barrier
//!   is opened by enqueued work.
//!
//! Background copies also yield on the host: the driver's locks favour the thread that calls most often, which is a background copy with two
//! calls per slice. Therefore it makes no call while another copy is being enqueued (an urgent call).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use glake_device::owned::{CompletionEvents, Flag, StreamRef};
use glake_device::{Compare, DeviceId};
use glake_units::Bytes;
use parking_lot::{Condvar, Mutex};
use tracing::debug;

use crate::Result;
use crate::paths::{Direction, MOST_GPUS};

/// Value of an open barrier.
const OPEN: u32 = 0;
/// Lowest bit of the serial number in the value of a closed barrier. The bits below hold the number of additional looks, beyond
/// [`LOOKS_BEFORE_OPENING`], that the watch grants the copy, plus one. They are part of the value because streams close barriers too.
const SERIAL: u32 = 12;
const MOST_LOOKS: u32 = (1 << SERIAL) - 1;
/// Maximum number of tracked background copies. Other copies close no barriers for further ones.
const TICKETS: u32 = 32;
/// Time after the end of a background or other copy during which another one is expected.
const LINGER: Duration = Duration::from_millis(100);
/// Interval of the watch while background copies are in flight.
const LOOK: Duration = Duration::from_millis(10);
/// Number of consecutive looks at which a barrier closed by the same copy is forced open, in addition to the looks granted for its bytes.
const LOOKS_BEFORE_OPENING: u32 = 20;
/// Bytes of a copy per additional look: 4 GB/s, less than any link worth lending.
const BYTES_A_LOOK: u64 = 40_000_000;

/// Barriers of all links.
#[derive(Debug)]
pub(crate) struct Barriers {
    shared: Arc<Shared>,
    watch: Mutex<Option<JoinHandle<()>>>,
}

/// Tracked background copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticket {
    place: usize,
    generation: u32,
}

#[derive(Debug)]
struct Shared {
    /// Two barriers per device, indexed by direction.
    barriers: Vec<Flag>,
    /// Generation of the last copy of each slot that has ended.
    ends: Vec<Flag>,
    /// Whether background copies are in flight or expected, as of the last look.
    needed: AtomicBool,
    urgent_calls: UrgentCalls,
    /// Number of times a barrier was closed.
    shut: AtomicU32,
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Debug)]
struct State {
    /// Generation of the copy in each slot, and whether it was in flight at the last look.
    places: Vec<(u32, bool)>,
    /// Time at which the end of the last background copy was detected.
    last: Option<Instant>,
    /// Bit set of barriers that a stream may still close and the watch must open, because the call that should open them failed.
    owed: u64,
    stopped: bool,
}

impl Barriers {
    /// Creates open barriers in pinned memory.
    pub(crate) fn new(completion_events: &Arc<CompletionEvents>) -> Result<Barriers> {
        let count = u32::try_from(2 * MOST_GPUS).unwrap_or(u32::MAX);
        let mut barriers = Flag::several(completion_events, count + TICKETS)?;
        let ends = barriers.split_off(2 * MOST_GPUS);
        let places = ends.iter().map(|_| (0, false)).collect();
        let state = Mutex::new(State { places, last: None, owed: 0, stopped: false });
        let shared = Shared {
            barriers,
            ends,
            needed: AtomicBool::new(false),
            urgent_calls: UrgentCalls::new(),
            shut: AtomicU32::new(0),
            state,
            wake: Condvar::new(),
        };
        Ok(Barriers { shared: Arc::new(shared), watch: Mutex::default() })
    }

    /// Registers a background copy that is about to be enqueued. `None` if it is not tracked: there are too many, the watch thread cannot
    /// start, or the engine has stopped.
    pub(crate) fn begin_background(&self) -> Option<Ticket> {
        if !self.is_watched() {
            return None;
        }
        let mut state = self.shared.state.lock();
        if state.stopped {
            return None;
        }
        self.shared.look(&mut state);
        let place = state.places.iter().position(|(_, under_way)| !under_way)?;
        let (generation, under_way) = &mut state.places[place];
        *generation = generation.wrapping_add(1);
        *under_way = true;
        let ticket = Ticket { place, generation: *generation };
        self.shared.needed.store(true, Ordering::Relaxed);
        self.shared.wake.notify_one();
        Some(ticket)
    }

    /// Records the end of a background copy at the current end of a stream. If that fails, the copy counts as ended.
    pub(crate) fn end_background_on(&self, ticket: Ticket, on: StreamRef<'_>) {
        let Some(end) = self.shared.ends.get(ticket.place) else { return };
        let tell = || end.set_on(on, ticket.generation);
        if let Err(error) = tell().or_else(|_| tell()) {
            debug!(target: "glake::transfer", %error, "a background copy is no longer counted");
            end.set(ticket.generation);
        }
    }

    /// Ends a background copy that was not enqueued or whose end no stream reports.
    pub(crate) fn end_background(&self, ticket: Ticket) {
        if let Some(end) = self.shared.ends.get(ticket.place) {
            end.set(ticket.generation);
        }
    }

    /// Makes a slice of a background copy wait until the barrier of its link is open.
    pub(crate) fn await_on(&self, direction: Direction, on: StreamRef<'_>) -> glake_device::Result<()> {
        match self.shared.barrier(on.device(), direction) {
            Some(barrier) => barrier.await_on(on, OPEN, Compare::Equal),
            None => Ok(()),
        }
    }

    /// Returns whether background copies are in flight or expected, so that other copies close barriers. One load if there never were any.
    pub(crate) fn is_needed(&self) -> bool {
        if !self.shared.needed.load(Ordering::Relaxed) {
            return false;
        }
        // Who has it looks just now. To be woken from a wait for it took a copy 60 us and more.
        let Some(mut state) = self.shared.state.try_lock() else { return true };
        self.shared.look(&mut state);
        let expected = state.last.is_some_and(|last| last.elapsed() < LINGER);
        let needed = !state.stopped && (expected || !state.is_idle());
        self.shared.needed.store(needed, Ordering::Relaxed);
        needed
    }

    /// Announces a copy with priority over background copies; `None` if there were none at the last look.
    pub(crate) fn urgent_call(&self) -> Option<UrgentCall<'_>> {
        self.shared.needed.load(Ordering::Relaxed).then(|| self.shared.urgent_calls.begin())
    }

    /// Returns whether copies with priority over background ones arrive continually.
    pub(crate) fn have_urgent_calls(&self) -> bool {
        self.shared.urgent_calls.were_here(LINGER)
    }

    /// Yields to urgent calls before a driver call of a background copy.
    pub(crate) fn yield_to_urgent(&self) {
        self.shared.urgent_calls.yield_to_them();
    }

    /// Closes the barrier of a link immediately, for a copy of at most `size` bytes there. Only for work that cannot be delayed and that
    /// opens the barrier.
    pub(crate) fn shut(&self, link: DeviceId, direction: Direction, size: Bytes) {
        if let Some(barrier) = self.shared.barrier(link, direction) {
            barrier.set(self.shared.shut_by(size));
        }
    }

    /// Opens a barrier immediately.
    pub(crate) fn open(&self, link: DeviceId, direction: Direction) {
        if let Some(barrier) = self.shared.barrier(link, direction) {
            barrier.set(OPEN);
        }
    }

    /// Closes the barrier of a link at the current end of a stream, for a copy of at most `size` bytes there. The caller must open it
    /// again.
    pub(crate) fn shut_on(
        &self,
        direction: Direction,
        on: StreamRef<'_>,
        size: Bytes,
    ) -> glake_device::Result<()> {
        match self.shared.barrier(on.device(), direction) {
            Some(barrier) => barrier.set_on(on, self.shared.shut_by(size)),
            None => Ok(()),
        }
    }

    /// Opens the barrier of a link at the current end of a stream, or immediately if that cannot be enqueued. If it is closed afterwards,
    /// the watch opens it.
    pub(crate) fn open_on(&self, direction: Direction, on: StreamRef<'_>) {
        let Some(barrier) = self.shared.barrier(on.device(), direction) else { return };
        let open = || barrier.set_on(on, OPEN);
        if open().or_else(|_| open()).is_err() {
            barrier.set(OPEN);
            self.owe(on.device(), direction);
        }
    }

    /// Makes the watch open the barrier of a link after a stream has closed it.
    fn owe(&self, link: DeviceId, direction: Direction) {
        if let Some(index) = self.shared.index(link, direction)
            && self.is_watched()
        {
            self.shared.state.lock().owed |= 1 << index;
            self.shared.wake.notify_one();
        }
    }

    /// Stops the watch once background copies in flight have ended. Later copies close no barriers.
    pub(crate) fn stop(&self) {
        let idle = {
            let mut state = self.shared.state.lock();
            state.stopped = true;
            self.shared.needed.store(false, Ordering::Relaxed);
            self.shared.look(&mut state);
            state.is_idle()
        };
        self.shared.wake.notify_one();
        if let Some(watch) = self.watch.lock().take().filter(|_| idle) {
            // Its end is all that is waited for: a thread that panicked has ended too.
            let _ = watch.join();
        }
    }

    /// Returns whether the watch runs, and starts it on the first call.
    fn is_watched(&self) -> bool {
        let mut watch = self.watch.lock();
        if watch.is_none() && !self.shared.state.lock().stopped {
            let shared = self.shared.clone();
            let named = std::thread::Builder::new().name("glake-barriers".to_owned());
            *watch = named.spawn(move || shared.watch()).ok();
        }
        watch.is_some()
    }
}

impl State {
    /// Returns whether no background copy is in flight.
    fn is_idle(&self) -> bool {
        !self.places.iter().any(|(_, under_way)| *under_way)
    }
}

impl Drop for Barriers {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn barrier(&self, link: DeviceId, direction: Direction) -> Option<&Flag> {
        self.barriers.get(self.index(link, direction)?)
    }

    fn index(&self, link: DeviceId, direction: Direction) -> Option<usize> {
        let index = 2 * usize::try_from(link.0).ok()? + direction.index();
        (index < self.barriers.len()).then_some(index)
    }

    /// Returns the value of a barrier closed by a copy, distinct from an open one and among many copies.
    fn shut_by(&self, size: Bytes) -> u32 {
        let looks = u32::try_from(size.get() / BYTES_A_LOOK).unwrap_or(u32::MAX);
        let looks = looks.saturating_add(1).min(MOST_LOOKS);
        self.shut.fetch_add(1, Ordering::Relaxed) << SERIAL | looks
    }

    /// Records which copies have ended.
    fn look(&self, state: &mut State) {
        let mut ended = false;
        for ((generation, under_way), end) in state.places.iter_mut().zip(&self.ends) {
            if *under_way && end.get() == *generation {
                *under_way = false;
                ended = true;
            }
        }
        if ended {
            state.last = Some(Instant::now());
        }
    }

    fn watch(&self) {
        // The value of each at the last look, and in how many looks in a row it was that.
        let mut seen = vec![(OPEN, 0_u32); self.barriers.len()];
        let mut state = self.state.lock();
        loop {
            self.look(&mut state);
            let shut = self.barriers.iter().any(|barrier| barrier.get() != OPEN);
            if state.is_idle() && !shut && (state.stopped || state.owed == 0) {
                if state.stopped {
                    return;
                }
                self.wake.wait(&mut state);
                continue;
            }
            for (index, (barrier, (value, looks))) in self.barriers.iter().zip(&mut seen).enumerate() {
                let now = barrier.get();
                *looks = if now == *value { looks.saturating_add(1) } else { 1 };
                *value = now;
                if now != OPEN && *looks >= LOOKS_BEFORE_OPENING + (now & MOST_LOOKS) {
                    barrier.set(OPEN);
                    state.owed &= !(1 << index);
                }
            }
            // Whoever enters while it looks need not wake it.
            self.wake.wait_for(&mut state, LOOK);
        }
    }
}

/// Maximum time that a slice yields. Other calls take about 20 us; if one waits for a lock held by the background copy's thread, it
/// continues after this time.
const LONGEST_YIELD: Duration = Duration::from_micros(200);

/// Urgent calls of an engine.
#[derive(Debug)]
pub(crate) struct UrgentCalls {
    now: AtomicU32,
    /// Time of the last call, in milliseconds since `begun`; 0: none so far.
    last: AtomicU64,
    begun: Instant,
}

/// Urgent call in progress; dropping it ends the call.
#[derive(Debug)]
pub(crate) struct UrgentCall<'a>(&'a UrgentCalls);

impl UrgentCalls {
    pub(crate) fn new() -> UrgentCalls {
        UrgentCalls { now: AtomicU32::new(0), last: AtomicU64::new(0), begun: Instant::now() }
    }

    /// Begins an urgent call.
    pub(crate) fn begin(&self) -> UrgentCall<'_> {
        self.now.fetch_add(1, Ordering::Relaxed);
        self.last.store(self.milliseconds(), Ordering::Relaxed);
        UrgentCall(self)
    }

    /// Returns whether a call was made within a period.
    pub(crate) fn were_here(&self, within: Duration) -> bool {
        let last = self.last.load(Ordering::Relaxed);
        last > 0 && u128::from(self.milliseconds().saturating_sub(last)) < within.as_millis()
    }

    /// Yields until urgent calls have ended, at most for [`LONGEST_YIELD`].
    pub(crate) fn yield_to_them(&self) {
        if self.now.load(Ordering::Relaxed) == 0 {
            return;
        }
        let begin = Instant::now();
        while self.now.load(Ordering::Relaxed) > 0 && begin.elapsed() < LONGEST_YIELD {
            std::thread::yield_now();
        }
    }

    /// Returns the milliseconds since creation, plus 1.
    fn milliseconds(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX).saturating_add(1)
    }
}

impl Drop for UrgentCall<'_> {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use glake_device::Driver;
    use glake_device::EventKind;
    use glake_device::owned::{OwnedEvent, OwnedStream};
    use glake_sim::{Census, SimOptions, Simulator};

    use super::*;

    const GPU: DeviceId = DeviceId(0);

    struct Fixture {
        sim: Arc<Simulator>,
        barriers: Barriers,
        background: OwnedStream,
        critical: OwnedStream,
        passed: OwnedEvent,
    }

    fn fixture() -> Fixture {
        let sim = Arc::new(Simulator::new(SimOptions::default()).unwrap());
        let driver: Arc<dyn Driver> = sim.clone();
        let completion_events = CompletionEvents::new(driver.clone());
        Fixture {
            barriers: Barriers::new(&completion_events).unwrap(),
            background: OwnedStream::new(&driver, GPU).unwrap(),
            critical: OwnedStream::new(&driver, GPU).unwrap(),
            passed: OwnedEvent::new(&driver, GPU, EventKind::Plain).unwrap(),
            sim,
        }
    }

    impl Fixture {
        fn work(&self, stream: &OwnedStream) {
            self.sim.enqueue_kernel(GPU, stream.id(), &[], &[], Duration::from_micros(10), |_| {}).unwrap();
        }

        /// Waits for the background's event and returns the elapsed time.
        fn until_passed(&self) -> Duration {
            let since = Instant::now();
            while !self.passed.is_passed().unwrap() {
                assert!(since.elapsed() < Duration::from_secs(5));
                self.sim.step();
                std::thread::sleep(Duration::from_millis(1));
            }
            since.elapsed()
        }

        fn slice(&self) {
            self.barriers.await_on(Direction::ToGpu, self.background.of()).unwrap();
            self.work(&self.background);
        }
    }

    #[test]
    fn slices_wait_while_a_critical_copy_runs() {
        let fixture = fixture();
        assert!(!fixture.barriers.is_needed());
        let ticket = fixture.barriers.begin_background().unwrap();
        assert!(fixture.barriers.is_needed());
        for _ in 0..4 {
            fixture.slice();
        }
        fixture.barriers.end_background_on(ticket, fixture.background.of());
        fixture.passed.record(fixture.background.id()).unwrap();
        fixture.barriers.shut_on(Direction::ToGpu, fixture.critical.of(), Bytes::mib(1)).unwrap();
        for _ in 0..3 {
            fixture.work(&fixture.critical);
        }
        fixture.barriers.open_on(Direction::ToGpu, fixture.critical.of());
        fixture.passed.synchronize().unwrap();
        // One slice had begun; the others came after the critical copy.
        assert_eq!(fixture.sim.now(), Duration::from_micros(10 + 20 + 30));
        assert!(fixture.barriers.is_needed(), "the next one is expected");
        std::thread::sleep(LINGER);
        // The watch may look just now.
        let is_over = |_| {
            std::thread::sleep(Duration::from_millis(1));
            !fixture.barriers.is_needed()
        };
        assert!((0..1000).any(is_over));
        let Fixture { sim, barriers, .. } = fixture;
        drop(barriers);
        drop((fixture.background, fixture.critical, fixture.passed));
        assert_eq!(sim.census(), Census::default());
    }

    #[test]
    fn a_barrier_that_nobody_opens_is_opened_by_the_watch() {
        let fixture = fixture();
        let ticket = fixture.barriers.begin_background().unwrap();
        fixture.barriers.shut_on(Direction::ToGpu, fixture.critical.of(), Bytes::mib(1)).unwrap();
        fixture.slice();
        fixture.barriers.end_background_on(ticket, fixture.background.of());
        fixture.passed.record(fixture.background.id()).unwrap();
        assert!(fixture.until_passed() >= LOOK * (LOOKS_BEFORE_OPENING - 1));
    }

    /// Work on no stream: the copy's end cannot be recorded, so that it counts as ended, and the barrier closes late.
    #[test]
    fn a_barrier_is_opened_for_copies_that_do_not_count() {
        let fixture = fixture();
        let ticket = fixture.barriers.begin_background().unwrap();
        fixture.barriers.end_background(ticket);
        // The watch sees that it has ended, and sleeps.
        std::thread::sleep(5 * LOOK);
        fixture.work(&fixture.critical);
        fixture.barriers.shut_on(Direction::ToGpu, fixture.critical.of(), Bytes::mib(1)).unwrap();
        // What else could not be enqueued.
        fixture.barriers.open(GPU, Direction::ToGpu);
        fixture.barriers.owe(GPU, Direction::ToGpu);
        fixture.critical.synchronize().unwrap();
        fixture.slice();
        fixture.passed.record(fixture.background.id()).unwrap();
        fixture.until_passed();
    }

    /// Returns how long a barrier closed for a copy of `size` stays closed if no work opens it.
    fn shut_for(fixture: &Fixture, size: Bytes) -> Duration {
        let ticket = fixture.barriers.begin_background().unwrap();
        fixture.barriers.shut(GPU, Direction::ToGpu, size);
        let since = Instant::now();
        let barrier = fixture.barriers.shared.barrier(GPU, Direction::ToGpu).unwrap();
        while barrier.get() != OPEN {
            assert!(since.elapsed() < Duration::from_secs(20), "the watch opens it some time");
            std::thread::sleep(Duration::from_millis(1));
        }
        fixture.barriers.end_background(ticket);
        since.elapsed()
    }

    #[test]
    fn a_barrier_stays_shut_for_as_long_as_its_copy_may_take() {
        let fixture = fixture();
        // At 4 GB/s: 0.6 s beyond the 0.2 that every copy has.
        assert!(shut_for(&fixture, Bytes::new(2_400_000_000)) >= Duration::from_millis(750));
        assert!(shut_for(&fixture, Bytes::mib(1)) >= LOOK * (LOOKS_BEFORE_OPENING - 1));
        // Copies that follow each other shut it anew, each for its own time.
        let ticket = fixture.barriers.begin_background().unwrap();
        let barrier = fixture.barriers.shared.barrier(GPU, Direction::ToGpu).unwrap();
        for _ in 0..12 {
            fixture.barriers.shut(GPU, Direction::ToGpu, Bytes::mib(1));
            std::thread::sleep(LOOK * 5);
            assert_ne!(barrier.get(), OPEN);
        }
        fixture.barriers.open(GPU, Direction::ToGpu);
        fixture.barriers.end_background(ticket);
        // No size, and no number of copies, is an open barrier.
        for size in [Bytes::ZERO, Bytes::MAX] {
            assert_ne!(fixture.barriers.shared.shut_by(size), OPEN);
        }
    }

    #[test]
    fn stopping_ends_the_watch_and_shuts_nothing_any_more() {
        let fixture = fixture();
        let ticket = fixture.barriers.begin_background().unwrap();
        fixture.barriers.stop();
        assert!(!fixture.barriers.is_needed() && fixture.barriers.begin_background().is_none());
        fixture.slice();
        fixture.barriers.end_background_on(ticket, fixture.background.of());
        fixture.background.synchronize().unwrap();
        fixture.barriers.stop();
    }

    #[test]
    fn more_copies_than_are_counted_do_no_harm() {
        let fixture = fixture();
        let tickets: Vec<Ticket> =
            (0..TICKETS).map(|_| fixture.barriers.begin_background().unwrap()).collect();
        assert!(fixture.barriers.begin_background().is_none());
        fixture.barriers.end_background_on(tickets[7], fixture.critical.of());
        assert!(fixture.barriers.begin_background().is_some_and(|ticket| ticket.place == 7));
    }
}

#[cfg(test)]
mod urgent_calls_tests {
    use super::*;

    #[test]
    fn slices_let_calls_pass_but_not_for_ever() {
        let urgent_calls = UrgentCalls::new();
        assert!(!urgent_calls.were_here(Duration::MAX));
        urgent_calls.yield_to_them();
        let call = urgent_calls.begin();
        let begin = Instant::now();
        urgent_calls.yield_to_them();
        assert!(begin.elapsed() >= LONGEST_YIELD);
        drop(call);
        urgent_calls.yield_to_them();
        assert_eq!(urgent_calls.now.load(Ordering::Relaxed), 0);
        assert!(urgent_calls.were_here(Duration::from_secs(60)));
        std::thread::sleep(Duration::from_millis(3));
        assert!(!urgent_calls.were_here(Duration::from_millis(1)));
    }

    #[test]
    fn a_slice_goes_on_when_the_last_call_has_ended() {
        let urgent_calls = UrgentCalls::new();
        std::thread::scope(|scope| {
            let first = urgent_calls.begin();
            let second = urgent_calls.begin();
            drop(first);
            scope.spawn(|| {
                std::thread::sleep(Duration::from_micros(50));
                drop(second);
            });
            urgent_calls.yield_to_them();
        });
        assert_eq!(urgent_calls.now.load(Ordering::Relaxed), 0);
    }
}
