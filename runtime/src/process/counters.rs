//! The writer of this process's counters page, which other processes of its user read without an agent.
//!
//! ```text
//! memory created or released ─► note ─► a ticker wakes ─┐
//! a ticker ticks, because blocks were freed ────────────┴► look: 100 ms after the first change ─► gather ─► page
//! ```
//!
//! Invariants: a hit never comes here. The page is written at most ten times a second, by the threads that poll completion points, and not
//! at all while nothing changes. It is written after a pause, so that what follows a change within 100 ms is in it too.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::Thread;
use std::time::{Duration, Instant};

use glake_device::DeviceId;
use glake_device::owned::SharedWords;
use glake_meter::ProcessStat;
use glake_tiers::{EvictedBytes, GpuPool};
use glake_transfer::Engine;
use glake_units::Bytes;
use glake_wire::{COUNTERS_WORDS, Counters, GpuCounters, PageError};
use parking_lot::Mutex;

use super::activity::now_ns;

/// Time from the first change to the write, and least time between two writes.
const INTERVAL: Duration = Duration::from_millis(100);

/// Publishes the counters of a process.
#[derive(Debug, Default)]
pub(super) struct CountersWriter {
    /// Name of the devices, such as `cuda`.
    backend: OnceLock<String>,
    /// Devices of the process, with their names in meters and their memory.
    devices: OnceLock<Vec<(DeviceId, String, Bytes)>>,
    /// Whether something has changed since the counters were gathered.
    has_changed: AtomicBool,
    /// Threads that look for changes, of which one is woken.
    lookers: Mutex<Vec<Thread>>,
    engine: Mutex<Weak<Engine>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    pools: Vec<Weak<GpuPool>>,
    page: Option<Page>,
    counters: Counters,
    /// Number of allocations in all pools at the last write; tells that a process works whose bytes are the same.
    allocations: u64,
    /// Time of the next write, if there is one.
    due: Option<Instant>,
}

#[derive(Debug)]
struct Page {
    /// Found by readers under `/proc/PID/fd`.
    _descriptor: OwnedFd,
    words: SharedWords,
}

impl CountersWriter {
    /// Sets the name of the devices.
    pub(super) fn belongs_to(&self, backend: &str) {
        let _ = self.backend.set(backend.to_owned());
    }

    /// Sets the devices, with their names in meters and their memory.
    pub(super) fn set_devices(&self, devices: impl Iterator<Item = (DeviceId, String, Bytes)>) {
        let _ = self.devices.set(devices.collect());
    }

    /// Adds the relays of an engine to the counters.
    pub(super) fn add_engine(&self, engine: &Arc<Engine>) {
        *self.engine.lock() = Arc::downgrade(engine);
    }

    /// Adds a started pool to the counters. Creates the page for the first one; without a page the process is not seen, and works.
    pub(super) fn add_pool(&self, pool: &Arc<GpuPool>) {
        let mut state = self.state.lock();
        state.pools.retain(|pool| pool.strong_count() > 0);
        state.pools.push(Arc::downgrade(pool));
        if state.page.is_none() {
            match open(self.backend.get().map_or("", String::as_str)) {
                Ok((page, counters)) => (state.page, state.counters) = (Some(page), counters),
                Err(error) => {
                    tracing::debug!(target: "glake::share", %error, "glake top does not see this process: it has no counters page");
                    return;
                }
            }
        }
        self.write(&mut state);
    }

    /// Registers the calling thread, which calls [`CountersWriter::look`] from now on.
    pub(super) fn looks(&self) {
        self.lookers.lock().push(std::thread::current());
    }

    /// Notes that memory was created or released. The caller may hold any lock except this writer's.
    pub(super) fn note(&self) {
        if !self.has_changed.swap(true, Ordering::AcqRel)
            && let Some(looker) = self.lookers.lock().first()
        {
            looker.unpark();
        }
    }

    /// Writes the page if that is due, and returns the time until it is. `has_ticked`: blocks were freed, or have passed.
    pub(super) fn look(&self, has_ticked: bool, now: Instant) -> Option<Duration> {
        if has_ticked {
            self.has_changed.store(true, Ordering::Release);
        }
        if !self.has_changed.load(Ordering::Acquire) {
            return None;
        }
        let mut state = self.state.lock();
        let due = *state.due.get_or_insert(now + INTERVAL);
        let rest = due.saturating_duration_since(now);
        if !rest.is_zero() {
            return Some(rest);
        }
        state.due = None;
        // Before the counters are gathered: later changes count again.
        self.has_changed.store(false, Ordering::Release);
        self.write(&mut state);
        None
    }

    fn write(&self, state: &mut State) {
        let engine = self.engine.lock().upgrade();
        let costs = engine.map(|engine| engine.relay_cost()).unwrap_or_default();
        let pools: Vec<Arc<GpuPool>> = state.pools.iter().filter_map(Weak::upgrade).collect();
        let (mut gpus, mut allocations) = (Vec::with_capacity(pools.len()), 0_u64);
        for (device, gpu, total) in self.devices.get().into_iter().flatten() {
            let pool = pools.iter().find(|pool| pool.device() == *device);
            let relays: Bytes = costs
                .iter()
                .filter(|cost| cost.relay == *device)
                .map(|cost| cost.context.saturating_add(cost.slots))
                .sum();
            if pool.is_none() && relays.is_zero() {
                continue;
            }
            let (of_pool, allocated) = pool.map(|pool| of_pool(pool)).unwrap_or_default();
            allocations = allocations.wrapping_add(allocated);
            gpus.push(GpuCounters { gpu: gpu.clone(), total: *total, relays, ..of_pool });
        }
        let State { page: Some(page), counters, allocations: before, .. } = state else { return };
        if gpus != counters.gpus || allocations != *before || counters.changed_ns == 0 {
            (counters.gpus, *before) = (gpus, allocations);
            counters.changed_ns = now_ns();
            counters.publish(page.words.words());
        }
    }
}

fn open(backend: &str) -> Result<(Page, Counters), PageError> {
    let pid = std::process::id();
    let start = ProcessStat::of(pid)?.start;
    let map = |file: std::os::fd::BorrowedFd<'_>| SharedWords::map(file, COUNTERS_WORDS);
    let (descriptor, words) = Counters::create_page(map)?;
    let counters = Counters { pid, start, backend: backend.to_owned(), ..Counters::default() };
    Ok((Page { _descriptor: descriptor, words }, counters))
}

/// Returns the counters of a pool, and the number of its allocations so far.
fn of_pool(pool: &GpuPool) -> (GpuCounters, u64) {
    let stats = pool.stats();
    let EvictedBytes { host, peers, files, discarded, copied_out, copied_back } = pool.report().evicted();
    let counters = GpuCounters {
        reserved: Bytes::new(stats.all.reserved_bytes.current),
        live: Bytes::new(stats.all.allocated_bytes.current),
        waste_hard: stats.waste.hard,
        waste_soft: stats.waste.soft,
        waste_stream: stats.waste.stream,
        evicted_host: host,
        evicted_peers: peers,
        evicted_files: files,
        discarded,
        copied_out,
        copied_back,
        ..GpuCounters::default()
    };
    (counters, stats.all.allocation.allocated)
}

#[cfg(test)]
#[cfg(not(schedules))]
mod tests {
    use std::fs::File;
    use std::sync::atomic::AtomicU64;

    use glake_device::Stream;
    use glake_wire::CountersView;

    use super::*;
    use crate::config::{Environment, Sources};
    use crate::process::{Process, Refill, Shrink};

    const TIMEOUT: Duration = Duration::from_secs(60);

    fn started() -> Process {
        let environment = Environment::from_iter([("GLAKE_DEVICE", "sim:h200x4")]);
        Process::start(Sources { environment, ..Sources::default() }.load().unwrap()).unwrap()
    }

    /// Returns the page of this process that belongs to `process`.
    fn view(process: &Process) -> CountersView {
        let state = process.observers.counters.state.lock();
        let page = &state.page.as_ref().unwrap()._descriptor;
        CountersView::new(page.try_clone().unwrap()).unwrap()
    }

    fn until(view: &CountersView, so: impl Fn(&Counters) -> bool) -> Counters {
        let begin = Instant::now();
        loop {
            match view.read() {
                Ok(counters) if so(&counters) => return counters,
                seen => assert!(begin.elapsed() < TIMEOUT, "{seen:?}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn the_page_follows_the_pool_and_names_its_process() {
        let process = started();
        assert!(process.observers.counters.state.lock().page.is_none(), "no pool, no page");
        let block = process.malloc(1, Bytes::mib(40), Stream(0)).unwrap();
        let view = view(&process);
        let own = ProcessStat::of(std::process::id()).unwrap();
        let seen = until(&view, |seen| seen.gpus.first().is_some_and(|gpu| gpu.live == Bytes::mib(40)));
        assert_eq!(
            (seen.pid, seen.start, seen.backend.as_str()),
            (std::process::id(), own.start, "sim:h200x4")
        );
        assert_eq!((seen.gpus.len(), seen.gpus[0].gpu.as_str()), (1, "1"));
        assert!(seen.gpus[0].reserved >= Bytes::mib(40) && seen.gpus[0].total > Bytes::gib(100), "{seen:?}");
        let shrunk = process.regions().shrink(&Shrink::default()).unwrap();
        let seen = until(&view, |seen| seen.gpus[0].reserved.is_zero());
        let evicted = seen.gpus[0].evicted_host;
        assert!(evicted >= Bytes::mib(40) && seen.gpus[0].evicted() == evicted, "{seen:?} {shrunk:?}");
        assert!(seen.gpus[0].copied_out >= Bytes::mib(40), "{seen:?}");
        process.regions().refill(&Refill::default()).unwrap();
        let seen = until(&view, |seen| seen.gpus[0].evicted().is_zero() && seen.gpus[0].reserved == evicted);
        assert_eq!(seen.gpus[0].copied_back, seen.gpus[0].copied_out);
        process.free(block).unwrap();
        until(&view, |seen| seen.gpus[0].live.is_zero());
    }

    /// Hits change nothing; a change is written once, 100 ms later; and then no thread has anything to wait for.
    #[test]
    fn the_page_is_written_after_a_pause_and_only_after_a_change() {
        let process = started();
        process.stop();
        let block = process.malloc(0, Bytes::mib(40), Stream(0)).unwrap();
        process.free(block).unwrap();
        let counters = &process.observers.counters;
        let now = Instant::now();
        let later = |ms| now + Duration::from_millis(ms);
        counters.look(true, later(0));
        counters.look(true, later(1000));
        let (view, before) = (view(&process), view(&process).read().unwrap());
        let same = |what: &str| assert_eq!(view.read().unwrap(), before, "{what}");
        assert_eq!(counters.look(false, later(1000)), None);
        for _ in 0..100 {
            let block = process.malloc(0, Bytes::mib(40), Stream(0)).unwrap();
            assert_eq!(counters.look(false, later(2000)), None, "a hit and a free that no tick follows");
            process.free(block).unwrap();
        }
        same("hits do not write");
        assert_eq!(counters.look(true, later(3000)), Some(INTERVAL));
        assert_eq!(counters.look(true, later(3060)), Some(Duration::from_millis(40)));
        same("not yet");
        assert_eq!(counters.look(false, later(3100)), None);
        assert_ne!(view.read().unwrap(), before, "the process works");
        assert_eq!(counters.look(false, later(9000)), None);
        let before = view.read().unwrap();
        counters.note();
        assert_eq!(counters.look(false, later(9000)), Some(INTERVAL));
        assert_eq!(counters.look(false, later(9100)), None);
        assert_eq!(view.read().unwrap(), before, "nothing has changed: nothing is written");
    }

    #[test]
    fn a_reader_never_sees_a_partial_record() {
        let map = |file: std::os::fd::BorrowedFd<'_>| SharedWords::map(file, COUNTERS_WORDS);
        let (page, words) = Counters::create_page(map).unwrap();
        assert!(
            SharedWords::map(std::os::fd::AsFd::as_fd(&page), COUNTERS_WORDS).is_err(),
            "no second writer"
        );
        let view = CountersView::new(page).unwrap();
        let over = AtomicBool::new(false);
        let last = AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 1..4_000 {
                    let bytes = Bytes::new(number);
                    let gpu = GpuCounters { live: bytes, relays: bytes, ..GpuCounters::default() };
                    let gpus = vec![gpu; glake_wire::PAGE_GPUS];
                    Counters { start: number, changed_ns: number, gpus, ..Counters::default() }
                        .publish(words.words());
                    last.store(number, Ordering::Release);
                }
                over.store(true, Ordering::Release);
            });
            while !over.load(Ordering::Acquire) {
                let least = last.load(Ordering::Acquire);
                // The writer may be interrupted in the middle of a record.
                let Ok(seen) = view.read() else { continue };
                assert!(seen.start >= least, "{} after {least}", seen.start);
                let whole =
                    |gpu: &GpuCounters| (gpu.live.get(), gpu.relays.get()) == (seen.start, seen.start);
                assert!(seen.changed_ns == seen.start && seen.gpus.iter().all(whole), "{seen:?}");
            }
        });
        assert_eq!(view.read().unwrap().start, 3_999);
    }

    /// Rate of malloc and free pairs with the page, relative to the rate without: the median of rounds in turns.
    #[test]
    fn soak_pairs_are_as_fast_with_the_page_as_without() {
        const PAIRS: u32 = 20_000;
        if std::env::var_os("GLAKE_SOAK").is_none() {
            return;
        }
        let [with, without] = [started(), started()];
        let round = |process: &Process| {
            let begin = Instant::now();
            for _ in 0..PAIRS {
                process.free(process.malloc(0, Bytes::mib(20), Stream(0)).unwrap()).unwrap();
            }
            begin.elapsed().as_secs_f64()
        };
        let _ = (round(&with), round(&without));
        {
            let mut state = without.observers.counters.state.lock();
            (state.page, state.pools) = (None, Vec::new());
        }
        let page = view(&with);
        let before = page.read().unwrap();
        let mut rates: Vec<f64> = Vec::new();
        for number in 0..400 {
            let (one, other) = if number % 2 == 0 { (&with, &without) } else { (&without, &with) };
            let (one, other) = (round(one), round(other));
            rates.push(if number % 2 == 0 { other / one } else { one / other });
        }
        rates.sort_by(f64::total_cmp);
        let median = rates[rates.len() / 2];
        eprintln!(
            "pairs with the page / without: {median:.4} (quartiles {:.4} to {:.4})",
            rates[100], rates[300]
        );
        assert_ne!(page.read().unwrap().changed_ns, before.changed_ns, "the page is written meanwhile");
        assert!(median >= 0.99, "{median}");
    }

    /// The page of a process that lies about its size cannot be mapped.
    #[test]
    fn a_file_that_can_shrink_is_not_mapped() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        assert!(SharedWords::map(std::os::fd::AsFd::as_fd(&file), 1).is_err());
        let (page, ()) = Counters::create_page(|_| Ok(())).unwrap();
        assert!(SharedWords::map(std::os::fd::AsFd::as_fd(&page), 1000).is_err());
        assert!(File::from(page).set_len(1).is_err());
    }
}
