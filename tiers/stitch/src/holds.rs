//! Holds: which work still uses blocks though their stream is behind it no more, and where those bytes are once they are free.
//!
//! ```text
//! block:   live, held ──free──► held piece ──the holds pass, or the completion point──► the stream's own
//!                                   └── handed out to its stream, behind a wait for the holds
//!          recorded on streams ──free──► withheld piece ──the holds pass, or the completion point──► the stream's own
//! ```
//!
//! A *read hold* is put on a live block. A *use hold* comes into being when a recorded block is freed, one for each stream that the block
//! was recorded on. No stream ever waits for a use hold: the work behind it may itself wait for later work of that stream.
//!
//! Invariants: a number is given once, to a hold and to a block's generation. The ranges of holds on different blocks are disjoint, those
//! of holds on one block are the same, and together they are what lies in the free lists of held pieces, what plans took from these, and
//! the withheld pieces that wait for holds.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::ids::{HoldId, StreamKey};

/// Several holds.
pub(crate) type HoldIds = SmallVec<[HoldId; 2]>;

/// A freed block that another stream may still use. The caller records an event on the stream after it got this, and passes the hold
/// with the event. That event also covers every use of the stream with a lower number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamUse {
    /// The hold on the block's bytes.
    pub hold: HoldId,
    /// The stream that the block was recorded on.
    pub stream: StreamKey,
}

/// What is known of a live block that was asked about.
#[derive(Debug)]
struct LiveBlock {
    generation: u64,
    holds: HoldIds,
}

/// The holds of one device.
#[derive(Debug, Default)]
pub(crate) struct Holds {
    /// The live blocks that were asked about, by where they begin.
    live: FxHashMap<u64, LiveBlock>,
    /// What has not passed: where its ranges begin, in bytes that are free.
    pending: FxHashMap<HoldId, SmallVec<[u64; 1]>>,
    /// Those ranges, by where they begin; where they end.
    ranges: BTreeMap<(u64, HoldId), u64>,
    /// The streams that live blocks were recorded on, by where the blocks begin.
    recorded: FxHashMap<u64, SmallVec<[StreamKey; 2]>>,
    /// Use holds that the caller was not told of.
    uses: Vec<StreamUse>,
    /// The last number that was given.
    given: u64,
}

impl Holds {
    /// A number for the life of the block that begins there.
    pub(crate) fn generation(&mut self, block: u64) -> u64 {
        let given = &mut self.given;
        let fresh = || {
            *given += 1;
            LiveBlock { generation: *given, holds: HoldIds::new() }
        };
        self.live.entry(block).or_insert_with(fresh).generation
    }

    /// Whether nobody asked about any live block: then none is held.
    #[inline]
    pub(crate) fn knows_none(&self) -> bool {
        self.live.is_empty()
    }

    /// A new hold on the live block that begins there, if it is of that generation.
    pub(crate) fn add(&mut self, block: u64, generation: u64) -> Option<HoldId> {
        let live = self.live.get_mut(&block).filter(|live| live.generation == generation)?;
        self.given += 1;
        let id = HoldId(self.given);
        // Now and then, so that many on one block cost no more than a few.
        if live.holds.len().is_power_of_two() {
            live.holds.retain(|held| self.pending.contains_key(held));
        }
        live.holds.push(id);
        self.pending.insert(id, SmallVec::new());
        Some(id)
    }

    /// The block that begins there is live no more; what still holds it.
    pub(crate) fn end_block(&mut self, block: u64) -> HoldIds {
        let mut holds = self.live.remove(&block).map(|live| live.holds).unwrap_or_default();
        holds.retain(|held| self.pending.contains_key(held));
        holds
    }

    /// Notes that a stream uses the live block that begins there.
    pub(crate) fn record(&mut self, block: u64, stream: StreamKey) {
        let streams = self.recorded.entry(block).or_default();
        if !streams.contains(&stream) {
            streams.push(stream);
        }
    }

    /// Ends a recorded block: adds a use hold for each stream that it was recorded on to the block's holds. Where one of the streams is
    /// unknown, nothing tells of the block's end but its completion point, and it has no holds.
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

    /// The use holds that have come into being since the last call.
    #[inline]
    pub(crate) fn take_uses(&mut self) -> Vec<StreamUse> {
        std::mem::take(&mut self.uses)
    }

    /// The live blocks that are recorded.
    pub(crate) fn recorded(&self) -> impl Iterator<Item = u64> + '_ {
        self.recorded.keys().copied()
    }

    /// Freed bytes that these hold.
    pub(crate) fn cover(&mut self, holds: &[HoldId], start: u64, end: u64) {
        for &id in holds {
            if let Some(starts) = self.pending.get_mut(&id) {
                starts.push(start);
                self.ranges.insert((start, id), end);
            }
        }
    }

    /// Forgets those of a freed block's holds that hold none of its bytes: these are not there.
    pub(crate) fn forget_idle(&mut self, holds: &[HoldId]) {
        for id in holds {
            if self.pending.get(id).is_some_and(|starts| starts.is_empty()) {
                self.pending.remove(id);
            }
        }
    }

    /// Bytes that are held no more, or that somebody waits for; what held them.
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

    /// What holds some of a range.
    pub(crate) fn on(&self, start: u64, end: u64) -> impl Iterator<Item = HoldId> + '_ {
        let before = self.ranges.range(..(end, HoldId::default())).rev();
        before.take_while(move |(_, range_end)| **range_end > start).map(|(&(_, id), _)| id)
    }

    /// A hold has passed; the free bytes that it held.
    pub(crate) fn pass(&mut self, id: HoldId) -> SmallVec<[(u64, u64); 2]> {
        let starts = self.pending.remove(&id).unwrap_or_default();
        starts.iter().filter_map(|&start| self.ranges.remove(&(start, id)).map(|end| (start, end))).collect()
    }

    /// How many there are: those of live blocks, and those that hold free bytes.
    #[cfg(test)]
    pub(crate) fn count(&self) -> usize {
        self.pending.len()
    }

    /// How many bytes the ranges are, each counted once.
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
    fn a_hold_is_of_one_life_of_a_block() {
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
    fn what_has_passed_holds_nothing() {
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
    fn what_is_taken_from_the_middle_leaves_both_ends() {
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
