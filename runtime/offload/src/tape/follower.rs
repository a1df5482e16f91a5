//! A later pass beside the tape of an earlier one.

use std::sync::Arc;

use super::{Step, Tape};
use crate::{ItemId, Pack, Position};

/// Follows a pass along a tape, step by step, and says from which position on it is another one.
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
    /// At the begin of a pass.
    pub fn new(tape: Arc<Tape>) -> Self {
        Follower { tape, steps: 0, packs: 0, diverged: None }
    }

    /// The pass packs its next item. Whether it is still as the tape.
    pub fn packed(&mut self, pack: &Pack) -> bool {
        let next = ItemId::new(self.packs);
        self.packs += 1;
        let like = matches!(self.tape.steps().get(self.steps), Some(Step::Pack(item)) if *item == next)
            && self.tape.items()[next.index()].admits(pack);
        self.step(like)
    }

    /// The pass unpacks `item`. Whether it is still as the tape.
    pub fn unpacked(&mut self, item: ItemId) -> bool {
        let like = self.tape.steps().get(self.steps) == Some(&Step::Unpack(item));
        self.step(like)
    }

    /// The position of the next step.
    pub fn position(&self) -> Position {
        Position(self.steps)
    }

    /// From which position on the pass is not as the tape.
    pub fn diverged(&self) -> Option<Position> {
        self.diverged
    }

    /// Whether every step of the tape was done, and nothing else.
    pub fn is_complete(&self) -> bool {
        self.diverged.is_none() && self.steps == self.tape.steps().len()
    }

    /// What is followed.
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
