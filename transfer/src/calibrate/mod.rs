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

use std::sync::Arc;
use std::time::Duration;

use glake_device::DeviceId;
use glake_device::owned::{CompletionEvents, DeviceSet};
use glake_units::{Bytes, Micros};
use tracing::warn;

use crate::Result;
use crate::paths::trials::{Outcome, Step, Trial, plan};
use crate::paths::{GpuLinks, PathGraph, Way};
use harness::{Fault, Harness, Lanes, measure};

/// Result of a calibration.
#[derive(Debug)]
pub struct Calibration {
    /// Path graph for splitting copies.
    pub graph: PathGraph,
    /// Total duration.
    pub took: Duration,
    /// Number of measured trials.
    pub trials: usize,
    /// Number of trials skipped for lack of time. The paths they would have measured count as absent.
    pub unfinished: usize,
    /// GPUs that failed or relayed wrong bytes. They are never used as relays.
    pub excluded: DeviceSet,
}

/// Progress of a calibration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Number of completed trials.
    pub done: usize,
    /// Number of trials planned so far.
    pub planned: usize,
}

/// Share of the budget reserved for releasing the memory.
const END: f64 = 0.1;
/// Approximate share of the time after context creation that is spent on allocating memory.
const MEMORY: f64 = 0.2;
/// Steps, each with the share of the remaining time that it must leave to later steps. The combined rate of all paths matters more than the
/// last pairs.
const STEPS: [(Step, f64); 3] = [(Step::Ways, 0.5), (Step::Sharing, 0.3), (Step::Together, 0.0)];

impl Calibration {
    /// Measures the links of `gpus`. Creates their contexts if the process has none. `clock` returns the time since an arbitrary moment; no
    /// trial begins later than `budget`.
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

/// State of a calibration in progress.
#[derive(Debug)]
struct Run<'a> {
    gpus: &'a [GpuLinks],
    outcomes: Vec<Outcome>,
    unfinished: usize,
    done: usize,
    planned: usize,
    /// GPUs that are excluded as relays.
    relays_out: DeviceSet,
    /// GPUs that are excluded entirely.
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

    /// Returns the GPUs that are not excluded.
    fn gpus(&self) -> Vec<GpuLinks> {
        self.gpus.iter().filter(|gpu| !self.lost.contains(gpu.device)).cloned().collect()
    }

    /// Returns the outcomes that involve no excluded GPU.
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

    /// Excludes a GPU after a fault: as a relay if it failed as a relay, entirely if it failed at its own copies or lost its context.
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

/// Returns the largest leg size.
fn largest(trials: &[Trial]) -> Bytes {
    let sizes = trials.iter().flat_map(|trial| &trial.legs).map(|leg| leg.size);
    sizes.fold(Bytes::ZERO, Bytes::max)
}

/// Returns a plan for which there is enough memory, planned for all of the remaining time or for a part of it.
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

/// Returns the lane index of a device. Devices without a lane do not occur in plans.
fn position(devices: &[DeviceId], device: DeviceId) -> Option<usize> {
    devices.iter().position(|known| *known == device)
}
