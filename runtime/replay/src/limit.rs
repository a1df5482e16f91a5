//! Smallest limit under which a trace completes.
//!
//! This property is not monotonic in the limit: with more room, an allocator may place a block where it splits a range that a later block
//! needs. The search bisects to 2 MiB, then tries limits above the result at growing distances. If one of them fails, the search continues
//! above it. The result is a limit under which the trace completed, while it failed at 2 MiB less (or that is less than the live memory)
//! and at no tried limit above the result. A smaller limit may succeed by chance; it is not useful.

use glake_units::Bytes;

use super::frame::completes;
use super::subject::{Refusal, Subject};
use crate::trace::Trace;

const STEP: u64 = 2 << 20;

/// Reason why no limit was found.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum FitError {
    /// Failure of the subject, or of its creation.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The trace does not complete even under the highest limit: give a higher one.
    #[error("the trace does not complete even under {ceiling}")]
    NeverFits {
        /// Highest limit that was tried.
        ceiling: Bytes,
    },
}

/// Finds the smallest limit under which the trace completes, in steps of 2 MiB, between the peak of live memory and `ceiling`, the reserved
/// peak of a replay without a limit. `make` creates a new subject under a limit. `progress` is called after every replay with the number of
/// replays so far.
///
/// # Errors
///
/// [`FitError`]: the trace does not complete under `ceiling`, or a subject failed.
pub fn find_limit<'a>(
    trace: &Trace,
    ceiling: Bytes,
    mut make: impl FnMut(Bytes) -> Result<Box<dyn Subject + 'a>, Refusal>,
    progress: &mut dyn FnMut(u64),
) -> Result<Bytes, FitError> {
    let mut replays = 0;
    let mut fits = |steps: u64| -> Result<bool, Refusal> {
        let mut subject = make(Bytes::new(steps.saturating_mul(STEP)))?;
        let fit = completes(trace, subject.as_mut())?;
        replays += 1;
        progress(replays);
        Ok(fit)
    };
    let top = ceiling.get().div_ceil(STEP);
    if !fits(top)? {
        return Err(FitError::NeverFits { ceiling });
    }
    // No limit below the peak of live memory can fit.
    let mut low = (trace.peaks().requested.get().div_ceil(STEP)).saturating_sub(1);
    loop {
        let found = bisect(low, top.max(low + 1), &mut fits)?;
        match first_failure_above(found, top, &mut fits)? {
            None => return Ok(Bytes::new(found.saturating_mul(STEP))),
            Some(failed) => low = failed,
        }
    }
}

/// Bisects between `low`, which does not fit, and `high`, which fits.
fn bisect(
    mut low: u64,
    mut high: u64,
    fits: &mut impl FnMut(u64) -> Result<bool, Refusal>,
) -> Result<u64, Refusal> {
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if fits(middle)? {
            high = middle;
        } else {
            low = middle;
        }
    }
    Ok(high)
}

/// Returns the highest limit that does not fit among those 1, 2, 4, ... steps above `found`.
fn first_failure_above(
    found: u64,
    top: u64,
    fits: &mut impl FnMut(u64) -> Result<bool, Refusal>,
) -> Result<Option<u64>, Refusal> {
    let mut failed = None;
    let mut distance = 1;
    while found + distance < top {
        if !fits(found + distance)? {
            failed = Some(found + distance);
        }
        distance *= 2;
    }
    Ok(failed)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::Counters;
    use super::*;
    use crate::trace::{BlockId, StreamIndex};

    /// Subject that fits if its field is set.
    struct Fits(bool);

    impl Subject for Fits {
        fn allocate(&mut self, _: BlockId, wanted: Bytes, _: StreamIndex, _: u64) -> Result<(), Refusal> {
            let (reserved, limit) = (Bytes::ZERO, Bytes::ZERO);
            if self.0 { Ok(()) } else { Err(Refusal::OutOfMemory { wanted, reserved, limit }) }
        }

        fn reserved(&self) -> Bytes {
            Bytes::ZERO
        }

        fn counters(&self) -> Counters {
            Counters::default()
        }
    }

    fn search(fits: impl Fn(u64) -> bool) -> Result<u64, FitError> {
        let trace = Trace::from_bytes(Path::new("t"), b"a 0 20971520 0 0\n", None).unwrap();
        let make = |limit: Bytes| Ok(Box::new(Fits(fits(limit.get() >> 20))) as Box<dyn Subject>);
        find_limit(&trace, Bytes::mib(999), make, &mut |_| ()).map(|limit| limit.get() >> 20)
    }

    #[test]
    fn finds_the_smallest() {
        for smallest in [20, 22, 500, 998, 1000] {
            assert_eq!(search(|limit| limit >= smallest).unwrap(), smallest);
        }
        assert!(matches!(search(|_| false), Err(FitError::NeverFits { .. })));
    }

    #[test]
    fn goes_on_above_a_hole() {
        // 100..=106 fits, 108..=199 does not: a reliable limit is above the hole.
        assert_eq!(search(|limit| (100..=106).contains(&limit) || limit >= 200).unwrap(), 200);
    }
}
