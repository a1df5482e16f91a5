//! Times of the steps of a pass, by events on its stream. Nothing waits for the events: they are read once they have passed.
//!
//! ```text
//! stream:  first pack ─ … ─ pack ─ … ─ unpack ─[wait for a copy]─ … ─ last drop
//! events:  begin            mark       before     the copy's end      mark
//! ```

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use glake_device::owned::OwnedEvent;
use glake_device::{DeviceId, Driver, EventKind, Stream};
use glake_offload::{ItemId, Measured, Position, ScopeId};
use glake_transfer::UserStream;
use glake_units::Bytes;

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
