//! The record of a pass.

use std::time::Duration;

use glake_units::Bytes;

use super::{Item, ShapeClass, shape::bucket};
use crate::{ItemId, Pack, Position};

/// In so many parts of a pass the times of several are compared.
const PARTS: usize = 16;

/// One step of the recorded order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The item is packed, for the first time.
    Pack(ItemId),
    /// One of its handles is unpacked.
    Unpack(ItemId),
}

/// What one pass did. [`Recorder`](crate::Recorder) makes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tape {
    pub(super) steps: Vec<Step>,
    pub(super) items: Vec<Item>,
    pub(super) times: Vec<Duration>,
    pub(super) rest: Vec<Bytes>,
    pub(super) timed: bool,
}

impl Tape {
    /// Its packs and unpacks in order.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Its items in the order of their packs.
    pub fn items(&self) -> &[Item] {
        &self.items
    }

    /// When the step at `position` began, or the pass ended; of compute alone.
    pub fn time_at(&self, position: Position) -> Duration {
        self.times.get(position.0).or(self.times.last()).copied().unwrap_or_default()
    }

    /// How long the pass took.
    pub fn time(&self) -> Duration {
        self.times.last().copied().unwrap_or_default()
    }

    /// Whether the pass was timed: without times a plan takes each step to be as long as a copy of its item.
    pub fn is_timed(&self) -> bool {
        self.timed
    }

    /// What the process has beside items from the step at `position` to the next one.
    pub fn rest_at(&self, position: Position) -> Bytes {
        self.rest.get(position.0).copied().unwrap_or_default()
    }

    /// How many items no backward unpacked: branches that are not used, or a pass that an exception ended.
    pub fn unused(&self) -> usize {
        self.items.iter().filter(|item| item.unpacks.is_empty()).count()
    }

    /// The key by which plans for passes like this one are kept.
    pub fn class(&self) -> ShapeClass {
        ShapeClass::of(self)
    }

    /// The first position at which `later` is not as this pass: another order, another scope, or an item that is larger
    /// or of another bucket of sizes. `None`: a plan for this tape holds for that pass.
    pub fn divergence(&self, later: &Tape) -> Option<Position> {
        let differs = |(mine, other): (&Step, &Step)| match (mine, other) {
            (Step::Pack(mine), Step::Pack(other)) => {
                !self.items[mine.index()].admits(&later.items[other.index()].pack)
            }
            _ => mine != other,
        };
        let at = self.steps.iter().zip(&later.steps).position(differs);
        let shorter = self.steps.len().min(later.steps.len());
        at.or((self.steps.len() != later.steps.len()).then_some(shorter)).map(Position)
    }

    /// Takes what is larger of `other`, a pass of the same class, so that a plan for this tape holds for both: bytes,
    /// the rest, and how long the forward holds an item. Of times, and of what recomputing takes, the least counts: a part takes longer
    /// where the host is late, or where something was waited for that nobody told of. Whether it is of the same class; nothing has
    /// changed if not.
    pub fn widen(&mut self, other: &Tape) -> bool {
        if self.class() != other.class() {
            return false;
        }
        let (own, others) = (self.bytes(), other.bytes());
        let are_timed = self.timed && other.timed;
        for (mine, other) in self.items.iter_mut().zip(&other.items) {
            mine.pack.bytes = mine.pack.bytes.max(other.pack.bytes);
            mine.pack.link_bytes = mine.pack.link_bytes.max(other.pack.link_bytes);
            mine.released = mine.released.max(other.released);
            mine.dropped = mine.dropped.max(other.dropped).max(mine.released);
            mine.recompute = match (mine.recompute, other.recompute) {
                (Some(before), Some(now)) if are_timed => Some(before.lesser(now)),
                (before, now) => now.or(before),
            };
        }
        for (mine, other) in self.rest.iter_mut().zip(&other.rest) {
            *mine = (*mine).max(*other);
        }
        if are_timed {
            self.least_times(&other.times, own, others);
        } else if other.timed {
            (self.timed, self.times) = (true, other.times.clone());
        }
        true
    }

    /// Each part of the pass takes the lesser of two times; those of the smaller pass are longer by as much as it has less bytes. Of single
    /// steps the lesser time would be too little: what one pass does before a step, another does behind it.
    fn least_times(&mut self, other: &[Duration], own: Bytes, others: Bytes) {
        #[allow(clippy::cast_precision_loss)] // a ratio of sizes
        let larger = |bytes: Bytes| own.max(others).get().max(1) as f64 / bytes.get().max(1) as f64;
        let lengths = |times: &[Duration], scale: f64| -> Vec<Duration> {
            times.windows(2).map(|pair| pair[1].saturating_sub(pair[0]).mul_f64(scale)).collect()
        };
        let (mine, other) = (lengths(&self.times, larger(own)), lengths(other, larger(others)));
        let steps = mine.len().div_ceil(PARTS).max(1);
        let mut until = Duration::ZERO;
        self.times = vec![until];
        for (mine, other) in mine.chunks(steps).zip(other.chunks(steps)) {
            let least = if mine.iter().sum::<Duration>() <= other.iter().sum() { mine } else { other };
            self.times.extend(least.iter().map(|length| {
                until += *length;
                until
            }));
        }
    }

    fn bytes(&self) -> Bytes {
        self.items.iter().map(|item| item.pack.bytes).sum()
    }
}

impl Tape {
    /// Memory beside items is more, or less, by what it was at the begin.
    pub(crate) fn shift(&mut self, from: Bytes, to: Bytes) {
        for rest in &mut self.rest {
            *rest = rest.saturating_add(to).saturating_sub(from);
        }
    }

    /// What memory had beside items counts no more.
    pub(crate) fn forget_rest(&mut self) {
        self.rest.fill(Bytes::ZERO);
    }
}

impl Item {
    /// Whether a plan that counts on this item holds for `pack` in its place.
    pub(crate) fn admits(&self, pack: &Pack) -> bool {
        let mine = self.pack;
        pack.scope == mine.scope
            && pack.leaf == mine.leaf
            && pack.bytes <= mine.bytes
            && pack.link_bytes <= mine.link_bytes
            && bucket(pack.bytes) == bucket(mine.bytes)
            && bucket(pack.link_bytes) == bucket(mine.link_bytes)
    }
}
