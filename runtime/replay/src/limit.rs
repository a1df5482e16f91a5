//! The smallest limit under which a trace completes.
//!
//! Whether a trace completes is not monotone in the limit: more room can lead an allocator to place a block where it
//! splits a range that a later block needs. So the search bisects at 2 MiB, then tries limits above what it found at
//! growing distances, and wherever one of them fails goes on above it. The answer is a limit under which the trace
//! was seen to complete, while it was seen to fail at 2 MiB less (or that is less than what was live), and at no
//! limit tried above the answer did it fail. A smaller limit that happens to fit may exist and is of no use to anyone.

use glake_units::Bytes;

use super::frame::completes;
use super::subject::{Refusal, Subject};
use crate::trace::Trace;

const STEP: u64 = 2 << 20;

/// Why no limit was found.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum FitError {
    /// The subject failed, or could not be made.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The trace does not complete even under the highest limit: give a higher one.
    #[error("the trace does not complete even under {ceiling}")]
    NeverFits {
        /// The highest limit that was tried.
        ceiling: Bytes,
    },
}

/// The smallest limit under which the trace completes, in steps of 2 MiB, between the peak of live memory and
/// `ceiling`, which is the reserved peak of a replay without a limit. `make` makes a fresh subject under a limit;
/// `progress` is called after every replay with the number done.
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
    // Below what is live at once nothing can fit.
    let mut low = (trace.peaks().requested.get().div_ceil(STEP)).saturating_sub(1);
    loop {
        let found = bisect(low, top.max(low + 1), &mut fits)?;
        match first_failure_above(found, top, &mut fits)? {
            None => return Ok(Bytes::new(found.saturating_mul(STEP))),
            Some(failed) => low = failed,
        }
    }
}

/// `low` does not fit, `high` does.
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

/// The highest of the limits tried above `found` that does not fit: 1, 2, 4, ... steps above.
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

    /// Fits where it is told to.
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
        // 100..=106 fits, 108..=199 does not: a limit that holds lies above the hole.
        assert_eq!(search(|limit| (100..=106).contains(&limit) || limit >= 200).unwrap(), 200);
    }
}
