//! Stitched blocks: further addresses at which chunks of primitive memory are mapped one after the other.
//!
//! ```text
//! segment a  [ 0 1 2 | 3 4 ]      segment b  [ 6 7 8 ]
//!                 └─────┘ └────────────┘
//! stitched        3 4 6 7 8          inactive while all of its chunks are free
//! ```
//!
//! Invariants: `free` of a block is the number of its chunks that are free; a block is in its stream's set of inactive
//! blocks if and only if all are, and it is not doomed.

use std::collections::{BTreeMap, BTreeSet};

use super::ranges::Range;
use crate::trace::StreamIndex;

/// A stitched block; numbered in the order of stitching.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Stitch(u32);

pub(super) struct Stitched {
    pub(super) stream: StreamIndex,
    pub(super) ranges: Vec<Range>,
    pub(super) chunks: u64,
    free: u64,
    /// The first so many chunks are in the program's hands; zero if it is not.
    pub(super) handed: u64,
    /// Part of its memory went back to the device: it is not used again.
    doomed: bool,
}

impl Stitched {
    /// The ranges of its first chunks.
    pub(super) fn first(&self, chunks: u64) -> Vec<Range> {
        let mut lacking = chunks;
        let mut first = Vec::new();
        for range in &self.ranges {
            let len = range.len.min(lacking);
            if len == 0 {
                break;
            }
            lacking -= len;
            first.push(range.first(len));
        }
        first
    }
}

/// A segment of primitive memory and the stitched blocks that map some of it.
struct Segment {
    len: u64,
    stream: StreamIndex,
    mapped: Vec<(Range, Stitch)>,
}

/// All stitched blocks (the paper's sPool) and the segments that they are made of.
#[derive(Default)]
pub(super) struct StitchedBlocks {
    blocks: Vec<Option<Stitched>>,
    segments: BTreeMap<u64, Segment>,
    inactive: BTreeMap<StreamIndex, BTreeSet<(u64, Stitch)>>,
    /// Chunks mapped by stitched blocks.
    mapped: u64,
}

impl StitchedBlocks {
    /// Chunks mapped by stitched blocks, in use or not.
    pub(super) const fn mapped(&self) -> u64 {
        self.mapped
    }

    pub(super) fn get(&self, stitch: Stitch) -> Option<&Stitched> {
        self.blocks.get(stitch.0 as usize)?.as_ref()
    }

    /// A segment of new memory, in use.
    pub(super) fn add_segment(&mut self, range: Range, stream: StreamIndex) {
        self.segments.insert(range.start, Segment { len: range.len, stream, mapped: Vec::new() });
    }

    /// Every segment, in the order of addresses.
    pub(super) fn segments(&self) -> Vec<(Range, StreamIndex)> {
        let range = |(&start, segment): (&u64, &Segment)| (Range { start, len: segment.len }, segment.stream);
        self.segments.iter().map(range).collect()
    }

    /// A segment goes back to the device, and with it the stitched blocks that map it; blocks in the program's hands
    /// (which use other parts) go when they are freed. Answers with the chunks that are unmapped for that.
    pub(super) fn remove_segment(&mut self, range: Range) -> u64 {
        let Some(segment) = self.segments.remove(&range.start) else { return 0 };
        let mut unmapped = 0;
        for (_, stitch) in segment.mapped {
            match self.blocks.get_mut(stitch.0 as usize).and_then(Option::as_mut) {
                Some(block) if block.handed > 0 => block.doomed = true,
                Some(_) => unmapped += self.remove(stitch),
                None => {}
            }
        }
        unmapped
    }

    /// Stitches chunks that are in use by now, and are all handed out.
    #[allow(clippy::cast_possible_truncation)] // fewer stitches than a trace has blocks
    pub(super) fn stitch(&mut self, ranges: Vec<Range>, stream: StreamIndex) -> Stitch {
        let stitch = Stitch(self.blocks.len() as u32);
        let chunks = ranges.iter().map(|range| range.len).sum();
        for &range in &ranges {
            if let Some(segment) = self.segment_mut(range) {
                segment.mapped.push((range, stitch));
            }
        }
        self.mapped += chunks;
        self.blocks.push(Some(Stitched { stream, ranges, chunks, free: 0, handed: chunks, doomed: false }));
        stitch
    }

    /// The smallest inactive block of at least `chunks` and at most `most` chunks, the oldest of equals.
    pub(super) fn best_fit(&self, stream: StreamIndex, chunks: u64, most: u64) -> Option<Stitch> {
        let &(found, stitch) = self.inactive.get(&stream)?.range((chunks, Stitch(0))..).next()?;
        (found <= most).then_some(stitch)
    }

    /// The program gets the first chunks of an inactive block, or gives all it has back (zero). The chunks themselves
    /// are told by [`StitchedBlocks::took`] and [`StitchedBlocks::freed`].
    pub(super) fn hand(&mut self, stitch: Stitch, chunks: u64) {
        if let Some(block) = self.blocks.get_mut(stitch.0 as usize).and_then(Option::as_mut) {
            block.handed = chunks;
        }
    }

    /// Free chunks are in use from now on.
    pub(super) fn took(&mut self, range: Range) {
        self.each_over(range, |block, overlap, inactive, stitch| {
            if block.free == block.chunks {
                inactive.remove(&(block.chunks, stitch));
            }
            block.free -= overlap;
        });
    }

    /// Chunks are free from now on.
    pub(super) fn freed(&mut self, range: Range) {
        self.each_over(range, |block, overlap, inactive, stitch| {
            block.free += overlap;
            if block.free == block.chunks && !block.doomed {
                inactive.insert((block.chunks, stitch));
            }
        });
    }

    /// A block that was given back; a doomed one is unmapped. Answers with the chunks that are unmapped for that.
    pub(super) fn returned(&mut self, stitch: Stitch) -> u64 {
        match self.get(stitch) {
            Some(block) if block.doomed => self.remove(stitch),
            _ => 0,
        }
    }

    /// Unmaps every block that is not in the program's hands, oldest first. Answers with the chunks.
    #[allow(clippy::cast_possible_truncation)] // fewer stitches than a trace has blocks
    pub(super) fn collect(&mut self) -> u64 {
        let idle = |(number, block): (usize, &Option<Stitched>)| {
            block.as_ref().filter(|block| block.handed == 0).map(|_| Stitch(number as u32))
        };
        let idle: Vec<Stitch> = self.blocks.iter().enumerate().filter_map(idle).collect();
        idle.into_iter().map(|stitch| self.remove(stitch)).sum()
    }

    fn remove(&mut self, stitch: Stitch) -> u64 {
        let Some(block) = self.blocks.get_mut(stitch.0 as usize).and_then(Option::take) else { return 0 };
        if let Some(inactive) = self.inactive.get_mut(&block.stream) {
            inactive.remove(&(block.chunks, stitch));
        }
        for &range in &block.ranges {
            if let Some(segment) = self.segment_mut(range) {
                segment.mapped.retain(|&(_, mapped)| mapped != stitch);
            }
        }
        self.mapped -= block.chunks;
        block.chunks
    }

    /// The segment that these chunks lie in; `None` once it is gone.
    fn segment_mut(&mut self, range: Range) -> Option<&mut Segment> {
        let (&start, segment) = self.segments.range_mut(..=range.start).next_back()?;
        (range.end() <= start + segment.len).then_some(segment)
    }

    fn each_over(
        &mut self,
        range: Range,
        mut change: impl FnMut(&mut Stitched, u64, &mut BTreeSet<(u64, Stitch)>, Stitch),
    ) {
        let Some((_, segment)) = self.segments.range(..=range.start).next_back() else { return };
        for &(mapped, stitch) in &segment.mapped {
            let overlap = mapped.overlap(range);
            if overlap > 0
                && let Some(block) = self.blocks.get_mut(stitch.0 as usize).and_then(Option::as_mut)
            {
                let inactive = self.inactive.entry(block.stream).or_default();
                change(block, overlap, inactive, stitch);
            }
        }
    }
}

#[cfg(test)]
impl StitchedBlocks {
    /// The inactive blocks of a stream, as their ranges.
    pub(super) fn inactive(&self, stream: StreamIndex) -> Vec<Vec<Range>> {
        let blocks = self.inactive.get(&stream).into_iter().flatten();
        blocks.filter_map(|&(_, stitch)| self.get(stitch)).map(|block| block.ranges.clone()).collect()
    }

    /// Panics where `free` of a block disagrees with what is free.
    pub(super) fn check(&self, is_free: impl Fn(u64) -> bool) {
        for block in self.blocks.iter().flatten().filter(|block| !block.doomed) {
            let chunks = block.ranges.iter().flat_map(|range| range.start..range.end());
            assert_eq!(block.free, chunks.filter(|&chunk| is_free(chunk)).count() as u64);
        }
    }
}
