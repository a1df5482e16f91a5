//! Live byte ranges of blocks, as declared by the program: pure.
//!
//! ```text
//! block    [ live |   dead   | live ]          declared ranges, relative to the block
//! home     [ live ]    [ de ] [ ad | live ]    the same bytes at home: one run, or the parts of a stitched block
//! kept     all bytes that blocks hold of an extent, without dead ones: copied at an eviction
//! ```
//!
//! Invariants: a block without a declaration is live as a whole. A declaration ends with its block, under the allocator's lock, so that the
//! next block at the address does not inherit it. Each declaration has a unique number.

use std::sync::atomic::{AtomicUsize, Ordering};

use glake_stitch::HomeRange;
use glake_units::Bytes;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

/// Alignment of ranges in bytes: the granularity of digests and of block copies.
const RANGE_ALIGNMENT: u64 = 512;

/// Byte range relative to the start of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteRange {
    /// First byte of the range.
    pub start: Bytes,
    /// End of the range, exclusive.
    pub end: Bytes,
}

/// Unique number of a declaration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct DeclarationId(u64);

/// Bytes of an extent that must be preserved.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct BytesToKeep {
    /// Ranges in address order.
    pub(super) ranges: Vec<HomeRange>,
    /// Bytes in blocks that were declared dead.
    pub(super) undefined: Bytes,
}

/// Declared live ranges of a pool's blocks. Changes under the allocator's lock.
#[derive(Debug, Default)]
pub(super) struct LiveRanges {
    /// Number of declarations; 0 in most pools, and read at every free.
    count: AtomicUsize,
    said: Mutex<Declarations>,
}

#[derive(Debug, Default)]
struct Declarations {
    /// Declarations by the offset of the block.
    by_block: FxHashMap<Bytes, Declaration>,
    /// Number of the next declaration.
    next: u64,
}

#[derive(Debug)]
struct Declaration {
    number: DeclarationId,
    /// Sorted, disjoint ranges; `None`: the whole block, until a later answer.
    live: Option<Vec<ByteRange>>,
}

impl LiveRanges {
    /// Declares the live bytes of a block, as returned by [`rounded`]. `None` makes all bytes live until [`LiveRanges::change`].
    pub(super) fn say(&self, block: Bytes, live: Option<Vec<ByteRange>>) -> DeclarationId {
        let mut said = self.said.lock();
        let number = DeclarationId(said.next);
        said.next += 1;
        said.by_block.insert(block, Declaration { number, live });
        self.count.store(said.by_block.len(), Ordering::Relaxed);
        number
    }

    /// Changes a declaration that is still in force. Returns whether it is.
    pub(super) fn change(&self, block: Bytes, number: DeclarationId, live: Option<Vec<ByteRange>>) -> bool {
        let mut said = self.said.lock();
        let known = said.by_block.get_mut(&block).filter(|said| said.number == number);
        known.map(|said| said.live = live).is_some()
    }

    /// Returns whether a declaration is still in force: the block lives and has no newer one.
    pub(super) fn is(&self, block: Bytes, number: DeclarationId) -> bool {
        self.said.lock().by_block.get(&block).is_some_and(|said| said.number == number)
    }

    /// Ends the declaration of the block at an offset: all its bytes are live again, or the block is gone.
    #[inline]
    pub(super) fn end(&self, block: Bytes) {
        if self.count.load(Ordering::Relaxed) > 0 {
            self.end_said(block);
        }
    }

    #[cold]
    fn end_said(&self, block: Bytes) {
        let mut said = self.said.lock();
        said.by_block.remove(&block);
        self.count.store(said.by_block.len(), Ordering::Relaxed);
    }

    /// Removes the dead bytes of blocks from the ranges of an extent; `home_of` returns the home ranges of a block.
    pub(super) fn narrow(
        &self,
        all: Vec<HomeRange>,
        home_of: impl Fn(Bytes) -> Option<Vec<HomeRange>>,
    ) -> BytesToKeep {
        if self.count.load(Ordering::Relaxed) == 0 {
            return BytesToKeep { ranges: all, undefined: Bytes::ZERO };
        }
        let (Some(first), Some(last)) = (all.first(), all.last()) else { return BytesToKeep::default() };
        let (start, end) = (first.offset, last.offset.saturating_add(last.size));
        let said = self.said.lock();
        let mut dead: Vec<HomeRange> = Vec::new();
        for (block, Declaration { live, .. }) in &said.by_block {
            let (Some(live), Some(home)) = (live, home_of(*block)) else { continue };
            let touches = |part: &&HomeRange| part.offset < end && end_of(part) > start;
            if home.iter().find(touches).is_some() {
                dead.extend(at_home(&others(live, size_of(&home)), &home));
            }
        }
        dead.sort_unstable_by_key(|range| range.offset);
        let ranges = without(&all, &dead);
        BytesToKeep { undefined: size_of(&all).saturating_sub(size_of(&ranges)), ranges }
    }
}

/// Sorts ranges of a block of `size` bytes, rounds them out to the alignment, joins touching ones and drops empty ones.
///
/// # Errors
/// The first range that exceeds the block or ends before it begins.
pub(super) fn rounded(ranges: &[ByteRange], size: Bytes) -> Result<Vec<ByteRange>, ByteRange> {
    if let Some(wrong) = ranges.iter().find(|range| range.start > range.end || range.end > size) {
        return Err(*wrong);
    }
    let round = |range: &ByteRange| ByteRange {
        start: Bytes::new(range.start.get() / RANGE_ALIGNMENT * RANGE_ALIGNMENT),
        end: Bytes::new(range.end.get().div_ceil(RANGE_ALIGNMENT) * RANGE_ALIGNMENT).min(size),
    };
    let mut sorted: Vec<ByteRange> =
        ranges.iter().filter(|range| range.start < range.end).map(round).collect();
    sorted.sort_unstable();
    let mut joined: Vec<ByteRange> = Vec::with_capacity(sorted.len());
    for range in sorted {
        match joined.last_mut().filter(|last| range.start <= last.end) {
            Some(last) => last.end = last.end.max(range.end),
            None => joined.push(range),
        }
    }
    Ok(joined)
}

/// Returns the bytes of a block of `size` bytes outside its sorted ranges.
fn others(ranges: &[ByteRange], size: Bytes) -> Vec<ByteRange> {
    let ends = ranges.iter().map(|range| range.end);
    let starts = ranges.iter().map(|range| range.start).chain([size]);
    let between = [Bytes::ZERO].into_iter().chain(ends).zip(starts);
    between.map(|(start, end)| ByteRange { start, end }).filter(|range| range.start < range.end).collect()
}

/// Translates sorted ranges of a block to home ranges; `home` holds the block's parts in block order.
pub(super) fn at_home(ranges: &[ByteRange], home: &[HomeRange]) -> Vec<HomeRange> {
    let (mut found, mut at) = (Vec::new(), Bytes::ZERO);
    for part in home {
        let end = at.saturating_add(part.size);
        for range in ranges.iter().filter(|range| range.start < end && range.end > at) {
            let (from, to) = (range.start.max(at), range.end.min(end));
            let offset = part.offset.saturating_add(from.saturating_sub(at));
            found.push(HomeRange { offset, size: to.saturating_sub(from) });
        }
        at = end;
    }
    found
}

/// Returns the bytes of `ranges` that are not in `gone`; both must be sorted.
pub(super) fn without(ranges: &[HomeRange], gone: &[HomeRange]) -> Vec<HomeRange> {
    let mut left = Vec::with_capacity(ranges.len());
    for range in ranges {
        let (mut at, end) = (range.offset, end_of(range));
        let first = gone.partition_point(|gone| end_of(gone) <= range.offset);
        for gone in gone[first..].iter().take_while(|gone| gone.offset < end) {
            if gone.offset > at {
                left.push(HomeRange { offset: at, size: gone.offset.saturating_sub(at) });
            }
            at = at.max(end_of(gone));
        }
        if at < end {
            left.push(HomeRange { offset: at, size: end.saturating_sub(at) });
        }
    }
    left
}

/// Returns the total size of ranges.
pub(super) fn size_of(ranges: &[HomeRange]) -> Bytes {
    ranges.iter().map(|range| range.size).sum()
}

fn end_of(range: &HomeRange) -> Bytes {
    range.offset.saturating_add(range.size)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes(start: u64, end: u64) -> ByteRange {
        ByteRange { start: Bytes::new(start), end: Bytes::new(end) }
    }

    fn home(offset: u64, size: u64) -> HomeRange {
        HomeRange { offset: Bytes::new(offset), size: Bytes::new(size) }
    }

    #[test]
    fn ranges_are_rounded_out_and_joined() {
        let size = Bytes::new(4096);
        let ranges = [bytes(1500, 1600), bytes(0, 1), bytes(700, 700), bytes(600, 1100), bytes(4000, 4096)];
        assert_eq!(rounded(&ranges, size).unwrap(), [bytes(0, 2048), bytes(3584, 4096)]);
        assert_eq!(rounded(&[], size).unwrap(), []);
        assert_eq!(rounded(&[bytes(0, 4096), bytes(5, 4097)], size), Err(bytes(5, 4097)));
        assert_eq!(rounded(&[bytes(9, 8)], size), Err(bytes(9, 8)));
    }

    #[test]
    fn what_is_said_ends_with_its_block_and_is_no_other_blocks() {
        let live = LiveRanges::default();
        let (block, other) = (Bytes::ZERO, Bytes::mib(2));
        let all = || vec![home(0, 2 << 20)];
        let home_of = |at: Bytes| Some(vec![HomeRange { offset: at, size: Bytes::mib(2) }]);
        let first = live.say(block, Some(Vec::new()));
        assert_eq!(live.narrow(all(), home_of), BytesToKeep { ranges: vec![], undefined: Bytes::mib(2) });
        live.end(other);
        assert!(live.is(block, first));
        live.end(block);
        assert_eq!(live.narrow(all(), home_of).ranges, all(), "the next block there is live as a whole");
        let second = live.say(block, None);
        assert!(!live.change(block, first, Some(Vec::new())) && !live.is(block, first));
        assert_eq!(live.narrow(all(), home_of).ranges, all());
        assert!(live.change(block, second, Some(vec![bytes(512, 1024)])));
        assert_eq!(live.narrow(all(), home_of).ranges, [home(512, 512)]);
    }

    #[test]
    fn a_stitched_block_is_narrowed_part_by_part() {
        let live = LiveRanges::default();
        // Its bytes lie at 8192, at 2048 and at 0, in this order.
        let parts = [home(8192, 1024), home(2048, 2048), home(0, 512)];
        live.say(Bytes::mib(1), Some(vec![bytes(512, 1536), bytes(3072, 3584)]));
        let home_of = |_| Some(parts.to_vec());
        let narrow = |all: &[HomeRange]| live.narrow(all.to_vec(), home_of).ranges;
        assert_eq!(narrow(&[home(0, 512), home(1024, 3072)]), [home(0, 512), home(1024, 1536)]);
        assert_eq!(narrow(&[home(8192, 1536)]), [home(8704, 1024)]);
        assert_eq!(narrow(&[home(1 << 20, 4096)]), [home(1 << 20, 4096)], "another extent");
    }

    /// Returns one bool for each unit of eight bytes.
    fn marked(ranges: &[HomeRange]) -> Vec<bool> {
        let inside =
            |at: u64| ranges.iter().any(|range| (range.offset.get()..end_of(range).get()).contains(&at));
        (0..64).map(inside).collect()
    }

    fn sorted() -> impl Strategy<Value = Vec<HomeRange>> {
        prop::collection::vec((0..6_u64, 1..6_u64), 0..8).prop_map(|steps| {
            let mut at = 0;
            let mut next = |(gap, size)| {
                let range = home(at + gap, size);
                at += gap + size;
                range
            };
            steps.into_iter().map(&mut next).collect()
        })
    }

    proptest! {
        #[test]
        fn what_is_left_is_what_was_not_taken(ranges in sorted(), gone in sorted()) {
            let left = marked(&without(&ranges, &gone));
            let expected: Vec<bool> =
                marked(&ranges).iter().zip(marked(&gone)).map(|(kept, gone)| *kept && !gone).collect();
            prop_assert_eq!(left, expected);
        }

        #[test]
        fn live_and_dead_bytes_are_a_blocks_bytes(ranges in sorted()) {
            let live: Vec<ByteRange> = ranges.iter().map(|range| ByteRange { start: range.offset, end: end_of(range) }).collect();
            let dead = others(&live, Bytes::new(64));
            let parts = [home(0, 64)];
            let found = marked(&at_home(&dead, &parts));
            prop_assert!(marked(&ranges).iter().zip(found).all(|(live, dead)| *live != dead));
        }
    }
}
