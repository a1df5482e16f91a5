//! A range of memory in a random program: what it holds if everything ran one after the other, and who used it last.

use glake_device::owned::Span;
use glake_device::{Address, KernelMemory, Touch};

use super::lane::Use;

/// Where a pattern is written: a little in every part that a path may take.
const STRIDE: usize = 64 << 10;
const LENGTH: usize = 64;

#[derive(Debug)]
pub(super) struct Place {
    pub(super) span: Span,
    /// The pattern that it holds by then; none yet where `None`.
    pub(super) seed: Option<u64>,
    pub(super) wrote: Option<Use>,
    pub(super) read: Vec<Use>,
}

impl Place {
    pub(super) fn new(span: Span) -> Place {
        Place { span, seed: None, wrote: None, read: Vec::new() }
    }

    /// What a step that writes it has to come after.
    pub(super) fn before_writing(&self) -> Vec<Use> {
        self.wrote.into_iter().chain(self.read.iter().copied()).collect()
    }

    pub(super) fn written(&mut self, by: Use, seed: Option<u64>) {
        self.wrote = Some(by);
        self.read.clear();
        self.seed = seed;
    }

    pub(super) fn read_by(&mut self, by: Use) {
        self.read.retain(|earlier| earlier.lane != by.lane);
        self.read.push(by);
    }

    pub(super) fn touch(&self) -> Touch {
        Touch { address: self.span.start(), size: self.span.size() }
    }
}

/// Writes a pattern.
pub(super) fn mark(memory: &mut dyn KernelMemory, touch: Touch, seed: u64) {
    for at in (0..touch.size.get()).step_by(STRIDE) {
        // A stray touch is told of by the next wait.
        let _ = memory.write(Address(touch.address.0 + at), &pattern(seed, at));
    }
}

/// Whether a pattern is there.
pub(super) fn is_marked(read: &mut dyn FnMut(Address, &mut [u8]) -> bool, touch: Touch, seed: u64) -> bool {
    let mut found = [0; LENGTH];
    let mut offsets = (0..touch.size.get()).step_by(STRIDE);
    offsets.all(|at| read(Address(touch.address.0 + at), &mut found) && found == pattern(seed, at))
}

/// Writes a pattern into memory of the host's.
pub(super) fn mark_bytes(bytes: &mut [u8], seed: u64) {
    for (at, part) in bytes.chunks_mut(STRIDE).enumerate() {
        let length = part.len().min(LENGTH);
        part[..length].copy_from_slice(&pattern(seed, (at * STRIDE) as u64)[..length]);
    }
}

/// Whether a pattern is in memory of the host's.
pub(super) fn are_marked(bytes: &[u8], seed: u64) -> bool {
    let mut parts = bytes.chunks(STRIDE).enumerate();
    parts.all(|(at, part)| {
        let length = part.len().min(LENGTH);
        part[..length] == pattern(seed, (at * STRIDE) as u64)[..length]
    })
}

fn pattern(seed: u64, at: u64) -> [u8; LENGTH] {
    let mut word = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ at;
    std::array::from_fn(|_| {
        word = (word ^ word >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word.to_be_bytes()[0]
    })
}
