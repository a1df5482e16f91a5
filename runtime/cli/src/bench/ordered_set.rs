//! Baseline of the hot path: best fit on an ordered set, as in most allocators of this kind.
//!
//! Free pieces are in a set by stream, size and address, as in torch's caching allocator; live blocks in a hash map by
//! address; all pieces are linked with their neighbours, split at 512 bytes and merged when freed. It has the same duties
//! as the pool: a mutex, the gauges of both pools (blocks, bytes and requested bytes, with peaks and totals), and separate
//! pieces per stream. It has no completion points, aliases or domains, which is to its advantage.
//!
//! The bare variant omits these duties: no lock, no gauges, and pieces common to all streams.

use std::collections::BTreeSet;

use glake_stitch::SMALL_LIMIT;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use super::BenchError;
use super::program::Allocates;

const QUANTUM: u64 = 512;
/// Marks the absence of a piece.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Piece {
    start: u64,
    size: u64,
    before: u32,
    after: u32,
    free: bool,
    stream: u32,
    requested: u64,
}

/// A gauge with its peak and its total.
#[derive(Clone, Copy, Debug, Default)]
struct Gauge {
    current: u64,
    peak: u64,
    total: u64,
}

impl Gauge {
    fn add(&mut self, amount: u64) {
        self.current += amount;
        self.total += amount;
        self.peak = self.peak.max(self.current);
    }
}

/// The gauges of one pool: blocks, bytes, requested bytes.
type Gauges = [Gauge; 3];

/// A best fit allocator of one range of addresses for each stream, behind a mutex.
#[derive(Debug)]
pub(super) struct OrderedSet {
    bare: bool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    pieces: Vec<Piece>,
    /// Places in `pieces` that nothing is in.
    spare: Vec<u32>,
    free: BTreeSet<(u32, u64, u64, u32)>,
    live: FxHashMap<u64, u32>,
    /// Gauges of all, small and large blocks; `None` for the bare variant.
    gauges: Option<[Gauges; 3]>,
}

impl OrderedSet {
    /// `size` bytes of addresses, in equal parts for each stream.
    pub(super) fn new(size: u64, streams: u32) -> Self {
        let part = size / u64::from(streams.max(1));
        let whole = |stream: u32| {
            let start = u64::from(stream) * part;
            Piece { start, size: part, before: NONE, after: NONE, free: true, stream, requested: 0 }
        };
        let state = State {
            pieces: (0..streams).map(whole).collect(),
            spare: Vec::new(),
            free: (0..streams).map(|stream| (stream, part, whole(stream).start, stream)).collect(),
            live: FxHashMap::default(),
            gauges: Some(Default::default()),
        };
        OrderedSet { bare: false, state: Mutex::new(state) }
    }

    /// Without the pool's duties.
    pub(super) fn bare(size: u64) -> Self {
        let mut set = OrderedSet { bare: true, ..Self::new(size, 1) };
        set.state.get_mut().gauges = None;
        set
    }
}

impl State {
    fn count(&mut self, size: u64, requested: u64, change: fn(&mut Gauge, u64)) {
        let Some(pools) = &mut self.gauges else { return };
        let pool = if size <= SMALL_LIMIT.get() { 1 } else { 2 };
        for gauges in [0, pool] {
            let [blocks, bytes, asked] = &mut pools[gauges];
            change(blocks, 1);
            change(bytes, size);
            change(asked, requested);
        }
    }

    fn take(&mut self, requested: u64, stream: u32) -> Option<u64> {
        let size = requested.max(1).next_multiple_of(QUANTUM);
        let &found = self.free.range((stream, size, 0, 0)..).next().filter(|found| found.0 == stream)?;
        self.free.remove(&found);
        let (_, _, start, id) = found;
        self.count(size, requested, Gauge::add);
        let piece = &mut self.pieces[id as usize];
        piece.free = false;
        piece.requested = requested;
        let (left, after) = (piece.size - size, piece.after);
        if left > 0 {
            piece.size = size;
            let rest = Piece {
                start: start + size,
                size: left,
                before: id,
                after,
                free: true,
                stream,
                requested: 0,
            };
            let rest_id = self.add(rest);
            self.pieces[id as usize].after = rest_id;
            if after != NONE {
                self.pieces[after as usize].before = rest_id;
            }
            self.free.insert((stream, left, rest.start, rest_id));
        }
        self.live.insert(start, id);
        Some(start)
    }

    fn give(&mut self, start: u64) -> Option<()> {
        let mut id = self.live.remove(&start)?;
        let Piece { before, after, size, requested, .. } = self.pieces[id as usize];
        self.count(size, requested, |gauge, amount| gauge.current -= amount);
        if after != NONE && self.pieces[after as usize].free {
            self.join(id, after);
        }
        if before != NONE && self.pieces[before as usize].free {
            self.join(before, id);
            id = before;
        }
        let piece = &mut self.pieces[id as usize];
        piece.free = true;
        self.free.insert((piece.stream, piece.size, piece.start, id));
        Some(())
    }

    /// Joins a piece with the one after it; those of them that are free leave the set.
    fn join(&mut self, first: u32, second: u32) {
        for id in [first, second] {
            let piece = self.pieces[id as usize];
            if piece.free {
                self.free.remove(&(piece.stream, piece.size, piece.start, id));
            }
        }
        let Piece { size, after, .. } = self.pieces[second as usize];
        let piece = &mut self.pieces[first as usize];
        piece.size += size;
        piece.after = after;
        if after != NONE {
            self.pieces[after as usize].before = first;
        }
        self.spare.push(second);
    }

    fn add(&mut self, piece: Piece) -> u32 {
        match self.spare.pop() {
            Some(id) => {
                self.pieces[id as usize] = piece;
                id
            }
            None => {
                self.pieces.push(piece);
                u32::try_from(self.pieces.len() - 1).unwrap_or(NONE)
            }
        }
    }
}

impl Allocates for OrderedSet {
    type Block = u64;

    #[inline]
    fn malloc(&mut self, size: u64, stream: usize) -> Result<u64, BenchError> {
        if self.bare {
            return self.state.get_mut().take(size, 0).ok_or(BenchError::SetFull);
        }
        let stream = u32::try_from(stream).map_err(|_| BenchError::SetFull)?;
        self.state.lock().take(size, stream).ok_or(BenchError::SetFull)
    }

    #[inline]
    fn free(&mut self, at: u64) -> Result<(), BenchError> {
        let given = if self.bare { self.state.get_mut().give(at) } else { self.state.lock().give(at) };
        given.ok_or(BenchError::SetFull)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fastrand::Rng;

    #[test]
    fn blocks_never_overlap_and_everything_joins_again() {
        let (set, mut random) = (OrderedSet::new(64 << 20, 2), Rng::with_seed(5));
        let mut set = set.state.into_inner();
        let mut live: Vec<(u64, u64)> = Vec::new();
        for turn in 0..20_000 {
            if live.len() > 100 || (random.usize(..2) == 0 && !live.is_empty()) {
                let (start, _) = live.swap_remove(random.usize(..live.len()));
                set.give(start).unwrap();
                continue;
            }
            let size = 1 + random.usize(..100_000) as u64;
            let start = set.take(size, turn % 2).unwrap();
            assert!(live.iter().all(|&(other, length)| start + size <= other || other + length <= start));
            live.push((start, size));
        }
        live.iter().for_each(|&(start, _)| set.give(start).unwrap());
        let left: Vec<_> = set.free.iter().map(|&(stream, size, start, _)| (stream, size, start)).collect();
        assert_eq!(left, [(0, 32 << 20, 0), (1, 32 << 20, 32 << 20)]);
        assert!(set.gauges.iter().flatten().flatten().all(|gauge| gauge.current == 0));
        assert!(set.give(0).is_none() && set.take(33 << 20, 0).is_none());
    }
}
