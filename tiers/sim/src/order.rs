//! Ordering of work: vector clocks over streams, and the last uses of every byte.
//!
//! Work is ordered before later work on its stream, before work that waits for an event recorded after it, and, once the host has seen it
//! done, before everything enqueued from then on. Completion in time by chance is no order. (Clocks: Mattern, Virtual time and global
//! states of distributed systems, 1989; the shadow is that of FastTrack, Flanagan and Freund, 2009, by ranges.)
//!
//! Memory mapped at two addresses is coherent only once the work that wrote it is done. So memory last used at another address needs more
//! than stream order: an event recorded after that use and waited for, on the same stream too. The *edges* of a stream are the work that it
//! is ordered after in that way.
//!
//! A wait for a value whose write is not enqueued yet makes a clock *loose*: the work ordered before it is unknown, so no conflict is
//! reported until the host has waited for it.

use std::collections::BTreeMap;

use glake_device::Refusal;

/// Position of work on a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) lane: u64,
    pub(super) n: u64,
}

/// A use of memory: its position, and the address at which the memory was mapped for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    pub(super) position: Position,
    pub(super) via: u64,
}

/// Work that precedes a piece of work.
#[derive(Clone, Debug, Default)]
pub(super) struct Order {
    /// Preceding work, by any kind of order.
    pub(super) clock: VectorClock,
    /// Preceding work, by its completion.
    pub(super) edges: VectorClock,
}

impl Order {
    /// Adds work that completes before this work begins.
    pub(super) fn completes(&mut self, clock: &VectorClock) {
        self.clock.join(clock);
        self.edges.join(clock);
    }

    /// Returns the rule that a use at an address breaks if it conflicts with an earlier one. `seen` is the work that the host has observed
    /// to be done.
    pub(super) fn breach(&self, seen: &VectorClock, earlier: Stamp, via: u64) -> Option<Refusal> {
        if seen.covers(earlier.position) || self.edges.covers(earlier.position) {
            None
        } else if !self.clock.covers(earlier.position) {
            Some(Refusal::Unordered)
        } else if earlier.via != via {
            Some(Refusal::Aliased)
        } else {
            None
        }
    }
}

/// For each stream, the last position that is ordered before.
#[derive(Clone, Debug, Default)]
pub(super) struct VectorClock {
    /// Positions in order of their streams.
    seen: Vec<(u64, u64)>,
    pub(super) loose: bool,
}

impl VectorClock {
    /// Returns a loose clock: ordered after unknown work.
    pub(super) fn unknown() -> Self {
        VectorClock { seen: Vec::new(), loose: true }
    }

    pub(super) fn covers(&self, position: Position) -> bool {
        self.loose || self.covers_surely(position)
    }

    fn covers_surely(&self, position: Position) -> bool {
        match self.seen.binary_search_by_key(&position.lane, |entry| entry.0) {
            Ok(at) => self.seen[at].1 >= position.n,
            Err(_) => false,
        }
    }

    pub(super) fn see(&mut self, position: Position) {
        match self.seen.binary_search_by_key(&position.lane, |entry| entry.0) {
            Ok(at) => self.seen[at].1 = self.seen[at].1.max(position.n),
            Err(at) => self.seen.insert(at, (position.lane, position.n)),
        }
    }

    /// Removes the entries that `other` covers.
    pub(super) fn forget(&mut self, other: &VectorClock) {
        self.seen.retain(|&(lane, n)| !other.covers_surely(Position { lane, n }));
    }

    /// Adds everything that `other` is ordered after.
    pub(super) fn join(&mut self, other: &VectorClock) {
        let mut at = 0;
        for &(lane, n) in &other.seen {
            at += self.seen[at..].partition_point(|entry| entry.0 < lane);
            match self.seen.get_mut(at) {
                Some(entry) if entry.0 == lane => entry.1 = entry.1.max(n),
                _ => self.seen.insert(at, (lane, n)),
            }
        }
        self.loose |= other.loose;
    }
}

#[derive(Clone, Debug)]
struct Cell {
    end: u64,
    write: Option<Stamp>,
    /// Reads since the last write; one per stream and address.
    reads: Vec<Stamp>,
}

/// Last uses of byte ranges. Invariant: cells do not overlap.
#[derive(Debug, Default)]
pub(super) struct Shadow {
    cells: BTreeMap<u64, Cell>,
    /// Number of cells at which the next pruning is due.
    crowded: usize,
}

/// Number of cells below which pruning is not worthwhile.
const FEW: usize = 256;

impl Shadow {
    /// Returns the first conflict with an earlier use, and the rule broken.
    pub(super) fn conflict(
        &self,
        start: u64,
        end: u64,
        write: bool,
        breach: impl Fn(Stamp) -> Option<Refusal>,
    ) -> Option<(u64, Refusal)> {
        let first = self.cells.range(..=start).next_back().map_or(start, |(at, _)| *at);
        self.cells.range(first..end).filter(|(_, cell)| cell.end > start).find_map(|(at, cell)| {
            let reads = cell.reads.iter().filter(|_| write);
            let rule = cell.write.iter().chain(reads).find_map(|stamp| breach(*stamp))?;
            Some((start.max(*at), rule))
        })
    }

    /// Records a use that conflicts with nothing.
    pub(super) fn note(&mut self, start: u64, end: u64, write: bool, stamp: Stamp) {
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
            self.cells.insert(start, Cell { end, write: Some(stamp), reads: Vec::new() });
            return;
        }
        let mut from = start;
        for at in inside {
            if from < at {
                self.cells.insert(from, Cell { end: at, write: None, reads: vec![stamp] });
            }
            if let Some(cell) = self.cells.get_mut(&at) {
                let older = |read: &Stamp| read.position.lane == stamp.position.lane && read.via == stamp.via;
                cell.reads.retain(|read| !older(read));
                cell.reads.push(stamp);
                from = cell.end;
            }
        }
        if from < end {
            self.cells.insert(from, Cell { end, write: None, reads: vec![stamp] });
        }
    }

    /// Forgets uses observed as done by the host, once there are many.
    pub(super) fn prune(&mut self, seen: &VectorClock) {
        if self.cells.len() <= self.crowded.max(FEW) {
            return;
        }
        self.cells.retain(|_, cell| {
            !cell.write.iter().chain(&cell.reads).all(|stamp| seen.covers_surely(stamp.position))
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

    fn position(lane: u64, n: u64) -> Position {
        Position { lane, n }
    }

    fn stamp(lane: u64, n: u64) -> Stamp {
        Stamp { position: position(lane, n), via: 0 }
    }

    #[test]
    fn unordered_uses_conflict() {
        let mut shadow = Shadow::default();
        shadow.note(0, 100, true, stamp(1, 1));
        shadow.note(20, 40, false, stamp(2, 1));
        let (mut order, seen) = (Order::default(), VectorClock::default());
        order.clock.see(position(1, 1));
        let conflict = |shadow: &Shadow, start, end, write, order: &Order| {
            shadow.conflict(start, end, write, |stamp| order.breach(&seen, stamp, 0)).map(|(at, _)| at)
        };
        assert_eq!(conflict(&shadow, 0, 100, false, &order), None);
        assert_eq!(conflict(&shadow, 0, 100, true, &order), Some(20));
        assert_eq!(conflict(&shadow, 30, 100, true, &order), Some(30));
        assert_eq!(conflict(&shadow, 40, 100, true, &order), None);
        order.clock.see(position(2, 1));
        assert_eq!(conflict(&shadow, 0, 100, true, &order), None);
        shadow.note(10, 30, true, stamp(3, 7));
        assert_eq!(conflict(&shadow, 0, 10, true, &order), None);
        assert_eq!(conflict(&shadow, 0, 11, false, &order), Some(10));
        assert_eq!(conflict(&shadow, 30, 200, true, &order), None);
        order.clock.loose = true;
        assert_eq!(conflict(&shadow, 0, 100, true, &order), None);
    }

    #[test]
    fn another_address_needs_a_completion() {
        let (mut order, seen) = (Order::default(), VectorClock::default());
        order.clock.see(position(1, 5));
        assert_eq!(order.breach(&seen, stamp(1, 5), 0), None);
        assert_eq!(order.breach(&seen, stamp(1, 5), 8), Some(Refusal::Aliased));
        assert_eq!(order.breach(&seen, stamp(2, 1), 8), Some(Refusal::Unordered));
        order.edges.see(position(1, 5));
        assert_eq!(order.breach(&seen, stamp(1, 5), 8), None);
        assert_eq!(order.breach(&order.clock, stamp(1, 4), 8), None, "the host has seen it");
    }

    #[test]
    fn uses_observed_by_the_host_are_pruned() {
        let mut shadow = Shadow::default();
        for n in 0..1000 {
            shadow.note(n * 10, n * 10 + 5, true, stamp(1, n));
        }
        let mut seen = VectorClock::default();
        seen.see(position(1, 989));
        shadow.prune(&seen);
        assert_eq!(shadow.cells.len(), 10);
    }
}
