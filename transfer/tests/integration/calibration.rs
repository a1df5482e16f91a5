//! Calibrations of servers that are reckoned, not run: what is found must be what they were reckoned from.
//!
//! The servers are those of `configs/topologies`, written out here as pipes once more, in the plainest way: max-min by the
//! fullest pipe first. It asks nothing of the crate but which trials and which shares there are.

#![allow(missing_docs)]
// What goes wrong here fails the test.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use glake_device::DeviceId;
use glake_device::owned::DeviceSet;
use glake_device::topology::Topology;
use glake_sim::SimTopology;
use glake_sim::load;
use glake_transfer::paths::trials::{Leg, Memory, Outcome, Step, Trial, plan};
use glake_transfer::paths::{Ask, Direction, GpuLinks, Load, PathGraph, Shares, Way, split};
use glake_units::{Bandwidth, Bytes, Micros};
use proptest::prelude::*;

/// A copy besides its bytes: native, over a relay, through a buffer; and what each leg after the second adds.
const LATENCY: (f64, f64, f64, f64) = (7.7, 14.5, 45.0, 3.1);

/// Two seconds.
const BUDGET: Micros = Micros(2e6);

struct Server {
    model: SimTopology,
    /// Between which GPUs a relay's stream takes the relay's link: elsewhere it takes the target's.
    zero_staging: fn(u32, u32) -> bool,
    /// Between which GPUs there is NVLink: elsewhere staged bytes take both links.
    nvlink: fn(u32, u32) -> bool,
    /// What any two links give together from their GPUs.
    pair: Option<f64>,
    /// What a measurement is off by, at most.
    noise: f64,
    seed: std::cell::Cell<u64>,
}

impl Server {
    fn new(name: &str) -> Server {
        Server {
            model: load(name).unwrap(),
            zero_staging: |_, _| true,
            nvlink: |_, _| true,
            pair: None,
            noise: 0.0,
            seed: 7.into(),
        }
    }

    fn gpus(&self) -> Vec<GpuLinks> {
        GpuLinks::of(&Topology::from(&self.model))
    }

    /// The pipes of a leg by name, with what each gives.
    fn route(&self, direction: Direction, leg: &Leg) -> BTreeMap<String, f64> {
        let (nvlink, zero_staging) = (self.nvlink, self.zero_staging);
        let joined = nvlink(leg.target.0, leg.relay.0);
        let relayed = match leg.way {
            Way::Direct => false,
            Way::ZeroStaging => joined && zero_staging(leg.target.0, leg.relay.0),
            Way::Staged => true,
        };
        let (target, link) =
            (leg.target.0 as usize, if relayed { leg.relay.0 } else { leg.target.0 } as usize);
        let gpu = &self.model.gpus[link];
        let pick = |to: f64, from: f64| if direction == Direction::ToGpu { to } else { from };
        let host = pick(self.model.host.read.0, self.model.host.write.0);
        let mut pipes = BTreeMap::from([("host".to_owned(), host)]);
        pipes.insert(format!("link {link}"), pick(gpu.link.to_gpu.0, gpu.link.from_gpu.0));
        if let Some(switch) = gpu.switch {
            let link = &self.model.switches[switch as usize];
            pipes.insert(format!("switch {switch}"), pick(link.to_gpu.0, link.from_gpu.0));
        }
        for other in (0..self.model.gpus.len()).filter(|other| *other != link) {
            let pair = self.pair.filter(|_| direction == Direction::FromGpu);
            pipes.extend(pair.map(|rate| (format!("pair {} {}", link.min(other), link.max(other)), rate)));
        }
        if link != target && !joined {
            let own = &self.model.gpus[target].link;
            pipes.insert(format!("link {target}"), pick(own.to_gpu.0, own.from_gpu.0));
        }
        if link != target {
            pipes.insert(format!("nvlink of {target}"), gpu.nvlink.unwrap().0);
            pipes.insert(format!("nvlink of {link}"), gpu.nvlink.unwrap().0);
            if let Some(far) = self.model.host.far_socket
                && gpu.socket != self.model.gpus[target].socket
            {
                pipes.insert(format!("far from {target}"), far.0);
            }
        }
        pipes
    }

    /// What a trial takes, in microseconds.
    fn took(&self, trial: &Trial) -> Micros {
        let forks = trial.legs.len().saturating_sub(2) as f64 * LATENCY.3;
        let mut legs: Vec<(f64, f64, BTreeMap<String, f64>)> = trial
            .legs
            .iter()
            .map(|leg| {
                let starts = match leg.way {
                    Way::Direct if leg.target == trial.legs[0].target => LATENCY.0,
                    Way::Direct | Way::ZeroStaging => LATENCY.1 + forks,
                    Way::Staged => LATENCY.2 + forks,
                };
                (starts, leg.size.get() as f64 / 1000.0, self.route(trial.direction, leg))
            })
            .collect();
        let mut now = 0.0;
        while !legs.is_empty() {
            let flowing: Vec<usize> = (0..legs.len()).filter(|leg| legs[*leg].0 <= now).collect();
            let rates = max_min(&flowing.iter().map(|leg| &legs[*leg].2).collect::<Vec<_>>());
            let ends = flowing.iter().zip(&rates).map(|(leg, rate)| now + legs[*leg].1 / rate);
            let begins = legs.iter().map(|leg| leg.0).filter(|starts| *starts > now);
            let next = ends.chain(begins).fold(f64::INFINITY, f64::min);
            for (leg, rate) in flowing.iter().zip(&rates) {
                legs[*leg].1 -= rate * (next - now);
            }
            now = next;
            legs.retain(|leg| leg.1 > 1e-6);
        }
        Micros(now * (1.0 + self.noise * self.random()))
    }

    /// From -1 to 1.
    fn random(&self) -> f64 {
        self.seed.set(self.seed.get().wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
        (self.seed.get() >> 33) as f64 / (1_u64 << 30) as f64 - 1.0
    }

    fn run(&self, trials: Vec<Trial>) -> Vec<Outcome> {
        trials.into_iter().map(|trial| Outcome { took: self.took(&trial), trial }).collect()
    }

    /// How long all runs of these trials take, in microseconds.
    fn cost(&self, trials: &[Trial]) -> f64 {
        trials.iter().map(|trial| f64::from(trial.repeats + 1) * (self.took(trial).0 + 30.0)).sum()
    }

    fn calibrated(&self) -> PathGraph {
        let (gpus, mut outcomes) = (self.gpus(), Vec::new());
        for step in Step::ALL {
            outcomes.extend(self.run(plan(step, &gpus, &outcomes, BUDGET)));
        }
        PathGraph::from_outcomes(&gpus, &outcomes).unwrap()
    }

    /// GB/s of a copy as it is split, and over the own link alone.
    fn copy(&self, graph: &PathGraph, target: u32, direction: Direction, size: Bytes) -> (f64, f64) {
        let shares = shares(graph, target, direction, size);
        let leg = |relay, way, size| Leg { target: DeviceId(target), relay, way, size };
        let legs = shares.iter().map(|share| leg(share.relay, share.way, share.size)).collect();
        let trial = |legs| Trial { direction, memory: Memory::Pool, legs, repeats: 1 };
        let native = vec![leg(DeviceId(target), Way::Direct, size)];
        let rate = |took: Micros| size.get() as f64 / took.0 / 1000.0;
        (rate(self.took(&trial(legs))), rate(self.took(&trial(native))))
    }
}

/// Rates of flows through pipes: the pipe that gives each of its flows least is shared evenly, and so on with the rest.
fn max_min(routes: &[&BTreeMap<String, f64>]) -> Vec<f64> {
    let mut rates = vec![None; routes.len()];
    while rates.iter().any(Option::is_none) {
        let even = |pipe: &String, most: f64| {
            let through = |flow: &usize| routes[*flow].contains_key(pipe);
            let fixed: f64 = (0..routes.len()).filter(through).filter_map(|flow| rates[flow]).sum();
            let open = (0..routes.len()).filter(through).filter(|flow| rates[*flow].is_none()).count();
            (most - fixed) / open as f64
        };
        let open = (0..routes.len()).filter(|flow| rates[*flow].is_none());
        let pipes = open.flat_map(|flow| routes[flow].iter());
        let (least, pipe) =
            pipes.map(|(pipe, most)| (even(pipe, *most), pipe)).min_by(|a, b| a.0.total_cmp(&b.0)).unwrap();
        for flow in 0..routes.len() {
            if rates[flow].is_none() && routes[flow].contains_key(pipe) {
                rates[flow] = Some(least);
            }
        }
    }
    rates.into_iter().map(Option::unwrap).collect()
}

fn shares(graph: &PathGraph, target: u32, direction: Direction, size: Bytes) -> Shares {
    let load = Load::new();
    let (target, zero_staging, staged) = (DeviceId(target), DeviceSet::ALL, DeviceSet::ALL);
    split(graph, &Ask { target, direction, size, zero_staging, staged, load: &load, expected: 0 })
}

fn near(found: f64, expected: f64) -> bool {
    (found / expected - 1.0).abs() < 0.01
}

#[test]
fn h200x4_is_bound_by_host_memory() {
    let server = Server::new("h200x4");
    let graph = server.calibrated();
    for (direction, limit) in [(Direction::ToGpu, 213.0), (Direction::FromGpu, 160.0)] {
        for target in 0..4 {
            let together = graph.together(DeviceId(target), direction).0;
            assert!(near(together, limit), "{together}");
            assert_eq!(shares(&graph, target, direction, Bytes::gib(1)).len(), 4);
            for size in [256, 1024, 4096] {
                let (rate, _) = server.copy(&graph, target, direction, Bytes::mib(size));
                assert!(rate > 0.95 * limit, "{size} MiB: {rate}");
            }
        }
    }
    let ceilings = &graph.paths().ceilings;
    assert_eq!(ceilings.len(), 2, "{ceilings:?}");
    assert!(ceilings.iter().all(|ceiling| ceiling.target.is_none() && ceiling.links.len() == 4));
    assert!((graph.paths().fork.0 - LATENCY.3).abs() < 0.1, "{:?}", graph.paths().fork);
    let own = graph.rates(DeviceId(2), Direction::ToGpu).next().unwrap();
    assert!(near(own.rate.0, 55.5) && (own.latency.0 - LATENCY.0).abs() < 0.1, "{own:?}");
    let relay = graph.rates(DeviceId(2), Direction::ToGpu).nth(1).unwrap();
    assert!(near(relay.rate.0, 55.5) && (relay.latency.0 - LATENCY.1).abs() < 0.1, "{relay:?}");
    assert!(graph.paths().links.iter().all(|link| link.break_even <= Bytes::kib(1536)));
}

/// On a server with four H100s two links gave 98 to 102 GB/s from their GPUs, four 126 to 139: each pair loses something, and yet more links
/// give more.
#[test]
fn pairs_that_lose_something_are_no_group_where_all_give_more() {
    let mut server = Server { pair: Some(98.0), ..Server::new("h200x4") };
    server.model.host.write = Bandwidth(128.0);
    let graph = server.calibrated();
    for target in 0..4 {
        let together = graph.together(DeviceId(target), Direction::FromGpu).0;
        assert!(near(together, 128.0), "{together}");
        for size in [16, 64, 256, 1024, 4096] {
            assert_eq!(shares(&graph, target, Direction::FromGpu, Bytes::mib(size)).len(), 4, "{size} MiB");
            let (rate, _) = server.copy(&graph, target, Direction::FromGpu, Bytes::mib(size));
            assert!(size < 256 || rate > 0.95 * 128.0, "{size} MiB: {rate}");
        }
        // What two of them lose is known too.
        let load = Load::new();
        let (target, size, direction) = (DeviceId(target), Bytes::mib(256), Direction::FromGpu);
        let (zero_staging, staged) = (DeviceSet::of(DeviceId((target.0 + 1) % 4)), DeviceSet::EMPTY);
        let two =
            split(&graph, &Ask { target, direction, size, zero_staging, staged, load: &load, expected: 0 });
        let rate = size.get() as f64 / two.predicted().0 / 1000.0;
        assert!(two.len() == 2 && (rate / 98.0 - 1.0).abs() < 0.02, "{rate} over {}", two.len());
    }
}

/// On such a server a pair is sometimes seen to share and sometimes not. Once three pairs were taken for one group, of which a third link would
/// add nothing, and copies left it out: 124 GB/s instead of 150.
#[test]
fn pairs_that_are_seen_to_lose_something_by_chance_leave_no_link_out() {
    for seed in 1..60 {
        let pair = Some(100.0);
        let mut server = Server { pair, noise: 0.03, seed: seed.into(), ..Server::new("h200x4") };
        server.model.host.write = Bandwidth(128.0);
        let graph = server.calibrated();
        for target in 0..4 {
            let used = shares(&graph, target, Direction::FromGpu, Bytes::gib(1)).len();
            assert_eq!(used, 4, "of GPU {target}, seed {seed}: {:?}", graph.paths().ceilings);
        }
    }
}

#[test]
fn h20x8_takes_of_the_far_socket_what_it_gives() {
    let server = Server::new("h20x8");
    let graph = server.calibrated();
    for (target, direction) in [(0, Direction::ToGpu), (5, Direction::FromGpu)] {
        let together = graph.together(DeviceId(target), direction).0;
        assert!(near(together, 4.0 * 53.0 + 60.0), "{together}");
        for size in [256, 1024, 4096] {
            let (rate, native) = server.copy(&graph, target, direction, Bytes::mib(size));
            assert!(rate > 4.62 * native && rate > 0.95 * 272.0, "{size} MiB: {rate}, native {native}");
        }
    }
    assert!(
        graph.paths().ceilings.iter().all(|ceiling| ceiling.target.is_some() && ceiling.links.len() == 4)
    );
}

#[test]
fn a100x8_has_four_switches() {
    let server = Server::new("a100x8");
    let graph = server.calibrated();
    let together = graph.together(DeviceId(3), Direction::ToGpu).0;
    assert!(near(together, 97.2), "{together}");
    for size in [256, 1024, 4096] {
        let (rate, _) = server.copy(&graph, 3, Direction::FromGpu, Bytes::mib(size));
        assert!(rate > 0.95 * 97.2, "{size} MiB: {rate}");
    }
    // One GPU of each switch is enough.
    assert_eq!(shares(&graph, 3, Direction::ToGpu, Bytes::gib(1)).len(), 4);
    let switches = graph.paths().ceilings.iter().filter(|ceiling| ceiling.direction == Direction::ToGpu);
    let links: Vec<Vec<u32>> =
        switches.map(|switch| switch.links.iter().map(|link| link.0).collect()).collect();
    assert_eq!(links, [[0, 1], [2, 3], [4, 5], [6, 7]]);
}

#[test]
fn where_zero_staging_does_not_help_there_is_no_such_way() {
    let server = Server { zero_staging: |_, _| false, ..Server::new("h200x4") };
    let graph = server.calibrated();
    assert!(graph.paths().relays.iter().all(|relay| relay.way == Way::Staged));
    assert_eq!(graph.paths().relays.len(), 24);
    for size in [1, 2, 4, 16, 64, 1024] {
        let (rate, native) = server.copy(&graph, 0, Direction::ToGpu, Bytes::mib(size));
        assert!(rate >= native * 0.999, "{size} MiB: {rate}, native {native}");
    }
    let (rate, _) = server.copy(&graph, 0, Direction::ToGpu, Bytes::gib(1));
    assert!(rate > 0.95 * 213.0, "{rate}");
}

/// GB/s of copies of 1 GiB to these targets, split one after the other and then all under way at once; split or native.
fn at_once(server: &Server, graph: &PathGraph, targets: &[u32]) -> (f64, f64) {
    let (load, direction, size) = (Load::new(), Direction::ToGpu, Bytes::gib(1));
    let (mut legs, mut native) = (Vec::new(), Vec::new());
    for &target in targets {
        let (target, zero_staging, staged) = (DeviceId(target), DeviceSet::ALL, DeviceSet::EMPTY);
        for share in
            &split(graph, &Ask { target, direction, size, zero_staging, staged, load: &load, expected: 0 })
        {
            load.begin(target, share.relay, direction, share.size);
            legs.push(Leg { target, relay: share.relay, way: share.way, size: share.size });
        }
        native.push(Leg { target, relay: target, way: Way::Direct, size });
    }
    let all = size.get() as f64 * targets.len() as f64 / 1000.0;
    let rate = |legs| all / server.took(&Trial { direction, memory: Memory::Pool, legs, repeats: 1 }).0;
    (rate(legs), rate(native))
}

#[test]
fn copies_at_once_share_the_links() {
    for (name, least) in [("h200x4", 0.98), ("h20x8", 0.95)] {
        let server = Server::new(name);
        let graph = server.calibrated();
        let all: Vec<u32> = (0..u32::try_from(server.model.gpus.len()).unwrap()).collect();
        let (rate, native) = at_once(&server, &graph, &all);
        println!("{name}, all at once: {rate:.1}, native {native:.1} GB/s");
        assert!(rate >= least * native, "{name}, all at once: {rate}, native {native}");
        let (rate, native) = at_once(&server, &graph, &[0, 1]);
        println!("{name}, two at once: {rate:.1}, native {native:.1} GB/s");
        assert!(rate >= 1.7 * native, "{name}, two of them: {rate}, native {native}");
    }
}

#[test]
fn ways_are_found_for_each_pair() {
    // Two islands; in the second, streams of relays take the target's link.
    let nvlink = |a: u32, b: u32| a / 2 == b / 2;
    let server = Server { nvlink, zero_staging: |a, _| a < 2, ..Server::new("h200x4") };
    let graph = server.calibrated();
    let ways = |target: u32| -> Vec<(u32, Way)> {
        let paths = graph.rates(DeviceId(target), Direction::ToGpu);
        paths.map(|path| (path.relay.0, path.way)).collect()
    };
    assert_eq!(ways(0), [(0, Way::Direct), (1, Way::ZeroStaging), (1, Way::Staged)]);
    assert_eq!(ways(3), [(3, Way::Direct), (2, Way::Staged)]);
}

#[test]
fn links_may_differ() {
    let mut server = Server::new("h200x4");
    for (gpu, rate) in server.model.gpus.iter_mut().zip([55.0, 27.0, 13.0, 55.0]) {
        (gpu.link.to_gpu.0, gpu.link.from_gpu.0) = (rate, rate);
    }
    let graph = server.calibrated();
    for (target, limit) in [(0, 150.0), (2, 150.0)] {
        assert!(near(graph.together(DeviceId(target), Direction::ToGpu).0, limit));
        let (rate, _) = server.copy(&graph, target, Direction::ToGpu, Bytes::gib(1));
        assert!(rate > 0.98 * limit, "{rate}");
    }
    assert!(graph.paths().ceilings.is_empty(), "{:?}", graph.paths().ceilings);
}

#[test]
fn without_outcomes_every_copy_is_native() {
    let gpus = Server::new("h200x4").gpus();
    let graph = PathGraph::from_outcomes(&gpus, &[]).unwrap();
    assert_eq!(shares(&graph, 0, Direction::ToGpu, Bytes::gib(1)).len(), 1);
    let alone = Server::new("h200x4");
    let trials = plan(Step::Ways, &gpus[..1], &[], BUDGET);
    assert_eq!(trials.len(), 4, "one link, two directions, two sizes");
    let graph = PathGraph::from_outcomes(&gpus[..1], &alone.run(trials)).unwrap();
    assert_eq!(shares(&graph, 0, Direction::ToGpu, Bytes::gib(1)).len(), 1);
}

#[test]
fn it_takes_no_more_than_its_budget() {
    for name in ["h200x4", "h20x8", "a100x8"] {
        let server = Server::new(name);
        let (gpus, mut outcomes, mut cost) = (server.gpus(), Vec::new(), 0.0);
        for step in Step::ALL {
            let trials = plan(step, &gpus, &outcomes, BUDGET);
            cost += server.cost(&trials);
            outcomes.extend(server.run(trials));
        }
        assert!(cost > 0.4e6, "{name}: {cost} us could be used better");
        assert!(cost < 2e6, "{name}: {cost} us");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Measurements scatter: what is found still moves as much, and is never worse than native.
    #[test]
    fn a_little_noise_changes_little(seed in any::<u64>(), which in 0..3usize) {
        let (name, limit) = [("h200x4", 213.0), ("h20x8", 272.0), ("a100x8", 97.2)][which];
        let server = Server { noise: 0.02, seed: seed.into(), ..Server::new(name) };
        let graph = server.calibrated();
        let exact = Server { noise: 0.0, ..server };
        for size in [1, 4, 16, 256, 4096] {
            let (rate, native) = exact.copy(&graph, 1, Direction::ToGpu, Bytes::mib(size));
            prop_assert!(rate >= 0.98 * native, "{name}, {size} MiB: {rate}, native {native}");
            prop_assert!(size < 256 || rate > 0.92 * limit, "{name}, {size} MiB: {rate}");
        }
    }

    /// A graph comes out whatever was measured, and it splits every copy into what covers it.
    #[test]
    fn nonsense_is_survived(
        tooks in prop::collection::vec(
            prop_oneof![Just(0.0), Just(-1.0), Just(f64::NAN), Just(f64::INFINITY), 1e-9..1e9],
            1..400,
        ),
    ) {
        let server = Server::new("h200x4");
        let gpus = server.gpus();
        let spoil = |trials: Vec<Trial>| -> Vec<Outcome> {
            trials.into_iter().zip(tooks.iter().cycle()).map(|(trial, took)| Outcome { trial, took: Micros(*took) }).collect()
        };
        let mut outcomes = Vec::new();
        for step in Step::ALL {
            outcomes.extend(spoil(plan(step, &gpus, &outcomes, BUDGET)));
        }
        let graph = PathGraph::from_outcomes(&gpus, &outcomes).unwrap();
        for target in 0..4 {
            let shares = shares(&graph, target, Direction::ToGpu, Bytes::gib(1));
            prop_assert_eq!(shares.iter().map(|share| share.size).sum::<Bytes>(), Bytes::gib(1));
        }
    }
}
