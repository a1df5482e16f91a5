//! Times of the steps of a pass, by events on its stream. Nothing waits for the events: they are read once they have passed.
//!
//! ```text
//! stream:  first pack ─ … ─ pack ─ … ─ unpack ─[wait for a copy]─ … ─ last drop
//! events:  begin            mark       before     the copy's end      mark
//! ```
//!
//! Further measurements for plans: bytes held by the pool and elsewhere on the GPU, rates of links, and room on the host.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use glake_device::owned::OwnedEvent;
use glake_device::{DeviceId, Driver, EventKind, Stream};
use glake_meter::{Meter as _, Nvml};
use glake_offload::{ItemId, Links, Measured, Position, ScopeId};
use glake_tiers::{AvailableMemory, GpuPool};
use glake_transfer::UserStream;
use glake_transfer::paths::{Direction, PathGraph};
use glake_units::{Bandwidth, Bytes};
use rustc_hash::FxHashMap;

use super::super::device::DeviceMemory;
use super::super::device_registry::DeviceRegistry;
use super::queue::{Moved, Queues};
use crate::sync::Mutex;

/// Maximum number of marks in a pass, and of each other timed kind. Steps after the last mark share its remaining time equally.
const MOST: usize = 8192;
/// Minimum bytes packed or unpacked between two marks.
const BETWEEN: Bytes = Bytes::mib(1);

/// Start and end event of a stretch of the stream's work.
type Stretch = (Arc<OwnedEvent>, Arc<OwnedEvent>);

/// Events of one pass.
#[derive(Debug)]
pub(super) struct PassTimer {
    driver: Arc<dyn Driver>,
    on: UserStream,
    events: Arc<Events>,
    begin: Arc<OwnedEvent>,
    marks: Vec<(Position, Arc<OwnedEvent>)>,
    waits: Vec<(Position, Stretch)>,
    leaves: Vec<(ItemId, Stretch)>,
    replays: Vec<(Position, ScopeId, Stretch)>,
    /// The stream's waits for memory before each step, by their numbers.
    memory: Vec<(Position, Range<u64>)>,
    /// Number of waits for memory so far.
    made: u64,
    leaf: Option<Arc<OwnedEvent>>,
    replay: Vec<(ScopeId, Arc<OwnedEvent>)>,
    /// Number of steps so far.
    steps: usize,
    since: Bytes,
}

/// Unused events for later passes.
#[derive(Debug, Default)]
pub(super) struct Events(Mutex<Vec<Arc<OwnedEvent>>>);

/// Passes that are timed, by the stream whose waits for copies they record.
#[derive(Debug, Default)]
pub(super) struct Timers {
    count: AtomicUsize,
    active: Mutex<Vec<Weak<Mutex<PassTimer>>>>,
    events: Arc<Events>,
}

impl Events {
    fn record(&self, driver: &Arc<dyn Driver>, on: UserStream) -> Option<Arc<OwnedEvent>> {
        let known = {
            let mut free = self.0.lock();
            let at =
                free.iter().rposition(|event| event.device() == on.device && Arc::strong_count(event) == 1);
            at.map(|at| free.swap_remove(at))
        };
        let event = match known {
            Some(event) => event,
            None => Arc::new(OwnedEvent::new(driver, on.device, EventKind::Timed).ok()?),
        };
        event.record(on.raw).ok()?;
        Some(event)
    }
}

impl Timers {
    /// Begins to time a pass; `None` if no event can be recorded.
    pub(super) fn begin(&self, driver: &Arc<dyn Driver>, on: UserStream) -> Option<Arc<Mutex<PassTimer>>> {
        let begin = self.events.record(driver, on)?;
        let (driver, events) = (driver.clone(), self.events.clone());
        let timer = Arc::new(Mutex::new(PassTimer {
            driver,
            on,
            events,
            begin,
            marks: Vec::new(),
            waits: Vec::new(),
            leaves: Vec::new(),
            replays: Vec::new(),
            memory: Vec::new(),
            made: 0,
            leaf: None,
            replay: Vec::new(),
            steps: 0,
            since: Bytes::ZERO,
        }));
        let mut active = self.active.lock();
        active.retain(|timer| timer.strong_count() > 0);
        active.push(Arc::downgrade(&timer));
        self.count.store(active.len(), Ordering::Relaxed);
        Some(timer)
    }

    /// Ends the timing of a pass.
    pub(super) fn end(&self, timer: &Arc<Mutex<PassTimer>>) {
        let mut active = self.active.lock();
        active.retain(|other| other.strong_count() > 0 && !Weak::ptr_eq(other, &Arc::downgrade(timer)));
        self.count.store(active.len(), Ordering::Relaxed);
    }

    /// Records that a stream is about to wait for a copy that ends with an event.
    pub(super) fn waits(&self, device: DeviceId, raw: Stream, copied: &Arc<OwnedEvent>) {
        if self.count.load(Ordering::Relaxed) == 0 {
            return;
        }
        let active: Vec<_> = self.active.lock().iter().filter_map(Weak::upgrade).collect();
        for timer in active {
            timer.lock().waits(device, raw, copied);
        }
    }
}

impl PassTimer {
    /// Begins a step that packs or unpacks `bytes`, after `made` waits for memory in total.
    pub(super) fn step(&mut self, bytes: Bytes, made: u64) {
        let before = std::mem::replace(&mut self.made, made);
        if self.steps > 0 && made > before && self.memory.len() < MOST {
            self.memory.push((Position(self.steps - 1), before..made));
        }
        self.since = self.since.saturating_add(bytes);
        if self.steps > 0 && self.since >= BETWEEN && self.marks.len() < MOST {
            self.mark();
        }
        self.steps += 1;
    }

    /// Undoes the last step, so that `steps` remain.
    pub(super) fn no_step(&mut self, steps: Position) {
        self.steps = steps.0;
    }

    /// Ends the pass. Returns whether its times will be known: the driver may refuse all events.
    pub(super) fn end(&mut self) -> bool {
        self.mark();
        !self.marks.is_empty()
    }

    /// Marks the start of a leaf.
    pub(super) fn leaf_begins(&mut self) {
        self.leaf = if self.leaves.len() < MOST { self.record() } else { None };
    }

    /// Marks the end of the most recent leaf: its output is packed.
    pub(super) fn leaf_ends(&mut self, item: ItemId) {
        if let Some(begin) = self.leaf.take()
            && let Some(end) = self.record()
        {
            self.leaves.push((item, (begin, end)));
        }
    }

    /// Marks the start or end of a scope's recomputation; `steps` is the number of steps for its saves.
    pub(super) fn replays(&mut self, scope: ScopeId, begins: bool, steps: usize) {
        self.steps = self.steps.max(steps);
        if begins && self.replays.len() + self.replay.len() >= MOST {
            return;
        }
        let Some(event) = self.record() else { return };
        if begins {
            self.replay.push((scope, event));
        } else if let Some(at) = self.replay.iter().rposition(|(other, _)| *other == scope) {
            let (_, begin) = self.replay.remove(at);
            let at = Position(self.steps.saturating_sub(1));
            self.replays.push((at, scope, (begin, event)));
        }
    }

    /// Returns the stream and its waits for memory before each step.
    pub(super) fn memory_waits(&self) -> (Stream, &[(Position, Range<u64>)]) {
        (self.on.raw, &self.memory)
    }

    fn waits(&mut self, device: DeviceId, raw: Stream, copied: &Arc<OwnedEvent>) {
        if self.on.device != device || self.on.raw != raw || self.waits.len() >= MOST {
            return;
        }
        if let Some(before) = self.record() {
            let at = Position(self.steps.saturating_sub(1));
            self.waits.push((at, (before, copied.clone())));
        }
    }

    fn mark(&mut self) {
        if let Some(event) = self.record() {
            self.marks.push((Position(self.steps), event));
            self.since = Bytes::ZERO;
        }
    }

    fn record(&self) -> Option<Arc<OwnedEvent>> {
        self.events.record(&self.driver, self.on)
    }

    /// Returns the measurements once all events have passed. Unknown times are no error.
    pub(super) fn read(&self) -> Option<(Measured, Duration)> {
        let last = self.marks.last().map(|(_, event)| event)?;
        if matches!(last.is_passed(), Ok(false)) {
            return None;
        }
        let between = |(from, to): &Stretch| {
            let micros = to.since(from).ok()?;
            Some(Duration::from_secs_f64(micros.max(0.0) / 1e6))
        };
        let since = |event: &Arc<OwnedEvent>| between(&(self.begin.clone(), event.clone()));
        let measured = Measured {
            marks: self.marks.iter().filter_map(|(at, event)| Some((*at, since(event)?))).collect(),
            waits: self.waits.iter().filter_map(|(at, wait)| Some((*at, between(wait)?))).collect(),
            leaves: self.leaves.iter().filter_map(|(item, leaf)| Some((*item, between(leaf)?))).collect(),
            replays: self
                .replays
                .iter()
                .filter_map(|(at, scope, replay)| Some((*at, *scope, between(replay)?)))
                .collect(),
        };
        let total = since(last).unwrap_or_default();
        Some((measured, total))
    }

    /// Returns the events for reuse.
    fn give_back(&mut self) {
        let mut free = self.events.0.lock();
        free.push(self.begin.clone());
        free.extend(self.marks.drain(..).map(|(_, event)| event));
        free.extend(self.waits.drain(..).map(|(_, (before, _))| before));
        let stretches = self.leaves.drain(..).map(|(_, stretch)| stretch);
        let stretches: Vec<Stretch> =
            stretches.chain(self.replays.drain(..).map(|(_, _, stretch)| stretch)).collect();
        free.extend(stretches.into_iter().flat_map(|(from, to)| [from, to]));
    }
}

impl Drop for PassTimer {
    fn drop(&mut self) {
        self.give_back();
    }
}

/// Assumed rate of a link without measurements.
pub(super) const LINK: Bandwidth = Bandwidth(50.0);
/// Assumed fraction of a link's rate while it carries both directions.
const AT_ONCE: f64 = 0.92;
/// Minimum bytes moved before a measured rate counts.
const ENOUGH: Bytes = Bytes::mib(64);
/// Granularity of the memory outside the pool, so that plans do not change with every module that the driver loads.
const STEP: u64 = 16 << 20;

/// Measurements of a process's devices.
#[derive(Debug)]
pub(super) struct Measures {
    registry: Arc<DeviceRegistry>,
    nvml: OnceLock<Option<Nvml>>,
    paths: OnceLock<PathGraph>,
    /// Sampling sites with the largest sample that each has not read yet.
    samples: Mutex<FxHashMap<(DeviceId, u64), Bytes>>,
    /// Budgets of sites for their pools.
    budgets: Mutex<FxHashMap<u64, (DeviceId, Bytes)>>,
    /// Bytes moved by each queue when its rate was last computed, and the rate.
    moved: Mutex<FxHashMap<(DeviceId, bool), (Moved, Bandwidth)>>,
}

impl Measures {
    pub(super) fn new(registry: &Arc<DeviceRegistry>) -> Measures {
        let (samples, budgets, moved) = Default::default();
        let (nvml, paths) = (OnceLock::new(), OnceLock::new());
        Measures { registry: registry.clone(), nvml, paths, samples, budgets, moved }
    }

    /// Returns the pool of a device if it has started.
    pub(super) fn pool(&self, device: DeviceId) -> Option<&Arc<GpuPool>> {
        self.memory(device)?.started().map(|started| &started.pool)
    }

    /// Returns the number of stream waits for memory that other work on a device still used.
    pub(super) fn waits_for_memory(&self, device: DeviceId) -> u64 {
        self.pool(device).map_or(0, |pool| pool.report().gpu_waits_made())
    }

    fn memory(&self, device: DeviceId) -> Option<&DeviceMemory> {
        self.registry.device(device.0.into()).ok()
    }

    /// Returns the bytes that a pool holds now, and the maximum since the same site's last call.
    pub(super) fn sample(&self, device: DeviceId, site: u64) -> Option<(Bytes, Bytes)> {
        let pool = self.pool(device)?;
        let mut samples = self.samples.lock();
        let (now, most) = pool.report().take_most();
        samples.entry((device, site)).or_default();
        for ((of, _), waiting) in samples.iter_mut() {
            if *of == device {
                *waiting = most.max(*waiting);
            }
        }
        samples.insert((device, site), now).map(|most| (now, most))
    }

    /// Returns the process's memory on a GPU outside the pool: contexts, modules and other allocators. If the driver lists no processes, as
    /// in some containers, all memory in use on the GPU counts as this process's.
    pub(super) fn beside(&self, device: DeviceId) -> Bytes {
        let Some(memory) = self.memory(device) else { return Bytes::ZERO };
        let reserved = memory.started().map_or(Bytes::ZERO, |started| started.pool.reserved());
        let shown = self.shown(memory).or_else(|| {
            let info = self.registry.completion_events.driver().memory_info(device).ok()?;
            Some(info.total.saturating_sub(info.free))
        });
        let beside = shown.unwrap_or_default().saturating_sub(reserved).get();
        Bytes::new(beside.div_ceil(STEP) * STEP)
    }

    fn shown(&self, memory: &DeviceMemory) -> Option<Bytes> {
        let pci = memory.info.pci.as_deref()?;
        let nvml = self.nvml.get_or_init(Nvml::open).as_ref()?;
        let shown = nvml.read(pci).ok()?.of_process(std::process::id());
        (!shown.is_zero()).then_some(shown)
    }

    /// Returns the rates of a device's links, measured where enough was moved, and the rates together with the links of other GPUs.
    pub(super) fn links(&self, device: DeviceId, queues: &Queues) -> (Links, Links) {
        let graph = self.paths.get_or_init(|| self.registry.assumed_paths());
        let known = |direction| {
            let own = graph.rates(device, direction).map(|rate| rate.rate).next();
            let own = own.filter(|rate| rate.0 > 0.0).unwrap_or(LINK);
            (own, Bandwidth(graph.together(device, direction).0.max(own.0)))
        };
        let [out, into] = [Direction::FromGpu, Direction::ToGpu].map(known);
        let is_on = self.registry.engine.is_on();
        let live = |direction, (own, all): (Bandwidth, Bandwidth)| {
            self.live(device, direction, queues).unwrap_or(if is_on { all } else { own })
        };
        let (live_out, live_into) = (live(Direction::FromGpu, out), live(Direction::ToGpu, into));
        let links = |out: Bandwidth, into: Bandwidth| {
            Links::new(out, into).at_once(Bandwidth(out.0 * AT_ONCE), Bandwidth(into.0 * AT_ONCE))
        };
        (links(live_out, live_into), links(out.1, into.1))
    }

    fn live(&self, device: DeviceId, direction: Direction, queues: &Queues) -> Option<Bandwidth> {
        let now = queues.moved_of(device, direction)?;
        let mut moved = self.moved.lock();
        let key = (device, direction == Direction::ToGpu);
        let before = moved.get(&key).copied();
        let since = before.map_or(Moved::default(), |(moved, _)| moved);
        let bytes = now.timed.saturating_sub(since.timed);
        let busy = now.busy.saturating_sub(since.busy);
        if bytes < ENOUGH || busy.is_zero() {
            return before.map(|(_, rate)| rate);
        }
        #[allow(clippy::cast_precision_loss)] // a rate
        let rate = Bandwidth(bytes.get() as f64 / busy.as_secs_f64() / 1e9);
        moved.insert(key, (now, rate));
        Some(rate)
    }

    /// Returns the bytes that a host pool may still pin, plus the bytes already pinned for offloading.
    pub(super) fn host_room(left: Bytes, own: Bytes) -> Bytes {
        let room = AvailableMemory::of_host().least().map_or(left, |least| least.min(left));
        room.saturating_add(own)
    }

    /// Sets the budget of a site for its pool; the smallest of all sites applies.
    pub(super) fn set_budget(&self, site: u64, budget: Option<(DeviceId, Bytes)>) {
        let mut budgets = self.budgets.lock();
        let before = match budget {
            Some(budget) => budgets.insert(site, budget),
            None => {
                self.samples.lock().retain(|(_, of), _| *of != site);
                budgets.remove(&site)
            }
        };
        for device in [before, budget].into_iter().flatten().map(|(device, _)| device) {
            let least = budgets.values().filter(|(of, _)| *of == device).map(|(_, budget)| *budget).min();
            if let Some(pool) = self.pool(device) {
                pool.set_budget(least);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::iter::repeat_n;

    use glake_device::{Priority, StreamId};
    use glake_sim::{SimOptions, Simulator};

    use super::*;

    #[test]
    fn a_pass_of_any_length_has_so_many_events_and_no_more() {
        let driver: Arc<dyn Driver> = Arc::new(Simulator::new(SimOptions::default()).unwrap());
        let device = DeviceId(0);
        let raw = driver.stream_create(device, Priority::default()).unwrap();
        let timers = Timers::default();
        let timer = timers.begin(&driver, UserStream { device, raw, id: StreamId(1) }).unwrap();
        let copied = timers.events.record(&driver, timer.lock().on).unwrap();
        let mut made = 0;
        for at in repeat_n(ItemId::new(0), 2 * MOST) {
            let mut timer = timer.lock();
            made += 1;
            timer.step(BETWEEN, made);
            timer.leaf_begins();
            timer.leaf_ends(at);
            timer.replays(ScopeId(0), true, 0);
            timer.waits(device, raw, &copied);
            timer.replays(ScopeId(0), false, 0);
        }
        // A replay that began and never ended counts as one.
        for scope in 0..2 * MOST {
            timer.lock().replays(ScopeId(u32::try_from(scope).unwrap()), true, 0);
        }
        timers.end(&timer);
        assert!(timer.lock().end());
        assert_eq!(timer.lock().memory.len(), MOST);
        drop(timer);
        // Marks and waits have one event, leaves and replays two.
        assert!(timers.events.0.lock().len() <= 6 * MOST + 2, "{}", timers.events.0.lock().len());
    }
}
