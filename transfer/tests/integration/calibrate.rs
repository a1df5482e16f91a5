//! A calibration finds what a simulated server is made of, within its budget, and leaves out what fails.

#![allow(missing_docs)]
// What goes wrong here fails the test.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use glake_device::owned::{CompletionEvents, DeviceSet};
use glake_device::topology::Topology;
use glake_device::{DeviceId, Driver, Fault, Faults, Injected, Verb, When};
use glake_sim::load;
use glake_sim::{Census, Clock, SimOptions, SimTopology, Simulator};
use glake_transfer::calibrate::{Calibration, Progress};
use glake_transfer::paths::{Direction, GpuLinks, PathGraph, Way};
use glake_units::Bytes;

const BUDGET: Duration = Duration::from_secs(1);

fn simulator(topology: SimTopology, clock: Clock) -> Arc<Simulator> {
    Arc::new(Simulator::new(SimOptions { topology, clock, ..SimOptions::default() }).unwrap())
}

/// Calibrates a model in virtual time, on `driver` over it.
fn calibrated(
    sim: &Arc<Simulator>,
    driver: Arc<dyn Driver>,
    topology: &SimTopology,
    budget: Duration,
) -> Calibration {
    let completion_events = CompletionEvents::new(driver);
    let gpus = GpuLinks::of(&Topology::from(topology));
    let mut last = Progress { done: 0, planned: 0 };
    let mut progress = |now: Progress| {
        assert!(now.done == last.done + 1 && now.done <= now.planned);
        last = now;
    };
    let clock = || sim.now();
    Calibration::run(&completion_events, &gpus, budget, &clock, &mut progress).unwrap()
}

/// Calibrates some of a model's GPUs: every copy moves its bytes, so that a whole server of eight takes minutes.
fn of_model(name: &str, gpus: &[usize]) -> Calibration {
    let mut topology = load(name).unwrap();
    topology.gpus = gpus.iter().map(|gpu| topology.gpus[*gpu].clone()).collect();
    let sim = simulator(topology.clone(), Clock::Virtual);
    let found = calibrated(&sim, sim.clone(), &topology, BUDGET);
    assert_eq!(sim.census(), Census::default());
    assert!(found.took <= BUDGET, "{name}: {:?}", found.took);
    assert_eq!((found.unfinished, found.excluded), (0, DeviceSet::EMPTY), "{name}");
    assert!(found.graph.is_calibrated());
    found
}

fn close(found: f64, expected: f64, part: f64, what: &str) {
    assert!((found / expected - 1.0).abs() < part, "{what}: {found} instead of {expected}");
}

/// The ways of the relays of a target, in order of the relays.
fn relays(graph: &PathGraph, target: u32, direction: Direction) -> Vec<(u32, Way)> {
    let paths = graph.rates(DeviceId(target), direction).filter(|path| path.way == Way::ZeroStaging);
    paths.map(|path| (path.relay.0, path.way)).collect()
}

#[test]
fn finds_links_that_only_host_memory_bounds() {
    let found = of_model("h200x4", &[0, 1, 2, 3]);
    for gpu in 0..4 {
        for (direction, link, together) in
            [(Direction::ToGpu, 55.5, 213.0), (Direction::FromGpu, 55.4, 160.0)]
        {
            let own = found.graph.rates(DeviceId(gpu), direction).next().unwrap();
            close(own.rate.0, link, 0.02, "own link");
            close(own.latency.0, 7.0, 0.1, "latency");
            assert_eq!(relays(&found.graph, gpu, direction).len(), 3);
            close(found.graph.together(DeviceId(gpu), direction).0, together, 0.03, "together");
        }
    }
}

#[test]
fn finds_what_the_other_socket_gives() {
    // Two of this socket and three of the other one.
    let found = of_model("h20x8", &[0, 1, 4, 5, 6]);
    for direction in Direction::BOTH {
        close(found.graph.together(DeviceId(0), direction).0, 2.0 * 53.0 + 60.0, 0.05, "together");
        close(found.graph.together(DeviceId(4), direction).0, 3.0 * 53.0 + 60.0, 0.05, "together");
    }
}

#[test]
fn finds_links_behind_one_switch() {
    let found = of_model("a100x8", &[0, 1, 2, 3]);
    for gpu in [0, 3] {
        for direction in Direction::BOTH {
            close(found.graph.together(DeviceId(gpu), direction).0, 2.0 * 24.3, 0.05, "together");
            let twin = gpu ^ 1;
            assert!(!relays(&found.graph, gpu, direction).iter().any(|(relay, _)| *relay == twin), "{gpu}");
        }
    }
}

#[test]
fn finds_that_no_relay_helps() {
    // Without NVLink what a relay carries crosses two links.
    let mut topology = load("h200x4").unwrap();
    topology.gpus.truncate(3);
    topology.gpus.iter_mut().for_each(|gpu| gpu.nvlink = None);
    let sim = simulator(topology.clone(), Clock::Virtual);
    let found = calibrated(&sim, sim.clone(), &topology, BUDGET);
    for gpu in 0..3 {
        for direction in Direction::BOTH {
            assert_eq!(found.graph.rates(DeviceId(gpu), direction).count(), 1);
        }
    }
}

#[test]
fn what_there_is_no_time_for_is_taken_for_absent() {
    let topology = load("h200x4").unwrap();
    let sim = simulator(topology.clone(), Clock::Virtual);
    let budget = Duration::from_millis(10);
    let found = calibrated(&sim, sim.clone(), &topology, budget);
    assert!(found.unfinished > 0 && found.took < budget * 2, "{:?}", found.took);
    for gpu in 0..4 {
        assert!(found.graph.together(DeviceId(gpu), Direction::ToGpu).0 <= 222.0);
    }
    let none = calibrated(&sim, sim.clone(), &topology, Duration::ZERO);
    assert_eq!(none.trials, 0);
    assert_eq!(none.graph.rates(DeviceId(0), Direction::ToGpu).count(), 0);
    assert_eq!(sim.census(), Census::default());
}

#[test]
fn keeps_its_budget_in_real_time() {
    let mut topology = load("h200x4").unwrap();
    topology.gpus.truncate(2);
    let sim = simulator(topology.clone(), Clock::Wall);
    let completion_events = CompletionEvents::new(sim.clone());
    let gpus = GpuLinks::of(&Topology::from(&topology));
    let since = Instant::now();
    let budget = Duration::from_millis(1500);
    let found =
        Calibration::run(&completion_events, &gpus, budget, &|| since.elapsed(), &mut |_| {}).unwrap();
    assert!(found.took < budget * 2, "{:?}", found.took);
    // How much it found, and at which rate, depends on the machine's load.
    assert!(found.graph.paths().links.iter().all(|link| link.rate.0 > 0.0));
    drop((found, completion_events));
    assert_eq!(sim.census(), Census::default());
}

/// Any verb failing once or for ever leaves a graph or an error, and nothing behind.
#[test]
fn faults_leave_out_what_fails_and_leak_nothing() {
    let mut topology = load("h200x4").unwrap();
    topology.gpus.truncate(2);
    let sim = simulator(topology.clone(), Clock::Virtual);
    let gpus = GpuLinks::of(&Topology::from(&topology));
    let verbs = [
        Verb::StreamCreate,
        Verb::EventCreate,
        Verb::Create,
        Verb::Map,
        Verb::SetAccess,
        Verb::HostRegister,
        Verb::Copy,
        Verb::EventRecord,
        Verb::StreamWaitEvent,
        Verb::EventSynchronize,
        Verb::EventElapsed,
        Verb::StreamSynchronize,
        Verb::ReadNow,
    ];
    for verb in verbs {
        for nth in [1, 2, 23] {
            let faults = Arc::new(Faults::new(sim.clone()));
            faults.set(&[Fault { verb: Some(verb), when: When::Nth(nth), error: Injected::Failed(700) }]);
            let completion_events = CompletionEvents::new(faults.clone());
            let clock = || sim.now();
            let found =
                Calibration::run(&completion_events, &gpus, Duration::from_millis(12), &clock, &mut |_| {});
            if let Ok(found) = &found {
                for gpu in found.excluded.iter() {
                    for target in 0..2 {
                        let relayed = relays(&found.graph, target, Direction::ToGpu);
                        assert!(relayed.iter().all(|(relay, _)| *relay != gpu.0), "{verb} {nth}");
                    }
                }
                let seen = faults.injected() == 0 || !found.excluded.is_empty() || verb == Verb::SetAccess;
                assert!(seen, "{verb} {nth}");
            }
            drop((found, completion_events));
            assert_eq!(sim.census(), Census::default(), "{verb} {nth}");
        }
    }
}

#[test]
fn a_server_of_one_gpu_has_its_own_link() {
    let topology = SimTopology::uniform(1, Bytes::gib(2));
    let sim = simulator(topology.clone(), Clock::Virtual);
    let found = calibrated(&sim, sim.clone(), &topology, BUDGET);
    let paths: Vec<_> = found.graph.rates(DeviceId(0), Direction::FromGpu).collect();
    assert_eq!(paths.len(), 1);
    close(paths[0].rate.0, 55.4, 0.02, "own link");
}
