//! Division of a broadcast into shares per GPU and slices. Pure.
//!
//! ```text
//!   bytes   │ GPU 0's share │ GPU 1's share │ GPU 2's share │     by the rates of their links
//!   slices  │ 0 │ 3 │ 6 │ 9 │ 1 │ 4 │ 7 │ 10│ 2 │ 5 │ 8 │ 11│     in the order of their issue
//! ```

use glake_units::Bytes;
use smallvec::SmallVec;

use crate::paths::GRAIN;

/// Slice that is pulled and forwarded as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slice {
    /// Index of the GPU that pulls it.
    pub(crate) source: usize,
    pub(crate) offset: Bytes,
    pub(crate) size: Bytes,
}

/// Slices of a broadcast in round-robin order of their shares.
#[derive(Clone, Debug)]
pub(crate) struct Slices {
    /// Remaining part and slice size of each share.
    left: SmallVec<[(Slice, Bytes); 8]>,
    prioritized: usize,
}

/// Minimum slice size, so that issuing takes no longer than the transfer. On H200s 2 MiB is best for 64 MiB, 8 MiB for 1 GiB; above that, 4
/// to 64 MiB make no difference.
const LEAST: Bytes = Bytes::mib(1);
const MANY: Bytes = Bytes::mib(8);
/// Minimum number of slices per share: the last slice must still be forwarded after it was pulled.
const PARTS: u64 = 8;
/// Maximum number of slices per share. More would fill the driver's queues, and a call that finds a queue full blocks until the stream
/// progresses, possibly until later work of the program.
const MOST: u64 = 64;

impl Slices {
    /// Divides `size` bytes among links in proportion to `rates`.
    pub(crate) fn new(size: Bytes, rates: &[f64]) -> Slices {
        let all: f64 = rates.iter().sum();
        let (mut sum, mut offset) = (0.0, Bytes::ZERO);
        let mut left = SmallVec::new();
        for (source, rate) in rates.iter().enumerate() {
            sum += rate;
            let end = if source + 1 == rates.len() { size } else { grains(size, sum / all) };
            let share = end.saturating_sub(offset);
            let part = |parts| Bytes::new(share.get().div_ceil(parts)).align_up(GRAIN).unwrap_or(share);
            let slice = part(PARTS).max(LEAST).min(MANY).max(part(MOST));
            left.push((Slice { source, offset, size: share }, slice));
            offset = offset.max(end);
        }
        Slices { left, prioritized: 0 }
    }
}

impl Iterator for Slices {
    type Item = Slice;

    fn next(&mut self) -> Option<Slice> {
        let count = self.left.len();
        let at = (0..count)
            .map(|step| (self.prioritized + step) % count)
            .find(|at| !self.left[*at].0.size.is_zero())?;
        self.prioritized = at + 1;
        let (rest, most) = &mut self.left[at];
        let slice = Slice { size: rest.size.min(*most), ..*rest };
        rest.offset = rest.offset.saturating_add(slice.size);
        rest.size = rest.size.saturating_sub(slice.size);
        Some(slice)
    }
}

/// Returns `part` of `size` in whole grains.
#[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, clippy::cast_sign_loss)]
fn grains(size: Bytes, part: f64) -> Bytes {
    let grains = (size.get() as f64 * part / GRAIN.get() as f64) as u64;
    Bytes::new(grains.saturating_mul(GRAIN.get())).min(size)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn links_take_turns_and_share_by_their_rates() {
        let slices: Vec<Slice> = Slices::new(Bytes::mib(12), &[50.0, 50.0, 100.0]).collect();
        let of = |source| slices.iter().filter(move |slice| slice.source == source);
        let sizes = [0, 1, 2].map(|source| of(source).map(|slice| slice.size).sum::<Bytes>());
        assert_eq!(sizes, [Bytes::mib(3), Bytes::mib(3), Bytes::mib(6)]);
        let sources: Vec<usize> = slices.iter().map(|slice| slice.source).collect();
        assert_eq!(sources, [0, 1, 2, 0, 1, 2, 0, 1, 2, 2, 2, 2]);
        assert_eq!(Slices::new(Bytes::gib(4), &[1.0; 4]).next().unwrap().size, Bytes::mib(16));
        assert_eq!(Slices::new(Bytes::gib(1), &[1.0; 4]).next().unwrap().size, Bytes::mib(8));
        assert_eq!(Slices::new(Bytes::mib(64), &[1.0; 4]).next().unwrap().size, Bytes::mib(2));
    }

    proptest! {
        #[test]
        fn slices_cover_the_bytes_once(size in 1_u64..1 << 34, rates in prop::collection::vec(1.0..100.0, 1..9)) {
            let size = Bytes::new(size);
            let mut slices: Vec<Slice> = Slices::new(size, &rates).collect();
            prop_assert!(slices.len() as u64 <= MOST * rates.len() as u64);
            slices.sort_unstable_by_key(|slice| slice.offset);
            let mut end = Bytes::ZERO;
            for slice in slices {
                prop_assert_eq!(slice.offset, end);
                prop_assert!(!slice.size.is_zero());
                end = slice.offset.saturating_add(slice.size);
            }
            prop_assert_eq!(end, size);
        }
    }
}
