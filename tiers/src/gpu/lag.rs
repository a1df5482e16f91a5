//! Histogram of the GPU's lag behind the host at misses.
//!
//! ```text
//! age of the oldest completion point not passed ─► bucket:  0 | 1 us: 4 a power of two ... | longer than 12 days
//! ```
//!
//! Each bucket ends a quarter above its beginning, which bounds the error of a quantile; the maximum is exact.

use std::time::Duration;

/// Buckets per power of two.
const SPLIT: u32 = 4;
const POWERS: u32 = 40;
const BUCKETS: usize = 2 + (SPLIT * POWERS) as usize;

/// Lag of the GPU behind the host over all misses: the age of the oldest event for frees that had not passed. The age is 0 if no frees are
/// pending.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompletionLag {
    /// Number of misses so far.
    pub misses: u64,
    /// Median of the lag, rounded up by at most a quarter.
    pub p50: Duration,
    /// 95th percentile of the lag, rounded up by at most a quarter.
    pub p95: Duration,
    /// Maximum of the lag, exact.
    pub max: Duration,
}

/// Counts of the buckets.
#[derive(Clone, Debug)]
pub(super) struct Lags {
    counts: [u64; BUCKETS],
    misses: u64,
    max: Duration,
}

impl Default for Lags {
    fn default() -> Self {
        Lags { counts: [0; BUCKETS], misses: 0, max: Duration::ZERO }
    }
}

#[allow(clippy::cast_possible_truncation)] // below 128 bits' logarithm
fn bucket_of(age: Duration) -> usize {
    let micros = age.as_micros();
    if micros == 0 {
        return 0;
    }
    let log = micros.ilog2();
    let quarter = if log < 2 { (micros << 2 >> log) as u32 } else { (micros >> (log - 2)) as u32 } % SPLIT;
    BUCKETS.min(2 + (SPLIT * log + quarter) as usize) - 1
}

/// Returns the upper bound of a bucket.
fn longest(bucket: usize) -> Duration {
    let Some(index) = bucket.checked_sub(1) else { return Duration::ZERO };
    let (log, quarter) = (index / SPLIT as usize, (index % SPLIT as usize) as u64);
    let next = ((u64::from(SPLIT) + quarter + 1) << log) / u64::from(SPLIT);
    Duration::from_micros(next)
}

impl Lags {
    /// Adds one miss to the histogram.
    pub(super) fn note(&mut self, age: Duration) {
        self.counts[bucket_of(age)] += 1;
        self.misses += 1;
        self.max = self.max.max(age);
    }

    pub(super) fn told(&self) -> CompletionLag {
        CompletionLag { misses: self.misses, p50: self.at(50), p95: self.at(95), max: self.max }
    }

    fn at(&self, percent: u64) -> Duration {
        let rank = self.misses.saturating_mul(percent).div_ceil(100).max(1);
        let mut seen = 0;
        let bucket = self.counts.iter().position(|count| {
            seen += count;
            seen >= rank
        });
        bucket.map_or(Duration::ZERO, longest).min(self.max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_age_lies_in_its_bucket() {
        let mut before = Duration::ZERO;
        for micros in (0..5000).chain((13..50).map(|power| (1u64 << power) + 7)) {
            let age = Duration::from_micros(micros);
            let bucket = bucket_of(age);
            assert!(bucket < BUCKETS && bucket_of(before) <= bucket, "{micros}");
            if bucket < BUCKETS - 1 {
                let (least, most) = (bucket.checked_sub(1).map(longest), longest(bucket));
                assert!(age <= most && least.is_none_or(|least| least <= age), "{micros}");
                assert!(most.as_micros() <= u128::from(micros + micros / 4 + 1), "{micros}");
            }
            before = age;
        }
    }

    #[test]
    fn quantiles_are_of_what_was_noted() {
        let mut lags = Lags::default();
        assert_eq!(lags.told(), CompletionLag::default());
        (0..90).for_each(|_| lags.note(Duration::ZERO));
        (0..8).for_each(|_| lags.note(Duration::from_micros(1000)));
        (0..2).for_each(|_| lags.note(Duration::from_millis(100)));
        let told = lags.told();
        assert_eq!((told.misses, told.p50, told.max), (100, Duration::ZERO, Duration::from_millis(100)));
        assert!((1000..=1280).contains(&told.p95.as_micros()), "{told:?}");
    }
}
