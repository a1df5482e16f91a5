//! Copies tell whether the graph still holds: a calibration of another server goes stale, and what was assumed is mended.

#![allow(missing_docs)]
// What goes wrong here fails the test.
#![allow(clippy::unwrap_used)]

use std::sync::{Arc, mpsc};
use std::time::Duration;

use glake_device::owned::{Buffer, CompletionEvents, DeviceSet, OwnedStream, Pages, Registration, Span};
use glake_device::topology::Topology;
use glake_device::{DeviceId, Driver};
use glake_sim::load;
use glake_sim::{Census, SimOptions, SimTopology, Simulator};
use glake_tiers::Pinning;
use glake_transfer::calibrate::Calibration;
use glake_transfer::paths::{Direction, GpuLinks, PathGraph};
use glake_transfer::{CopyHandle, CopyOptions, Engine, EngineOptions, UserStream};
use glake_units::{Bandwidth, Bytes};

const GPU: DeviceId = DeviceId(0);

/// Two GPUs with links of so many GB/s each way, and nothing else that bounds them.
fn two(rate: f64) -> SimTopology {
    let mut topology = load("h200x4").unwrap();
    topology.gpus.truncate(2);
    for gpu in &mut topology.gpus {
        (gpu.link.to_gpu, gpu.link.from_gpu) = (Bandwidth(rate), Bandwidth(rate));
    }
    topology
}

fn links(topology: &SimTopology) -> Vec<GpuLinks> {
    GpuLinks::of(&Topology::from(topology))
}

/// A calibration looks at what its copies bring; the copies here are timed.
fn simulator(topology: &SimTopology, times_only: bool) -> Arc<Simulator> {
    let options = SimOptions { topology: topology.clone(), times_only, ..SimOptions::default() };
    Arc::new(Simulator::new(options).unwrap())
}

fn calibrated(topology: &SimTopology) -> PathGraph {
    let sim = simulator(topology, false);
    let completion_events = CompletionEvents::new(sim.clone());
    let budget = Duration::from_millis(200);
    Calibration::run(&completion_events, &links(topology), budget, &|| sim.now(), &mut |_| {}).unwrap().graph
}

/// An engine with a stream, and memory for copies to a GPU.
struct Fixture {
    sim: Arc<Simulator>,
    engine: Arc<Engine>,
    streams: [(OwnedStream, UserStream); 2],
    /// One a stream.
    to: [Span; 2],
    from: Span,
}

impl Fixture {
    fn new(topology: &SimTopology, graph: PathGraph) -> Fixture {
        let sim = simulator(topology, true);
        let driver: Arc<dyn Driver> = sim.clone();
        let completion_events = CompletionEvents::new(driver.clone());
        let gpus: DeviceSet = links(topology).iter().map(|gpu| gpu.device).collect();
        let options = EngineOptions { relays: gpus, shared_gpus: true, ..EngineOptions::default() };
        gpus.iter().for_each(|gpu| sim.hold_context(gpu).unwrap());
        let engine = Engine::new(completion_events.clone(), graph, options).unwrap();
        let (done, ready) = mpsc::channel();
        engine.start_relays(move |_| done.send(()).unwrap()).unwrap();
        ready.recv().unwrap();
        let size = Bytes::mib(64);
        let to = [(); 2].map(|()| {
            let memory = Arc::new(Buffer::new(&completion_events, GPU, size, gpus).unwrap());
            memory.span(Bytes::ZERO, size).unwrap()
        });
        let from = Arc::new(Registration::new(&completion_events, Pages::new(size, 0).unwrap()).unwrap());
        let streams = [(); 2].map(|()| {
            let stream = OwnedStream::new(&driver, GPU).unwrap();
            let on = UserStream::of(&*driver, GPU, stream.id()).unwrap();
            (stream, on)
        });
        let from = Span::pinned(&from, Bytes::ZERO, size).unwrap();
        Fixture { sim, engine, streams, to, from }
    }

    fn copy(&self, stream: usize) -> CopyHandle {
        let (to, on) = (&self.to[stream], self.streams[stream].1);
        self.engine.copy(to, &self.from, on, CopyOptions::default()).unwrap()
    }

    /// Copies of 64 MiB on a stream, one after another, waited for each.
    fn copies(&self, count: usize) {
        for _ in 0..count {
            self.copy(0).wait().unwrap();
        }
    }

    fn rate(&self) -> f64 {
        let begun = self.sim.now();
        self.copies(1);
        self.from.size().get() as f64 / (self.sim.now() - begun).as_secs_f64() / 1e9
    }

    /// The other GPU's link is given up: another process of the machine copies to a GPU of its own over it.
    fn give_up(&self) {
        self.copies_beside_others();
        let alone = self.rate();
        assert!(alone < 52.0, "the link that was busy is given up: {alone}");
    }

    fn copies_beside_others(&self) {
        let (driver, other): (Arc<dyn Driver>, DeviceId) = (self.sim.clone(), DeviceId(1));
        let stream = OwnedStream::new(&driver, other).unwrap();
        let size = self.from.size();
        let memory = Buffer::new(&CompletionEvents::new(driver), other, size, DeviceSet::EMPTY).unwrap();
        let to = Arc::new(memory).span(Bytes::ZERO, size).unwrap();
        for _ in 0..120 {
            stream.of().copy(&to, &self.from).unwrap();
            self.copies(1);
            stream.synchronize().unwrap();
        }
    }

    fn own(&self) -> f64 {
        self.engine.graph().rates(GPU, Direction::ToGpu).next().unwrap().rate.0
    }

    fn end(self) {
        self.engine.stop();
        let sim = self.sim.clone();
        drop(self);
        assert_eq!(sim.census(), Census::default());
    }
}

#[test]
fn a_calibration_holds_until_links_give_a_fifth_less() {
    let graph = calibrated(&two(50.0));
    for (rate, stale) in [(50.0, false), (44.0, false), (35.0, true), (65.0, true)] {
        let fixture = Fixture::new(&two(rate), graph.clone());
        assert!(fixture.engine.graph().is_calibrated());
        let (told, stale_now) = mpsc::channel();
        fixture.engine.when_stale(move |engine| told.send(engine.is_stale()).unwrap());
        fixture.copies(16);
        assert!(!fixture.engine.is_stale(), "{rate}: after 1 GiB, of which some copies are timed");
        fixture.copies(160);
        assert_eq!(fixture.engine.is_stale(), stale, "{rate}");
        assert_eq!(fixture.engine.graph().is_calibrated(), !stale, "{rate}");
        if stale {
            assert!(stale_now.recv().unwrap());
        }
        assert!(stale_now.try_recv().is_err());
        fixture.engine.replace_graph(graph.clone());
        assert!(!fixture.engine.is_stale());
        fixture.end();
    }
}

#[test]
fn copies_beside_others_say_nothing() {
    let fixture = Fixture::new(&two(50.0), calibrated(&two(50.0)));
    for _ in 0..120 {
        let handles = [0, 1].map(|stream| fixture.copy(stream));
        handles.into_iter().for_each(|handle| handle.wait().unwrap());
    }
    assert!(!fixture.engine.is_stale() && fixture.engine.graph().is_calibrated());
    fixture.end();
}

/// What a program's first steps meet: memory for their copies is pinned beside them, by threads that fill the host's memory.
#[test]
fn copies_beside_pinning_say_nothing() {
    let fixture = Fixture::new(&two(50.0), PathGraph::conservative(&links(&two(50.0))));
    let pinning = Arc::new(Pinning::default());
    fixture.engine.ignore_while_pinning(&pinning);
    let under_way = pinning.begin();
    fixture.copies_beside_others();
    drop(under_way);
    let rate = fixture.rate();
    assert!(rate > 90.0, "{rate}");
    fixture.give_up();
    fixture.end();
}

#[test]
fn what_was_assumed_is_refined() {
    // Links of which the system says 55 give 35.
    let fixture = Fixture::new(&two(35.0), PathGraph::conservative(&links(&two(55.0))));
    let before = fixture.engine.graph().together(GPU, Direction::ToGpu).0;
    fixture.copies(120);
    let after = fixture.engine.graph().together(GPU, Direction::ToGpu).0;
    assert!(before > 100.0 && (after / 70.0 - 1.0).abs() < 0.1, "{before}, {after}");
    assert!(fixture.own() > 0.0 && !fixture.engine.is_stale() && !fixture.engine.graph().is_calibrated());
    assert!(fixture.rate() > 60.0, "still over both");
    fixture.end();
}

#[test]
fn relays_that_gain_nothing_are_given_up() {
    let mut topology = load("h200x4-direct").unwrap();
    topology.gpus.truncate(2);
    let fixture = Fixture::new(&topology, PathGraph::conservative(&links(&topology)));
    let native = {
        fixture.engine.set_relays(DeviceSet::EMPTY);
        let native = fixture.rate();
        fixture.engine.set_relays((0..2).map(DeviceId).collect());
        native
    };
    let first = fixture.rate();
    assert!(first >= 0.98 * native, "{first}, native {native}");
    fixture.copies(200);
    let rate = fixture.rate();
    assert!(rate >= 0.98 * native, "{rate}, native {native}");
    let splits = fixture.engine.statistics().split_copies;
    fixture.copies(4000);
    let tried = fixture.engine.statistics().split_copies - splits;
    assert!((1..4000 / 8).contains(&tried), "{tried}: they go over their own link, and seldom try again");
    fixture.end();
}

#[test]
fn relays_that_were_busy_once_serve_again() {
    let fixture = Fixture::new(&two(50.0), PathGraph::conservative(&links(&two(50.0))));
    fixture.give_up();
    fixture.copies(300);
    let again = fixture.rate();
    assert!(again > 90.0, "{again}");
    fixture.end();
}

/// As in a training step: copies back begin when those to the host are over, and nobody looks what became of them before the next step's.
#[test]
fn copies_of_the_other_direction_that_are_over_keep_none_from_being_timed() {
    let fixture = Fixture::new(&two(50.0), PathGraph::conservative(&links(&two(50.0))));
    let back = || {
        let on = fixture.streams[1].1;
        let copied = fixture.engine.copy(&fixture.from, &fixture.to[1], on, CopyOptions::default());
        drop(copied.unwrap());
        fixture.streams[1].0.synchronize().unwrap();
    };
    fixture.give_up();
    for _ in 0..10 {
        back();
        fixture.copies(60);
    }
    let again = fixture.rate();
    assert!(again > 90.0, "{again}");
    fixture.end();
}

#[test]
fn an_attempt_that_no_copy_can_judge_ends() {
    // The relay's link is so slow that it holds up the other half of each copy.
    let mut topology = two(50.0);
    topology.gpus[1].link.to_gpu = Bandwidth(12.0);
    let fixture = Fixture::new(&topology, PathGraph::conservative(&links(&two(50.0))));
    fixture.copies(200);
    assert!(fixture.rate() > 49.0, "it is given up");
    let begun = fixture.engine.statistics().split_copies;
    // Beside another, no copy is timed.
    let pairs = |count: u64| {
        for _ in 0..count {
            let handles = [0, 1].map(|stream| fixture.copy(stream));
            handles.into_iter().for_each(|handle| handle.wait().unwrap());
        }
        fixture.engine.statistics().split_copies - begun
    };
    let tried = pairs(512);
    assert!(tried > 0 && tried < 300, "{tried} of 1024");
    assert_eq!(pairs(64), tried, "it is over");
    // Small ones would not be timed either: they begin no attempt.
    let small = Bytes::mib(8);
    let (to, from) =
        (fixture.to[0].part(Bytes::ZERO, small).unwrap(), fixture.from.part(Bytes::ZERO, small).unwrap());
    for _ in 0..8192 {
        let copy = fixture.engine.copy(&to, &from, fixture.streams[0].1, CopyOptions::default()).unwrap();
        copy.wait().unwrap();
    }
    assert_eq!(fixture.engine.statistics().split_copies - begun, tried);
    drop((to, from));
    fixture.end();
}
