//! The simulated device as a driver: one lock around the state, and what tests ask besides the verbs.

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use glake_units::Bytes;
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::arena::Arena;
use super::calls::{Call, Calls};
use super::capture::Captures;
use super::clock::{Clock, Ticking};
use super::context::{ContextId, ContextKind, Contexts};
use super::denial::{Checked, Denial};
use super::event::Events;
use super::kernel::Modules;
use super::ledger::{Account, Ledger};
use super::memory::{Can, Memory};
use super::request::{KernelRequest, Request};
use super::route::Plumbing;
use super::state::State;
use super::stream::Streams;
use super::timeline::{Point, Timeline};
use super::topology::SimTopology;
use super::world::World;
use glake_device::owned::{DeviceSet, Span};
use glake_device::{
    Address, Compare, DeviceId, DeviceInfo, Driver, DriverError, KernelMemory, Result, Stream, Touch, Verb,
};

/// What to simulate, and how.
#[derive(Clone, Debug)]
pub struct SimOptions {
    /// The server.
    pub topology: SimTopology,
    /// What time is.
    pub clock: Clock,
    /// Whether conflicting uses of memory must be ordered by streams and events, or are refused.
    pub strict_ordering: bool,
    /// Whether a kernel that touches memory which its context does not reach is accepted, and its context lost when its
    /// stream comes to it, as on CUDA: every later call in that context answers [`DriverError::Sticky`] with 700, other
    /// contexts go on. Else such a kernel is refused when it is enqueued.
    pub faults_kill: bool,
    /// How many pieces of work that have not run a stream holds at most: enqueuing more blocks the caller until one
    /// has, and is a [`DriverError::Deadlock`] where none ever will. A copy from pageable memory takes two places.
    /// None: as many as wanted.
    pub queue: Option<usize>,
    /// Onto how many queues of the hardware the streams of each context are dealt in turn
    /// (`CUDA_DEVICE_MAX_CONNECTIONS`): work whose stream waits holds up what is issued later on the same queue, of
    /// other streams. None: each stream has its own.
    pub hardware_queues: Option<u32>,
    /// A folder through which processes share these GPUs: what they use is counted there in common, and a context costs
    /// memory too ([`crate::SimGpu::context`]). None: each has its own, and contexts cost nothing.
    pub shared: Option<PathBuf>,
    /// Whether copies, fills and kernels take their time and leave memory as it is: GiBs that are copied then need no
    /// memory of this machine. What streams write and wait for (values, events) is as ever.
    pub times_only: bool,
}

impl Default for SimOptions {
    /// One GPU of 1 GiB in virtual time, strict.
    fn default() -> Self {
        SimOptions {
            topology: SimTopology::uniform(1, Bytes::gib(1)),
            clock: Clock::Virtual,
            strict_ordering: true,
            faults_kill: false,
            queue: None,
            hardware_queues: None,
            shared: None,
            times_only: false,
        }
    }
}

/// How much of everything is alive: all zero when nothing leaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Address reservations.
    pub reservations: usize,
    /// Mappings.
    pub mappings: usize,
    /// Physical allocations, also those that only mappings keep.
    pub extents: usize,
    /// Streams that were made.
    pub streams: usize,
    /// Events.
    pub events: usize,
    /// Modules.
    pub modules: usize,
}

/// A simulated server of GPUs: a [`glake_device::Driver`] whose memory is real and whose time is simulated. Its calls run in
/// the primary contexts, but for one that [`Simulator::own`] gave.
#[derive(Debug)]
pub struct Simulator {
    pub(super) server: Arc<Server>,
    /// In which contexts its calls run.
    pub(super) kind: ContextKind,
}

/// What all drivers of a simulated server share.
#[derive(Debug)]
pub(super) struct Server {
    state: Mutex<State>,
    /// Work was enqueued, so a wait may be over sooner than thought.
    pub(super) wake: Condvar,
    infos: Vec<DeviceInfo>,
    /// How much work a stream holds at most.
    queue: Option<usize>,
    /// Where processes share the GPUs: its calls wait while it is locked.
    calls: Option<Calls>,
}

/// The state, for one call of this process.
pub(super) struct Held<'a> {
    state: MutexGuard<'a, State>,
    /// Ends after the state is let go of.
    _call: Option<Call<'a>>,
}

impl Deref for Held<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Held<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

/// A wait in wall time looks at values in memory, which the host may write, at least so often.
const GLANCE: Duration = Duration::from_micros(200);
/// A shorter sleep than this is not worth the wake-up.
const SHORT: Duration = Duration::from_micros(80);

impl Simulator {
    /// Makes the devices. [`DriverError::Os`] where the operating system has no memory for them.
    pub fn new(options: SimOptions) -> Result<Self> {
        Self::build(options).map_err(|denial| denial.of(Verb::Devices))
    }

    fn build(options: SimOptions) -> Checked<Self> {
        let SimOptions {
            topology,
            clock,
            strict_ordering,
            faults_kill,
            queue,
            hardware_queues,
            shared,
            times_only,
        } = options;
        // Devices are bits of a word in the access of a mapping.
        if topology.gpus.len() > 64 {
            return Err(Denial::OutOfMemory(Bytes::ZERO));
        }
        let (mut arenas, mut infos, mut latencies) = (Vec::new(), Vec::new(), Vec::new());
        let plumbing = Plumbing::new(&topology);
        let timeline = Timeline::new(plumbing.capacity());
        for (index, gpu) in (0_u32..).zip(&topology.gpus) {
            let account = match &shared {
                Some(folder) => Some(Account::open(Ledger::open(folder, index as usize, gpu)?)?),
                None => None,
            };
            let context = if shared.is_some() { gpu.context } else { Bytes::ZERO };
            let arena = Arena::new(&format!("glake-arena-{index}"), gpu.memory, context, account)?;
            infos.push(DeviceInfo {
                id: DeviceId(index),
                name: gpu.name.clone(),
                memory: arena.capacity(),
                pci: None,
                exportable: gpu.exportable,
                gpu_direct: gpu.gpu_direct,
            });
            arenas.push(arena);
            latencies.push((gpu.latency.0.max(0.0) * 1e3) as u64);
        }
        let calls = arenas.first().map_or(Ok(None), Arena::calls)?;
        let host = Arena::new("glake-arena-host", HOST_MEMORY, Bytes::ZERO, None)?;
        let can = topology.gpus.iter().map(|gpu| Can { export: gpu.exportable, gpu_direct: gpu.gpu_direct });
        let can = can.collect();
        let sockets = topology.gpus.iter().map(|gpu| gpu.socket + 1).max().unwrap_or(1);
        let world = World {
            memory: Memory::new(arenas, host, sockets, can),
            events: Events::default(),
            strays: Vec::new(),
            lost: HashMap::new(),
            times_only,
        };
        let state = State {
            clock: Ticking::start(clock),
            timeline,
            world,
            streams: Streams::default(),
            captures: Captures::default(),
            contexts: Contexts::default(),
            modules: Modules::default(),
            plumbing,
            latencies,
            strict: strict_ordering,
            faults_kill,
            hardware_queues,
        };
        let queue = queue.map(|bound| bound.max(1));
        let server = Server { state: Mutex::new(state), wake: Condvar::new(), infos, queue, calls };
        Ok(Simulator { server: Arc::new(server), kind: ContextKind::Primary })
    }

    /// The same server through contexts of our own, one for each device: [`Driver::own_contexts`], with what tests ask
    /// besides. Memory, time and the census are those of the whole server; each call gives further contexts.
    pub fn own(&self) -> Simulator {
        let kind = self.locked().contexts.add_own();
        Simulator { server: self.server.clone(), kind }
    }

    /// Lets time pass to where the next piece of work is done; false where nothing enqueued ever will be. In wall
    /// time it sleeps until then.
    pub fn step(&self) -> bool {
        let mut state = self.server.begin();
        if let (Some(now), Some(next)) = (state.clock.read(), state.timeline.next()) {
            std::thread::sleep(Duration::from_nanos(next.saturating_sub(now)));
        }
        let State { timeline, world, .. } = &mut *state;
        timeline.step(world)
    }

    /// Lets time pass; in wall time it sleeps.
    pub fn advance(&self, time: Duration) {
        let mut state = self.server.begin();
        if state.clock.read().is_some() {
            drop(state);
            std::thread::sleep(time);
            return;
        }
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let State { timeline, world, .. } = &mut *state;
        timeline.advance(timeline.now().saturating_add(nanos), world);
    }

    /// How much time has passed since the simulator was made.
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.locked().timeline.now())
    }

    /// What is alive.
    pub fn census(&self) -> Census {
        let state = self.locked();
        let (reservations, mappings, extents) = state.world.memory.counts();
        Census {
            reservations,
            mappings,
            extents,
            streams: state.streams.len(),
            events: state.world.events.len(),
            modules: state.modules.len(),
        }
    }

    /// Enqueues a kernel given as a closure, which takes `duration` and runs at its end. It reaches device memory
    /// and registered memory only, by what it declares; it must not call the simulator.
    pub fn enqueue_kernel(
        &self,
        device: DeviceId,
        stream: Stream,
        reads: &[Touch],
        writes: &[Touch],
        duration: Duration,
        body: impl Fn(&mut dyn KernelMemory) + Send + Sync + 'static,
    ) -> Result<()> {
        let kernel = KernelRequest {
            reads: reads.to_vec(),
            writes: writes.to_vec(),
            duration: Some(duration),
            body: Arc::new(body),
        };
        self.enqueue(Verb::Launch, device, stream, Request::Kernel(kernel))
    }

    /// Memory for asynchronous work: what would be undefined is refused when the work is enqueued. The devices of
    /// `reach` may touch it; what it is, is asked of its first byte.
    pub fn span(&self, start: Address, size: Bytes, reach: DeviceSet) -> Result<Span> {
        let kind = self.pointer_attributes(start)?.kind;
        // SAFETY: the simulator refuses work on memory that is not there.
        Ok(unsafe { Span::lent(start, size, kind, reach) })
    }

    /// As [`glake_device::Driver::stream_wait_value`] for equality: what would be undefined is refused here.
    pub fn enqueue_wait(&self, device: DeviceId, stream: Stream, address: Address, value: u32) -> Result<()> {
        let request = Request::WaitValue { address, value, compare: Compare::Equal };
        self.enqueue(Verb::StreamWaitValue, device, stream, request)
    }

    /// As [`glake_device::Driver::stream_write_value`]: what would be undefined is refused here.
    pub fn enqueue_signal(
        &self,
        device: DeviceId,
        stream: Stream,
        address: Address,
        value: u32,
    ) -> Result<()> {
        self.enqueue(Verb::StreamWriteValue, device, stream, Request::WriteValue { address, value })
    }

    /// The most pieces of work that were on one stream behind a wait that had not passed, since the last reset.
    pub fn deepest_queue(&self) -> u64 {
        self.locked().timeline.deepest()
    }

    /// Counts [`Simulator::deepest_queue`] anew.
    pub fn reset_deepest_queue(&self) {
        self.locked().timeline.forget_deepest();
    }

    // What the verbs are made of.

    pub(super) fn infos(&self) -> &[DeviceInfo] {
        &self.server.infos
    }

    /// The context of a device that this driver's calls run in.
    pub(super) fn context(&self, device: DeviceId) -> ContextId {
        ContextId { device, kind: self.kind }
    }

    /// The context whose stream a handle is.
    pub(super) fn context_of(&self, verb: Verb, stream: Stream) -> Result<ContextId> {
        self.ask(verb, |state| state.streams.context(stream, state.current()))
    }

    /// Runs a verb in a context that is not lost, and that waits for nothing.
    pub(super) fn ask_in<T>(
        &self,
        verb: Verb,
        context: ContextId,
        ask: impl FnOnce(&mut State) -> Checked<T>,
    ) -> Result<T> {
        self.ask(verb, |state| {
            state.alive(context)?;
            ask(state)
        })
    }

    /// Runs a verb that enqueues a piece of work, once its stream has room for it.
    pub(super) fn ask_on<T>(
        &self,
        verb: Verb,
        context: ContextId,
        stream: Stream,
        ask: impl FnOnce(&mut State) -> Checked<T>,
    ) -> Result<T> {
        let mut state = self.locked();
        if let Some(bound) = self.server.queue {
            let lane = state.lane(context, stream).map_err(|denial| denial.of(verb))?;
            self.wait_until(verb, &mut state, |state| state.has_room(lane, bound))?;
        }
        ask(&mut state).map_err(|denial| denial.of(verb))
    }

    /// The state, with all done that is due.
    pub(super) fn locked(&self) -> Held<'_> {
        let mut state = self.server.begin();
        state.catch_up();
        state
    }

    /// Runs a verb that waits for nothing.
    pub(super) fn ask<T>(&self, verb: Verb, ask: impl FnOnce(&mut State) -> Checked<T>) -> Result<T> {
        ask(&mut self.locked()).map_err(|denial| denial.of(verb))
    }

    /// Enqueues work, and waits for it where the caller must.
    pub(super) fn enqueue(
        &self,
        verb: Verb,
        device: DeviceId,
        stream: Stream,
        request: Request,
    ) -> Result<()> {
        let context = self.context(device);
        self.enqueue_in(verb, context, stream, request)
    }

    /// As above, in this context.
    pub(super) fn enqueue_in(
        &self,
        verb: Verb,
        context: ContextId,
        stream: Stream,
        request: Request,
    ) -> Result<()> {
        let waited = self.ask_on(verb, context, stream, |state| state.enqueue(context, stream, request))?;
        self.server.wake.notify_all();
        if let Some(awaiting) = waited {
            self.wait_for(verb, |_| Ok(vec![awaiting.point]))?;
            return self.ask_in(verb, context, |state| {
                state.streams.observe_on(awaiting.point.lane, &awaiting.clock);
                Ok(())
            });
        }
        Ok(())
    }

    /// Waits until points that are found now have passed.
    pub(super) fn wait_for(
        &self,
        verb: Verb,
        points: impl FnOnce(&mut State) -> Checked<Vec<Point>>,
    ) -> Result<()> {
        let mut state = self.locked();
        let points = points(&mut state).map_err(|denial| denial.of(verb))?;
        self.wait_until(verb, &mut state, |state| points.iter().all(|point| state.timeline.passed(*point)))
    }

    /// Waits until something holds; the lock is given up meanwhile.
    fn wait_until(
        &self,
        verb: Verb,
        Held { state, .. }: &mut Held<'_>,
        holds: impl Fn(&State) -> bool,
    ) -> Result<()> {
        loop {
            state.catch_up();
            if holds(state) {
                return Ok(());
            }
            let Some(now) = state.clock.read() else {
                let State { timeline, world, .. } = &mut **state;
                if timeline.step(world) {
                    continue;
                }
                return Err(DriverError::Deadlock { verb });
            };
            let next = state.timeline.next().map(|next| Duration::from_nanos(next.saturating_sub(now)));
            match next {
                Some(left) if left < SHORT => MutexGuard::unlocked(state, std::thread::yield_now),
                _ => {
                    let left = next.unwrap_or(GLANCE).saturating_sub(SHORT / 2).min(GLANCE.max(SHORT));
                    self.server.wake.wait_for(state, left);
                }
            }
        }
    }
}

impl Server {
    /// A call begins.
    fn begin(&self) -> Held<'_> {
        let call = self.calls.as_ref().map(Calls::begin);
        Held { state: self.state.lock(), _call: call }
    }
}

/// How much memory a simulated host node gives.
const HOST_MEMORY: Bytes = Bytes::gib(256);
