//! Captures as torch makes them: a pool is begun before its capture, and ended after it, unless the capture fails.

use glake_device::CaptureState;
use glake_sim::SimTopology;

use super::*;

const GPU: DeviceId = DeviceId(0);

/// A process, and the device under it.
struct Fixture {
    sim: Arc<Simulator>,
    process: Process,
}

/// What torch's graph asks for, in its order.
struct Capturing<'a> {
    fixture: &'a Fixture,
    id: PoolId,
    stream: Stream,
}

fn fixture(settings: &str) -> Fixture {
    let options = SimOptions {
        topology: SimTopology::uniform(2, Bytes::gib(1)),
        clock: Clock::Wall,
        strict_ordering: false,
        ..SimOptions::default()
    };
    let sim = Arc::new(Simulator::new(options).unwrap());
    let environment = Environment::from_iter([("GLAKE_DEVICE", "sim:h200x4")]);
    let sources = Sources { environment, ..Sources::default() }.with_overrides("test", settings).unwrap();
    let under = sim.clone();
    let process = Process::start_on(sources.load().unwrap(), |_| under).unwrap();
    Fixture { sim, process }
}

impl Fixture {
    fn capturing(&self, pool: u64) -> Capturing<'_> {
        Capturing { fixture: self, id: PoolId(pool, 0), stream: self.process.streams().create(0).unwrap() }
    }

    /// Whether completion points are held back on a device, asked by a thread that captures nothing.
    fn held(&self, device: usize) -> bool {
        let memory = &self.process.devices[device];
        let pool = &self.process.started(memory).unwrap().pool;
        let asked = || {
            let block = self.process.malloc(device.try_into().unwrap(), mib(10), STREAM).unwrap();
            self.process.free(block).unwrap();
            matches!(pool.settle(), Err(PoolError::Driver(DriverError::Capturing { .. })))
        };
        std::thread::scope(|scope| scope.spawn(asked).join().unwrap())
    }

    fn both_held(&self) -> [bool; 2] {
        [self.held(0), self.held(1)]
    }
}

impl Capturing<'_> {
    /// As torch's graph: the pool first. It takes what is allocated on streams of this capture.
    fn begin(&self) -> Result<()> {
        self.begin_pool()?;
        self.fixture.sim.begin_capture(GPU, self.stream).unwrap();
        Ok(())
    }

    fn begin_pool(&self) -> Result<()> {
        let (sim, stream) = (self.fixture.sim.clone(), self.stream);
        let takes = move |asked| {
            asked == stream && matches!(sim.capture_state(GPU, asked), Ok(CaptureState::Active(_)))
        };
        self.fixture.process.pools().begin(0, self.id, Some(Arc::new(takes)))
    }

    fn malloc(&self) -> Address {
        self.fixture.process.malloc(0, mib(10), self.stream).unwrap()
    }

    /// What may not be done in a capture.
    fn breaks(&self) {
        self.fixture.sim.stream_synchronize(GPU, self.stream).unwrap_err();
    }

    /// As torch's graph: where the capture failed that is all.
    fn end(&self) -> glake_device::Result<()> {
        self.fixture.sim.end_capture(GPU, self.stream)?;
        self.fixture.process.pools().end(0, self.id).unwrap();
        Ok(())
    }

    fn fails(&self) {
        self.breaks();
        self.end().unwrap_err();
    }
}

#[test]
fn a_capture_that_failed_holds_no_device_s_points() {
    let fixture = fixture("");
    let graph = fixture.capturing(1);
    graph.begin().unwrap();
    let block = graph.malloc();
    assert_eq!(fixture.both_held(), [true; 2]);
    graph.fails();
    assert_eq!(fixture.both_held(), [true; 2], "other threads do not ask the driver of it");
    // Its own thread does, with whatever it asks next.
    fixture.process.free(fixture.process.malloc(0, mib(10), STREAM).unwrap()).unwrap();
    assert_eq!(fixture.both_held(), [false; 2]);
    fixture.process.free(block).unwrap();
    // Nobody ends its pool, and the next graph has one of its own.
    let next = fixture.capturing(2);
    next.begin().unwrap();
    next.malloc();
    assert_eq!(fixture.both_held(), [true; 2]);
    next.end().unwrap();
    assert_eq!(fixture.both_held(), [false; 2]);
}

#[test]
fn a_capture_of_which_nothing_was_allocated_is_over_when_its_thread_allocates_elsewhere() {
    let fixture = fixture("");
    let graph = fixture.capturing(1);
    graph.begin_pool().unwrap();
    assert!(fixture.held(0), "it is about to begin");
    fixture.sim.begin_capture(GPU, graph.stream).unwrap();
    assert!(fixture.held(0), "other threads' allocations say nothing of it");
    graph.fails();
    assert!(fixture.held(0), "nobody has told yet");
    fixture.process.malloc(0, mib(10), STREAM).unwrap();
    assert_eq!(fixture.both_held(), [false; 2]);
}

#[test]
fn a_capture_that_never_began_holds_nothing_once_its_thread_has_ended() {
    let fixture = fixture("");
    std::thread::scope(|scope| {
        scope.spawn(|| fixture.capturing(1).begin_pool().unwrap()).join().unwrap();
    });
    assert_eq!(fixture.both_held(), [false; 2]);
}

#[test]
fn a_pool_can_be_begun_again_after_its_capture_failed() {
    let fixture = fixture("");
    let allocates: [&dyn Fn(&Capturing<'_>); 3] = [
        &|graph| _ = graph.malloc(),
        &|_| (),
        // After it: what the thread allocates in no capture.
        &|graph| {
            graph.fails();
            fixture.process.malloc(0, mib(10), STREAM).unwrap();
            fixture.sim.begin_capture(GPU, graph.stream).unwrap();
        },
    ];
    for (pool, allocate) in (1..).zip(allocates) {
        let first = fixture.capturing(pool);
        first.begin().unwrap();
        allocate(&first);
        first.fails();
        let again = fixture.capturing(pool);
        again.begin().unwrap();
        let inside = again.malloc();
        assert_eq!(fixture.both_held(), [true; 2]);
        assert!(
            matches!(fixture.capturing(pool).begin(), Err(ref error) if error.says("already: end that first")),
            "it is open"
        );
        let mut live = Vec::new();
        fixture.process.pools().blocks(0, again.id, |address, _| live.push(address)).unwrap();
        assert!(live.contains(&inside));
        again.end().unwrap();
        assert_eq!(fixture.both_held(), [false; 2]);
        assert!(
            matches!(fixture.process.pools().end(0, again.id), Err(ref error) if error.says("has no private pool"))
        );
    }
}

/// A pool of the program's that is begun and ended inside a capture: the capture goes on.
#[test]
fn what_is_begun_inside_a_capture_does_not_end_its_hold() {
    let fixture = fixture("");
    let graph = fixture.capturing(1);
    graph.begin().unwrap();
    let inner = PoolId(0, 7);
    fixture.process.pools().begin(0, inner, None).unwrap();
    graph.malloc();
    fixture.process.pools().end(0, inner).unwrap();
    assert_eq!(fixture.both_held(), [true; 2]);
    graph.malloc();
    graph.end().unwrap();
    assert_eq!(fixture.both_held(), [false; 2]);
}

#[test]
fn a_shortage_in_a_capture_is_out_of_memory_and_says_what_was_not_waited_for() {
    let fixture = fixture("pool.limit = \"64MiB\"");
    let other = fixture.process.streams().create(0).unwrap();
    let graph = fixture.capturing(1);
    graph.begin().unwrap();
    graph.malloc();
    let freed = fixture.process.malloc(0, mib(40), other).unwrap();
    fixture.process.free(freed).unwrap();
    for (before, stream) in (0..).zip([STREAM, graph.stream]) {
        assert_eq!(fixture.process.reports().stats(0).unwrap().counters.num_ooms, before);
        let error = fixture.process.malloc(0, mib(40), stream).unwrap_err();
        assert!(matches!(error, ProcessError::OutOfMemory(_)), "{error}");
        let text = error.to_string();
        assert!(text.starts_with("CUDA out of memory. Tried to allocate 40.00 MiB. GPU 0 has"), "{text}");
        assert!(text.contains("40.00 MiB is pending on streams") && text.contains("capture"), "{text}");
        assert!(!text.contains("waited for all pending work"), "{text}");
    }
    assert_eq!(fixture.process.reports().stats(0).unwrap().counters.num_ooms, 2);
    graph.end().unwrap();
    fixture.process.malloc(0, mib(40), STREAM).unwrap();
}

#[test]
fn where_the_capture_s_stream_is_known_an_allocation_elsewhere_inside_it_breaks_nothing() {
    let fixture = fixture("");
    let graph = fixture.capturing(1);
    graph.begin_pool().unwrap();
    fixture.process.pools().expect_capture(0, graph.id, graph.stream).unwrap();
    fixture.sim.begin_capture(GPU, graph.stream).unwrap();
    // The first allocation of the thread is on a stream outside of its own capture.
    let outside = fixture.process.malloc(0, mib(10), STREAM).unwrap();
    assert_eq!(fixture.both_held(), [true; 2]);
    let inside = graph.malloc();
    graph.end().unwrap();
    assert_eq!(fixture.both_held(), [false; 2]);
    // And where it failed with nothing allocated, the same allocation shows that.
    let failed = fixture.capturing(2);
    failed.begin_pool().unwrap();
    fixture.process.pools().expect_capture(0, failed.id, failed.stream).unwrap();
    fixture.sim.begin_capture(GPU, failed.stream).unwrap();
    failed.fails();
    assert_eq!(fixture.both_held(), [true; 2]);
    fixture.process.free(fixture.process.malloc(0, mib(10), STREAM).unwrap()).unwrap();
    assert_eq!(fixture.both_held(), [false; 2]);
    [outside, inside].into_iter().for_each(|block| fixture.process.free(block).unwrap());
    let error = fixture.process.pools().expect_capture(0, PoolId(9, 9), STREAM).unwrap_err();
    assert!(error.says("has no private pool"), "{error}");
}
