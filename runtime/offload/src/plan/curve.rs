//! Memory that must be on the GPU in each cell, independent of the links.

use super::Verdict;
use super::course::{Course, NONE};

/// Memory use of a pass: bytes in each cell.
#[derive(Clone, Debug, Default)]
pub(crate) struct Curve {
    cells: Vec<i64>,
}

impl Curve {
    /// Computes the curve of verdicts: kept items; other items while the forward pass holds them and while the backward pass uses them, as
    /// if copies took no time; and the memory outside items.
    pub(crate) fn fill(&mut self, course: &Course, verdicts: &[Verdict], replayed: &[bool]) {
        self.cells.clear();
        self.cells.resize(course.cells + 1, 0);
        for (item, verdict) in course.items.iter().zip(verdicts) {
            if *verdict == Verdict::Keep {
                self.add(item.bytes, item.pack, item.end);
                continue;
            }
            match course.need(item, replayed) {
                NONE => self.add(item.bytes, item.pack, item.release),
                need if need <= item.release + 1 => {
                    self.add(item.bytes, item.pack, item.last.max(item.release));
                }
                need => {
                    self.add(item.bytes, item.pack, item.release);
                    self.add(item.bytes, need, item.last);
                }
            }
        }
        let mut sum = 0;
        self.cells.pop();
        for (cell, rest) in self.cells.iter_mut().zip(&course.rest) {
            sum += *cell;
            *cell = sum + rest;
        }
    }

    /// Returns the maximum over all cells.
    pub(crate) fn peak(&self) -> i64 {
        self.cells.iter().copied().max().unwrap_or(0)
    }

    /// Returns the bytes of each cell.
    pub(crate) fn cells(&self) -> &[i64] {
        &self.cells
    }

    fn add(&mut self, bytes: i64, from: usize, last: usize) {
        self.cells[from] += bytes;
        self.cells[last + 1] -= bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::course::tests::small;

    #[test]
    fn kept_to_the_end_offloaded_while_used_recomputed_from_the_replay() {
        let course = small();
        let mut curve = Curve::default();
        let mut of = |verdicts: [Verdict; 3]| {
            let mut replayed = Vec::new();
            course.replayed(&verdicts, &mut replayed);
            curve.fill(&course, &verdicts, &replayed);
            curve.cells().to_vec()
        };
        assert_eq!(of([Verdict::Keep; 3]), [101, 111, 211, 211, 111, 101]);
        assert_eq!(of([Verdict::Offload; 3]), [101, 110, 200, 200, 110, 101]);
        // The first two are of one scope, whose replay begins with the second.
        assert_eq!(
            of([Verdict::Recompute, Verdict::Recompute, Verdict::Keep]),
            [101, 110, 200, 200, 111, 101]
        );
        assert_eq!(of([Verdict::Recompute, Verdict::Keep, Verdict::Keep]), [101, 110, 210, 210, 111, 101]);
    }
}
