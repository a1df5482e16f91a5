//! GPU memory of a process in addition to the items of its pass.

use std::collections::BTreeMap;

use glake_units::Bytes;

use crate::Position;

/// Samples of this memory, by position.
#[derive(Clone, Debug, Default)]
pub(super) struct Rest {
    samples: Vec<(Position, Bytes)>,
}

impl Rest {
    /// Records a sample after `at` steps, or the maximum since the previous one.
    pub(super) fn sample(&mut self, at: Position, rest: Bytes) {
        self.samples.push((at, rest));
    }

    /// Returns the memory in each of `cells` cells, where a cell follows its step: at least the samples on both sides.
    pub(super) fn resolve(&self, cells: usize) -> Vec<Bytes> {
        let mut curve = vec![Bytes::ZERO; cells];
        if cells == 0 {
            return curve;
        }
        // A sample after so many steps is of the cell behind the last of them.
        let cell = |at: Position| at.0.saturating_sub(1).min(cells - 1);
        let mut samples: BTreeMap<usize, Bytes> = BTreeMap::new();
        for (at, rest) in &self.samples {
            let largest = samples.entry(cell(*at)).or_default();
            *largest = (*largest).max(*rest);
        }
        let Some((&first, &rest)) = samples.first_key_value() else { return curve };
        curve[..first].fill(rest);
        let (mut from, mut before) = (first, rest);
        for (at, rest) in samples {
            if at > from {
                curve[from + 1..at].fill(before.max(rest));
            }
            curve[at] = rest;
            (from, before) = (at, rest);
        }
        curve[from + 1..].fill(before);
        curve
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn between_two_samples_it_is_the_larger() {
        let mut rest = Rest::default();
        rest.sample(Position(2), Bytes::new(10));
        rest.sample(Position(5), Bytes::new(30));
        rest.sample(Position(5), Bytes::new(20));
        rest.sample(Position(7), Bytes::new(5));
        let curve: Vec<u64> = rest.resolve(9).iter().map(|bytes| bytes.get()).collect();
        assert_eq!(curve, [10, 10, 30, 30, 30, 30, 5, 5, 5]);
    }

    #[test]
    fn without_samples_it_is_nothing() {
        assert_eq!(Rest::default().resolve(2), [Bytes::ZERO; 2]);
        let mut early = Rest::default();
        early.sample(Position(0), Bytes::new(7));
        assert_eq!(early.resolve(0), []);
        assert_eq!(early.resolve(2), [Bytes::new(7); 2]);
    }
}
