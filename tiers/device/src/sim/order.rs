//! Which work is ordered before which: vector clocks over streams, and the last uses of every byte.
//!
//! Work is ordered before what is enqueued later on its stream, before what waits for an event recorded after it,
//! and, once the host has seen it done, before everything enqueued from then on. That it happened to be done in time
//! is no order. (Clocks: Mattern, Virtual time and global states of distributed systems, 1989; the shadow is that of
//! FastTrack, Flanagan and Freund, 2009, by ranges.)
//!
//! A wait for a value whose write is not enqueued yet makes a clock *loose*: what it is ordered after is not known,
//! so nothing is held against it until the host has waited for it.

use std::collections::BTreeMap;

/// Work on a stream, by its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Epoch {
    pub(super) lane: u64,
    pub(super) n: u64,
}

/// For each stream, up to which of its work something is ordered after.
#[derive(Clone, Debug, Default)]
pub(super) struct VectorClock {
    /// Ordered by stream.
    seen: Vec<(u64, u64)>,
    pub(super) loose: bool,
}

impl VectorClock {
    /// After something, but what is not known.
    pub(super) fn unknown() -> Self {
        VectorClock { seen: Vec::new(), loose: true }
    }

    pub(super) fn covers(&self, epoch: Epoch) -> bool {
        self.loose || self.covers_surely(epoch)
    }

    fn covers_surely(&self, epoch: Epoch) -> bool {
        match self.seen.binary_search_by_key(&epoch.lane, |entry| entry.0) {
            Ok(at) => self.seen[at].1 >= epoch.n,
            Err(_) => false,
        }
    }

    pub(super) fn see(&mut self, epoch: Epoch) {
        match self.seen.binary_search_by_key(&epoch.lane, |entry| entry.0) {
            Ok(at) => self.seen[at].1 = self.seen[at].1.max(epoch.n),
            Err(at) => self.seen.insert(at, (epoch.lane, epoch.n)),
        }
    }

    /// Drops what `other` says too.
    pub(super) fn forget(&mut self, other: &VectorClock) {
        self.seen.retain(|&(lane, n)| !other.covers_surely(Epoch { lane, n }));
    }

    /// Becomes ordered after all that `other` is ordered after.
    pub(super) fn join(&mut self, other: &VectorClock) {
        for &(lane, n) in &other.seen {
            self.see(Epoch { lane, n });
        }
        self.loose |= other.loose;
    }
}

#[derive(Clone, Debug)]
struct Cell {
    end: u64,
    write: Option<Epoch>,
    /// Since the write; one a stream.
    reads: Vec<Epoch>,
}

/// The last uses of a range of bytes. Invariant: cells do not overlap.
#[derive(Debug, Default)]
pub(super) struct Shadow {
    cells: BTreeMap<u64, Cell>,
    /// How many cells it takes to look for those that can go.
    crowded: usize,
}

/// Fewer cells are not worth pruning.
const FEW: usize = 256;

impl Shadow {
    /// Where a use conflicts with an earlier one that it is not ordered after.
    pub(super) fn conflict(
        &self,
        start: u64,
        end: u64,
        write: bool,
        ordered: impl Fn(Epoch) -> bool,
    ) -> Option<u64> {
        let first = self.cells.range(..=start).next_back().map_or(start, |(at, _)| *at);
        self.cells
            .range(first..end)
            .filter(|(_, cell)| cell.end > start)
            .find(|(_, cell)| {
                let unordered = |epoch: &Epoch| !ordered(*epoch);
                cell.write.iter().any(unordered) || (write && cell.reads.iter().any(unordered))
            })
            .map(|(at, _)| start.max(*at))
    }

    /// Notes a use that conflicts with nothing.
    pub(super) fn note(&mut self, start: u64, end: u64, write: bool, epoch: Epoch) {
        if start >= end {
            return;
        }
        self.split(start);
        self.split(end);
        let inside: Vec<u64> = self.cells.range(start..end).map(|(at, _)| *at).collect();
        if write {
            for at in inside {
                self.cells.remove(&at);
            }
            self.cells.insert(start, Cell { end, write: Some(epoch), reads: Vec::new() });
            return;
        }
        let mut from = start;
        for at in inside {
            if from < at {
                self.cells.insert(from, Cell { end: at, write: None, reads: vec![epoch] });
            }
            if let Some(cell) = self.cells.get_mut(&at) {
                cell.reads.retain(|read| read.lane != epoch.lane);
                cell.reads.push(epoch);
                from = cell.end;
            }
        }
        if from < end {
            self.cells.insert(from, Cell { end, write: None, reads: vec![epoch] });
        }
    }

    /// Forgets uses that the host has seen done, once there are many.
    pub(super) fn prune(&mut self, seen: &VectorClock) {
        if self.cells.len() <= self.crowded.max(FEW) {
            return;
        }
        self.cells.retain(|_, cell| {
            !(cell.write.iter().all(|epoch| seen.covers_surely(*epoch))
                && cell.reads.iter().all(|epoch| seen.covers_surely(*epoch)))
        });
        self.crowded = self.cells.len() * 2;
    }

    fn split(&mut self, at: u64) {
        if let Some((_, cell)) = self.cells.range_mut(..at).next_back()
            && cell.end > at
        {
            let right = cell.clone();
            cell.end = at;
            self.cells.insert(at, right);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn epoch(lane: u64, n: u64) -> Epoch {
        Epoch { lane, n }
    }

    #[test]
    fn conflicts_are_with_what_is_not_ordered_before() {
        let mut shadow = Shadow::default();
        shadow.note(0, 100, true, epoch(1, 1));
        shadow.note(20, 40, false, epoch(2, 1));
        let mut clock = VectorClock::default();
        clock.see(epoch(1, 1));
        let conflict = |shadow: &Shadow, start, end, write, clock: &VectorClock| {
            shadow.conflict(start, end, write, |epoch| clock.covers(epoch))
        };
        assert_eq!(conflict(&shadow, 0, 100, false, &clock), None);
        assert_eq!(conflict(&shadow, 0, 100, true, &clock), Some(20));
        assert_eq!(conflict(&shadow, 30, 100, true, &clock), Some(30));
        assert_eq!(conflict(&shadow, 40, 100, true, &clock), None);
        clock.see(epoch(2, 1));
        assert_eq!(conflict(&shadow, 0, 100, true, &clock), None);
        shadow.note(10, 30, true, epoch(3, 7));
        assert_eq!(conflict(&shadow, 0, 10, true, &clock), None);
        assert_eq!(conflict(&shadow, 0, 11, false, &clock), Some(10));
        assert_eq!(conflict(&shadow, 30, 200, true, &clock), None);
        clock.loose = true;
        assert_eq!(conflict(&shadow, 0, 100, true, &clock), None);
    }

    #[test]
    fn what_the_host_has_seen_is_forgotten() {
        let mut shadow = Shadow::default();
        for n in 0..1000 {
            shadow.note(n * 10, n * 10 + 5, true, epoch(1, n));
        }
        let mut seen = VectorClock::default();
        seen.see(epoch(1, 989));
        shadow.prune(&seen);
        assert_eq!(shadow.cells.len(), 10);
    }
}
