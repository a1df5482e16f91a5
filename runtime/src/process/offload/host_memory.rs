//! Pinned host memory for the offloaded bytes of one GPU, taken from the process's pool in chunks and kept between steps of a program.
//!
//! A program that runs ahead of its GPU offloads the next bytes while the copies in of the previous step are still pending. A released
//! range is therefore handed out again at once, with a *mark*: the copy out waits, on the GPU, for the copy in that reads the range. All
//! copies out of a GPU run on one stream and all copies in on another, so that the latest of several marks suffices.
//!
//! Invariant: a chunk without ranges in use may be returned at any time; its pool reuses it once the work on it is finished.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use glake_device::owned::{OwnedEvent, Span};
use glake_tiers::{HostBlock, HostPool, Reclaim};
use glake_units::Bytes;

use super::super::{ProcessError, Result};
use super::chunks::{ChunkSizes, MOST};
use super::ranges::{Ranges, Taken, rounded};
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
        self.pool.has_room(size.saturating_sub(free))?;
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

    /// Adds a chunk of `whole` bytes, or of the smallest size that fits `size` if memory is short. Called without locks, because it may pin
    /// memory.
    fn grow(&self, size: Bytes, whole: Bytes) -> Result<()> {
        let exact = rounded(size.get()).map_or(size, Bytes::new);
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
