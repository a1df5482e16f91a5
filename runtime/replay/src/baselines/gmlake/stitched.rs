//! Stitched blocks: additional addresses at which chunks of primitive memory are mapped in sequence.
//!
//! ```text
//! segment a  [ 0 1 2 | 3 4 ]      segment b  [ 6 7 8 ]
//!                 └─────┘ └────────────┘
//! stitched        3 4 6 7 8          inactive while all of its chunks are free
//! ```
//!
//! Invariants: `free` of a block is the number of its free chunks; a block is in its stream's set of inactive blocks if and only if all its
//! chunks are free and it is not doomed.

use std::collections::{BTreeMap, BTreeSet};

use super::ranges::Range;
use crate::trace::StreamIndex;

/// Number of a stitched block, in the order of stitching.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Stitch(u32);

pub(super) struct Stitched {
    pub(super) stream: StreamIndex,
    pub(super) ranges: Vec<Range>,
    pub(super) chunks: u64,
    free: u64,
    /// Number of leading chunks in use by the program; zero if the block is not allocated.
    pub(super) handed: u64,
    /// Set once part of its memory was returned to the device: the block is not reused.
    doomed: bool,
}

impl Stitched {
    /// Returns the ranges of the first `chunks` chunks.
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

/// Segment of primitive memory and the stitched blocks that map parts of it.
struct Segment {
    len: u64,
    stream: StreamIndex,
    mapped: Vec<(Range, Stitch)>,
}

/// All stitched blocks (the paper's sPool) and the segments they are made of.
#[derive(Default)]
pub(super) struct StitchedBlocks {
    blocks: Vec<Option<Stitched>>,
    segments: BTreeMap<u64, Segment>,
    inactive: BTreeMap<StreamIndex, BTreeSet<(u64, Stitch)>>,
    /// Number of chunks mapped by stitched blocks.
    mapped: u64,
}

impl StitchedBlocks {
    /// Returns the number of chunks mapped by stitched blocks, in use or idle.
    pub(super) const fn mapped(&self) -> u64 {
        self.mapped
    }

    pub(super) fn get(&self, stitch: Stitch) -> Option<&Stitched> {
        self.blocks.get(stitch.0 as usize)?.as_ref()
    }

    /// Adds a segment of new memory, in use.
    pub(super) fn add_segment(&mut self, range: Range, stream: StreamIndex) {
        self.segments.insert(range.start, Segment { len: range.len, stream, mapped: Vec::new() });
    }

    /// Returns all segments, ordered by address.
    pub(super) fn segments(&self) -> Vec<(Range, StreamIndex)> {
        let range = |(&start, segment): (&u64, &Segment)| (Range { start, len: segment.len }, segment.stream);
        self.segments.iter().map(range).collect()
    }

    /// Removes a segment and unmaps the stitched blocks that map it. Blocks that the program uses (through other chunks) are unmapped once
    /// they are freed. Returns the number of unmapped chunks.
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

    /// Stitches ranges that are already in use. The program uses all of the block.
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

    /// Returns the smallest inactive block of `chunks` to `most` chunks; of equal ones, the oldest.
    pub(super) fn best_fit(&self, stream: StreamIndex, chunks: u64, most: u64) -> Option<Stitch> {
        let &(found, stitch) = self.inactive.get(&stream)?.range((chunks, Stitch(0))..).next()?;
        (found <= most).then_some(stitch)
    }

    /// Sets the number of leading chunks that the program uses; zero when it frees the block. The chunks themselves are recorded by
    /// [`StitchedBlocks::took`] and [`StitchedBlocks::freed`].
    pub(super) fn hand(&mut self, stitch: Stitch, chunks: u64) {
        if let Some(block) = self.blocks.get_mut(stitch.0 as usize).and_then(Option::as_mut) {
            block.handed = chunks;
        }
    }

    /// Records that free chunks are now in use.
    pub(super) fn took(&mut self, range: Range) {
        self.each_over(range, |block, overlap, inactive, stitch| {
            if block.free == block.chunks {
                inactive.remove(&(block.chunks, stitch));
            }
            block.free -= overlap;
        });
    }

    /// Records that chunks are now free.
    pub(super) fn freed(&mut self, range: Range) {
        self.each_over(range, |block, overlap, inactive, stitch| {
            block.free += overlap;
            if block.free == block.chunks && !block.doomed {
                inactive.insert((block.chunks, stitch));
            }
        });
    }

    /// Handles a freed block: a doomed one is unmapped. Returns the number of unmapped chunks.
    pub(super) fn returned(&mut self, stitch: Stitch) -> u64 {
        match self.get(stitch) {
            Some(block) if block.doomed => self.remove(stitch),
            _ => 0,
        }
    }

    /// Unmaps all blocks that the program does not use, oldest first. Returns the number of unmapped chunks.
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

    /// Returns the segment of the given chunks; `None` if it was removed.
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
    /// Returns the inactive blocks of a stream as lists of ranges.
    pub(super) fn inactive(&self, stream: StreamIndex) -> Vec<Vec<Range>> {
        let blocks = self.inactive.get(&stream).into_iter().flatten();
        blocks.filter_map(|&(_, stitch)| self.get(stitch)).map(|block| block.ranges.clone()).collect()
    }

    /// Panics if `free` of any block disagrees with `is_free`.
    pub(super) fn check(&self, is_free: impl Fn(u64) -> bool) {
        for block in self.blocks.iter().flatten().filter(|block| !block.doomed) {
            let chunks = block.ranges.iter().flat_map(|range| range.start..range.end());
            assert_eq!(block.free, chunks.filter(|&chunk| is_free(chunk)).count() as u64);
        }
    }
}
