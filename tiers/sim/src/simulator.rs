//! The simulated device as a driver: one lock around the state, and extra operations for tests.

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

/// Options of a simulation.
#[derive(Clone, Debug)]
pub struct SimOptions {
    /// Description of the server.
    pub topology: SimTopology,
    /// Clock by which work completes.
    pub clock: Clock,
    /// Whether conflicting uses of memory that are not ordered by streams and events are refused.
    pub strict_ordering: bool,
    /// Whether a kernel that accesses memory out of its context's reach is accepted and its context lost when the stream reaches it, as on
    /// CUDA: every later call in that context returns [`DriverError::Sticky`] with 700, other contexts go on. If false, such a kernel is
    /// refused when it is enqueued.
    pub faults_kill: bool,
    /// Capacity of a stream in pending operations: at the limit, enqueuing blocks the caller until one has run, and fails with
    /// [`DriverError::Deadlock`] if none ever will. A copy from pageable memory takes two places. `None`: unlimited.
    pub queue: Option<usize>,
    /// Number of hardware queues per context, assigned to its streams round robin (`CUDA_DEVICE_MAX_CONNECTIONS`): work of a waiting stream
    /// delays work issued later to the same queue by other streams. `None`: one queue per stream.
    pub hardware_queues: Option<u32>,
    /// Folder through which processes share these GPUs: their use is counted there, and a context takes memory
    /// ([`crate::SimGpu::context`]). `None`: not shared, and contexts take no memory.
    pub shared: Option<PathBuf>,
    /// Whether copies, fills and kernels only take time and leave memory unchanged, so that copies of GiBs need no memory of this machine.
    /// Values and events work as usual.
    pub times_only: bool,
}

impl Default for SimOptions {
    /// Returns the default: one GPU of 1 GiB in virtual time, with strict ordering.
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

/// Numbers of live objects; all zero when nothing leaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Number of address reservations.
    pub reservations: usize,
    /// Number of live mappings.
    pub mappings: usize,
    /// Physical allocations, including those kept alive by mappings only.
    pub extents: usize,
    /// Number of created streams, without default streams.
    pub streams: usize,
    /// Number of live events.
    pub events: usize,
    /// Number of loaded modules.
    pub modules: usize,
}

/// A simulated server of GPUs: a [`glake_device::Driver`] whose memory is real and whose time is simulated. Calls run in the primary
/// contexts, except on a driver returned by [`Simulator::own`].
#[derive(Debug)]
pub struct Simulator {
    pub(super) server: Arc<Server>,
    /// Kind of the contexts that calls run in.
    pub(super) kind: ContextKind,
}

/// State shared by all drivers of a simulated server.
#[derive(Debug)]
pub(super) struct Server {
    state: Mutex<State>,
    /// Notified when work was enqueued, which may end a wait early.
    pub(super) wake: Condvar,
    infos: Vec<DeviceInfo>,
    /// Capacity of a stream in pending operations.
    queue: Option<usize>,
    /// Call gate of this process; `None` unless processes share the GPUs.
    calls: Option<Calls>,
}

/// Locked state, for one call of this process.
pub(super) struct Held<'a> {
    state: MutexGuard<'a, State>,
    /// Declared last, so that the call ends after the state is unlocked.
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

/// Polling interval of a wall-clock wait: the host may write the values in memory that it waits for.
const GLANCE: Duration = Duration::from_micros(200);
/// Shortest sleep that is worth a wake-up.
const SHORT: Duration = Duration::from_micros(80);

impl Simulator {
    /// Creates the simulated devices. [`DriverError::Os`] if the operating system has no memory for them.
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
        // The access rights of a mapping have one bit per device.
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

    /// Returns the same server through private contexts, one per device: [`Driver::own_contexts`] with the operations for tests. Memory,
    /// time and census are those of the whole server; each call returns new contexts.
    pub fn own(&self) -> Simulator {
        let kind = self.locked().contexts.add_own();
        Simulator { server: self.server.clone(), kind }
    }

    /// Advances time to the completion of the next piece of work; returns false if nothing enqueued will ever complete. In wall time it
    /// sleeps until then.
    pub fn step(&self) -> bool {
        let mut state = self.server.begin();
        if let (Some(now), Some(next)) = (state.clock.read(), state.timeline.next()) {
            std::thread::sleep(Duration::from_nanos(next.saturating_sub(now)));
        }
        let State { timeline, world, .. } = &mut *state;
        timeline.step(world)
    }

    /// Advances time; in wall time it sleeps.
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

    /// Returns the time since the simulator was created.
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.locked().timeline.now())
    }

    /// Returns the numbers of live objects.
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

    /// Enqueues a kernel given as a closure, which takes `duration` and runs at its end. It accesses device memory and registered memory
    /// only through its declared ranges, and must not call the simulator.
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

    /// Returns memory for asynchronous work, accessible to the devices of `reach`. Its first byte determines its kind; undefined uses are
    /// refused when work is enqueued.
    pub fn span(&self, start: Address, size: Bytes, reach: DeviceSet) -> Result<Span> {
        let kind = self.pointer_attributes(start)?.kind;
        // SAFETY: the simulator refuses work on memory that is not there.
        Ok(unsafe { Span::lent(start, size, kind, reach) })
    }

    /// Makes a stream wait for a value, like [`glake_device::Driver::stream_wait_value`] with equality. Safe, because undefined uses are
    /// refused.
    pub fn enqueue_wait(&self, device: DeviceId, stream: Stream, address: Address, value: u32) -> Result<()> {
        let request = Request::WaitValue { address, value, compare: Compare::Equal };
        self.enqueue(Verb::StreamWaitValue, device, stream, request)
    }

    /// Writes a value on a stream, like [`glake_device::Driver::stream_write_value`]. Safe, because undefined uses are refused.
    pub fn enqueue_signal(
        &self,
        device: DeviceId,
        stream: Stream,
        address: Address,
        value: u32,
    ) -> Result<()> {
        self.enqueue(Verb::StreamWriteValue, device, stream, Request::WriteValue { address, value })
    }

    /// Returns the largest number of operations that were queued on one stream behind an unfinished wait, since the last reset.
    pub fn deepest_queue(&self) -> u64 {
        self.locked().timeline.deepest()
    }

    /// Resets [`Simulator::deepest_queue`] to zero.
    pub fn reset_deepest_queue(&self) {
        self.locked().timeline.forget_deepest();
    }

    // Building blocks of the verbs.

    pub(super) fn infos(&self) -> &[DeviceInfo] {
        &self.server.infos
    }

    /// Returns the context in which this driver's calls on a device run.
    pub(super) fn context(&self, device: DeviceId) -> ContextId {
        ContextId { device, kind: self.kind }
    }

    /// Returns the context of a stream handle.
    pub(super) fn context_of(&self, verb: Verb, stream: Stream) -> Result<ContextId> {
        self.ask(verb, |state| state.streams.context(stream, state.current()))
    }

    /// Runs a non-blocking verb in a context that is not lost.
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

    /// Locks the state after running all due work.
    pub(super) fn locked(&self) -> Held<'_> {
        let mut state = self.server.begin();
        state.catch_up();
        state
    }

    /// Runs a non-blocking verb.
    pub(super) fn ask<T>(&self, verb: Verb, ask: impl FnOnce(&mut State) -> Checked<T>) -> Result<T> {
        ask(&mut self.locked()).map_err(|denial| denial.of(verb))
    }

    /// Enqueues work, and waits for it if the caller must.
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

    /// Enqueues work like [`Simulator::enqueue`], in the given context.
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

    /// Waits until the points found at the start have passed.
    pub(super) fn wait_for(
        &self,
        verb: Verb,
        points: impl FnOnce(&mut State) -> Checked<Vec<Point>>,
    ) -> Result<()> {
        let mut state = self.locked();
        let points = points(&mut state).map_err(|denial| denial.of(verb))?;
        self.wait_until(verb, &mut state, |state| points.iter().all(|point| state.timeline.passed(*point)))
    }

    /// Waits until a condition holds, with the lock released meanwhile.
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
    /// Begins a call: passes the call gate and locks the state.
    fn begin(&self) -> Held<'_> {
        let call = self.calls.as_ref().map(Calls::begin);
        Held { state: self.state.lock(), _call: call }
    }
}

/// Memory of a simulated host node.
const HOST_MEMORY: Bytes = Bytes::gib(256);
