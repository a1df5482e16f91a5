//! Model of GMLake, the stitching allocator of arXiv 2401.08156 (ASPLOS 2024), with the options of its tutorial.
//!
//! Physical memory is made of 2 MiB chunks. A **primitive block** is a run of chunks that were created together. A **stitched block** is a
//! second address range at which chunks of several primitive blocks are mapped in sequence; it is kept for reuse. A stitched block is
//! inactive while all of its chunks are free. Each stream has its own blocks.
//!
//! A request above 1 MiB, rounded to chunks, is served by the first of these states that applies (the paper, section 4, "BestFit"):
//!
//! | state | condition | action |
//! |---|---|---|
//! | [`Fit::Exact`], S1 | an inactive block of exactly this size, primitive or stitched | use it |
//! | [`Fit::Single`], S2 | a larger primitive block, or a stitched one at most `reuse_limit` times as large | split it, or use its first chunks |
//! | [`Fit::Multiple`], S3 | primitive blocks that together are large enough | stitch them, largest first, and split the last one |
//! | [`Fit::Insufficient`], S4 | too little free memory | create the missing chunks and stitch them with all free ones |
//! | [`Fit::OutOfMemory`], S5 | the device refuses | return segments that are entirely free, and retry |
//!
//! Requests below `fragment_limit` are never stitched: missing memory is created in one piece, as in torch. A freed block joins its free
//! neighbours of the same segment, as in torch. Small requests go to torch's small pool.
//!
//! Where the paper, the tutorial and the published program differ, the model takes the variant that needs less memory: S4 creates only the
//! missing chunks (the program does so on request), and split blocks join again (not specified in the paper).

mod ranges;
mod stitched;

#[cfg(test)]
mod example;

use std::collections::BTreeMap;

use glake_units::Bytes;

use self::ranges::{FreeRanges, Range};
use self::stitched::{Stitch, StitchedBlocks};
use super::caching::Caching;
use super::costs::Costs;
use super::live::Live;
use super::rules::{self, Class};
use crate::trace::{BlockId, StreamIndex};
use crate::{Counters, Refusal, Subject};

/// Size of a chunk in bytes.
const CHUNK: u64 = 2 << 20;

/// Options of the tutorial.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Knobs {
    /// Minimum size of stitched requests (`fragment_limit`). The paper uses 128 MiB.
    pub fragment_limit: Bytes,
    /// Maximum ratio of an idle stitched block's size to the request that reuses it (`reuseLimit`).
    pub reuse_limit: f64,
    /// Stitch only when memory cannot grow (`defragment_level` 1).
    pub stitch_last: bool,
    /// Bytes mapped by stitched blocks above which idle ones are unmapped (`auto_gc_limits`).
    pub auto_gc: Bytes,
}

/// Default values of the tutorial.
impl Default for Knobs {
    fn default() -> Self {
        Knobs {
            fragment_limit: Bytes::mib(512),
            reuse_limit: 10.0,
            stitch_last: false,
            auto_gc: Bytes::gib(1000),
        }
    }
}

/// State of the paper's algorithm that served a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// S1, a block of exactly the requested size.
    Exact,
    /// S2, part of a larger block.
    Single,
    /// S3, several blocks, stitched together.
    Multiple,
    /// S4, new memory stitched with existing free memory.
    Insufficient,
    /// S5, served after memory was returned to the device, or refused.
    OutOfMemory,
}

/// Model of the GMLake allocator.
pub struct GmLake {
    knobs: Knobs,
    /// Freed blocks join their free neighbours if set.
    join: bool,
    small: Caching,
    free: BTreeMap<StreamIndex, FreeRanges>,
    stitched: StitchedBlocks,
    live: Live<Placed>,
    /// Start of the next segment, in chunks.
    frontier: u64,
    /// Number of chunks created and not returned.
    made: u64,
    limit: Bytes,
    stitches: u64,
    costs: Costs,
    last_fit: Option<Fit>,
}

/// Location of a large block of the trace.
#[derive(Clone, Copy)]
enum Placed {
    Primitive(Range, StreamIndex),
    Stitched(Stitch),
}

impl GmLake {
    /// Creates an allocator on a device with `limit` bytes of memory; [`Bytes::MAX`] means unlimited.
    pub fn new(knobs: Knobs, limit: Bytes) -> Self {
        GmLake {
            knobs,
            join: true,
            small: Caching::new(limit),
            free: BTreeMap::new(),
            stitched: StitchedBlocks::default(),
            live: Live::new(),
            frontier: 0,
            made: 0,
            limit,
            stitches: 0,
            costs: Costs::default(),
            last_fit: None,
        }
    }

    /// Keeps split primitive blocks split: the paper names no operation that joins them again; the published program joins them.
    #[must_use]
    pub fn without_joining(self) -> Self {
        GmLake { join: false, ..self }
    }

    /// Returns the state that served the last request above 1 MiB.
    pub const fn last_fit(&self) -> Option<Fit> {
        self.last_fit
    }

    fn place(&mut self, chunks: u64, stream: StreamIndex) -> Option<(Placed, Fit)> {
        if let Some(found) = self.exact(chunks, stream).or_else(|| self.single(chunks, stream)) {
            return Some(found);
        }
        let may_stitch = Bytes::new(chunks * CHUNK) >= self.knobs.fragment_limit;
        if !may_stitch {
            return self.make(chunks, stream);
        }
        if self.knobs.stitch_last {
            self.make(chunks, stream)
                .or_else(|| self.multiple(chunks, stream))
                .or_else(|| self.insufficient(chunks, stream))
        } else {
            self.multiple(chunks, stream).or_else(|| self.insufficient(chunks, stream))
        }
    }

    /// State S1 of the module's table.
    fn exact(&mut self, chunks: u64, stream: StreamIndex) -> Option<(Placed, Fit)> {
        let range = self.free.entry(stream).or_default().best_fit(chunks);
        if let Some(range) = range.filter(|range| range.len == chunks) {
            self.take(range, stream);
            return Some((Placed::Primitive(range, stream), Fit::Exact));
        }
        let stitch = self.stitched.best_fit(stream, chunks, chunks)?;
        self.reuse(stitch, chunks);
        Some((Placed::Stitched(stitch), Fit::Exact))
    }

    /// State S2 of the module's table.
    fn single(&mut self, chunks: u64, stream: StreamIndex) -> Option<(Placed, Fit)> {
        if let Some(range) = self.free.entry(stream).or_default().best_fit(chunks) {
            let range = range.first(chunks);
            self.take(range, stream);
            return Some((Placed::Primitive(range, stream), Fit::Single));
        }
        let stitch = self.stitched.best_fit(stream, chunks, self.reusable(chunks))?;
        self.reuse(stitch, chunks);
        Some((Placed::Stitched(stitch), Fit::Single))
    }

    /// State S3 of the module's table.
    fn multiple(&mut self, chunks: u64, stream: StreamIndex) -> Option<(Placed, Fit)> {
        let ranges = self.free.entry(stream).or_default().largest(chunks)?;
        Some((self.stitch(ranges, stream), Fit::Multiple))
    }

    /// State S4 of the module's table.
    fn insufficient(&mut self, chunks: u64, stream: StreamIndex) -> Option<(Placed, Fit)> {
        let free = self.free.entry(stream).or_default();
        let lacking = chunks.checked_sub(free.total())?;
        let mut ranges = free.largest(free.total())?;
        if lacking == 0 {
            return None;
        }
        let made = self.segment(lacking, stream)?;
        if ranges.is_empty() {
            return Some((Placed::Primitive(made, stream), Fit::Insufficient));
        }
        self.free.entry(stream).or_default().insert(made);
        ranges.push(made);
        Some((self.stitch(ranges, stream), Fit::Insufficient))
    }

    /// State S4 without stitching: creates new memory in one piece.
    fn make(&mut self, chunks: u64, stream: StreamIndex) -> Option<(Placed, Fit)> {
        let whole = self.segment(rules::segment(chunks * CHUNK) / CHUNK, stream)?;
        let range = whole.first(chunks);
        if range.len < whole.len {
            let rest = Range { start: range.end(), len: whole.len - range.len };
            self.free.entry(stream).or_default().insert(rest);
        }
        Some((Placed::Primitive(range, stream), Fit::Insufficient))
    }

    /// Creates a segment of new memory, in use.
    fn segment(&mut self, chunks: u64, stream: StreamIndex) -> Option<Range> {
        let wanted = Bytes::new(chunks.checked_mul(CHUNK)?);
        if self.reserved().checked_add(wanted)? > self.limit {
            return None;
        }
        let range = Range { start: self.frontier, len: chunks };
        // A gap keeps segments from joining.
        self.frontier += chunks + 1;
        self.made += chunks;
        self.costs.create(chunks);
        self.costs.map(chunks);
        self.stitched.add_segment(range, stream);
        Some(range)
    }

    /// Stitches the given free ranges.
    fn stitch(&mut self, ranges: Vec<Range>, stream: StreamIndex) -> Placed {
        for &range in &ranges {
            self.take(range, stream);
        }
        self.costs.map(ranges.iter().map(|range| range.len).sum());
        self.stitches += 1;
        let stitch = self.stitched.stitch(ranges, stream);
        if self.stitched.mapped().saturating_mul(CHUNK) > self.knobs.auto_gc.get() {
            let unmapped = self.stitched.collect();
            self.costs.unmap(unmapped);
        }
        Placed::Stitched(stitch)
    }

    /// Hands out the first chunks of an inactive stitched block.
    fn reuse(&mut self, stitch: Stitch, chunks: u64) {
        let Some(block) = self.stitched.get(stitch) else { return };
        let (stream, ranges) = (block.stream, block.first(chunks));
        for range in ranges {
            self.take(range, stream);
        }
        self.stitched.hand(stitch, chunks);
    }

    fn take(&mut self, range: Range, stream: StreamIndex) {
        self.free.entry(stream).or_default().take(range);
        self.stitched.took(range);
    }

    fn release(&mut self, placed: Placed) {
        match placed {
            Placed::Primitive(range, stream) => self.give_back(range, stream),
            Placed::Stitched(stitch) => {
                let Some(block) = self.stitched.get(stitch) else { return };
                let (stream, ranges) = (block.stream, block.first(block.handed));
                self.stitched.hand(stitch, 0);
                for range in ranges {
                    self.give_back(range, stream);
                }
                let unmapped = self.stitched.returned(stitch);
                self.costs.unmap(unmapped);
            }
        }
    }

    fn give_back(&mut self, range: Range, stream: StreamIndex) {
        let free = self.free.entry(stream).or_default();
        if self.join {
            free.join(range)
        } else {
            free.insert(range)
        }
        self.stitched.freed(range);
    }

    /// Completes all pending frees and returns segments that are entirely free to the device.
    fn release_cached(&mut self) {
        for placed in self.live.take_requested() {
            self.release(placed);
        }
        for (range, stream) in self.stitched.segments() {
            let free = self.free.entry(stream).or_default();
            if free.covers(range) {
                free.take(range);
                let unmapped = self.stitched.remove_segment(range);
                self.made -= range.len;
                self.costs.unmap(unmapped + range.len);
                self.costs.release(range.len);
            }
        }
        self.small.release_cached();
    }

    fn allocate_large(&mut self, block: BlockId, size: u64, stream: StreamIndex) -> bool {
        let chunks = size.div_ceil(CHUNK);
        if let Some((placed, fit)) = self.place(chunks, stream) {
            self.last_fit = Some(fit);
            self.live.insert(block, placed);
            return true;
        }
        self.last_fit = Some(Fit::OutOfMemory);
        self.release_cached();
        let found = self.make(chunks, stream).or_else(|| self.place(chunks, stream));
        if let Some((placed, _)) = found {
            self.live.insert(block, placed);
        }
        found.is_some()
    }

    fn allocate_small(
        &mut self,
        block: BlockId,
        bytes: Bytes,
        stream: StreamIndex,
        now_us: u64,
    ) -> Result<(), Refusal> {
        self.small.set_limit(self.limit.saturating_sub(self.large()));
        self.small.allocate(block, bytes, stream, now_us).or_else(|_| {
            self.release_cached();
            self.small.set_limit(self.limit.saturating_sub(self.large()));
            self.small.allocate(block, bytes, stream, now_us)
        })
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
    fn reusable(&self, chunks: u64) -> u64 {
        // The conversion saturates: an infinite limit means no limit.
        (chunks as f64 * self.knobs.reuse_limit) as u64
    }

    const fn large(&self) -> Bytes {
        Bytes::new(self.made * CHUNK)
    }
}

impl Subject for GmLake {
    fn allocate(
        &mut self,
        block: BlockId,
        bytes: Bytes,
        stream: StreamIndex,
        now_us: u64,
    ) -> Result<(), Refusal> {
        let size = rules::rounded(bytes);
        let done = match Class::of(size) {
            Class::Small => self.allocate_small(block, bytes, stream, now_us).is_ok(),
            Class::Large => self.allocate_large(block, size, stream),
        };
        let (reserved, limit) = (self.reserved(), self.limit);
        if done { Ok(()) } else { Err(Refusal::OutOfMemory { wanted: bytes, reserved, limit }) }
    }

    fn free_requested(&mut self, block: BlockId, now_us: u64) -> Result<(), Refusal> {
        self.live.request(block);
        self.small.free_requested(block, now_us)
    }

    fn free_completed(&mut self, block: BlockId, now_us: u64) -> Result<(), Refusal> {
        match self.live.take(block) {
            Some(placed) => self.release(placed),
            None => self.small.free_completed(block, now_us)?,
        }
        Ok(())
    }

    fn reserved(&self) -> Bytes {
        self.large().saturating_add(self.small.reserved())
    }

    fn counters(&self) -> Counters {
        let (large, small) = (self.costs.counters(), self.small.counters());
        Counters {
            stitches: self.stitches,
            extent_maps: large.extent_maps,
            driver_calls: large.driver_calls + small.driver_calls,
            driver_ns: large.driver_ns + small.driver_ns,
            ..large
        }
    }
}

#[cfg(test)]
impl GmLake {
    /// Panics if two blocks share a chunk or chunks are unaccounted for.
    pub(super) fn check(&self) {
        self.small.check();
        let mut free = Vec::new();
        for ranges in self.free.values() {
            free.extend(ranges.all());
        }
        let mut all = free.clone();
        for placed in self.live.all() {
            match placed {
                Placed::Primitive(range, _) => all.push(range),
                Placed::Stitched(stitch) => {
                    let block = self.stitched.get(stitch).expect("a live block is known");
                    assert!(block.handed > 0);
                    all.extend(block.first(block.handed));
                }
            }
        }
        all.sort_unstable_by_key(|range| range.start);
        assert!(all.windows(2).all(|pair| pair[0].end() <= pair[1].start), "two blocks share a chunk");
        assert_eq!(all.iter().map(|range| range.len).sum::<u64>(), self.made);
        self.stitched.check(|chunk| free.iter().any(|range| (range.start..range.end()).contains(&chunk)));
    }
}
