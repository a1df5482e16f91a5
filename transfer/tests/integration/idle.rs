//! An engine whose copies are done takes no time of the processor. Alone in its process, so that all threads are its own.

#![allow(missing_docs)]
// What goes wrong here fails the test.
#![allow(clippy::unwrap_used)]

use std::sync::{Arc, mpsc};
use std::time::Duration;

use glake_device::owned::{Buffer, CompletionEvents, DeviceSet, OwnedStream, Pages, Registration, Span};
use glake_device::topology::Topology;
use glake_device::{DeviceId, Driver};
use glake_sim::load;
use glake_sim::{SimOptions, Simulator};
use glake_transfer::paths::{GpuLinks, PathGraph};
use glake_transfer::{CopyOptions, Engine, EngineOptions, Priority, UserStream};
use glake_units::Bytes;

/// What the kernel says of how often the engine's threads ran, by name.
fn runs() -> Vec<(String, Vec<String>)> {
    let mut found = Vec::new();
    for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
        let read = |name| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        let name = read("comm").trim().to_owned();
        if name.starts_with("glake-") {
            let status = read("status");
            let switches = status.lines().filter(|line| line.contains("ctxt_switches"));
            found.push((name, switches.map(str::to_owned).collect()));
        }
    }
    found.sort();
    found
}

#[test]
fn threads_sleep_while_there_is_nothing_to_do() {
    let topology = load("h200x4").unwrap();
    let gpus: DeviceSet = (0..4).map(DeviceId).collect();
    let graph = PathGraph::conservative(&GpuLinks::of(&Topology::from(&topology)));
    let sim = Arc::new(Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap());
    (0..4).for_each(|gpu| sim.hold_context(DeviceId(gpu)).unwrap());
    let driver: Arc<dyn Driver> = sim;
    let completion_events = CompletionEvents::new(driver.clone());
    let options = EngineOptions { relays: gpus, shared_gpus: true, ..EngineOptions::default() };
    let engine = Engine::new(completion_events.clone(), graph, options).unwrap();
    let (done, ready) = mpsc::channel();
    engine.start_relays(move |_| done.send(()).unwrap()).unwrap();
    ready.recv().unwrap();
    let (size, gpu) = (Bytes::mib(32), DeviceId(1));
    let memory = Arc::new(Buffer::new(&completion_events, gpu, size, gpus).unwrap());
    let host = Arc::new(Registration::new(&completion_events, Pages::new(size, 1).unwrap()).unwrap());
    let (to, from) =
        (memory.span(Bytes::ZERO, size).unwrap(), Span::pinned(&host, Bytes::ZERO, size).unwrap());
    let stream = OwnedStream::new(&driver, gpu).unwrap();
    let on = UserStream::of(&*driver, gpu, stream.id()).unwrap();
    for priority in [Priority::Background, Priority::Critical, Priority::Normal, Priority::Background] {
        let options = CopyOptions { priority, ..CopyOptions::default() };
        engine.copy(&to, &from, on, options).unwrap().wait().unwrap();
    }
    // What is under way may end.
    std::thread::sleep(Duration::from_millis(200));
    let before = runs();
    assert!(before.iter().any(|(name, _)| name == "glake-barriers"), "{before:?}");
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(runs(), before);
    engine.stop();
    assert_eq!(runs(), []);
}
