//! Simulated worker: its memory, its gate, its requests, and its compute.
//!
//! A step generates a token for each request, and prompts are read between two steps.
//!
//! ```text
//! progress ──┬── step ──┬── step ──┬─ prompt ─ prompt ─┬── step ──┬──►      in the worker's own seconds of compute
//!            steps_from            reads_from          steps_from read_by
//! ```

use std::collections::VecDeque;
use std::time::Duration;

use glake_units::Bytes;

use super::load::Request;
use super::policy::Speeds;
use crate::node::Worker;
use crate::{Account, GpuId};

/// Running request, in the worker's own seconds of compute.
#[derive(Clone, Debug)]
pub(super) struct Running {
    pub(super) asked: Request,
    begun_at: f64,
    pub(super) first_at: f64,
    pub(super) done_at: f64,
    /// Seconds to the first token, once generated.
    pub(super) ttft: Option<f64>,
    pub(super) longest_gap: f64,
}

/// Gate that admits the uses of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gate {
    Open,
    /// Running uses continue to their next safe point.
    Parking,
    Closed,
}

/// Simulated memory of a worker on one GPU.
#[derive(Clone, Debug)]
pub(super) struct GpuShare {
    pub(super) gpu: GpuId,
    pub(super) lease: Bytes,
    weights: Bytes,
    kv: Bytes,
    weights_out: Bytes,
    kv_out: Bytes,
    /// End of the copies of the granted bytes.
    pub(super) copied_by: Duration,
}

#[derive(Clone, Debug)]
pub(super) struct Model {
    pub(super) spec: Worker,
    pub(super) gate: Gate,
    pub(super) held: Vec<GpuShare>,
    pub(super) active: Vec<Running>,
    pub(super) queue: VecDeque<Request>,
    pub(super) steps: Steps,
    pub(super) parked_at: Option<Duration>,
    /// Number of the latest park; events of cancelled parks are ignored.
    pub(super) parks: u32,
    /// Number of shrinks under way.
    pub(super) shrinks: u32,
    pub(super) busy: bool,
    floor: Bytes,
    copies_out: bool,
}

impl Model {
    /// Creates a worker with all of its memory resident, or none.
    pub(super) fn new(spec: Worker, step_ms: f64, floor: Bytes, speeds: &Speeds, resident: bool) -> Self {
        let (mut weights, kv) = (spec.part(spec.weights), spec.part(spec.kv));
        if speeds.restarts {
            weights = weights.saturating_add(floor);
        }
        let held = spec.gpus.iter().map(|&gpu| GpuShare {
            gpu: GpuId(gpu),
            lease: if resident { weights.saturating_add(kv) } else { Bytes::ZERO },
            weights,
            kv,
            weights_out: if resident { Bytes::ZERO } else { weights },
            kv_out: if resident { Bytes::ZERO } else { kv },
            copied_by: Duration::ZERO,
        });
        Model {
            held: held.collect(),
            gate: if resident { Gate::Open } else { Gate::Closed },
            active: Vec::new(),
            queue: VecDeque::new(),
            steps: Steps::new(spec.decode_ms, step_ms),
            parked_at: None,
            parks: 0,
            shrinks: 0,
            busy: false,
            floor: if speeds.restarts { Bytes::ZERO } else { floor },
            copies_out: speeds.copies_out,
            spec,
        }
    }

    pub(super) fn runs(&self) -> bool {
        self.gate != Gate::Closed && !self.active.is_empty() && !self.steps.stands()
    }

    pub(super) fn waits(&self) -> bool {
        !self.queue.is_empty() || !self.active.is_empty()
    }

    pub(super) fn is_resident(&self) -> bool {
        self.held.iter().all(|held| held.weights_out.is_zero() && held.kv_out.is_zero())
    }

    pub(super) fn weights(&self) -> Bytes {
        self.held.first().map_or(Bytes::ZERO, |held| held.weights)
    }

    pub(super) fn step(&self) -> f64 {
        self.steps.length
    }

    /// Returns the live KV cache on each GPU.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // tokens
    fn live(&self) -> Bytes {
        let tokens = |running: &Running| {
            let answered = ((self.steps.progress - running.first_at).max(0.0) / self.step()) as u64;
            let read =
                if self.steps.progress > running.begun_at { u64::from(running.asked.context) } else { 0 };
            read + answered.min(u64::from(running.asked.generated))
        };
        self.room_of(self.active.iter().map(tokens).sum())
    }

    fn room_of(&self, tokens: u64) -> Bytes {
        self.spec.part(self.spec.kv_per_token.checked_mul(tokens).unwrap_or(Bytes::MAX))
    }

    pub(super) fn accounts(&self) -> Vec<Account> {
        self.held.iter().map(|held| held.account(self.floor, self.copies_out)).collect()
    }

    /// Evicts bytes from a GPU: unused lease first, then weights, which have copies, then the KV cache. Returns the evicted and the copied
    /// bytes.
    pub(super) fn evict(&mut self, gpu: GpuId, bytes: Bytes) -> (Bytes, Bytes) {
        let (live, copies_out) = (self.live(), self.copies_out);
        let Some(held) = self.held.iter_mut().find(|held| held.gpu == gpu) else {
            return (Bytes::ZERO, Bytes::ZERO);
        };
        let live = live.min(held.kv);
        let before = held.live_out(live);
        let leaves = bytes.saturating_sub(held.lease.saturating_sub(held.resident()));
        let weights = leaves.min(held.weights.saturating_sub(held.weights_out));
        let kv = leaves.saturating_sub(weights).min(held.kv.saturating_sub(held.kv_out));
        held.kv_out = held.kv_out.saturating_add(kv);
        held.weights_out = held.weights_out.saturating_add(weights);
        let live_left = held.live_out(live).saturating_sub(before);
        (kv.saturating_add(weights), if copies_out { weights } else { live_left })
    }

    /// Returns the part of the granted bytes that a link carries.
    #[allow(clippy::cast_possible_truncation)] // a part of a u64
    pub(super) fn copied_of(&self, place: usize, bytes: Bytes) -> Bytes {
        let live = self.live();
        let held = &self.held[place];
        let live_out = if self.copies_out { Bytes::ZERO } else { held.live_out(live.min(held.kv)) };
        let copied = u128::from(held.weights_out.saturating_add(live_out).get());
        let all = u128::from(held.weights_out.saturating_add(held.kv_out).get());
        Bytes::new((u128::from(bytes.get()) * copied / all.max(1)) as u64)
    }

    pub(super) fn refilled(&mut self) {
        self.held.iter_mut().for_each(|held| (held.weights_out, held.kv_out) = (Bytes::ZERO, Bytes::ZERO));
    }

    /// Starts requests that fit the KV cache: their prompts are read in turn after the current step, and no token is generated meanwhile.
    /// Returns the number of running requests that were visited.
    pub(super) fn begin(&mut self) -> u64 {
        let mut visited = 0;
        let tokens = |request: &Request| u64::from(request.context) + u64::from(request.generated);
        let room = self.spec.part(self.spec.kv);
        while let Some(next) = self.queue.front().copied() {
            let taken = self.active.iter().map(|running| tokens(&running.asked)).sum::<u64>() + tokens(&next);
            if !self.active.is_empty() && self.room_of(taken) > room {
                break;
            }
            visited += self.active.len() as u64;
            let is_idle = self.active.is_empty();
            let read = self.steps.read(f64::from(next.context) / self.spec.prefill_tok_s, is_idle);
            for running in self.active.iter_mut().filter(|running| running.done_at > read.from + HAIR) {
                running.done_at += read.later;
                if running.first_at > read.from + HAIR {
                    running.first_at += read.later;
                } else {
                    running.longest_gap = running.longest_gap.max(read.gap);
                }
            }
            let first_at = self.steps.read_by();
            self.active.push(Running {
                asked: next,
                begun_at: read.from,
                first_at,
                done_at: first_at + f64::from(next.generated.saturating_sub(1)) * self.step(),
                ttft: None,
                longest_gap: 0.0,
            });
            self.queue.pop_front();
        }
        visited
    }

    /// Returns the compute until the next token, end or change of phase.
    pub(super) fn next(&self) -> Option<f64> {
        let next =
            |running: &Running| if running.ttft.is_none() { running.first_at } else { running.done_at };
        let next = self.active.iter().map(next).min_by(f64::total_cmp)?;
        let next = self.steps.turns().fold(next, f64::min);
        Some((next - self.steps.progress).max(0.0))
    }
}

impl GpuShare {
    fn resident(&self) -> Bytes {
        let out = self.weights_out.saturating_add(self.kv_out);
        self.weights.saturating_add(self.kv).saturating_sub(out)
    }

    /// Returns the live part of the evicted KV cache; dead parts are evicted first.
    fn live_out(&self, live: Bytes) -> Bytes {
        self.kv_out.saturating_sub(self.kv.saturating_sub(live))
    }

    /// Returns the state that the worker reports. The dead part of its KV cache is known only at a shrink, so all of it counts.
    fn account(&self, floor: Bytes, copies_out: bool) -> Account {
        let here = if copies_out { (self.weights, self.weights_out) } else { (self.kv, self.kv_out) };
        Account {
            lease: self.lease,
            resident: self.resident(),
            evicted: self.weights_out.saturating_add(self.kv_out),
            dirty: here.0.saturating_sub(here.1),
            ..Account::nothing(self.gpu, floor)
        }
    }
}

/// Tolerance between two sums of the same figures.
pub(super) const HAIR: f64 = 1e-7;

/// Position of a worker in its steps and prompts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Steps {
    /// Compute so far, in seconds.
    pub(super) progress: f64,
    /// Length of a step.
    pub(super) length: f64,
    /// Part of a step in which the GPU computes.
    computes: f64,
    /// Start and length of the latest or next reading of prompts.
    reads_from: f64,
    reads: f64,
    /// Time from which steps follow the prompts, one after the other.
    steps_from: f64,
    /// Position of the stop at the next safe point, if the worker must park.
    stops_at: Option<f64>,
}

/// Schedule of one more prompt.
#[derive(Clone, Copy, Debug)]
pub(super) struct PromptSchedule {
    /// Start of the reading, together with all prompts before the same step.
    pub(super) from: f64,
    /// Delay of the following steps.
    pub(super) later: f64,
    /// Time without a token for running requests.
    pub(super) gap: f64,
}

impl Steps {
    pub(super) fn new(decode_ms: f64, step_ms: f64) -> Self {
        let (length, computes) = (decode_ms / 1e3, step_ms / 1e3);
        Steps {
            progress: 0.0,
            length,
            computes,
            reads_from: 0.0,
            reads: 0.0,
            steps_from: 0.0,
            stops_at: None,
        }
    }

    /// Advances by `compute` seconds, up to the stop.
    pub(super) fn pass(&mut self, compute: f64) {
        self.progress = (self.progress + compute).min(self.stops_at.unwrap_or(f64::INFINITY));
    }

    /// Stops at the next safe point: after the current step, or between two parts of a prompt. Returns the distance.
    pub(super) fn stop(&mut self) -> f64 {
        let is_reading = self.progress + HAIR < self.steps_from;
        let at = if is_reading { self.progress } else { self.step_ends().max(self.progress) };
        self.stops_at = Some(at);
        at - self.progress
    }

    /// Cancels the stop.
    pub(super) fn go_on(&mut self) {
        self.stops_at = None;
    }

    pub(super) fn stands(&self) -> bool {
        self.stops_at.is_some_and(|at| at <= self.progress)
    }

    /// Returns the fraction of a GPU that the worker can use now.
    pub(super) fn demand(&self) -> f64 {
        let is_read = self.progress + HAIR >= self.reads_from && self.progress + HAIR < self.read_by();
        let reads = if is_read { self.reads } else { 0.0 };
        ((reads + self.computes) / self.length).min(1.0)
    }

    /// Returns the positions at which the demand changes or the worker stops.
    pub(super) fn turns(&self) -> impl Iterator<Item = f64> {
        let turns = [Some(self.reads_from), Some(self.read_by()), self.stops_at];
        let progress = self.progress;
        turns.into_iter().flatten().filter(move |at| *at > progress)
    }

    /// Returns the end of the step before which prompts are read.
    pub(super) fn read_by(&self) -> f64 {
        self.steps_from + self.length
    }

    /// Schedules a prompt of `prompt` seconds after the current step and earlier prompts; immediately if no request is running.
    pub(super) fn read(&mut self, prompt: f64, is_idle: bool) -> PromptSchedule {
        if is_idle {
            (self.reads_from, self.reads, self.steps_from) = (self.progress, 0.0, self.progress);
        } else if self.progress > self.reads_from + HAIR {
            let is_reading = self.progress + HAIR < self.steps_from;
            let end = if is_reading { self.read_by() } else { self.step_ends() };
            (self.reads_from, self.reads, self.steps_from) = (end, 0.0, end);
        }
        let before = self.delay();
        self.reads += prompt;
        self.steps_from = self.reads_from + self.delay();
        PromptSchedule {
            from: self.reads_from,
            later: self.delay() - before,
            gap: self.length + self.delay(),
        }
    }

    /// Returns the delay of the next step by prompts: their compute minus the GPU's idle part of a step.
    fn delay(&self) -> f64 {
        (self.reads + self.computes - self.length).max(0.0)
    }

    /// Returns the end of the current step.
    fn step_ends(&self) -> f64 {
        let steps = ((self.progress - self.steps_from - HAIR) / self.length).ceil();
        self.steps_from + steps.max(0.0) * self.length
    }
}

/// Returns the max-min fair share of one GPU for these demands: no worker gets less than an equal part of the remainder.
pub(super) fn equal_part(mut demands: Vec<f64>) -> f64 {
    demands.sort_by(f64::total_cmp);
    let count = u32::try_from(demands.len()).unwrap_or(u32::MAX);
    let mut left = 1.0;
    for (demand, sharing) in demands.into_iter().zip((1..=count).rev()) {
        let equal = left / f64::from(sharing);
        if demand > equal {
            return equal;
        }
        left -= demand;
    }
    1.0
}

#[cfg(test)]
mod steps_tests {
    use super::*;

    fn near(found: f64, wanted: f64) {
        assert!((found - wanted).abs() < 1e-9, "{found} is not {wanted}");
    }

    #[test]
    fn prompts_are_read_together_after_the_step_that_is_under_way() {
        let mut steps = Steps::new(12.0, 12.0);
        near(steps.read(0.03, true).gap, 0.042);
        steps.pass(0.03 + 0.012 + 0.004);
        let (first, second) = (steps.read(0.02, false), steps.read(0.01, false));
        near(first.from, 0.054);
        near(second.from, 0.054);
        near(first.later, 0.02);
        near(second.gap, 0.042);
        near(steps.read_by(), 0.054 + 0.03 + 0.012);
        // While the two prompts are read, a third waits for the step after them.
        steps.pass(0.02);
        near(steps.read(0.01, false).from, 0.096);
    }

    #[test]
    fn a_prompt_uses_the_idle_part_of_a_step() {
        let mut steps = Steps::new(12.0, 4.0);
        near(steps.demand(), 1.0 / 3.0);
        near(steps.read(0.006, true).later, 0.0);
        near(steps.demand(), 10.0 / 12.0);
        near(steps.read(0.014, true).later, 0.006);
        near(steps.demand(), 1.0);
        steps.pass(0.018);
        near(steps.demand(), 1.0 / 3.0);
    }

    #[test]
    fn a_stop_is_after_a_step_or_in_a_prompt() {
        let mut steps = Steps::new(12.0, 12.0);
        steps.read(0.03, true);
        steps.pass(0.01);
        near(steps.stop(), 0.0);
        assert!(steps.stands());
        steps.go_on();
        steps.pass(0.025);
        near(steps.stop(), 0.007);
        steps.pass(1.0);
        near(steps.progress, 0.042);
    }
}
