//! The thread that makes what copies use: contexts, lanes, events, slots. A copy makes none of these.
//!
//! It sleeps while nothing is asked of it, and holds the engine weakly.

use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use glake_device::owned::DeviceSet;
use glake_device::{DeviceId, MemoryInfo};
use glake_units::Bytes;
use parking_lot::{Condvar, Mutex};

use crate::engine::lane::Lane;
use crate::kinds::foreign::slots::Ring;
use crate::kinds::foreign::target::TargetSide;
use crate::links::lane_set::{LaneSet, StreamMarks};
use crate::links::suspension::{PAUSE, Suspension};
use crate::schedule::barriers::Barriers;
use crate::{Engine, RelayCost};
use crate::{Result, TransferError};

/// What the thread is to do.
#[derive(Debug, Default)]
pub(crate) struct Worker {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct Shared {
    orders: Mutex<Orders>,
    woken: Condvar,
}

type After = Box<dyn FnOnce(&Engine) + Send>;

#[derive(Default)]
struct Orders {
    prepare: bool,
    after: Vec<After>,
    /// A calibrated graph was seen not to hold.
    stale: bool,
    /// What is called then.
    when_stale: Vec<After>,
    /// Devices whose streams copies fork from.
    forks: DeviceSet,
    more_lane_sets: bool,
    /// GPUs whose memory is copied.
    make_resources: DeviceSet,
    /// How many rests were asked for, if one was since.
    suspend: Option<u64>,
    stop: bool,
}

/// Leases that are made before one is missed.
const FIRST: usize = 2;

impl Worker {
    /// Makes the wanted relays ready, then calls `after`; starts the thread if there is none.
    pub(crate) fn prepare(&self, engine: &Arc<Engine>, after: After) -> Result<()> {
        let mut thread = self.thread.lock();
        if thread.is_none() {
            let (shared, engine) = (self.shared.clone(), Arc::downgrade(engine));
            let spawned =
                std::thread::Builder::new().name("glake-relays".into()).spawn(move || run(&shared, &engine));
            *thread = Some(spawned.map_err(TransferError::NoThread)?);
        }
        self.order(|orders| {
            orders.prepare = true;
            orders.after.push(after);
        });
        Ok(())
    }

    /// Whether it ever was.
    pub(crate) fn is_started(&self) -> bool {
        self.thread.lock().is_some()
    }

    /// Relays were put to rest.
    pub(crate) fn suspend(&self, asked: u64) {
        self.order(|orders| orders.suspend = orders.suspend.max(Some(asked)));
    }

    /// The relays that are wanted have changed.
    pub(crate) fn again(&self) {
        self.order(|orders| orders.prepare = true);
    }

    fn more_lane_sets(&self) {
        // Asked by every copy of such a stream.
        if !self.shared.orders.lock().more_lane_sets {
            self.order(|orders| orders.more_lane_sets = true);
        }
    }

    /// Copies fork from a device that has no event for it.
    pub(crate) fn fork_event(&self, device: DeviceId) {
        self.order(|orders| orders.forks = orders.forks.union(DeviceSet::of(device)));
    }

    /// Copies of a GPU's memory could use what is not made yet.
    pub(crate) fn make_resources(&self, device: DeviceId) {
        self.order(|orders| orders.make_resources = orders.make_resources.union(DeviceSet::of(device)));
    }

    /// Has `call` called when a calibrated graph is seen not to hold.
    pub(crate) fn when_stale(&self, call: After) {
        self.order(|orders| orders.when_stale.push(call));
    }

    /// It was seen.
    pub(crate) fn stale(&self) {
        self.order(|orders| orders.stale = true);
    }

    /// Ends the thread; waits for its end, unless called by it.
    pub(crate) fn stop(&self) {
        self.order(|orders| orders.stop = true);
        let thread = self.thread.lock().take();
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }

    fn order(&self, change: impl FnOnce(&mut Orders)) {
        change(&mut self.shared.orders.lock());
        self.shared.woken.notify_all();
    }
}

impl Shared {
    /// Sleeps until something is asked, or for so long.
    fn next(&self, most: Option<Duration>) -> Orders {
        let mut orders = self.orders.lock();
        while !orders.is_some() {
            match most {
                None => self.woken.wait(&mut orders),
                Some(most) => {
                    self.woken.wait_for(&mut orders, most);
                    break;
                }
            }
        }
        let (stop, mut when_stale) = (orders.stop, std::mem::take(&mut orders.when_stale));
        let mut next = std::mem::take(&mut *orders);
        // Kept: an ended thread does not come back.
        orders.stop = stop;
        match next.stale {
            true => next.after.append(&mut when_stale),
            false => orders.when_stale = when_stale,
        }
        next
    }
}

impl Orders {
    fn is_some(&self) -> bool {
        let asked = self.prepare || self.stop || self.stale || self.more_lane_sets || self.suspend.is_some();
        asked || !self.forks.is_empty() || !self.make_resources.is_empty()
    }
}

impl std::fmt::Debug for Orders {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Orders").field("stop", &self.stop).finish_non_exhaustive()
    }
}

fn run(shared: &Shared, engine: &Weak<Engine>) {
    let mut forks = DeviceSet::EMPTY;
    let (mut suspension, mut more) = (Suspension::default(), false);
    loop {
        let orders = shared.next(more.then_some(PAUSE));
        let Some(engine) = engine.upgrade() else { return };
        if orders.stop {
            return;
        }
        forks = forks.union(orders.forks);
        if orders.prepare {
            forks = forks.union(engine.in_use());
        }
        engine.provide(&orders, forks);
        for after in orders.after {
            after(&engine);
        }
        if let Some(asked) = orders.suspend {
            suspension.ask(asked);
        }
        more = suspension.step(&engine);
        if !engine.relays.ready().is_empty() {
            // Those that were of suspended relays are gone.
            engine.make_lane_sets(forks);
        }
    }
}

impl Engine {
    /// A stream found no lane set: one more is made, up to the limit.
    pub(crate) fn want_lane_set(&self) {
        if self.lane_sets.len() < self.options().streams.max(1) {
            self.worker.more_lane_sets();
        }
    }

    fn provide(&self, orders: &Orders, forks: DeviceSet) {
        if orders.prepare {
            let ready = self.relays.ready().union(self.relays.suspended());
            let missing = self.relays.wanted().without(ready).without(self.of_program()).iter();
            // Asked of all before any is made: what is made for one can need a context on another.
            let missing: Vec<_> = missing.map(|relay| (relay, self.driver.memory_info(relay))).collect();
            for (relay, before) in missing {
                let made = before.map_err(TransferError::from);
                if let Err(error) = made.and_then(|before| self.make_ready(relay, before, forks)) {
                    tracing::warn!(target: "glake::transfer", %relay, %error, "a GPU cannot be a relay");
                }
            }
        }
        let suspended = self.relays.suspended();
        let targets = if orders.prepare { self.with_resources() } else { DeviceSet::EMPTY };
        targets.union(orders.make_resources).iter().for_each(|device| self.make_resources(device));
        if orders.prepare {
            self.relays.ready().without(suspended).iter().for_each(|relay| self.make_relay_resources(relay));
        }
        let most = self.options().streams.max(1);
        if orders.more_lane_sets && self.lane_sets.is_short() && self.lane_sets.len() < most {
            self.add_lane_set(forks);
        }
        for lane_set in self.lane_sets.snapshot() {
            self.furnish(&lane_set, forks);
        }
    }

    /// GPUs that the program uses, where it has them to itself: by a primary context, which none of ours is.
    fn of_program(&self) -> DeviceSet {
        if self.options().shared_gpus {
            return DeviceSet::EMPTY;
        }
        // An answer that says nothing is no permission.
        let used = |relay: &DeviceId| self.driver.has_context(*relay).unwrap_or(true);
        self.relays.wanted().iter().filter(used).collect::<DeviceSet>().union(self.relays.left())
    }

    /// Makes a GPU a relay: its context first, which may take half a second.
    fn make_ready(&self, relay: DeviceId, before: MemoryInfo, forks: DeviceSet) -> Result<()> {
        self.make_gates();
        self.make_lane_sets(forks);
        for lane_set in self.lane_sets.snapshot() {
            self.add_lane(&lane_set, relay)?;
        }
        // Where a suspension was given up, some of it is there still.
        let earlier = self.relays.cost(relay);
        let slots = match earlier {
            Some(RelayCost { slots, .. }) if !slots.is_zero() => slots,
            _ => self.add_slots(relay),
        };
        let after = self.driver.memory_info(relay)?;
        let taken = before.free.saturating_sub(after.free).saturating_sub(slots);
        let context = earlier.map_or(taken, |earlier| earlier.context);
        self.relays.set_cost(RelayCost { relay, context, slots });
        self.relays.add_ready(relay);
        Ok(())
    }

    /// The lane sets that there are before one is missed.
    fn make_lane_sets(&self, forks: DeviceSet) {
        while self.lane_sets.len() < FIRST.min(self.options().streams.max(1)) {
            self.add_lane_set(forks);
        }
    }

    /// Gates for the links, by which background copies give way: without them they do not.
    fn make_gates(&self) {
        if self.barriers.get().is_none() {
            match Barriers::new(&self.epochs) {
                // Only this thread makes them.
                Ok(barriers) => drop(self.barriers.set(barriers)),
                Err(error) => {
                    tracing::warn!(target: "glake::transfer", %error, "background copies do not give way");
                }
            }
        }
    }

    /// A lane set more, with a lane on every relay that is ready.
    fn add_lane_set(&self, forks: DeviceSet) {
        let lane_set = Arc::new(LaneSet::new(self.devices));
        for relay in self.relays.ready().iter() {
            if let Err(error) = self.add_lane(&lane_set, relay) {
                tracing::warn!(target: "glake::transfer", %relay, %error, "a stream's copies do without a relay");
            }
        }
        self.furnish(&lane_set, forks);
        self.lane_sets.add(lane_set);
    }

    fn add_lane(&self, lane_set: &LaneSet, relay: DeviceId) -> Result<()> {
        if lane_set.lane(relay).is_none() {
            lane_set.add_lane(relay, Lane::of_relay(self.relay_driver(), relay)?);
        }
        Ok(())
    }

    /// What a lane set has in the primary contexts of GPUs: marks where copies fork, and a target's side of slots.
    fn furnish(&self, lane_set: &LaneSet, forks: DeviceSet) {
        for device in forks.iter().filter(|device| lane_set.marks(*device).is_none()) {
            match StreamMarks::new(&self.driver, device) {
                Ok(marks) => lane_set.add_marks(device, marks),
                Err(error) => {
                    tracing::warn!(target: "glake::transfer", %device, %error, "copies of its streams stay native");
                }
            }
        }
        // Where the program has the GPU to itself: for copies that find their ways late.
        for target in
            self.with_resources().without(self.relays.ready()).iter().filter(|_| !self.options().shared_gpus)
        {
            if lane_set.lane(target).is_none()
                && let Ok(lane) = Lane::of_target(&self.driver, target)
            {
                lane_set.add_lane(target, lane);
            }
        }
        let pairs = self.with_resources().iter().flat_map(|target| {
            let relays = self.relays.ready().without(DeviceSet::of(target));
            relays.iter().map(move |relay| (target, relay)).collect::<Vec<_>>()
        });
        // Of a slot that the target does not reach it is none.
        let pairs = pairs.filter(|(target, relay)| {
            lane_set.side(*target, *relay).is_none()
                && matches!(self.driver.can_access_peer(*target, *relay), Ok(true))
        });
        for (target, relay) in pairs {
            match TargetSide::new(&self.driver, target) {
                Ok(side) => lane_set.add_side(target, relay, side),
                Err(error) => {
                    tracing::warn!(target: "glake::transfer", %target, %relay, %error, "no slots for its memory");
                }
            }
        }
    }

    /// Slots on a relay, open to every GPU: without them it relays memory of ours only.
    fn add_slots(&self, relay: DeviceId) -> Bytes {
        if !self.is_staging() {
            return Bytes::ZERO;
        }
        let rings = match Ring::all(&self.own, relay, self.options().slots, self.reachable(relay)) {
            Ok(rings) => rings,
            Err(error) => {
                tracing::warn!(target: "glake::transfer", %relay, %error, "a relay has no memory for slots");
                return Bytes::ZERO;
            }
        };
        let taken = rings.iter().map(Ring::size).sum();
        for ring in rings {
            self.relays.give_ring(relay, ring);
        }
        taken
    }

    /// The GPUs whose work can touch a relay's memory.
    fn reachable(&self, relay: DeviceId) -> DeviceSet {
        let all = (0_u32..).map(DeviceId).take(self.devices);
        let reach = |device: &DeviceId| {
            *device == relay || matches!(self.driver.can_access_peer(*device, relay), Ok(true))
        };
        all.filter(reach).collect()
    }

    /// The GPUs that have a primary context.
    fn in_use(&self) -> DeviceSet {
        let all = (0_u32..).map(DeviceId).take(self.devices);
        all.filter(|device| matches!(self.driver.has_context(*device), Ok(true))).collect()
    }

    fn is_staging(&self) -> bool {
        !self.options().slots.is_zero()
    }
}
