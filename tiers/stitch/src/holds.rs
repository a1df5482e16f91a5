//! Holds and completion points: the work that freed bytes must wait for. A hold records that one event's work still uses a block.
//!
//! ```text
//! block:   live, held ──free──► held piece ──the holds pass, or the completion point──► free for its stream
//!                                   └── handed out to its stream, behind a wait for the holds
//!          recorded on streams ──free──► withheld piece ──the holds pass, or the completion point──► free for its stream
//! ```
//!
//! A *read hold* is put on a live block. A *use hold* is created when a recorded block is freed, one for each stream that the block was
//! recorded on. No stream ever waits for a use hold: the work behind it may itself wait for later work of that stream.
//!
//! Invariants: each number is given once, to a hold or to a block's generation. Ranges of holds on different blocks are disjoint; ranges of
//! holds on one block are equal. Together they are the pieces in the lists of held pieces, the pieces that plans took from these, and the
//! withheld pieces that wait for holds.
//!
//! Completion points divide the order of frees; the last passed point tells which frees' work has completed:
//!
//! ```text
//! passed ──── closed, its event recorded ──── open: frees belong to it now
//! ```
//!
//! Invariant: a completion point passes after it was closed, so `passed` is always before `open`.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::ids::{HoldId, PointNumber, StreamKey};

/// A few hold ids.
pub(crate) type HoldIds = SmallVec<[HoldId; 2]>;

/// A freed block that another stream may still use. The caller then records an event on the stream, and passes the hold once the event has
/// completed. The event also covers all uses of the stream with lower numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamUse {
    /// Hold on the block's bytes.
    pub hold: HoldId,
    /// Stream that the block was recorded on.
    pub stream: StreamKey,
}

/// State of a live block whose generation was requested.
#[derive(Debug)]
struct LiveBlock {
    generation: u64,
    holds: HoldIds,
}

/// The holds of one device.
#[derive(Debug, Default)]
pub(crate) struct Holds {
    /// Live blocks with a generation, by their start.
    live: FxHashMap<u64, LiveBlock>,
    /// Pending holds, with the starts of the free ranges that they hold.
    pending: FxHashMap<HoldId, SmallVec<[u64; 1]>>,
    /// Ends of the held ranges, by start and hold.
    ranges: BTreeMap<(u64, HoldId), u64>,
    /// Streams that live blocks were recorded on, by the start of the block.
    recorded: FxHashMap<u64, SmallVec<[StreamKey; 2]>>,
    /// Use holds that the caller has not taken yet.
    uses: Vec<StreamUse>,
    /// Last number given to a hold or a generation.
    given: u64,
}

impl Holds {
    /// Returns the generation of the live block at an offset.
    pub(crate) fn generation(&mut self, block: u64) -> u64 {
        let given = &mut self.given;
        let fresh = || {
            *given += 1;
            LiveBlock { generation: *given, holds: HoldIds::new() }
        };
        self.live.entry(block).or_insert_with(fresh).generation
    }

    /// Returns whether no live block has a generation; then no live block is held.
    #[inline]
    pub(crate) fn knows_none(&self) -> bool {
        self.live.is_empty()
    }

    /// Adds a hold to the live block at an offset; `None` if its generation differs.
    pub(crate) fn add(&mut self, block: u64, generation: u64) -> Option<HoldId> {
        let live = self.live.get_mut(&block).filter(|live| live.generation == generation)?;
        self.given += 1;
        let id = HoldId(self.given);
        // Prune at powers of two, so that many holds on one block stay cheap.
        if live.holds.len().is_power_of_two() {
            live.holds.retain(|held| self.pending.contains_key(held));
        }
        live.holds.push(id);
        self.pending.insert(id, SmallVec::new());
        Some(id)
    }

    /// Ends the record of a block that is freed; returns its pending holds.
    pub(crate) fn end_block(&mut self, block: u64) -> HoldIds {
        let mut holds = self.live.remove(&block).map(|live| live.holds).unwrap_or_default();
        holds.retain(|held| self.pending.contains_key(held));
        holds
    }

    /// Records that a stream uses the live block at an offset.
    pub(crate) fn record(&mut self, block: u64, stream: StreamKey) {
        let streams = self.recorded.entry(block).or_default();
        if !streams.contains(&stream) {
            streams.push(stream);
        }
    }

    /// Converts the streams of a recorded block to use holds and adds them to the block's holds. If one of the streams is unknown, only the
    /// completion point tells the end of the use, and the block gets no holds.
    pub(crate) fn end_recorded(&mut self, block: u64, holds: &mut HoldIds) {
        let streams = self.recorded.remove(&block).unwrap_or_default();
        debug_assert!(!streams.is_empty(), "a recorded block was recorded on a stream");
        if streams.contains(&StreamKey::UNKNOWN) {
            holds.clear();
            return;
        }
        for stream in streams {
            self.given += 1;
            let hold = HoldId(self.given);
            holds.push(hold);
            self.pending.insert(hold, SmallVec::new());
            self.uses.push(StreamUse { hold, stream });
        }
    }

    /// Takes the use holds created since the last call.
    #[inline]
    pub(crate) fn take_uses(&mut self) -> Vec<StreamUse> {
        std::mem::take(&mut self.uses)
    }

    /// Iterates over the starts of the recorded live blocks.
    pub(crate) fn recorded(&self) -> impl Iterator<Item = u64> + '_ {
        self.recorded.keys().copied()
    }

    /// Puts freed bytes under `holds`.
    pub(crate) fn cover(&mut self, holds: &[HoldId], start: u64, end: u64) {
        for &id in holds {
            if let Some(starts) = self.pending.get_mut(&id) {
                starts.push(start);
                self.ranges.insert((start, id), end);
            }
        }
    }

    /// Forgets the holds of a freed block that hold none of its bytes, because those have no memory.
    pub(crate) fn forget_idle(&mut self, holds: &[HoldId]) {
        for id in holds {
            if self.pending.get(id).is_some_and(|starts| starts.is_empty()) {
                self.pending.remove(id);
            }
        }
    }

    /// Releases a range from all holds and returns them: it is no longer held, or a stream waits for the holds.
    pub(crate) fn take(&mut self, start: u64, end: u64) -> HoldIds {
        let before = self.ranges.range(..(end, HoldId::default())).rev();
        let touching = before.take_while(|(_, range_end)| **range_end > start);
        let touching: SmallVec<[(u64, HoldId, u64); 2]> =
            touching.map(|(&(from, id), &to)| (from, id, to)).collect();
        let mut holds = HoldIds::new();
        for (from, id, to) in touching {
            self.ranges.remove(&(from, id));
            let starts = self.pending.entry(id).or_default();
            starts.retain(|&mut other| other != from);
            for (from, to) in [(from, start), (end, to)].into_iter().filter(|(from, to)| from < to) {
                starts.push(from);
                self.ranges.insert((from, id), to);
            }
            if starts.is_empty() {
                self.pending.remove(&id);
            }
            if !holds.contains(&id) {
                holds.push(id);
            }
        }
        holds
    }

    /// Iterates over the holds on any part of a range.
    pub(crate) fn on(&self, start: u64, end: u64) -> impl Iterator<Item = HoldId> + '_ {
        let before = self.ranges.range(..(end, HoldId::default())).rev();
        before.take_while(move |(_, range_end)| **range_end > start).map(|(&(_, id), _)| id)
    }

    /// Passes a hold and returns the free ranges that it held.
    pub(crate) fn pass(&mut self, id: HoldId) -> SmallVec<[(u64, u64); 2]> {
        let starts = self.pending.remove(&id).unwrap_or_default();
        starts.iter().filter_map(|&start| self.ranges.remove(&(start, id)).map(|end| (start, end))).collect()
    }

    /// Returns the number of pending holds, on live blocks and on free bytes.
    #[cfg(test)]
    pub(crate) fn count(&self) -> usize {
        self.pending.len()
    }

    /// Returns the number of held bytes, each counted once.
    pub(crate) fn bytes(&self) -> u64 {
        let mut upto = 0;
        let own = self.ranges.iter().map(|(&(start, _), &end)| {
            let own = end.saturating_sub(start.max(upto));
            upto = end.max(upto);
            own
        });
        own.sum()
    }
}

/// The completion points of one device.
#[derive(Debug)]
pub(crate) struct CompletionPoints {
    /// Completion point of the current frees; closed when an event is recorded for it.
    open: PointNumber,
    /// Whether the open point has frees.
    uncovered: bool,
    passed: PointNumber,
}

impl Default for CompletionPoints {
    fn default() -> Self {
        CompletionPoints { open: PointNumber(1), uncovered: false, passed: PointNumber(0) }
    }
}

impl CompletionPoints {
    /// Returns the open completion point, to which frees belong.
    #[inline]
    pub(crate) fn open(&self) -> PointNumber {
        self.open
    }

    /// Returns the last completion point that has passed.
    #[inline]
    pub(crate) fn passed(&self) -> PointNumber {
        self.passed
    }

    /// Returns whether work of a completion point may still run.
    #[inline]
    pub(crate) fn is_pending(&self, point: PointNumber) -> bool {
        point > self.passed
    }

    /// Returns the open completion point if it has frees that no recorded event covers.
    pub(crate) fn uncovered(&self) -> Option<PointNumber> {
        self.uncovered.then_some(self.open)
    }

    /// Marks the open completion point as in need of an event: a block was freed, or the last event could not be recorded.
    #[inline]
    pub(crate) fn uncover(&mut self) {
        self.uncovered = true;
    }

    /// Closes the open completion point, whose event was recorded, and returns it.
    pub(crate) fn close(&mut self) -> PointNumber {
        let closed = self.open;
        self.open = closed.next();
        self.uncovered = false;
        closed
    }

    /// Marks a completion point as passed.
    pub(crate) fn pass(&mut self, point: PointNumber) {
        debug_assert!(point < self.open, "a completion point passes after it was closed");
        self.passed = self.passed.max(point);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(holds: &Holds, start: u64, end: u64) -> Vec<HoldId> {
        let mut on: Vec<HoldId> = holds.on(start, end).collect();
        on.sort();
        on.dedup();
        on
    }

    #[test]
    fn a_hold_ends_with_the_block_of_its_generation() {
        let mut holds = Holds::default();
        let first = holds.generation(0);
        assert_eq!(holds.generation(0), first);
        let held = holds.add(0, first).unwrap();
        assert!(holds.add(0, first + 1).is_none() && holds.add(512, first).is_none());
        assert_eq!(holds.end_block(0)[..], [held]);
        assert!(holds.add(0, first).is_none(), "it is over");
        let second = holds.generation(0);
        assert!(second != first && holds.end_block(0).is_empty(), "the next block there is not held");
        assert!(holds.end_block(512).is_empty());
    }

    #[test]
    fn a_passed_hold_holds_nothing() {
        let mut holds = Holds::default();
        let generation = holds.generation(0);
        let (one, two) = (holds.add(0, generation).unwrap(), holds.add(0, generation).unwrap());
        assert!(holds.pass(one).is_empty());
        let left = holds.end_block(0);
        assert_eq!(left[..], [two]);
        holds.cover(&left, 0, 100);
        assert_eq!(holds.pass(two)[..], [(0, 100)]);
        assert_eq!((holds.count(), holds.bytes()), (0, 0));
    }

    #[test]
    fn taking_the_middle_of_a_range_leaves_both_ends_held() {
        let mut holds = Holds::default();
        let generations = [holds.generation(0), holds.generation(100)];
        let one = holds.add(0, generations[0]).unwrap();
        let [two, three] = [(); 2].map(|()| holds.add(100, generations[1]).unwrap());
        holds.cover(&[one], 0, 100);
        holds.cover(&[two, three], 100, 200);
        assert_eq!(holds.bytes(), 200);
        let mut taken = holds.take(80, 120);
        taken.sort();
        assert_eq!(taken[..], [one, two, three]);
        assert_eq!(on(&holds, 0, 200), [one, two, three]);
        assert_eq!((on(&holds, 80, 120), holds.bytes()), (vec![], 160));
        assert_eq!(holds.take(150, 160).len(), 2);
        let mut passed = holds.pass(two).to_vec();
        passed.sort_unstable();
        assert_eq!(passed, [(120, 150), (160, 200)]);
        assert_eq!(on(&holds, 100, 200), [three]);
    }
}

#[cfg(test)]
mod points_tests {
    use super::*;

    #[test]
    fn frees_are_pending_until_their_point_passes() {
        let mut points = CompletionPoints::default();
        assert_eq!((points.uncovered(), points.passed()), (None, PointNumber(0)));
        points.uncover();
        let freed = points.open();
        assert_eq!(points.uncovered(), Some(freed));
        assert_eq!(points.close(), freed);
        assert!(points.uncovered().is_none() && points.is_pending(freed));
        let later = points.close();
        points.pass(later);
        points.pass(freed);
        assert_eq!(points.passed(), later, "what has passed stays passed");
        assert!(!points.is_pending(freed) && points.is_pending(points.open()));
    }
}
