//! A worker that is made up: its memory, its gate, its requests.

use std::collections::VecDeque;
use std::time::Duration;

use glake_units::Bytes;

use super::load::Request;
use super::speeds::Speeds;
use crate::node::Worker;
use crate::{GpuId, Holding};

/// A request that runs, in the worker's own seconds of compute.
#[derive(Clone, Debug)]
pub(super) struct Running {
    pub(super) asked: Request,
    begun_at: f64,
    pub(super) first_at: f64,
    pub(super) done_at: f64,
    /// Seconds to the first token, once it is there.
    pub(super) ttft: Option<f64>,
    pub(super) longest_gap: f64,
}

/// Whether uses may run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gate {
    Open,
    /// Those that run go on to their next safe point.
    Parking,
    Closed,
}

/// What it has of one GPU.
#[derive(Clone, Debug)]
pub(super) struct Held {
    pub(super) gpu: GpuId,
    pub(super) lease: Bytes,
    weights: Bytes,
    kv: Bytes,
    weights_out: Bytes,
    kv_out: Bytes,
    /// When what was granted is copied.
    pub(super) copied_by: Duration,
}

#[derive(Clone, Debug)]
pub(super) struct Model {
    pub(super) spec: Worker,
    pub(super) gate: Gate,
    pub(super) held: Vec<Held>,
    pub(super) active: Vec<Running>,
    pub(super) queue: VecDeque<Request>,
    /// Seconds of compute that it has had.
    pub(super) progress: f64,
    pub(super) parked_at: Option<Duration>,
    /// Parks that were taken back do not come to pass.
    pub(super) parks: u32,
    /// Shrinks under way.
    pub(super) shrinks: u32,
    pub(super) busy: bool,
    floor: Bytes,
    copies_out: bool,
}

impl Model {
    /// One that has its memory, or has none of it.
    pub(super) fn new(spec: Worker, floor: Bytes, speeds: &Speeds, resident: bool) -> Self {
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
            spec,
            gate: if resident { Gate::Open } else { Gate::Closed },
            active: Vec::new(),
            queue: VecDeque::new(),
            progress: 0.0,
            parked_at: None,
            parks: 0,
            shrinks: 0,
            busy: false,
            floor: if speeds.restarts { Bytes::ZERO } else { floor },
            copies_out: speeds.copies_out,
        }
    }

    pub(super) fn runs(&self) -> bool {
        self.gate != Gate::Closed && !self.active.is_empty()
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
        self.spec.decode_ms / 1e3
    }

    /// Live KV cache on each GPU.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // tokens
    fn live(&self) -> Bytes {
        let tokens = |running: &Running| {
            let answered = ((self.progress - running.first_at).max(0.0) / self.step()) as u64;
            let read = if self.progress > running.begun_at { u64::from(running.asked.context) } else { 0 };
            read + answered.min(u64::from(running.asked.generated))
        };
        self.room_of(self.active.iter().map(tokens).sum())
    }

    fn room_of(&self, tokens: u64) -> Bytes {
        self.spec.part(self.spec.kv_per_token.checked_mul(tokens).unwrap_or(Bytes::MAX))
    }

    pub(super) fn holdings(&self) -> Vec<Holding> {
        let live = self.live();
        self.held.iter().map(|held| held.holding(self.floor, live.min(held.kv), self.copies_out)).collect()
    }

    /// Takes so many bytes away from a GPU: leased and not made first, then the KV cache, then weights. Says how many
    /// left, and how many of them are copied.
    pub(super) fn evict(&mut self, gpu: GpuId, bytes: Bytes) -> (Bytes, Bytes) {
        let (live, copies_out) = (self.live(), self.copies_out);
        let Some(held) = self.held.iter_mut().find(|held| held.gpu == gpu) else {
            return (Bytes::ZERO, Bytes::ZERO);
        };
        let live = live.min(held.kv);
        let before = held.live_out(live);
        let leaves = bytes.saturating_sub(held.lease.saturating_sub(held.resident()));
        let kv = leaves.min(held.kv.saturating_sub(held.kv_out));
        let weights = leaves.saturating_sub(kv).min(held.weights.saturating_sub(held.weights_out));
        held.kv_out = held.kv_out.saturating_add(kv);
        held.weights_out = held.weights_out.saturating_add(weights);
        let live_left = held.live_out(live).saturating_sub(before);
        (kv.saturating_add(weights), if copies_out { weights } else { live_left })
    }

    /// Of so many granted bytes, how many a link carries.
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

    /// Begins the requests that its KV cache has room for.
    pub(super) fn begin(&mut self) {
        let tokens = |request: &Request| u64::from(request.context) + u64::from(request.generated);
        let room = self.spec.part(self.spec.kv);
        while let Some(next) = self.queue.front() {
            let taken = self.active.iter().map(|running| tokens(&running.asked)).sum::<u64>() + tokens(next);
            if !self.active.is_empty() && self.room_of(taken) > room {
                break;
            }
            let prefill = f64::from(next.context) / self.spec.prefill_tok_s;
            let first_at = self.progress + prefill + self.step();
            self.active.push(Running {
                asked: *next,
                begun_at: self.progress,
                first_at,
                done_at: first_at + f64::from(next.generated.saturating_sub(1)) * self.step(),
                ttft: None,
                longest_gap: 0.0,
            });
            self.queue.pop_front();
        }
    }

    /// How much compute the next token or end is away.
    pub(super) fn next(&self) -> Option<f64> {
        let next =
            |running: &Running| if running.ttft.is_none() { running.first_at } else { running.done_at };
        let next = self.active.iter().map(next).min_by(f64::total_cmp)?;
        Some((next - self.progress).max(0.0))
    }
}

impl Held {
    fn resident(&self) -> Bytes {
        let out = self.weights_out.saturating_add(self.kv_out);
        self.weights.saturating_add(self.kv).saturating_sub(out)
    }

    /// What is dead of a KV cache leaves first.
    fn live_out(&self, live: Bytes) -> Bytes {
        self.kv_out.saturating_sub(self.kv.saturating_sub(live))
    }

    fn holding(&self, floor: Bytes, live: Bytes, copies_out: bool) -> Holding {
        let live_out = self.live_out(live);
        let live_here = live.saturating_sub(live_out);
        Holding {
            gpu: self.gpu,
            floor,
            lease: self.lease,
            resident: self.resident(),
            fixed: Bytes::ZERO,
            evicted: self.weights_out.saturating_add(live_out),
            room: self.kv_out.saturating_sub(live_out),
            dirty: if copies_out { self.weights.saturating_sub(self.weights_out) } else { live_here },
            discardable: self.kv.saturating_sub(self.kv_out).saturating_sub(live_here),
            hosted: Bytes::ZERO,
        }
    }
}
