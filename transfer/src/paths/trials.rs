//! Plan of a calibration's trials. Pure: nothing runs here.
//!
//! ```text
//!   Ways ────► run ─► outcomes ─┐    each link alone, each relay alone, each relay beside the target's own link
//!   Sharing ─► run ─► outcomes ─┤    links in pairs, relays in pairs, of the ways that there are
//!   Together ► run ─► outcomes ─┴─►  PathGraph::from_outcomes        all paths, each with what it can carry meanwhile
//! ```
//!
//! A trial begins on a stream of its first leg's target: all legs fork from it and join to it, as a copy's do. What is
//! measured is the time from the fork to the join; the first run is thrown away, and of the others the median counts.
//! Trials stand in the order of their weight: whoever runs out of time leaves out the last ones.

use glake_device::DeviceId;
use glake_units::{Bytes, Micros};

use super::outcomes::Findings;
use super::{Direction, GpuLinks, MOST_GPUS, SLICE, Way, bytes_a_micro, float};

/// Memory kind of a trial's targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Memory {
    /// Pool memory, accessible to relays.
    Pool,
    /// `cudaMalloc` memory, accessible to its own GPU only.
    Foreign,
}

/// Part of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Leg {
    /// GPU whose memory is copied.
    pub target: DeviceId,
    /// GPU whose link is used; the target itself for its own.
    pub relay: DeviceId,
    /// Way of the leg.
    pub way: Way,
    /// Bytes copied from or to pinned memory.
    pub size: Bytes,
}

/// Copies that start together.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Trial {
    /// Direction of all legs.
    pub direction: Direction,
    /// Memory kind of the targets.
    pub memory: Memory,
    /// Parts of the trial.
    pub legs: Vec<Leg>,
    /// Number of measured runs, after one warm-up run.
    pub repeats: u32,
}

/// Measured time of a trial.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Trial that was measured.
    pub trial: Trial,
    /// Median time from fork to join.
    pub took: Micros,
}

/// Size of small copies, whose time is mostly latency.
pub(super) const SMALL: Bytes = SLICE;
/// Candidate sizes of large copies with their number of runs; the first one within the budget is used.
const LARGE: [(Bytes, u32); 8] = [
    (Bytes::mib(64), 5),
    (Bytes::mib(64), 3),
    (Bytes::mib(32), 5),
    (Bytes::mib(32), 3),
    (Bytes::mib(16), 3),
    (Bytes::mib(8), 3),
    (Bytes::mib(4), 3),
    (Bytes::mib(4), 2),
];
/// Number of runs of small copies, which are cheap and vary more.
const SMALL_REPEATS: u32 = 9;
/// Fixed cost of a run, in microseconds.
const RUN: f64 = 60.0;
/// Assumed rate of an unknown link, in bytes per microsecond.
const SLOW: f64 = 12_000.0;

/// Step of a calibration. Each uses the outcomes of the earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Finds the ways and the rate of each alone.
    Ways,
    /// Finds which of them share limits.
    Sharing,
    /// Measures the combined rates.
    Together,
}

impl Step {
    /// All steps in order.
    pub const ALL: [Step; 3] = [Step::Ways, Step::Sharing, Step::Together];

    /// Returns the step's share of the total time.
    const fn part(self) -> f64 {
        match self {
            Step::Ways | Step::Sharing => 0.4,
            Step::Together => 0.2,
        }
    }
}

/// Plans a step's trials from the `outcomes` of earlier steps; `budget` is the time for all steps.
pub fn plan(step: Step, gpus: &[GpuLinks], outcomes: &[Outcome], budget: Micros) -> Vec<Trial> {
    let devices = devices(gpus);
    let budget = budget.0 * step.part();
    match step {
        Step::Ways => {
            let known = gpus.iter().filter_map(|gpu| gpu.link).map(bytes_a_micro).filter(|rate| *rate > 0.0);
            fitted(budget, known.reduce(f64::min).unwrap_or(SLOW), |plan| ways(&devices, plan))
        }
        Step::Sharing => {
            let found = Findings::ways(gpus, outcomes);
            fitted(budget, found.slowest().unwrap_or(SLOW), |plan| sharing(&devices, &found, plan))
        }
        Step::Together => {
            let found = Findings::shared(gpus, outcomes);
            fitted(budget, found.slowest().unwrap_or(SLOW), |plan| together(&devices, &found, plan))
        }
    }
}

fn ways(devices: &[DeviceId], plan: &mut Plan) {
    let size = plan.large;
    for (target, direction) in each(devices) {
        plan.twice(direction, Memory::Pool, Leg { target, relay: target, way: Way::Direct, size });
    }
    for (way, memory) in [(Way::ZeroStaging, Memory::Pool), (Way::Staged, Memory::Foreign)] {
        for (target, direction) in each(devices) {
            for relay in devices.iter().copied().filter(|relay| *relay != target) {
                let own = Leg { target, relay: target, way: Way::Direct, size };
                let leg = Leg { target, relay, way, size };
                plan.twice(direction, memory, leg);
                plan.once(direction, memory, vec![own, leg]);
            }
        }
    }
}

fn sharing(devices: &[DeviceId], found: &Findings<'_>, plan: &mut Plan) {
    let size = plan.large;
    let leg = |target, relay, way, direction| found.leg(target, relay, way, direction, size);
    for direction in Direction::BOTH {
        for (a, b) in pairs(devices) {
            let legs = [a, b].into_iter().filter_map(|device| leg(device, device, Way::Direct, direction));
            plan.once(direction, Memory::Pool, legs.collect());
        }
    }
    for (target, direction) in each(devices) {
        let way = found.main_way(target, direction);
        let memory = if way == Way::Staged { Memory::Foreign } else { Memory::Pool };
        for (a, b) in pairs(devices) {
            let legs = [a, b].into_iter().filter_map(|relay| leg(target, relay, way, direction));
            plan.once(direction, memory, legs.collect());
        }
    }
}

fn together(devices: &[DeviceId], found: &Findings<'_>, plan: &mut Plan) {
    let size = plan.large;
    let own = |device, direction| found.leg(device, device, Way::Direct, direction, size);
    for direction in Direction::BOTH {
        let all: Vec<Leg> = devices.iter().filter_map(|device| own(*device, direction)).collect();
        plan.once(direction, Memory::Pool, found.in_step(direction, all, size));
    }
    for (target, direction) in each(devices) {
        for (way, memory) in [(Way::ZeroStaging, Memory::Pool), (Way::Staged, Memory::Foreign)] {
            let relays = devices.iter().filter_map(|relay| found.leg(target, *relay, way, direction, size));
            let legs: Vec<Leg> = own(target, direction).into_iter().chain(relays).collect();
            if legs.len() > 2 {
                plan.small(direction, memory, &legs);
                plan.once(direction, memory, found.in_step(direction, legs, size));
            }
        }
    }
}

fn devices(gpus: &[GpuLinks]) -> Vec<DeviceId> {
    let part = |device: &DeviceId| usize::try_from(device.0).is_ok_and(|index| index < MOST_GPUS);
    gpus.iter().map(|gpu| gpu.device).filter(part).collect()
}

fn each(devices: &[DeviceId]) -> impl Iterator<Item = (DeviceId, Direction)> {
    devices.iter().flat_map(|device| Direction::BOTH.map(|direction| (*device, direction)))
}

fn pairs(devices: &[DeviceId]) -> impl Iterator<Item = (DeviceId, DeviceId)> {
    devices.iter().enumerate().flat_map(|(index, a)| devices[index + 1..].iter().map(|b| (*a, *b)))
}

/// Returns the plan with the largest copies and most runs that fits the budget, or the smallest plan.
fn fitted(budget: f64, rate: f64, fill: impl Fn(&mut Plan)) -> Vec<Trial> {
    let mut last = Vec::new();
    for (large, repeats) in LARGE {
        let mut plan = Plan { trials: Vec::new(), large, repeats };
        fill(&mut plan);
        last = plan.trials;
        if last.iter().map(|trial| cost(trial, rate)).sum::<f64>() <= budget {
            break;
        }
    }
    last
}

/// Estimates the time of a trial if every link reaches `rate` and two legs may share one.
fn cost(trial: &Trial, rate: f64) -> f64 {
    let largest = trial.legs.iter().map(|leg| float(leg.size)).fold(0.0, f64::max);
    let shared = if trial.legs.len() > 1 { 1.5 } else { 1.0 };
    f64::from(trial.repeats + 1) * (RUN + shared * largest / rate)
}

/// Trials of a step, for one size of large copies.
struct Plan {
    trials: Vec<Trial>,
    large: Bytes,
    repeats: u32,
}

impl Plan {
    fn once(&mut self, direction: Direction, memory: Memory, legs: Vec<Leg>) {
        if legs.len() > 1 {
            self.trials.push(Trial { direction, memory, legs, repeats: self.repeats });
        }
    }

    fn small(&mut self, direction: Direction, memory: Memory, legs: &[Leg]) {
        let legs = legs.iter().map(|leg| Leg { size: SMALL, ..*leg }).collect();
        self.trials.push(Trial { direction, memory, legs, repeats: SMALL_REPEATS });
    }

    /// Adds a small trial for the fixed cost and a large one for the rate.
    fn twice(&mut self, direction: Direction, memory: Memory, leg: Leg) {
        self.small(direction, memory, &[leg]);
        self.trials.push(Trial { direction, memory, legs: vec![leg], repeats: self.repeats });
    }
}
