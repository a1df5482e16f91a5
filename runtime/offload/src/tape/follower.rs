//! Comparison of a later pass with an earlier tape.

use std::sync::Arc;

use super::{Step, Tape};
use crate::{ItemId, Pack, Position};

/// Follows a pass along a tape, step by step, and reports where it diverges.
///
/// ```
/// use std::sync::Arc;
/// use glake_offload::{Follower, Pack, Position, Recorder};
/// use glake_units::Bytes;
///
/// let mut recorder = Recorder::new();
/// let a = recorder.packed(Pack::new(Bytes::mib(4)));
/// let b = recorder.packed(Pack::new(Bytes::mib(1)));
/// recorder.unpacked(b)?;
/// recorder.unpacked(a)?;
/// let mut later = Follower::new(Arc::new(recorder.finish()));
/// assert!(later.packed(&Pack::new(Bytes::mib(4))));
/// assert!(!later.packed(&Pack::new(Bytes::mib(2))));
/// assert_eq!(later.diverged(), Some(Position(1)));
/// # Ok::<(), glake_offload::TapeError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Follower {
    tape: Arc<Tape>,
    steps: usize,
    packs: usize,
    diverged: Option<Position>,
}

impl Follower {
    /// Creates a follower at the begin of a pass.
    pub fn new(tape: Arc<Tape>) -> Self {
        Follower { tape, steps: 0, packs: 0, diverged: None }
    }

    /// Records the next pack. Returns whether the pass still matches the tape.
    pub fn packed(&mut self, pack: &Pack) -> bool {
        let next = ItemId::new(self.packs);
        self.packs += 1;
        let like = matches!(self.tape.steps().get(self.steps), Some(Step::Pack(item)) if *item == next)
            && self.tape.items()[next.index()].admits(pack);
        self.step(like)
    }

    /// Records an unpack of `item`. Returns whether the pass still matches the tape.
    pub fn unpacked(&mut self, item: ItemId) -> bool {
        let like = self.tape.steps().get(self.steps) == Some(&Step::Unpack(item));
        self.step(like)
    }

    /// Returns the position of the next step.
    pub fn position(&self) -> Position {
        Position(self.steps)
    }

    /// Returns the position of the divergence; `None` while the pass matches.
    pub fn diverged(&self) -> Option<Position> {
        self.diverged
    }

    /// Returns whether the pass executed every step of the tape and no other.
    pub fn is_complete(&self) -> bool {
        self.diverged.is_none() && self.steps == self.tape.steps().len()
    }

    /// Returns the tape that the pass is compared with.
    pub fn tape(&self) -> &Arc<Tape> {
        &self.tape
    }

    fn step(&mut self, like: bool) -> bool {
        if !like && self.diverged.is_none() {
            self.diverged = Some(Position(self.steps));
        }
        self.steps += 1;
        self.diverged.is_none()
    }
}
