//! Measures what the server's links give: runs the trials of [`crate::paths::trials`] and hands their outcomes back to the
//! graph.
//!
//! ```text
//!   a step's plan ─► measure ─► outcomes ─► the next step's plan ─► ... ─► PathGraph
//!                      │ begun ──fork──┬── own leg ────────┬──join── ended      timed events of the target's stream
//!                      │               └─► relay's stream ─┘
//!                      └ bytes of relays that touch the target's memory themselves are compared with their source
//! ```
//!
//! Invariants: nothing is begun once the budget is used up; a relay that failed, or whose bytes were wrong, is no part of the
//! graph; a question whose trials were left out is answered as carefully as the graph does without them.

mod harness;
mod measure;
mod pattern;

use std::sync::Arc;
use std::time::Duration;

use glake_device::DeviceId;
use glake_device::owned::{CompletionEvents, DeviceSet};
use glake_units::{Bytes, Micros};
use tracing::warn;

use crate::Result;
use crate::paths::trials::{Outcome, Step, Trial, plan};
use crate::paths::{GpuLinks, PathGraph, Way};
use harness::{Harness, Lanes};
use measure::{Fault, measure};

/// What a server's links gave.
#[derive(Debug)]
pub struct Calibration {
    /// The graph to split copies by.
    pub graph: PathGraph,
    /// How long it took in all.
    pub took: Duration,
    /// How many trials were measured.
    pub trials: usize,
    /// How many there was no time for: what they would have shown is taken for absent.
    pub unfinished: usize,
    /// GPUs that failed, or relayed wrong bytes: they relay nothing.
    pub excluded: DeviceSet,
}

/// How far a calibration is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Trials that are over.
    pub done: usize,
    /// Trials that are planned by now.
    pub planned: usize,
}

/// Of the budget, what is kept for giving the memory back.
const END: f64 = 0.1;
/// Of what is left once the contexts are there, about how much the memory takes.
const MEMORY: f64 = 0.2;
/// The steps, and how much of what is left then each has to leave to those after it: what all paths give together counts more
/// than the last pairs.
const STEPS: [(Step, f64); 3] = [(Step::Ways, 0.5), (Step::Sharing, 0.3), (Step::Together, 0.0)];

impl Calibration {
    /// Measures the links of `gpus`, which makes their contexts where the process has none. `clock` tells the time since
    /// any moment; after `budget` of it nothing more is begun.
    ///
    /// # Errors
    /// What the driver answers where there is no GPU left to measure, or no pinned memory.
    pub fn run(
        completion_events: &Arc<CompletionEvents>,
        gpus: &[GpuLinks],
        budget: Duration,
        clock: &dyn Fn() -> Duration,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Calibration> {
        let begun = clock();
        let left = || budget.mul_f64(1.0 - END).saturating_sub(clock().saturating_sub(begun));
        let lanes = Lanes::new(completion_events, gpus.iter().map(|gpu| gpu.device))?;
        let mut run = Run::new(gpus);
        run.leave(lanes.failed());
        let all = micros(left().mul_f64(1.0 - MEMORY));
        let wanted = largest(&plan(Step::Ways, &run.gpus(), &[], all));
        let harness = Harness::new(completion_events, lanes, wanted, left().mul_f64(MEMORY), clock)?;
        run.leave(harness.failed());
        for (step, rest) in STEPS {
            let trials =
                fitting(&harness, |part| plan(step, &run.gpus(), &run.trusted(), Micros(all.0 * part)));
            let over = left().mul_f64(rest);
            run.trials(&harness, &trials, &|| left() <= over, progress);
        }
        drop(harness);
        let graph = PathGraph::from_outcomes(&run.gpus(), &run.trusted())?;
        Ok(Calibration {
            graph,
            took: clock().saturating_sub(begun),
            trials: run.outcomes.len(),
            unfinished: run.unfinished,
            excluded: run.relays_out.union(run.lost),
        })
    }
}

/// What is known so far.
#[derive(Debug)]
struct Run<'a> {
    gpus: &'a [GpuLinks],
    outcomes: Vec<Outcome>,
    unfinished: usize,
    done: usize,
    planned: usize,
    /// They relay nothing.
    relays_out: DeviceSet,
    /// They do nothing at all.
    lost: DeviceSet,
}

impl<'a> Run<'a> {
    fn new(gpus: &'a [GpuLinks]) -> Run<'a> {
        Run {
            gpus,
            outcomes: Vec::new(),
            unfinished: 0,
            done: 0,
            planned: 0,
            relays_out: DeviceSet::EMPTY,
            lost: DeviceSet::EMPTY,
        }
    }

    fn leave(&mut self, failed: DeviceSet) {
        self.lost = self.lost.union(failed);
    }

    /// The GPUs that are left.
    fn gpus(&self) -> Vec<GpuLinks> {
        self.gpus.iter().filter(|gpu| !self.lost.contains(gpu.device)).cloned().collect()
    }

    /// The outcomes of what is left.
    fn trusted(&self) -> Vec<Outcome> {
        self.outcomes.iter().filter(|outcome| self.is_open(&outcome.trial)).cloned().collect()
    }

    fn is_open(&self, trial: &Trial) -> bool {
        trial.legs.iter().all(|leg| {
            let relays = leg.relay != leg.target && self.relays_out.contains(leg.relay);
            !relays && !self.lost.contains(leg.target) && !self.lost.contains(leg.relay)
        })
    }

    fn trials(
        &mut self,
        harness: &Harness,
        trials: &[Trial],
        over: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(Progress),
    ) {
        self.planned += trials.len();
        for (index, trial) in trials.iter().enumerate() {
            if over() {
                self.unfinished += trials.len() - index;
                self.planned -= trials.len() - index;
                break;
            }
            if self.is_open(trial) && harness.holds(trial) {
                self.trial(harness, trial);
            }
            self.done += 1;
            progress(Progress { done: self.done, planned: self.planned });
        }
    }

    fn trial(&mut self, harness: &Harness, trial: &Trial) {
        // Another part of the pattern each time, so that bytes of an earlier trial are never taken for this one's.
        let turn = self.done as u64;
        match measure(harness, trial, turn) {
            Ok(took) => match harness.is_right(trial, turn) {
                Ok(true) => self.outcomes.push(Outcome { trial: trial.clone(), took }),
                Ok(false) => {
                    for leg in trial.legs.iter().filter(|leg| leg.way != Way::Direct) {
                        warn!(target: "glake::transfer", relay = %leg.relay, target = %leg.target, way = ?leg.way, "wrong bytes in a trial: this GPU relays nothing");
                        self.relays_out = self.relays_out.union(DeviceSet::of(leg.relay));
                    }
                }
                Err(fault) => self.blame(trial, &fault),
            },
            Err(fault) => self.blame(trial, &fault),
        }
    }

    /// A GPU that fails as a relay relays nothing; one that fails at its own copies, or lost its context, is left out.
    fn blame(&mut self, trial: &Trial, fault: &Fault) {
        let Fault { device, error } = fault;
        let relays = trial.legs.iter().any(|leg| leg.relay == *device && leg.target != *device);
        if relays && !error.is_sticky() {
            warn!(target: "glake::transfer", relay = %device, %error, "a trial failed: this GPU relays nothing");
            self.relays_out = self.relays_out.union(DeviceSet::of(*device));
        } else {
            warn!(target: "glake::transfer", %device, %error, "a trial failed: this GPU is left out");
            self.lost = self.lost.union(DeviceSet::of(*device));
        }
    }
}

/// The largest leg.
fn largest(trials: &[Trial]) -> Bytes {
    let sizes = trials.iter().flat_map(|trial| &trial.legs).map(|leg| leg.size);
    sizes.fold(Bytes::ZERO, Bytes::max)
}

/// A plan whose legs there is memory for: of all the time that is left, or of less.
fn fitting(harness: &Harness, plan: impl Fn(f64) -> Vec<Trial>) -> Vec<Trial> {
    let mut part = 1.0;
    loop {
        let trials = plan(part);
        if largest(&trials) <= harness.largest() || part < 0.01 {
            return trials;
        }
        part /= 2.0;
    }
}

fn micros(time: Duration) -> Micros {
    Micros(time.as_secs_f64() * 1e6)
}

/// The lane of a device is asked for by many: those that there is none of are none of the plan's.
fn position(devices: &[DeviceId], device: DeviceId) -> Option<usize> {
    devices.iter().position(|known| *known == device)
}
