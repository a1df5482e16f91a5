//! Calibrated by its own simulator, each server of `configs/topologies` gives one GPU what its links can; where relays gain nothing,
//! what a native copy does.

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
use glake_transfer::calibrate::Calibration;
use glake_transfer::paths::{Direction, GpuLinks, PathGraph};
use glake_transfer::{CopyOptions, Engine, EngineOptions, UserStream};
use glake_units::Bytes;

const BUDGET: Duration = Duration::from_secs(1);

/// A calibration looks at what its copies bring; the copies here are timed.
fn simulator(model: &SimTopology, times_only: bool) -> Arc<Simulator> {
    let options = SimOptions { topology: model.clone(), times_only, ..SimOptions::default() };
    Arc::new(Simulator::new(options).unwrap())
}

/// An engine on a calibrated server.
struct Server {
    name: &'static str,
    sim: Arc<Simulator>,
    driver: Arc<dyn Driver>,
    completion_events: Arc<CompletionEvents>,
    engine: Arc<Engine>,
    gpus: DeviceSet,
}

impl Server {
    fn calibrated(name: &'static str) -> Server {
        let model = load(name).unwrap();
        let links = GpuLinks::of(&Topology::from(&model));
        let found = {
            let sim = simulator(&model, false);
            let completion_events = CompletionEvents::new(sim.clone());
            Calibration::run(&completion_events, &links, BUDGET, &|| sim.now(), &mut |_| {}).unwrap()
        };
        println!("{name}: {} trials in {:?}, {} without time", found.trials, found.took, found.unfinished);
        assert!(found.took <= BUDGET && found.excluded.is_empty(), "{name}: {found:?}");
        let sim = simulator(&model, true);
        let driver: Arc<dyn Driver> = sim.clone();
        let completion_events = CompletionEvents::new(driver.clone());
        let gpus: DeviceSet = links.iter().map(|gpu| gpu.device).collect();
        gpus.iter().for_each(|gpu| sim.hold_context(gpu).unwrap());
        let engine = engine(&completion_events, found.graph, gpus);
        Server { name, sim, driver, completion_events, engine, gpus }
    }

    /// GB/s of one copy between pinned memory and a GPU; of a native one, where there are no relays.
    fn rate(&self, gpu: DeviceId, direction: Direction, size: Bytes, relays: DeviceSet) -> f64 {
        self.engine.set_relays(relays);
        let memory = Arc::new(Buffer::new(&self.completion_events, gpu, size, self.gpus).unwrap());
        let memory = memory.span(Bytes::ZERO, size).unwrap();
        let host =
            Arc::new(Registration::new(&self.completion_events, Pages::new(size, 0).unwrap()).unwrap());
        let host = Span::pinned(&host, Bytes::ZERO, size).unwrap();
        let (to, from) = match direction {
            Direction::ToGpu => (&memory, &host),
            Direction::FromGpu => (&host, &memory),
        };
        let stream = OwnedStream::new(&self.driver, gpu).unwrap();
        let on = UserStream::of(&*self.driver, gpu, stream.id()).unwrap();
        let begun = self.sim.now();
        self.engine.copy(to, from, on, CopyOptions::default()).unwrap().wait().unwrap();
        stream.synchronize().unwrap();
        size.get() as f64 / (self.sim.now() - begun).as_secs_f64() / 1e9
    }

    fn end(self) {
        let Server { sim, driver, completion_events, engine, .. } = self;
        engine.stop();
        drop((engine, completion_events, driver));
        assert_eq!(sim.census(), Census::default());
    }
}

fn engine(completion_events: &Arc<CompletionEvents>, graph: PathGraph, gpus: DeviceSet) -> Arc<Engine> {
    let options = EngineOptions { relays: gpus, shared_gpus: true, ..EngineOptions::default() };
    let engine = Engine::new(completion_events.clone(), graph, options).unwrap();
    let (done, ready) = mpsc::channel();
    engine.start_relays(move |_| done.send(()).unwrap()).unwrap();
    ready.recv().unwrap();
    engine
}

/// Large copies of these GPUs, the first's up to 1 GiB, reach 0.95 of the limit, and more than `above` GB/s, by direction.
fn reaches(name: &'static str, gpus: [u32; 2], limits: [f64; 2], above: [f64; 2]) {
    let server = Server::calibrated(name);
    for (gpu, most) in gpus.into_iter().map(DeviceId).zip([1024, 256]) {
        for ((direction, limit), above) in Direction::BOTH.into_iter().zip(limits).zip(above) {
            for size in
                [256, 384, 512, 1024].map(Bytes::mib).into_iter().filter(|size| *size <= Bytes::mib(most))
            {
                let rate = server.rate(gpu, direction, size, server.gpus);
                println!("{name} {gpu} {direction:?} {size}: {rate:.1} of {limit:.1} GB/s");
                assert!(rate >= 0.95 * limit, "{name} {gpu} {direction:?} {size}: {rate} of {limit}");
                assert!(rate > above, "{name} {gpu} {direction:?} {size}: {rate}, not above {above}");
            }
            is_never_worse(&server, gpu, direction, &[1, 2, 4, 16, 64]);
        }
    }
    server.end();
}

/// Copies of so many MiB are no slower than native ones.
fn is_never_worse(server: &Server, gpu: DeviceId, direction: Direction, sizes: &[u64]) {
    for size in sizes.iter().copied().map(Bytes::mib) {
        let native = server.rate(gpu, direction, size, DeviceSet::EMPTY);
        let rate = server.rate(gpu, direction, size, server.gpus);
        println!("{} {gpu} {direction:?} {size}: {rate:.1}, native {native:.1} GB/s", server.name);
        let name = server.name;
        assert!(rate >= 0.98 * native, "{name} {gpu} {direction:?} {size}: {rate}, native {native}");
    }
}

#[test]
fn h20x8() {
    // MMA, on that server: 4.62 times a native copy of 53 GB/s.
    let limit = 4.0 * 53.0 + 60.0;
    reaches("h20x8", [0, 6], [limit; 2], [4.62 * 53.0; 2]);
}

#[test]
fn a100x8() {
    // GLake's own figures, on that server.
    reaches("a100x8", [0, 5], [4.0 * 24.3; 2], [83.1, 71.2]);
}

#[test]
fn h200x4() {
    reaches("h200x4", [0, 3], [213.0, 160.0], [0.0; 2]);
}

#[test]
fn no_relay_gains_anything() {
    for name in ["h200x4-direct", "pcie4x4"] {
        let server = Server::calibrated(name);
        for (gpu, sizes) in [(0, &[1, 2, 4, 16, 64, 256][..]), (3, &[1, 4, 64][..])] {
            for direction in Direction::BOTH {
                is_never_worse(&server, DeviceId(gpu), direction, sizes);
            }
        }
        server.end();
    }
}
