//! Record of a pass.

use std::time::Duration;

use glake_units::Bytes;

use super::{Item, ShapeClass, shape::bucket};
use crate::{ItemId, Pack, Position};

/// Number of parts of a pass in which the times of several passes are compared.
const PARTS: usize = 16;

/// Step of the recorded order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// First pack of an item.
    Pack(ItemId),
    /// Unpack of one of its handles.
    Unpack(ItemId),
}

/// Record of one pass, created by a [`Recorder`](crate::Recorder).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tape {
    pub(super) steps: Vec<Step>,
    pub(super) items: Vec<Item>,
    pub(super) times: Vec<Duration>,
    pub(super) rest: Vec<Bytes>,
    pub(super) timed: bool,
}

impl Tape {
    /// Returns the packs and unpacks in order.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Returns the items in pack order.
    pub fn items(&self) -> &[Item] {
        &self.items
    }

    /// Returns the compute time until the begin of the step at `position`, or until the end of the pass.
    pub fn time_at(&self, position: Position) -> Duration {
        self.times.get(position.0).or(self.times.last()).copied().unwrap_or_default()
    }

    /// Returns the duration of the pass.
    pub fn time(&self) -> Duration {
        self.times.last().copied().unwrap_or_default()
    }

    /// Returns whether the pass was timed. Without times, a plan assumes that each step takes as long as a copy of its item.
    pub fn is_timed(&self) -> bool {
        self.timed
    }

    /// Returns the memory in addition to items between the step at `position` and the next one.
    pub fn rest_at(&self, position: Position) -> Bytes {
        self.rest.get(position.0).copied().unwrap_or_default()
    }

    /// Returns the number of items that no backward pass unpacked: unused branches, or a pass ended by an exception.
    pub fn unused(&self) -> usize {
        self.items.iter().filter(|item| item.unpacks.is_empty()).count()
    }

    /// Returns the key of plans for passes like this one.
    pub fn class(&self) -> ShapeClass {
        ShapeClass::of(self)
    }

    /// Returns the first position at which `later` differs: another order or scope, or an item that is larger or in another size bucket.
    /// `None`: a plan for this tape is valid for that pass.
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

    /// Widens the tape to the maximum of both passes, so that a plan is valid for either: sizes, other memory, and how long the forward
    /// pass holds items. Times become the minimum: a part takes longer if the host is late or after an unrecorded wait. Returns `false`,
    /// with nothing changed, if `other` is of another class.
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

    /// Sets each part of the pass to the lesser of two times, after scaling those of the smaller pass by its bytes. Single steps are not
    /// compared: work before a step in one pass may follow it in another.
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
    /// Shifts the other memory by the difference of two initial values.
    pub(crate) fn shift(&mut self, from: Bytes, to: Bytes) {
        for rest in &mut self.rest {
            *rest = rest.saturating_add(to).saturating_sub(from);
        }
    }

    /// Clears the memory in addition to items.
    pub(crate) fn forget_rest(&mut self) {
        self.rest.fill(Bytes::ZERO);
    }
}

impl Item {
    /// Returns whether a plan based on this item is valid for `pack` in its place.
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
