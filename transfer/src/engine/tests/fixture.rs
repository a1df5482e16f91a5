//! A server, an engine on it, and memory of all kinds.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use glake_device::owned::{Buffer, CompletionEvents, DeviceSet, OwnedStream, Pages, Registration, Span};
use glake_device::topology::Topology;
use glake_device::{Address, DeviceId, Driver, Faults, Stream};
use glake_sim::{Census, Clock, SimOptions, SimTopology, Simulator, pattern};
use glake_units::Bytes;

use crate::paths::{Direction, GpuLinks, PathGraph};
use crate::{CopyOptions, Engine, EngineOptions, UserStream};

pub(super) const GPU: DeviceId = DeviceId(0);
const PART: usize = 256 << 10;

pub(super) struct Fixture {
    pub(super) sim: Arc<Simulator>,
    pub(super) faults: Arc<Faults>,
    pub(super) driver: Arc<dyn Driver>,
    pub(super) completion_events: Arc<CompletionEvents>,
    pub(super) engine: Option<Arc<Engine>>,
    pub(super) gpus: DeviceSet,
    times_only: bool,
}

impl Fixture {
    /// A server by name, all of whose GPUs are relays.
    pub(super) fn new(name: &str) -> Fixture {
        Fixture::with(name, EngineOptions::default())
    }

    pub(super) fn with(name: &str, options: EngineOptions) -> Fixture {
        Fixture::timed(name, options, Clock::Virtual)
    }

    /// For tests of how long copies take, which bring no bytes here.
    pub(super) fn of_times(name: &str) -> Fixture {
        let device = SimOptions { times_only: true, ..SimOptions::default() };
        Fixture::on(name, EngineOptions::default(), device)
    }

    pub(super) fn timed(name: &str, options: EngineOptions, clock: Clock) -> Fixture {
        Fixture::on(name, options, SimOptions { clock, ..SimOptions::default() })
    }

    /// On a device of such behaviour.
    pub(super) fn on(name: &str, options: EngineOptions, device: SimOptions) -> Fixture {
        Fixture::made(name, EngineOptions { shared_gpus: true, ..options }, device)
    }

    /// With these options as they are.
    pub(super) fn made(name: &str, options: EngineOptions, device: SimOptions) -> Fixture {
        let topology = match name {
            "uniform" => SimTopology::uniform(4, Bytes::gib(1)),
            name => glake_sim::load(name).unwrap(),
        };
        let gpus: DeviceSet = (0..u32::try_from(topology.gpus.len()).unwrap()).map(DeviceId).collect();
        let graph = PathGraph::conservative(&GpuLinks::of(&Topology::from(&topology)));
        let times_only = device.times_only;
        let sim = Arc::new(Simulator::new(SimOptions { topology, ..device }).unwrap());
        let faults = Arc::new(Faults::new(sim.clone()));
        let driver: Arc<dyn Driver> = faults.clone();
        let completion_events = CompletionEvents::new(driver.clone());
        let relays = if options.relays.is_empty() { gpus } else { options.relays };
        // A program has a context on its GPU; on every one where they are shared.
        let used = if options.shared_gpus { gpus } else { DeviceSet::of(GPU) };
        used.iter().for_each(|gpu| sim.hold_context(gpu).unwrap());
        let shared = options.shared_gpus;
        let engine =
            Engine::new(completion_events.clone(), graph, EngineOptions { relays, ..options }).unwrap();
        used.iter().for_each(|gpu| engine.shared.resources.want(gpu));
        let (done, ready) = mpsc::channel();
        engine.start_relays(move |_| done.send(()).unwrap()).unwrap();
        ready.recv().unwrap();
        assert_eq!(engine.relays(), if shared { relays } else { relays.without(used) });
        Fixture { sim, faults, driver, completion_events, engine: Some(engine), gpus, times_only }
    }

    pub(super) fn engine(&self) -> &Arc<Engine> {
        self.engine.as_ref().unwrap()
    }

    pub(super) fn stream(&self, device: DeviceId) -> OwnedStream {
        OwnedStream::new(&self.driver, device).unwrap()
    }

    pub(super) fn user(&self, device: DeviceId, raw: Stream) -> UserStream {
        UserStream::of(&*self.driver, device, raw).unwrap()
    }

    /// Gives a stream a kernel that takes longer than enqueueing.
    pub(super) fn keep_busy(&self, on: &OwnedStream) {
        let took = Duration::from_micros(300);
        self.sim.enqueue_kernel(on.device(), on.id(), &[], &[], took, |_| {}).unwrap();
    }

    /// Pinned memory that holds a pattern, where bytes are copied.
    pub(super) fn pinned(&self, size: Bytes, seed: u64) -> Arc<Registration> {
        let threads = usize::from(!self.times_only);
        let pages = Pages::new(size, threads).unwrap();
        let mut memory = Registration::new(&self.completion_events, pages).unwrap();
        if !self.times_only {
            pattern::fill(memory.as_mut_slice(), 0, seed);
        }
        Arc::new(memory)
    }

    /// Pool memory that every GPU may touch.
    pub(super) fn mapped(&self, device: DeviceId, size: Bytes) -> Arc<Buffer> {
        Arc::new(Buffer::new(&self.completion_events, device, size, self.gpus).unwrap())
    }

    /// Plain memory.
    pub(super) fn plain(&self, device: DeviceId, size: Bytes) -> Plain {
        let start = self.sim.plain_alloc(device, size).unwrap();
        let span = self.sim.span(start, size, DeviceSet::of(device)).unwrap();
        Plain { sim: self.sim.clone(), start, span }
    }

    pub(super) fn copy(&self, to: &Span, from: &Span, on: UserStream) {
        self.engine().copy(to, from, on, CopyOptions::default()).unwrap();
    }

    pub(super) fn wait(&self, on: UserStream) {
        self.driver.stream_synchronize(on.device, on.raw).unwrap();
    }

    /// The bytes of a span of a GPU, by the driver alone.
    pub(super) fn read(&self, span: &Span) -> Vec<u8> {
        assert!(!self.times_only);
        let mut bytes = vec![0; usize::try_from(span.size().get()).unwrap()];
        self.sim.read_now(span.device().unwrap(), span.start(), &mut bytes).unwrap();
        bytes
    }

    /// Whether a span of a GPU holds these bytes, by the driver alone.
    pub(super) fn holds(&self, span: &Span, bytes: &[u8]) -> bool {
        assert!(!self.times_only);
        assert_eq!(span.size().get(), bytes.len() as u64);
        // A part at a time: the system takes longer to make memory for all of it than to copy that.
        let mut found = vec![0; PART];
        (span.start().0..).step_by(PART).zip(bytes.chunks(PART)).all(|(at, part)| {
            let found = &mut found[..part.len()];
            self.sim.read_now(span.device().unwrap(), Address(at), found).unwrap();
            found == part
        })
    }

    /// What the engine carried on a way.
    pub(super) fn carried(&self, way: crate::paths::Way) -> Bytes {
        self.engine().statistics().paths.iter().filter(|path| path.way == way).map(|path| path.bytes).sum()
    }

    /// Drops the engine and looks for what is left.
    pub(super) fn end(self) {
        self.end_with(0);
    }

    /// The same, where graphs hold the kernels of so many GPUs.
    pub(super) fn end_with(mut self, modules: usize) {
        self.faults.set(&[]);
        if let Some(engine) = self.engine.take() {
            engine.stop();
        }
        let (sim, completion_events) = (self.sim.clone(), self.completion_events.clone());
        drop(self);
        drop(completion_events);
        assert_eq!(sim.census(), Census { modules, ..Census::default() });
    }
}

pub(super) struct Plain {
    sim: Arc<Simulator>,
    start: Address,
    pub(super) span: Span,
}

impl Drop for Plain {
    fn drop(&mut self) {
        self.sim.plain_free(self.start).unwrap();
    }
}

/// As Rust's slices count.
pub(super) fn length(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap()
}

/// Both ends of a copy in a direction, of host and GPU.
pub(super) fn ends<'a>(direction: Direction, host: &'a Span, gpu: &'a Span) -> (&'a Span, &'a Span) {
    match direction {
        Direction::ToGpu => (gpu, host),
        Direction::FromGpu => (host, gpu),
    }
}
