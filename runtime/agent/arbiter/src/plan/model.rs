//! Simulated worker: its memory, its gate, its requests.

use std::collections::VecDeque;
use std::time::Duration;

use glake_units::Bytes;

use super::load::Request;
use super::speeds::Speeds;
use super::steps::{HAIR, Steps};
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
pub(super) struct Held {
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
    pub(super) held: Vec<Held>,
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
        let held = spec.gpus.iter().map(|&gpu| Held {
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
    pub(super) fn begin(&mut self) {
        let tokens = |request: &Request| u64::from(request.context) + u64::from(request.generated);
        let room = self.spec.part(self.spec.kv);
        while let Some(next) = self.queue.front().copied() {
            let taken = self.active.iter().map(|running| tokens(&running.asked)).sum::<u64>() + tokens(&next);
            if !self.active.is_empty() && self.room_of(taken) > room {
                break;
            }
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

impl Held {
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
