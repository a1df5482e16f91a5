//! Pinned host memory for the offloaded bytes of one GPU, taken from the process's pool in chunks and kept between steps of a program.
//!
//! A program that runs ahead of its GPU offloads the next bytes while the copies in of the previous step are still pending. A released
//! range is therefore handed out again at once, with a *mark*: the copy out waits, on the GPU, for the copy in that reads the range. All
//! copies out of a GPU run on one stream and all copies in on another, so that the latest of several marks suffices.
//!
//! Invariant: a chunk without ranges in use may be returned at any time; its pool reuses it once the work on it is finished.
//!
//! Free ranges are chosen by best fit and joined when they are returned (pure). A range is returned with a *mark* that its next owner must
//! wait for. Joined ranges keep the later mark.
//!
//! An entry that does not fit at the end of a chunk continues in another ([`Ranges::take_parts`]). Chunks are small compared with the
//! total, so that little more than the rest of the last one is lost.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use glake_device::Address;
use glake_device::owned::{OwnedEvent, Span};
use glake_tiers::{HostBlock, HostPool, Reclaim};
use glake_units::Bytes;

use super::super::{ProcessError, Result};
use crate::sync::Mutex;

/// A copy in that still reads a range, with its number in its queue.
#[derive(Clone, Debug)]
pub(super) struct InMark {
    pub(super) number: u64,
    pub(super) event: Arc<OwnedEvent>,
}

impl PartialEq for InMark {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for InMark {}

impl PartialOrd for InMark {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for InMark {
    fn cmp(&self, other: &Self) -> Ordering {
        self.number.cmp(&other.number)
    }
}

/// Host memory of one entry: one range, or several in sequence.
#[derive(Debug)]
pub(super) struct HostRange {
    /// Allocated ranges and the used span of each.
    parts: Vec<(Taken, Span)>,
    /// Copy in that the first copy to the range must wait for.
    pub(super) mark: Option<InMark>,
}

impl HostRange {
    /// Returns the address of the first byte if the range is contiguous.
    pub(super) fn address(&self) -> Option<Address> {
        match &self.parts[..] {
            [(_, span)] => Some(span.start()),
            _ => None,
        }
    }

    /// Pairs each host part with the GPU span of the same bytes.
    pub(super) fn beside(&self, gpu: &Span) -> Vec<(Span, Span)> {
        let mut at = Bytes::ZERO;
        let pairs = self.parts.iter().filter_map(|(_, host)| {
            let there = gpu.part(at, host.size())?;
            at = at.saturating_add(host.size());
            Some((host.clone(), there))
        });
        pairs.collect()
    }
}

#[derive(Debug, Default)]
struct Memory {
    chunks: BTreeMap<usize, HostBlock>,
    /// Number of chunks created so far.
    made: usize,
    ranges: Ranges<InMark>,
}

/// Host memory for the copies of one GPU.
#[derive(Debug)]
pub(super) struct HostMemory {
    pool: Arc<HostPool>,
    chunks: ChunkSizes,
    memory: Mutex<Memory>,
    /// Number of threads that are taking more memory; free chunks are not returned meanwhile, because they would be taken again.
    growing: AtomicUsize,
}

impl HostMemory {
    /// Creates the host memory on a pool with arenas of `arena` bytes.
    pub(super) fn new(pool: &Arc<HostPool>, arena: Bytes) -> Arc<HostMemory> {
        let (chunks, (memory, growing)) = (ChunkSizes::of(arena), Default::default());
        let host = Arc::new(HostMemory { pool: pool.clone(), chunks, memory, growing });
        pool.add_reclaimer(&host);
        host
    }

    /// Takes a range of `size` bytes.
    ///
    /// # Errors
    /// [`ProcessError::Host`].
    pub(super) fn take(&self, size: Bytes) -> Result<HostRange> {
        let mut is_short = false;
        loop {
            let mut memory = self.memory.lock();
            if let Some(range) = memory.take(size) {
                return Ok(range);
            }
            let missing = memory.ranges.missing(size.get()).map_or(size, Bytes::new);
            drop(memory);
            if is_short {
                // The free ranges are too small to help: return them to make room for one that is large enough.
                self.grow(size, size)?;
                continue;
            }
            match self.keeping(|| self.grow(missing, self.chunks.next(missing, self.bytes().0))) {
                Err(ProcessError::Host(error)) if error.is_shortage() => is_short = true,
                grown => grown?,
            }
        }
    }

    /// Takes a contiguous range of `size` bytes.
    ///
    /// # Errors
    /// As [`HostMemory::take`].
    pub(super) fn reserve(&self, size: Bytes) -> Result<HostRange> {
        loop {
            if let Some(range) = self.memory.lock().take_one(size) {
                return Ok(range);
            }
            match self.keeping(|| self.grow(size, self.chunks.next(size, Bytes::ZERO))) {
                // Free chunks may be returned to make room for one that is large enough.
                Err(ProcessError::Host(error)) if error.is_shortage() => self.grow(size, size)?,
                grown => grown?,
            }
        }
    }

    /// Returns a range; `last` is the last copy in that was started from it.
    pub(super) fn put(&self, range: HostRange, last: Option<InMark>) {
        let HostRange { parts, mark } = range;
        let last = last.max(mark);
        let mut memory = self.memory.lock();
        for (taken, span) in parts {
            drop(span);
            memory.ranges.put(taken, last.clone());
        }
    }

    /// Ensures that `size` bytes are free.
    ///
    /// # Errors
    /// As [`HostMemory::take`], if the host lacks the memory; the bytes pinned so far are kept.
    pub(super) fn prepare(&self, size: Bytes) -> Result<()> {
        let free = Bytes::new(self.memory.lock().ranges.total());
        self.pool.has_room(size.saturating_sub(free), Bytes::ZERO)?;
        self.keeping(|| {
            loop {
                let free = Bytes::new(self.memory.lock().ranges.total());
                if free >= size {
                    return Ok(());
                }
                let missing = size.saturating_sub(free);
                self.grow(missing.min(MOST), self.chunks.ahead(missing))?;
            }
        })
    }

    /// Checks whether `size` bytes can be had, of which `freed` are the process's, and freed as they are pinned.
    ///
    /// # Errors
    /// As [`HostMemory::take`]; nothing is pinned.
    pub(super) fn has_room(&self, size: Bytes, freed: Bytes) -> Result<()> {
        let free = Bytes::new(self.memory.lock().ranges.total());
        Ok(self.pool.has_room(size.saturating_sub(free), freed)?)
    }

    /// Runs `grow`, which takes memory from the pool, while this memory is not reclaimed.
    fn keeping<T>(&self, grow: impl FnOnce() -> T) -> T {
        self.growing.fetch_add(1, Relaxed);
        let grown = grow();
        self.growing.fetch_sub(1, Relaxed);
        grown
    }

    /// Returns completely free chunks to the pool, up to `wanted` bytes or all. Returns their size.
    pub(super) fn give_up(&self, wanted: Bytes) -> Bytes {
        let mut given = Vec::new();
        let mut memory = self.memory.lock();
        let Memory { chunks, ranges, .. } = &mut *memory;
        let mut left = wanted;
        given.extend(chunks.extract_if(.., |id, chunk| {
            let goes = !left.is_zero() && ranges.remove(*id, chunk.size().get());
            left = if goes { left.saturating_sub(chunk.size()) } else { left };
            goes
        }));
        drop(memory);
        given.iter().map(|(_, chunk)| chunk.size()).sum()
    }

    /// Returns the bytes taken from the pool and the bytes in use.
    pub(super) fn bytes(&self) -> (Bytes, Bytes) {
        let memory = self.memory.lock();
        let all: Bytes = memory.chunks.values().map(HostBlock::size).sum();
        (all, all.saturating_sub(Bytes::new(memory.ranges.total())))
    }

    /// Adds a chunk of at least `whole` bytes, or of the smallest size that fits `size` if memory is short. Called without locks, because it
    /// may pin memory.
    ///
    /// Chunks are whole quanta like the ranges in them, so that the range for which a chunk was taken fits into it.
    fn grow(&self, size: Bytes, whole: Bytes) -> Result<()> {
        let quanta = |bytes: Bytes| rounded(bytes.get()).map_or(bytes, Bytes::new);
        let (exact, whole) = (quanta(size), quanta(whole));
        let block = match self.pool.take(whole) {
            Err(error) if error.is_shortage() && exact < whole => self.pool.take(exact),
            taken => taken,
        }?;
        let mut memory = self.memory.lock();
        let size = block.size().get();
        memory.made += 1;
        let chunk = memory.made;
        memory.chunks.insert(chunk, block);
        memory.ranges.add(chunk, size);
        Ok(())
    }
}

impl Memory {
    fn take(&mut self, size: Bytes) -> Option<HostRange> {
        let (taken, mark) = self.ranges.take_parts(size.get())?;
        self.range(taken, mark, size)
    }

    fn take_one(&mut self, size: Bytes) -> Option<HostRange> {
        let (taken, mark) = self.ranges.take(size.get())?;
        self.range(vec![taken], mark, size)
    }

    /// Returns the spans of `size` bytes in taken parts.
    fn range(&mut self, taken: Vec<Taken>, mark: Option<InMark>, size: Bytes) -> Option<HostRange> {
        let mut left = size;
        let spans: Option<Vec<Span>> = { taken.iter() }
            .map(|part| {
                let used = left.min(Bytes::new(part.size));
                left = left.saturating_sub(used);
                self.chunks.get(&part.chunk)?.span(Bytes::new(part.offset), used)
            })
            .collect();
        let Some(spans) = spans else {
            debug_assert!(false, "a range lies in its chunk");
            taken.into_iter().for_each(|part| self.ranges.put(part, mark.clone()));
            return None;
        };
        Some(HostRange { parts: taken.into_iter().zip(spans).collect(), mark })
    }
}

impl Reclaim for HostMemory {
    fn reclaim(&self, wanted: Bytes) -> Bytes {
        if self.growing.load(Relaxed) > 0 { Bytes::ZERO } else { self.give_up(wanted) }
    }
}

/// Granularity of sizes and offsets.
pub(super) const QUANTUM: u64 = 512;
/// Minimum size of a part, except the last one: a copy of a part must be worth its call.
pub(super) const LEAST_PART: u64 = 4 << 20;

/// An allocated part of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Taken {
    pub(super) chunk: usize,
    pub(super) offset: u64,
    pub(super) size: u64,
}

#[derive(Clone, Debug)]
struct Free<M> {
    size: u64,
    mark: Option<M>,
}

/// Free ranges by chunk and offset.
#[derive(Debug)]
pub(super) struct Ranges<M> {
    free: BTreeMap<(usize, u64), Free<M>>,
}

impl<M> Default for Ranges<M> {
    fn default() -> Self {
        Ranges { free: BTreeMap::new() }
    }
}

impl<M: Clone + Ord> Ranges<M> {
    /// Adds a new chunk that is entirely free, of whole quanta.
    pub(super) fn add(&mut self, chunk: usize, size: u64) {
        debug_assert!(size.is_multiple_of(QUANTUM), "{size} bytes are no whole quanta");
        self.free.insert((chunk, 0), Free { size, mark: None });
    }

    /// Takes the front of the smallest range that is large enough; among equals the one returned first.
    pub(super) fn take(&mut self, size: u64) -> Option<(Taken, Option<M>)> {
        let size = rounded(size)?;
        let fitting = self.free.iter().filter(|(_, free)| free.size >= size);
        let (&(chunk, offset), _) =
            fitting.min_by(|(_, one), (_, other)| (one.size, &one.mark).cmp(&(other.size, &other.mark)))?;
        let Free { size: whole, mark } = self.free.remove(&(chunk, offset))?;
        if whole > size {
            self.free.insert((chunk, offset + size), Free { size: whole - size, mark: mark.clone() });
        }
        Some((Taken { chunk, offset, size }, mark))
    }

    /// Takes `size` bytes in one range or, if none is large enough, in several, largest first, so that the ends of chunks are used too.
    pub(super) fn take_parts(&mut self, size: u64) -> Option<(Vec<Taken>, Option<M>)> {
        if let Some((taken, mark)) = self.take(size) {
            return Some((vec![taken], mark));
        }
        if self.missing(size)? > 0 {
            return None;
        }
        let (mut parts, mut last, mut left) = (Vec::new(), None, rounded(size)?);
        while left > 0
            && let Some(most) = self.free.values().map(|free| free.size).max()
            && let Some((part, mark)) = self.take(left.min(most))
        {
            left -= part.size;
            last = last.max(mark);
            parts.push(part);
        }
        Some((parts, last))
    }

    /// Returns the bytes that must become free, in one range, before `size` bytes can be taken; 0 if none are missing.
    pub(super) fn missing(&self, size: u64) -> Option<u64> {
        let size = rounded(size)?;
        let large = |free: &&Free<M>| free.size >= LEAST_PART;
        let free = self.free.values().filter(large).map(|free| free.size).sum();
        let fits = self.free.values().any(|free| free.size >= size);
        Some(match size.saturating_sub(free) {
            _ if fits => 0,
            _ if size < LEAST_PART => size,
            0 => 0,
            missing => missing.max(LEAST_PART),
        })
    }

    /// Returns a range to the free ones.
    pub(super) fn put(&mut self, taken: Taken, mark: Option<M>) {
        let Taken { chunk, mut offset, size } = taken;
        let mut free = Free { size, mark };
        if let Some(next) = self.free.remove(&(chunk, offset + size)) {
            free = Free { size: size + next.size, mark: free.mark.max(next.mark) };
        }
        let before = self.free.range(..(chunk, offset)).next_back();
        let before = before.filter(|(at, before)| at.0 == chunk && at.1 + before.size == offset);
        if let Some((&at, _)) = before
            && let Some(before) = self.free.remove(&at)
        {
            offset = at.1;
            free = Free { size: before.size + free.size, mark: before.mark.max(free.mark) };
        }
        self.free.insert((chunk, offset), free);
    }

    /// Removes a chunk of this size if it is entirely free.
    pub(super) fn remove(&mut self, chunk: usize, size: u64) -> bool {
        let is_whole = self.free.get(&(chunk, 0)).is_some_and(|free| free.size == size);
        is_whole && self.free.remove(&(chunk, 0)).is_some()
    }

    /// Returns the free bytes in total.
    pub(super) fn total(&self) -> u64 {
        self.free.values().map(|free| free.size).sum()
    }
}

/// Rounds a size up to the granularity; `None` on overflow.
pub(super) fn rounded(size: u64) -> Option<u64> {
    size.max(1).checked_next_multiple_of(QUANTUM)
}

/// Number of the smallest chunks that fill an arena of the pool.
const IN_ARENA: u64 = 4;
/// Divisor of the current total that gives the size of the next chunk.
const PART: u64 = 32;
/// Maximum size of a chunk, unless a single entry is larger.
pub(super) const MOST: Bytes = Bytes::gib(4);
/// Arena size for a pool that pins each request separately.
const ARENA: Bytes = Bytes::mib(256);

/// Sizes of the chunks taken from a pool.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChunkSizes {
    arena: Bytes,
    least: Bytes,
}

impl ChunkSizes {
    /// Returns the sizes for a pool with arenas of `arena` bytes. Several of the smallest chunks fill an arena; larger chunks have arenas
    /// of their own.
    pub(super) fn of(arena: Bytes) -> ChunkSizes {
        let arena = if arena < Bytes::mib(8) { ARENA } else { arena };
        let arena = arena.align_up(Bytes::mib(8)).unwrap_or(ARENA);
        ChunkSizes { arena, least: Bytes::new(arena.get() / IN_ARENA) }
    }

    /// Returns the size of the next chunk, for an entry of `size` bytes and a current total of `there`.
    pub(super) fn next(self, size: Bytes, there: Bytes) -> Bytes {
        let part = Bytes::new(there.get() / PART).min(MOST);
        let two = self.least.saturating_add(self.least);
        let chunk = match part {
            part if part < two => self.least,
            part if part < self.arena => two,
            part => Bytes::new(part.get() / self.arena.get() * self.arena.get()),
        };
        chunk.max(size.align_up(self.least).unwrap_or(size))
    }

    /// Returns the size of the next chunk if `missing` bytes are known to be needed.
    pub(super) fn ahead(self, missing: Bytes) -> Bytes {
        missing.min(MOST).align_up(self.least).unwrap_or(missing)
    }
}

#[cfg(test)]
mod ranges_tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_least_that_is_enough_is_taken_and_what_touches_is_joined() {
        let mut ranges = Ranges::<u64>::default();
        ranges.add(0, 8192);
        ranges.add(1, 4096);
        let (small, mark) = ranges.take(100).unwrap();
        assert_eq!((small, mark), (Taken { chunk: 1, offset: 0, size: 512 }, None));
        let (large, _) = ranges.take(8192).unwrap();
        assert_eq!(large.chunk, 0);
        assert!(ranges.take(4096).is_none());
        ranges.put(small, Some(7));
        assert_eq!(ranges.take(4096).unwrap().1, Some(7), "all of it is behind the mark");
        ranges.put(large, Some(3));
        assert!(!ranges.remove(0, 4096) && ranges.remove(0, 8192) && !ranges.remove(1, 4096));
        assert_eq!(ranges.total(), 0);
    }

    proptest! {
        /// Parts add up to the requested size, and `missing` is 0 whenever a request succeeds.
        #[test]
        fn parts_are_as_much_as_was_asked_for(sizes in prop::collection::vec(1u64..40 << 20, 1..40), returned in any::<prop::sample::Index>()) {
            let (mut ranges, mut held) = (Ranges::<usize>::default(), Vec::new());
            (0..3).for_each(|chunk| ranges.add(chunk, (16 << 20) * (chunk as u64 + 1)));
            for size in sizes {
                let (missing, before) = (ranges.missing(size).unwrap(), ranges.total());
                let Some((parts, _)) = ranges.take_parts(size) else {
                    prop_assert!(missing > 0);
                    // Adding the missing bytes suffices.
                    let chunk = 10 + held.len();
                    ranges.add(chunk, rounded(missing).unwrap());
                    let (parts, _) = ranges.take_parts(size).unwrap();
                    held.push(parts);
                    continue;
                };
                let taken: u64 = parts.iter().map(|part| part.size).sum();
                prop_assert_eq!((missing, taken, before - ranges.total()), (0, rounded(size).unwrap(), taken));
                let short = parts.iter().filter(|part| part.size < LEAST_PART).count();
                prop_assert!(short <= 1);
                held.push(parts);
                if held.len() > 4 {
                    held.swap_remove(returned.index(held.len())).into_iter().for_each(|part| ranges.put(part, Some(1)));
                }
            }
        }

        /// Allocated ranges never overlap, and the mark of a byte is at least that of its previous owner.
        #[test]
        fn what_is_taken_is_nobody_else_s(program in prop::collection::vec((any::<bool>(), 1u64..5000, any::<prop::sample::Index>()), 1..200)) {
            let (mut ranges, mut bytes) = (Ranges::<usize>::default(), vec![[None::<usize>; 32]; 3]);
            (0..3).for_each(|chunk| ranges.add(chunk, 32 * QUANTUM));
            let mut held: Vec<Taken> = Vec::new();
            let cells = |taken: &Taken| (taken.offset / QUANTUM) as usize..((taken.offset + taken.size) / QUANTUM) as usize;
            for (now, (takes, size, which)) in program.into_iter().enumerate() {
                if takes {
                    let Some((taken, mark)) = ranges.take(size) else { continue };
                    prop_assert!(taken.size >= size && taken.offset + taken.size <= 32 * QUANTUM);
                    for other in held.iter().filter(|other| other.chunk == taken.chunk) {
                        prop_assert!(other.offset + other.size <= taken.offset || taken.offset + taken.size <= other.offset);
                    }
                    prop_assert!(bytes[taken.chunk][cells(&taken)].iter().all(|last| *last <= mark));
                    held.push(taken);
                } else if !held.is_empty() {
                    let taken = held.swap_remove(which.index(held.len()));
                    bytes[taken.chunk][cells(&taken)].fill(Some(now));
                    ranges.put(taken, Some(now));
                }
            }
            held.into_iter().for_each(|taken| ranges.put(taken, None));
            prop_assert!((0..3).all(|chunk| ranges.remove(chunk, 32 * QUANTUM)));
        }
    }
}

#[cfg(test)]
mod chunks_tests {
    use super::super::host_memory::Ranges;
    use super::*;

    /// Returns the sizes of the tensors that one layer of a model offloads in a step with `tokens` tokens.
    fn layer(tokens: u64, hidden: u64, inner: u64) -> Vec<u64> {
        let (small, large) = (tokens * hidden * 2, tokens * inner * 2);
        vec![
            small,
            small / 4,
            small / 4,
            small,
            large,
            tokens * 4,
            large,
            small,
            tokens * 32 * 4,
            large,
            small,
        ]
    }

    /// Returns the host memory that all steps need, relative to the largest amount offloaded at a time.
    fn pinned(steps: &[Vec<u64>]) -> f64 {
        let chunks = ChunkSizes::of(ARENA);
        let (mut ranges, mut all, mut count, mut most) = (Ranges::<u64>::default(), 0, 0, 0);
        for step in steps {
            let mut held = Vec::new();
            for &size in step {
                let taken = loop {
                    if let Some((taken, _)) = ranges.take_parts(size) {
                        break taken;
                    }
                    let missing = ranges.missing(size).unwrap();
                    let chunk = chunks.next(Bytes::new(missing), Bytes::new(all)).get();
                    (all, count) = (all + chunk, count + 1);
                    ranges.add(count, chunk);
                };
                held.push(taken);
            }
            most = most.max(step.iter().sum());
            held.into_iter().rev().flatten().for_each(|taken| ranges.put(taken, None));
        }
        all as f64 / most as f64
    }

    #[test]
    fn little_is_lost_whatever_a_step_is_like() {
        for tokens in [4096, 8000, 8192, 11_111, 16_384].into_iter().chain((500..20_000).step_by(1471)) {
            let step: Vec<u64> = (0..32).flat_map(|_| layer(tokens, 4096, 14_336)).collect();
            let lost = pinned(&[step]);
            assert!(lost <= 1.05, "{tokens} tokens: {lost}");
        }
        for (least, most) in [(6000, 9000), (500, 4000), (1000, 16_000), (8000, 8200)] {
            let lengths = (0..20_u64).map(|step| least + step * 7919 % (most - least));
            let steps = lengths.map(|tokens| (0..32).flat_map(|_| layer(tokens, 4096, 14_336)).collect());
            let lost = pinned(&steps.collect::<Vec<Vec<u64>>>());
            assert!(lost <= 1.05, "{least} to {most} tokens: {lost}");
        }
    }

    #[test]
    fn chunks_fill_arenas_and_grow_with_what_there_is() {
        let chunks = ChunkSizes::of(ARENA);
        let next = |there: u64| chunks.next(Bytes::new(1), Bytes::gib(there));
        assert_eq!([0, 1, 2, 4, 9, 100].map(next), [64, 64, 64, 128, 256, 3072].map(Bytes::mib));
        assert_eq!(chunks.next(Bytes::mib(65), Bytes::ZERO), Bytes::mib(128));
        assert_eq!(chunks.ahead(Bytes::mib(65)), Bytes::mib(128));
        assert_eq!(chunks.ahead(Bytes::gib(30)), MOST);
        assert_eq!(ChunkSizes::of(Bytes::ZERO).next(Bytes::new(1), Bytes::ZERO), Bytes::mib(64));
    }
}
