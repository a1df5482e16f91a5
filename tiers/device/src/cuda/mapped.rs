//! Cache of which allocations were mapped: the driver takes microseconds to answer.
//!
//! Invariant: a slot holds an allocation's number and its answer in one word. Numbers are never reused within a process.

use std::sync::atomic::{AtomicU64, Ordering};

/// Number of cached answers.
const PLACES: usize = 64;

pub(super) struct Mapped([AtomicU64; PLACES]);

impl Mapped {
    pub(super) fn new() -> Mapped {
        Mapped([const { AtomicU64::new(0) }; PLACES])
    }

    pub(super) fn known(&self, number: u64) -> Option<bool> {
        let word = self.place(number).load(Ordering::Relaxed);
        (number > 0 && word >> 1 == number).then_some(word & 1 == 1)
    }

    pub(super) fn remember(&self, number: u64, mapped: bool) {
        if number > 0 && number < 1 << 63 {
            self.place(number).store(number << 1 | u64::from(mapped), Ordering::Relaxed);
        }
    }

    fn place(&self, number: u64) -> &AtomicU64 {
        // The remainder is less than the length, so it fits.
        &self.0[(number % PLACES as u64) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_belong_to_one_allocation() {
        let mapped = Mapped::new();
        mapped.remember(5, true);
        mapped.remember(6, false);
        assert_eq!(
            [5, 6, 7, 5 + 64].map(|number| mapped.known(number)),
            [Some(true), Some(false), None, None]
        );
        mapped.remember(5 + 64, false);
        assert_eq!([5, 5 + 64].map(|number| mapped.known(number)), [None, Some(false)]);
        for number in [0, 1 << 63] {
            mapped.remember(number, true);
            assert_eq!(mapped.known(number), None);
        }
    }
}
