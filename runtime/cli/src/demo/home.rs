//! Mappings reconstructed from the log of driver calls, independent of the pool.

use std::collections::BTreeMap;

use glake_device::{Logged, Verb};
use glake_tiers::Block;

use glake_replay::trace::BlockId;

/// A range of addresses: start and length.
pub(super) type Range = (u64, u64);

/// Every mapping by its address.
#[derive(Clone, Debug, Default)]
pub(super) struct Home {
    mapped: BTreeMap<u64, u64>,
}

impl Home {
    /// Applies logged driver calls.
    pub(super) fn follow(&mut self, log: Vec<Logged>) {
        for Logged { call, .. } in log.into_iter().filter(|logged| logged.done) {
            let (start, size) = (call.start.0, call.size.get());
            match call.verb {
                Verb::Map => drop(self.mapped.insert(start, size)),
                Verb::Unmap => self.mapped.retain(|at, _| !(start..start + size).contains(at)),
                _ => {}
            }
        }
    }

    /// Mappings that lie in a range.
    pub(super) fn within(&self, (start, size): Range) -> impl Iterator<Item = Range> + '_ {
        self.mapped.range(start..start + size).map(|(start, size)| (*start, *size))
    }

    /// Returns the mappings outside a range.
    pub(super) fn without(&self, (start, size): Range) -> Home {
        let outside = self.mapped.iter().filter(|(at, _)| !(start..start + size).contains(*at));
        Home { mapped: outside.map(|(start, size)| (*start, *size)).collect() }
    }

    /// Mappings that no live block touches.
    pub(super) fn idle(&self, live: &[(BlockId, Block)]) -> Vec<Range> {
        let taken = sorted(live);
        let is_free = |&(start, size): &Range| {
            let next = taken.partition_point(|block| block.0 + block.1 <= start);
            taken.get(next).is_none_or(|block| block.0 >= start + size)
        };
        self.mapped.iter().map(|(start, size)| (*start, *size)).filter(is_free).collect()
    }

    /// Mapped bytes between live blocks, joined where they touch.
    pub(super) fn free_ranges(&self, live: &[(BlockId, Block)]) -> Vec<Range> {
        let taken = sorted(live);
        let mut free: Vec<Range> = Vec::new();
        for (&start, &size) in &self.mapped {
            let mut at = start;
            let first = taken.partition_point(|block| block.0 + block.1 <= start);
            for &(from, length) in taken[first..].iter().take_while(|block| block.0 < start + size) {
                add(&mut free, at, from);
                at = from + length;
            }
            add(&mut free, at, start + size);
        }
        free
    }

    /// The mappings as lines of `width` marks, each for an equal share of the addresses between the first and the last
    /// mapping: `S` mostly in `lent`, else `#` live, `+` partly live, `.` free, and a blank where nothing is mapped.
    pub(super) fn picture(
        &self,
        width: usize,
        lines: usize,
        live: &[(BlockId, Block)],
        lent: &[Range],
    ) -> String {
        let (Some((&first, _)), Some((&last, &size))) =
            (self.mapped.first_key_value(), self.mapped.last_key_value())
        else {
            return String::new();
        };
        let live = sorted(live);
        let cells = (width * lines) as u64;
        let share = (last + size - first).div_ceil(cells);
        let marks = (0..cells).map(|cell| {
            let place = (first + cell * share, share);
            let mapped = covered(self.mapped.iter().map(|(start, size)| (*start, *size)), place);
            let (live, lent) = (covered(live.iter().copied(), place), covered(lent.iter().copied(), place));
            match (lent * 2 > share, live * 4 > share * 3, live * 4 > share, mapped > 0) {
                (true, ..) => 'S',
                (_, true, ..) => '#',
                (_, _, true, _) => '+',
                (_, _, _, true) => '.',
                _ => ' ',
            }
        });
        let marks: Vec<char> = marks.collect();
        let rows: Vec<String> = marks.chunks(width).map(|row| row.iter().collect::<String>()).collect();
        rows.join("\n")
    }
}

fn sorted(live: &[(BlockId, Block)]) -> Vec<Range> {
    let mut taken: Vec<Range> = live.iter().map(|(_, block)| (block.address.0, block.size.get())).collect();
    taken.sort_unstable();
    taken
}

fn add(free: &mut Vec<Range>, from: u64, to: u64) {
    match free.last_mut() {
        _ if from >= to => {}
        Some(last) if last.0 + last.1 == from => last.1 = to - last.0,
        _ => free.push((from, to - from)),
    }
}

fn covered(ranges: impl Iterator<Item = Range>, (start, size): Range) -> u64 {
    ranges.map(|(from, length)| (from + length).min(start + size).saturating_sub(from.max(start))).sum()
}

#[cfg(test)]
mod tests {
    use glake_device::{Address, Call};
    use glake_units::Bytes;

    use super::*;

    fn home(maps: &[Range]) -> Home {
        let logged = |verb, (start, size)| {
            let call = Call { verb, device: None, start: Address(start), size: Bytes::new(size), gpus: 0 };
            Logged { call, done: true }
        };
        let mut home = Home::default();
        home.follow(maps.iter().map(|&range| logged(Verb::Map, range)).collect());
        home.follow(vec![logged(Verb::Unmap, (90, 20))]);
        home
    }

    #[test]
    fn free_is_what_lies_between() {
        let home = home(&[(0, 10), (10, 10), (30, 10), (90, 10), (100, 10)]);
        let block = |start, size| (BlockId(0), Block { address: Address(start), size: Bytes::new(size) });
        let live = [block(4, 3), block(12, 2), block(34, 6)];
        assert_eq!(home.free_ranges(&live), [(0, 4), (7, 5), (14, 6), (30, 4)]);
        assert_eq!(home.idle(&live[1..]), [(0, 10)]);
        assert_eq!(home.picture(4, 1, &live, &[(30, 10)]), "+. S");
    }
}
