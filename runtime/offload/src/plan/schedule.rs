//! Schedule of a plan: the position at which each reload begins, and by which each copy out must have completed.
//!
//! Both follow from positions and bytes, so that they hold whatever the copies take:
//!
//! - Reloads are walked from the last to the first. Each would begin so late that it just arrives (links a tenth slower
//!   than they are), behind those before it. Where the cells in between have no room the latest of them begin later.
//! - Copies out end in the order of their packs. What has been packed, and is not held by the forward, counts until the
//!   position at which room runs out: there the oldest must have ended.

use std::collections::VecDeque;

use super::Verdict;
use super::course::{Course, NONE};
use super::trial::Curve;

/// Factor by which links are assumed slower than measured when choosing where a reload begins.
const MARGIN: f64 = 1.1;

/// Both copy queues with their progress at each position.
#[derive(Clone, Debug, Default)]
pub(crate) struct Schedule {
    /// Items in the order of their copies out and of their reloads.
    pub(crate) out: Vec<usize>,
    pub(crate) into: Vec<usize>,
    /// Number of `out` that must have completed, and of `into` that must have begun, before each step.
    pub(crate) settled: Vec<usize>,
    pub(crate) issued: Vec<usize>,
    /// Step at which each item's reload begins.
    pub(crate) reload_at: Vec<usize>,
    /// Maximum memory held in each cell.
    pub(crate) held: Vec<i64>,
    /// Memory of items reloaded ahead of their use, per cell.
    pub(crate) ahead: Vec<i64>,
    window: VecDeque<(usize, f64)>,
    needed: Vec<usize>,
    /// Begin of each step with recomputing and without waiting.
    begins: Vec<f64>,
    shift: Vec<f64>,
    heads: Heads,
    floors: Heads,
    released: Heads,
}

impl Schedule {
    /// Computes the schedule of verdicts whose `curve` stays within `budget`.
    pub(crate) fn fill(
        &mut self,
        course: &Course,
        verdicts: &[Verdict],
        replayed: &[bool],
        curve: &Curve,
        budget: i64,
    ) {
        let offloaded = |index: &usize| verdicts[*index] == Verdict::Offload;
        self.out.clear();
        self.out.extend((0..course.items.len()).filter(offloaded));
        self.begins(course, verdicts);
        self.reloads(course, replayed, curve, budget);
        self.copies_out(course, curve, budget);
    }

    fn begins(&mut self, course: &Course, verdicts: &[Verdict]) {
        self.begins.clone_from(&course.begins);
        let mut any = false;
        self.shift.clear();
        self.shift.resize(course.cells + 1, 0.0);
        for scope in course.scopes.iter().filter(|scope| scope.start != NONE) {
            let again = scope.items.iter().filter(|item| verdicts[**item] == Verdict::Recompute);
            let time: f64 = again.filter_map(|item| course.items[*item].recompute).sum();
            self.shift[scope.start + 1] += time;
            any |= time > 0.0;
        }
        if any {
            let mut sum = 0.0;
            for (begin, by) in self.begins.iter_mut().zip(&self.shift) {
                sum += by;
                *begin += sum;
            }
        }
    }

    /// Places reloads, from the last cell to the first.
    fn reloads(&mut self, course: &Course, replayed: &[bool], curve: &Curve, budget: i64) {
        let cells = course.cells;
        self.reload_at.clear();
        self.reload_at.resize(course.items.len(), NONE);
        self.ahead.clear();
        self.ahead.resize(cells, 0);
        self.heads.clear(cells + 1);
        self.floors.clear(cells + 1);
        // Pushed in the order of packs and so found in the reverse, which is the order of most backwards.
        for &index in &self.out {
            let item = &course.items[index];
            let need = course.need(item, replayed);
            if need != NONE {
                self.heads.push(need, index, course.items.len());
                self.floors.push((item.release + 1).min(need), index, course.items.len());
            }
        }
        let out_ends = self.out_ends(course);
        let (mut bytes, mut link_begins) = (0, f64::INFINITY);
        self.window.clear();
        self.into.clear();
        for cell in (0..cells).rev() {
            // Those needed at the step behind this cell, where several are: the first unpacked is the first to come.
            self.needed.clear();
            let mut next = self.heads.first(cell + 1);
            while next != NONE {
                self.needed.push(next);
                next = self.heads.next(next);
            }
            self.needed.sort_unstable_by_key(|index| course.items[*index].first);
            for &index in self.needed.iter().rev() {
                let slower = if self.begins[cell + 1] < out_ends { course.rates.into_at_once } else { 1.0 };
                let arrives = self.begins[cell + 1].min(link_begins);
                link_begins = arrives - course.items[index].into * MARGIN / slower;
                self.window.push_front((index, link_begins));
                bytes += course.items[index].bytes;
            }
            // The step behind this cell is where the latest begin: in time, for want of room, or because they are held
            // in this cell anyway.
            let step = cell + 1;
            let mut held = self.floors.first(step);
            while held != NONE {
                while self.reload_at[held] == NONE {
                    let Some((index, _)) = self.window.pop_back() else { break };
                    self.begin(index, step);
                    bytes -= course.items[index].bytes;
                }
                held = self.floors.next(held);
            }
            while let Some((index, begins)) = self.window.back().copied() {
                let in_time = self.begins[step] <= begins;
                if !in_time && curve.cells()[cell] + bytes <= budget {
                    break;
                }
                self.window.pop_back();
                self.begin(index, step);
                bytes -= course.items[index].bytes;
                if !in_time && self.window.is_empty() {
                    link_begins = self.begins[step];
                }
            }
            self.ahead[cell] = bytes;
        }
        self.into.reverse();
    }

    /// Begins the reload of `index` at `step`, before all reloads placed so far.
    fn begin(&mut self, index: usize, step: usize) {
        self.reload_at[index] = step;
        self.into.push(index);
    }

    /// Determines from the first cell to the last which copies must have completed before each step, given where reloads begin.
    pub(crate) fn copies_out(&mut self, course: &Course, curve: &Curve, budget: i64) {
        let cells = course.cells;
        self.released.clear(cells + 1);
        for (at, &index) in self.out.iter().enumerate() {
            self.released.push(course.items[index].release + 1, at, self.out.len());
        }
        self.settled.clear();
        self.issued.clear();
        self.held.clear();
        let (mut settled, mut issued, mut backlog) = (0, 0, 0);
        for cell in 0..cells {
            let mut at = self.released.first(cell);
            while at != NONE {
                if at >= settled {
                    backlog += course.items[self.out[at]].bytes;
                }
                at = self.released.next(at);
            }
            let room = budget - curve.cells()[cell] - self.ahead[cell];
            // What is reloaded at this step has been copied out before.
            let mut must = settled;
            while issued < self.into.len() && self.reload_at[self.into[issued]] <= cell {
                let index = self.into[issued];
                must = must.max(self.out.partition_point(|other| *other <= index));
                issued += 1;
            }
            while settled < must || (backlog > room && settled < self.out.len()) {
                let item = &course.items[self.out[settled]];
                if item.pack >= cell {
                    break;
                }
                if item.release < cell {
                    backlog -= item.bytes;
                }
                settled += 1;
            }
            self.settled.push(settled);
            self.issued.push(issued);
            self.held.push(curve.cells()[cell] + self.ahead[cell] + backlog);
        }
    }

    /// Estimates when the last copy out completes.
    fn out_ends(&self, course: &Course) -> f64 {
        let next = |ends: f64, index: &usize| {
            ends.max(self.begins[course.items[*index].pack]) + course.items[*index].out
        };
        self.out.iter().fold(0.0, next)
    }
}

/// Linked lists of numbers per position, without an allocation each.
#[derive(Clone, Debug, Default)]
struct Heads {
    heads: Vec<usize>,
    nexts: Vec<usize>,
}

impl Heads {
    fn clear(&mut self, positions: usize) {
        self.heads.clear();
        self.heads.resize(positions, NONE);
    }

    /// Prepends `number` (below `numbers`) to the list of `position`.
    fn push(&mut self, position: usize, number: usize, numbers: usize) {
        if self.nexts.len() < numbers {
            self.nexts.resize(numbers, NONE);
        }
        self.nexts[number] = std::mem::replace(&mut self.heads[position], number);
    }

    fn first(&self, position: usize) -> usize {
        self.heads.get(position).copied().unwrap_or(NONE)
    }

    fn next(&self, number: usize) -> usize {
        self.nexts[number]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::course::tests::small;

    fn schedule(budget: i64) -> Schedule {
        let (course, verdicts) = (small(), [Verdict::Offload, Verdict::Offload, Verdict::Keep]);
        let (mut curve, mut schedule, replayed) = (Curve::default(), Schedule::default(), [false]);
        curve.fill(&course, &verdicts, &replayed);
        assert_eq!(curve.cells(), [101, 110, 200, 200, 110, 101]);
        schedule.fill(&course, &verdicts, &replayed, &curve, budget);
        schedule
    }

    #[test]
    fn with_room_reloads_begin_in_time_and_nothing_is_waited_for() {
        let schedule = schedule(1000);
        // A copy takes a step and a tenth; the second to come is needed at step 4, the first at step 5 behind it.
        assert_eq!((&schedule.into[..], &schedule.reload_at[..2]), (&[1, 0][..], &[3, 2][..]));
    }

    #[test]
    fn without_room_they_begin_when_they_are_needed_and_copies_out_are_waited_for() {
        let schedule = schedule(200);
        assert_eq!(schedule.reload_at[..2], [4, 4]);
        assert_eq!(schedule.settled, [0, 0, 2, 2, 2, 2]);
        assert_eq!(schedule.issued, [0, 0, 0, 0, 2, 2]);
        assert_eq!(schedule.held, [101, 111, 200, 200, 111, 101]);
    }
}
