//! What calibration copies to find out what the links give: a plan, nothing is run here.
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
use super::table::GpuLinks;
use super::{Direction, MOST_GPUS, SLICE, Way, bytes_a_micro, float};

/// Whose memory a trial copies from or to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Memory {
    /// A pool's, that relays may touch.
    Pool,
    /// What `cudaMalloc` gives: its own GPU only may touch it.
    Foreign,
}

/// A part of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Leg {
    /// Whose memory.
    pub target: DeviceId,
    /// Whose link; the target for its own.
    pub relay: DeviceId,
    /// Which way.
    pub way: Way,
    /// How much, from pinned memory or to it.
    pub size: Bytes,
}

/// Copies that are begun together.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Trial {
    /// Which way the bytes go.
    pub direction: Direction,
    /// Of which kind the targets' memory is.
    pub memory: Memory,
    /// Its parts.
    pub legs: Vec<Leg>,
    /// How often it is measured, after one run that is not.
    pub repeats: u32,
}

/// What a trial took.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Which.
    pub trial: Trial,
    /// From the fork to the join, the median of its repeats.
    pub took: Micros,
}

/// What a trial's small copies are: too small for the bytes to count much.
pub(super) const SMALL: Bytes = SLICE;
/// What its large ones may be, and how often they are measured: the first that fits the budget is taken.
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
/// How often small copies are measured: they cost little and scatter more.
const SMALL_REPEATS: u32 = 9;
/// What a run costs besides its bytes.
const RUN: f64 = 60.0;
/// A link of which nothing is known, in bytes a microsecond.
const SLOW: f64 = 12_000.0;

/// A part of a calibration; each builds on the outcomes of those before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Which ways there are, and what each gives alone.
    Ways,
    /// Which of them share something.
    Sharing,
    /// What all give together.
    Together,
}

impl Step {
    /// All, in their order.
    pub const ALL: [Step; 3] = [Step::Ways, Step::Sharing, Step::Together];

    /// How much of the time for all is its own.
    const fn part(self) -> f64 {
        match self {
            Step::Ways | Step::Sharing => 0.4,
            Step::Together => 0.2,
        }
    }
}

/// A step's trials, after `outcomes` of the steps before it; `budget` is the time for all steps.
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

/// The plan of the largest copies, measured most often, that fits; else that of the smallest.
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

/// About what a trial takes where every link gives so many bytes a microsecond, and two legs may have to share.
fn cost(trial: &Trial, rate: f64) -> f64 {
    let largest = trial.legs.iter().map(|leg| float(leg.size)).fold(0.0, f64::max);
    let shared = if trial.legs.len() > 1 { 1.5 } else { 1.0 };
    f64::from(trial.repeats + 1) * (RUN + shared * largest / rate)
}

/// The trials of a step, for large copies of one size.
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

    /// Small and large: what it takes besides its bytes, and what the bytes take.
    fn twice(&mut self, direction: Direction, memory: Memory, leg: Leg) {
        self.small(direction, memory, &[leg]);
        self.trials.push(Trial { direction, memory, legs: vec![leg], repeats: self.repeats });
    }
}
