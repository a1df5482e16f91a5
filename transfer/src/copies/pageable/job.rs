//! One pageable copy in progress, and the helper threads. Threads take chunks from a shared counter, each through its own slots and path. They
//! are started on first use and sleep while idle.
//!
//! ```text
//!  to a GPU     source ──thread──► slot ──path──► memory        a slot is refilled once its copy is known to be complete
//!  from a GPU   memory ──path──► slot ──thread──► target        stored past the caches
//! ```
//!
//! Invariants:
//! - A chunk counts as arrived only when its own copy completed without an error. Otherwise it is left to the caller.
//! - A slot that work may still access is not touched. If the completion cannot be detected, the slot is never used again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, unbounded};
use glake_device::owned::{DeviceSet, Span};
use glake_device::{DeviceId, DriverError};
use glake_units::Bytes;
use parking_lot::{Condvar, Mutex};
use smallvec::SmallVec;

use crate::copies::pageable::staging::{SLOTS, Slot, StagingBuffers};
use crate::copies::shared::Route;
use crate::links::lane::StagingStream;
use crate::links::relays::Relays;
use crate::paths::Direction;

pub(crate) struct Job {
    relays: Arc<Relays>,
    staging: Arc<StagingBuffers>,
    to: Span,
    from: Span,
    route: Route,
    /// GPUs whose links the copy uses.
    paths: SmallVec<[DeviceId; 8]>,
    chunk: Bytes,
    /// Offset of the next chunk.
    next: AtomicU64,
    /// Number of threads that have joined.
    threads: AtomicUsize,
    /// Bit set of paths found lost.
    dead: AtomicU64,
    outcome: Mutex<Outcome>,
    ended: Condvar,
}

/// Result of a pageable copy.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// Bytes of chunks that arrived or failed.
    settled: Bytes,
    /// Chunks that must be copied on another path.
    pub(crate) left: Vec<Chunk>,
    /// Bytes and number of copies that arrived on each path.
    pub(crate) carried: SmallVec<[(DeviceId, Bytes, u64); 8]>,
    /// Error of the driver if work on the target may still be in progress and its end cannot be detected.
    pub(crate) unjoined: Option<DriverError>,
    /// Streams and slots of that work; the slots' events mark its end.
    pub(crate) unjoined_on: Vec<(Arc<StagingStream>, usize)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) offset: Bytes,
    pub(crate) size: Bytes,
}

/// Chunk in flight in a slot.
struct Flight<'a> {
    chunk: Chunk,
    slot: &'a Slot,
    path: DeviceId,
    staging_stream: Arc<StagingStream>,
    /// Whether an event marks the chunk's end. If not, the thread has synchronized its stream.
    marked: bool,
}

/// Outcome of waiting for work.
enum End {
    Done,
    /// The GPU is lost and runs no more work.
    Lost,
    Unknown(DriverError),
}

impl Job {
    pub(crate) fn new(
        relays: &Arc<Relays>,
        staging: &Arc<StagingBuffers>,
        ends: (&Span, &Span),
        route: Route,
        paths: SmallVec<[DeviceId; 8]>,
    ) -> Job {
        let (to, from) = (ends.0.clone(), ends.1.clone());
        let chunk = chunk(to.size(), staging.threads(), staging.slot());
        Job {
            relays: relays.clone(),
            staging: staging.clone(),
            to,
            from,
            route,
            paths,
            chunk,
            next: AtomicU64::new(0),
            threads: AtomicUsize::new(0),
            dead: AtomicU64::new(0),
            outcome: Mutex::default(),
            ended: Condvar::new(),
        }
    }

    /// Returns the number of threads that have work.
    pub(crate) fn width(&self) -> usize {
        let chunks = self.to.size().get().div_ceil(self.chunk.get().max(1));
        self.staging.threads().min(usize::try_from(chunks).unwrap_or(usize::MAX))
    }

    /// Blocks until no thread works on the copy. Chunks that no thread took are left over.
    pub(crate) fn finish(&self) -> Outcome {
        while let Some(chunk) = self.claim() {
            self.settle(chunk, None);
        }
        let mut outcome = self.outcome.lock();
        while outcome.settled < self.to.size() {
            self.ended.wait(&mut outcome);
        }
        std::mem::take(&mut outcome)
    }

    fn claim(&self) -> Option<Chunk> {
        let size = self.to.size();
        // Stops where all is taken, so that it never wraps.
        if self.next.load(Ordering::Relaxed) >= size.get() {
            return None;
        }
        let offset = Bytes::new(self.next.fetch_add(self.chunk.get(), Ordering::Relaxed));
        let left = size.saturating_sub(offset);
        (!left.is_zero()).then(|| Chunk { offset, size: self.chunk.min(left) })
    }

    /// Records a chunk as arrived over a path, or as left over (`None`).
    fn settle(&self, chunk: Chunk, path: Option<DeviceId>) {
        let mut outcome = self.outcome.lock();
        match path {
            None => outcome.left.push(chunk),
            Some(path) => match outcome.carried.iter_mut().find(|(known, ..)| *known == path) {
                Some((_, bytes, copies)) => {
                    *bytes = bytes.saturating_add(chunk.size);
                    *copies += 1;
                }
                None => outcome.carried.push((path, chunk.size, 1)),
            },
        }
        outcome.settled = outcome.settled.saturating_add(chunk.size);
        if outcome.settled >= self.to.size() {
            self.ended.notify_all();
        }
    }

    /// Starts a chunk over the thread's own path or another one; `None` if no path accepts it.
    fn launch<'a>(&'a self, chunk: Chunk, slot: &'a Slot, thread: usize) -> Option<Flight<'a>> {
        let held = slot.memory.part(Bytes::ZERO, chunk.size)?;
        let (to, from) = match self.route.direction {
            Direction::ToGpu => {
                self.from.part(chunk.offset, chunk.size)?.copy_on_host(&held).ok()?;
                (self.to.part(chunk.offset, chunk.size)?, held)
            }
            Direction::FromGpu => (held, self.from.part(chunk.offset, chunk.size)?),
        };
        let count = self.paths.len();
        for path in (0..count).map(|step| self.paths[(thread + step) % count]) {
            let staging_stream =
                self.staging.staging_stream(self.route.target, path).filter(|_| !self.is_dead(path));
            let Some(staging_stream) = staging_stream else { continue };
            let (stream, done) = (staging_stream.stream.id(), staging_stream.done.get(slot.index)?);
            if let Err(error) = staging_stream.stream.of().copy(&to, &from) {
                self.blame(path, &error);
                continue;
            }
            let marked = done.record(stream).or_else(|_| done.record(stream)).is_ok();
            return Some(Flight { chunk, slot, path, staging_stream, marked });
        }
        None
    }

    /// Waits for a chunk's copy and drains its slot.
    fn land(&self, flight: &Flight<'_>) {
        let Flight { chunk, slot, path, staging_stream, marked } = flight;
        let arrived = match self.end(staging_stream, slot, *path, *marked) {
            End::Done => self.route.direction == Direction::ToGpu || self.empty(*chunk, slot),
            End::Lost => false,
            End::Unknown(error) => {
                slot.lost.store(true, Ordering::Relaxed);
                if self.route.direction == Direction::ToGpu {
                    let mut outcome = self.outcome.lock();
                    outcome.unjoined = Some(error);
                    outcome.unjoined_on.push((staging_stream.clone(), slot.index));
                }
                false
            }
        };
        self.settle(*chunk, arrived.then_some(*path));
    }

    /// Copies bytes that arrived in a slot to their destination.
    fn empty(&self, chunk: Chunk, slot: &Slot) -> bool {
        let ends = (slot.memory.part(Bytes::ZERO, chunk.size), self.to.part(chunk.offset, chunk.size));
        let (Some(held), Some(to)) = ends else { return false };
        held.copy_on_host_uncached(&to).is_ok()
    }

    fn end(&self, staging_stream: &StagingStream, slot: &Slot, path: DeviceId, marked: bool) -> End {
        let by_event = || staging_stream.done.get(slot.index).map(|done| done.synchronize());
        let mut last = None;
        for attempt in 0..4 {
            // A stream covers more than one slot's work: only where the event does not answer.
            let waited =
                if marked && attempt < 2 { by_event() } else { Some(staging_stream.stream.synchronize()) };
            match waited {
                Some(Ok(())) => return End::Done,
                Some(Err(error)) if error.is_sticky() => {
                    self.blame(path, &error);
                    return End::Lost;
                }
                Some(Err(error)) => last = Some(error),
                None => {}
            }
        }
        last.map_or(End::Lost, End::Unknown)
    }

    fn is_dead(&self, path: DeviceId) -> bool {
        DeviceSet::from_bits(self.dead.load(Ordering::Relaxed)).contains(path)
    }

    fn blame(&self, path: DeviceId, error: &DriverError) {
        tracing::debug!(target: "glake::transfer", %path, %error, "a part of a pageable copy goes another way");
        if error.is_sticky() {
            self.dead.fetch_or(DeviceSet::of(path).bits(), Ordering::Relaxed);
            self.relays.fence(path);
        }
    }
}

impl Work for Job {
    fn help(&self) {
        let thread = self.threads.fetch_add(1, Ordering::Relaxed);
        let slots = self.staging.slots_of(thread);
        let mut flights: SmallVec<[Option<Flight<'_>>; SLOTS]> = slots.iter().map(|_| None).collect();
        for prioritized in (0..slots.len()).cycle() {
            if let Some(flight) = flights[prioritized].take() {
                self.land(&flight);
            }
            let usable = !slots[prioritized].lost.load(Ordering::Relaxed);
            if !usable && slots.iter().all(|slot| slot.lost.load(Ordering::Relaxed)) {
                break;
            }
            if !usable {
                continue;
            }
            let Some(chunk) = self.claim() else {
                // Those launched first land first.
                (1..slots.len()).for_each(|step| {
                    if let Some(flight) = flights[(prioritized + step) % slots.len()].take() {
                        self.land(&flight);
                    }
                });
                break;
            };
            flights[prioritized] = self.launch(chunk, slots[prioritized], thread);
            if flights[prioritized].is_none() {
                self.settle(chunk, None);
            }
        }
        for flight in flights.iter().flatten() {
            self.land(flight);
        }
    }
}

/// Returns the chunk size: a few chunks per thread, so that all threads and links stay busy until the end.
fn chunk(size: Bytes, threads: usize, slot: Bytes) -> Bytes {
    const LEAST: Bytes = Bytes::kib(256);
    let share = size.get() / (4 * threads.max(1) as u64);
    Bytes::new(share & !4095).max(LEAST).min(slot)
}

/// Work that several threads share until none is left.
pub(crate) trait Work: Send + Sync {
    fn help(&self);
}

/// Pool of helper threads in addition to the calling ones.
pub(crate) struct Threads {
    most: usize,
    running: Mutex<Option<Running>>,
}

struct Running {
    orders: Sender<Arc<dyn Work>>,
    threads: Vec<JoinHandle<()>>,
}

impl Threads {
    pub(crate) fn new(most: usize) -> Threads {
        Threads { most, running: Mutex::new(None) }
    }

    /// Wakes up to `helpers` threads and shares the work with them. If the system refuses threads, the caller does all of it.
    pub(crate) fn call(&self, work: &Arc<dyn Work>, helpers: usize) {
        if self.most == 0 {
            return;
        }
        let mut running = self.running.lock();
        let running = running.get_or_insert_with(|| start(self.most));
        for _ in 0..helpers.min(running.threads.len()) {
            // The receivers live as long as the threads.
            let _ = running.orders.send(work.clone());
        }
    }

    /// Stops the threads and waits for their end.
    pub(crate) fn stop(&self) {
        let Some(Running { orders, threads }) = self.running.lock().take() else { return };
        drop(orders);
        for thread in threads {
            let _ = thread.join();
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.stop();
    }
}

impl std::fmt::Debug for Threads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Threads").field("most", &self.most).finish_non_exhaustive()
    }
}

fn start(count: usize) -> Running {
    let (orders, inbox) = unbounded::<Arc<dyn Work>>();
    let spawn = |index| {
        let inbox: Receiver<Arc<dyn Work>> = inbox.clone();
        let thread = std::thread::Builder::new().name(format!("glake-pageable-{index}"));
        thread.spawn(move || inbox.iter().for_each(|work| work.help()))
    };
    let threads = (0..count).map_while(|index| match spawn(index) {
        Ok(thread) => Some(thread),
        Err(error) => {
            tracing::warn!(target: "glake::transfer", %error, "pageable copies have fewer threads");
            None
        }
    });
    Running { orders, threads: threads.collect() }
}

#[cfg(test)]
mod threads_tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    struct Meeting {
        all: Barrier,
        came: AtomicU32,
    }

    impl Work for Meeting {
        fn help(&self) {
            self.all.wait();
            self.came.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn all_threads_help_at_a_time_and_end_with_their_owner() {
        let threads = Threads::new(3);
        for _ in 0..2 {
            let meeting = Arc::new(Meeting { all: Barrier::new(4), came: AtomicU32::new(0) });
            let work: Arc<dyn Work> = meeting.clone();
            // More are asked for than there are.
            threads.call(&work, 9);
            work.help();
            while Arc::strong_count(&meeting) > 2 {
                std::thread::yield_now();
            }
            assert_eq!(meeting.came.load(Ordering::Relaxed), 4);
        }
        drop(threads);
        let nobody = Threads::new(0);
        let meeting: Arc<dyn Work> = Arc::new(Meeting { all: Barrier::new(2), came: AtomicU32::new(0) });
        nobody.call(&meeting, 5);
        assert_eq!(Arc::strong_count(&meeting), 1);
    }
}
