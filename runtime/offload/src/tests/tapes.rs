//! Passes made up: like a transformer's, and like nothing.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use glake_units::{Bandwidth, Bytes};

use crate::{ItemId, Links, Pack, Recompute, Recorder, ScopeId, Tape};

/// A model to make a pass of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Model {
    pub(super) layers: u32,
    /// Items a layer.
    pub(super) items: usize,
    pub(super) mean: u64,
    /// What a layer's forward takes.
    pub(super) forward: Duration,
    pub(super) checkpointed: bool,
    pub(super) seed: u64,
}

impl Model {
    /// Layers of the same sizes, forward and then backward, and a head whose logits are the rest's peak.
    pub(super) fn tape(&self) -> Arc<Tape> {
        let mut rng = Rng::with_seed(self.seed);
        let sizes: Vec<(Bytes, Bytes, f64, bool)> = (0..self.items)
            .map(|_| {
                let bytes = Bytes::new(self.mean / 4 + rng.u64(0..self.mean * 3 / 2));
                let narrow = if rng.u8(0..4) == 0 { Bytes::new(bytes.get() / 2) } else { bytes };
                let inner = rng.bool();
                (bytes, narrow, if inner { 0.05 } else { 1.0 }, inner)
            })
            .collect();
        let work: f64 = sizes.iter().map(|(_, _, work, _)| work).sum();
        let base = Bytes::new(self.mean * 4);
        let mut recorder = Recorder::new();
        let mut now = Duration::ZERO;
        let mut packed = Vec::new();
        for layer in 0..self.layers {
            for &(bytes, narrow, part, inner) in &sizes {
                let pack = Pack::new(bytes).narrowed_to(narrow).within(ScopeId(layer));
                let item = recorder.packed(pack);
                let time = self.forward.mul_f64(part / work);
                if self.checkpointed {
                    let how = if inner { Recompute::Inner(time) } else { Recompute::Leaf(time) };
                    recorder.recomputable(item, how).unwrap();
                }
                recorder.sampled(base);
                now += time;
                recorder.mark(now);
                packed.push((item, time));
            }
        }
        recorder.sampled(Bytes::new(self.mean * 5));
        now += self.forward / 4;
        recorder.mark(now);
        for (item, time) in packed.into_iter().rev() {
            recorder.unpacked(item).unwrap();
            recorder.dropped(item).unwrap();
            recorder.sampled(base);
            now += time * 2;
            recorder.mark(now);
        }
        assert!(recorder.is_over());
        Arc::new(recorder.finish())
    }

    /// Links over which all items of a pass go in `ratio` times its forward.
    pub(super) fn links(&self, ratio: f64) -> Links {
        let tape = self.tape();
        let bytes: u64 = tape.items().iter().map(|item| item.pack().link_bytes.get()).sum();
        #[allow(clippy::cast_precision_loss)]
        let rate = bytes as f64 / (self.forward * self.layers).as_secs_f64() / ratio / 1e9;
        let (alone, both) = (Bandwidth(rate), Bandwidth(rate * 0.9));
        Links { copy: Duration::ZERO, ..Links::new(alone, alone).at_once(both, both) }
    }
}

/// A pass of any order: several forwards and backwards, shared items, branches that nothing uses, graphs retained,
/// storages that the program holds on to.
pub(super) fn wild(seed: u64, steps: usize) -> Arc<Tape> {
    let mut rng = Rng::with_seed(seed);
    let mut recorder = Recorder::new();
    let mut live: Vec<(ItemId, usize, bool)> = Vec::new();
    let mut now = Duration::ZERO;
    for step in 0..steps {
        now += Duration::from_micros(rng.u64(0..200));
        recorder.mark(now);
        recorder.sampled(Bytes::kib(rng.u64(0..512)));
        let forward = rng.usize(0..steps) > step;
        if live.is_empty() || (forward && rng.u8(0..4) > 0) {
            let bytes = Bytes::kib(1 + rng.u64(0..256));
            let pack = Pack::new(bytes);
            let scope = ScopeId(rng.u32(0..6));
            let pack = if rng.bool() { pack.within(scope) } else { pack };
            let item = recorder.packed(pack.narrowed_to(Bytes::new(bytes.get() / (1 + rng.u64(0..2)))));
            if pack.scope.is_some() && rng.u8(0..3) > 0 {
                let time = Duration::from_micros(rng.u64(1..300));
                let how = if rng.bool() { Recompute::Inner(time) } else { Recompute::Leaf(time) };
                recorder.recomputable(item, how).unwrap();
            }
            let handles = 1 + rng.usize(0..2);
            (1..handles).for_each(|_| recorder.shared(item).unwrap());
            live.push((item, handles, false));
            continue;
        }
        let at = if rng.bool() { live.len() - 1 } else { rng.usize(0..live.len()) };
        let (item, handles, released) = &mut live[at];
        let (unpacks, drops) = match rng.u8(0..8) {
            0 if !*released => {
                recorder.released(*item).unwrap();
                *released = true;
                (false, false)
            }
            0 | 1 => (true, false),
            2 => (false, true),
            _ => (true, true),
        };
        if unpacks {
            recorder.unpacked(*item).unwrap();
        }
        if drops {
            recorder.dropped(*item).unwrap();
            *handles -= 1;
        }
        if *handles == 0 {
            live.remove(at);
        }
    }
    Arc::new(recorder.finish())
}
