//! Pinned host memory for what is offloaded from one GPU, taken from the process's pool in chunks and kept between steps of a program.
//!
//! A program that runs ahead of its GPU packs what it offloads next while the copies in of the step before are still to run. So a
//! range that is released is handed out again at once, behind a *mark*: the copy out waits, on the GPU, for the copy in that reads it. All
//! copies out of a GPU are on one stream, in whose order they write; all copies in on another, so that of several marks the later
//! one counts.
//!
//! Invariant: a chunk that no range of is in hands may be given up at any time; its pool hands it out again when work on it is done.

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

/// A copy in that still reads a range, by its number among all of its queue.
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

/// Host memory of one entry: one range, or several one behind the other.
#[derive(Debug)]
pub(super) struct HostRange {
    /// Each with what of it is asked for.
    parts: Vec<(Taken, Span)>,
    /// What its first copy has to wait for.
    pub(super) mark: Option<InMark>,
}

impl HostRange {
    /// Its parts, each beside the bytes of a GPU that it is for.
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
    /// How many chunks there were.
    made: usize,
    ranges: Ranges<InMark>,
}

/// The host memory of one GPU's copies.
#[derive(Debug)]
pub(super) struct HostMemory {
    pool: Arc<HostPool>,
    chunks: ChunkSizes,
    memory: Mutex<Memory>,
    /// So many take more: what is free is not given up meanwhile, to be taken again.
    growing: AtomicUsize,
}

impl HostMemory {
    /// Of a pool with arenas of this size.
    pub(super) fn new(pool: &Arc<HostPool>, arena: Bytes) -> Arc<HostMemory> {
        let (chunks, (memory, growing)) = (ChunkSizes::of(arena), Default::default());
        let host = Arc::new(HostMemory { pool: pool.clone(), chunks, memory, growing });
        pool.add_reclaimer(&host);
        host
    }

    /// Memory for so many bytes.
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
                // What is free here is too small to be of use beside others: it may go for a range that is large enough.
                self.grow(size, size)?;
                continue;
            }
            match self.keeping(|| self.grow(missing, self.chunks.next(missing, self.bytes().0))) {
                Err(ProcessError::Host(error)) if error.is_shortage() => is_short = true,
                grown => grown?,
            }
        }
    }

    /// Takes memory back; `last` is the last copy that was begun from it.
    pub(super) fn put(&self, range: HostRange, last: Option<InMark>) {
        let HostRange { parts, mark } = range;
        let last = last.max(mark);
        let mut memory = self.memory.lock();
        for (taken, span) in parts {
            drop(span);
            memory.ranges.put(taken, last.clone());
        }
    }

    /// Has so much free.
    ///
    /// # Errors
    /// As [`HostMemory::take`]: where there is not so much nothing is pinned; what was had by then stays.
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

    /// Does something that takes more of the pool, which has nothing of this back for it.
    fn keeping<T>(&self, grow: impl FnOnce() -> T) -> T {
        self.growing.fetch_add(1, Relaxed);
        let grown = grow();
        self.growing.fetch_sub(1, Relaxed);
        grown
    }

    /// Gives up chunks that are free as a whole, so much or all; returns how much.
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

    /// What it has of the pool, and what of that is in hands.
    pub(super) fn bytes(&self) -> (Bytes, Bytes) {
        let memory = self.memory.lock();
        let all: Bytes = memory.chunks.values().map(HostBlock::size).sum();
        (all, all.saturating_sub(Bytes::new(memory.ranges.total())))
    }

    /// One more chunk of a size, or where there is not so much one in which so much fits; under no lock, for it may pin memory.
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
