//! Predictions of the time in which memory leaves and returns: bytes over the link rate, corrected by observations.

use std::time::Duration;

use glake_units::Bytes;

/// Cost of driver calls per GiB of clean memory, measured on one H200; the next constant is the fixed cost of a switch.
const CLEAN_GIB: Duration = Duration::from_micros(530);
const FIXED: Duration = Duration::from_millis(6);

/// Corrections of one worker. Each observation corrects 30 % of the error; copies stay between 1/4 and 16 times the link rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Predictions {
    /// Observed time of a refill in thousandths of the computed one.
    refill: u32,
    shrink: u32,
    park: Duration,
    has_shrunk: bool,
}

impl Default for Predictions {
    fn default() -> Self {
        Predictions { refill: 1000, shrink: 1000, park: Duration::from_millis(30), has_shrunk: false }
    }
}

impl Predictions {
    pub(crate) fn refill(&self, copied: Bytes, link: Bytes) -> Duration {
        scaled(FIXED + over(copied, link), self.refill)
    }

    pub(crate) fn shrink(&self, leaving: Bytes, dirty: Bytes, link: Bytes) -> Duration {
        let clean = nanos(u128::from(leaving.get()) * CLEAN_GIB.as_nanos() / u128::from(Bytes::gib(1).get()));
        scaled(FIXED + clean + over(dirty, link), self.shrink)
    }

    pub(crate) fn park(&self) -> Duration {
        self.park
    }

    /// Records that a refill of `copied` bytes took `took`.
    pub(crate) fn saw_refill(&mut self, copied: Bytes, link: Bytes, took: Duration) {
        self.refill = corrected(self.refill, FIXED + over(copied, link), took);
    }

    /// Records that a shrink of `leaving` bytes took `took`.
    pub(crate) fn saw_shrink(&mut self, leaving: Bytes, dirty: Bytes, link: Bytes, took: Duration) {
        let plain = Predictions { shrink: 1000, ..*self }.shrink(leaving, dirty, link);
        self.shrink = corrected(self.shrink, plain, took);
        self.has_shrunk = true;
    }

    /// Returns whether a shrink has ended; the first one may take longer than later ones.
    pub(crate) fn has_shrunk(&self) -> bool {
        self.has_shrunk
    }

    /// Records that parking took `took`, or was not complete by then, which raises the next prediction. Predictions never exceed `longest`.
    pub(crate) fn saw_park(&mut self, took: Duration, longest: Duration) {
        self.park = (self.park.min(longest) * 7 + took.min(longest) * 3) / 10;
    }
}

/// Returns the time of a transfer of `bytes` over a link.
pub(crate) fn over(bytes: Bytes, link: Bytes) -> Duration {
    nanos(u128::from(bytes.get()) * 1_000_000_000 / u128::from(link.get().max(1)))
}

fn nanos(nanos: u128) -> Duration {
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX / 1024).min(u64::MAX / 1024))
}

fn scaled(time: Duration, thousandths: u32) -> Duration {
    time.saturating_mul(thousandths) / 1000
}

fn corrected(before: u32, plain: Duration, took: Duration) -> u32 {
    let seen = took.as_nanos().saturating_mul(1000) / plain.as_nanos().max(1);
    let seen = u32::try_from(seen).unwrap_or(u32::MAX).clamp(250, 16_000);
    (before * 7 + seen * 3) / 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn predictions_converge_to_observations() {
        let (link, bytes) = (Bytes::new(50_000_000_000), Bytes::gib(8));
        let mut seen = Predictions::default();
        let truth = Duration::from_millis(400);
        for _ in 0..20 {
            seen.saw_refill(bytes, link, truth);
        }
        let error = seen.refill(bytes, link).abs_diff(truth);
        assert!(error < Duration::from_millis(5), "{error:?}");
        assert!(seen.shrink(bytes, Bytes::ZERO, link) < Duration::from_millis(12));
    }

    #[test]
    fn predictions_of_parks_are_bounded() {
        let (mut seen, longest) = (Predictions::default(), Duration::from_secs(75));
        for _ in 0..1_000 {
            seen.saw_park(seen.park() * 4, longest);
            assert!(seen.park() <= longest, "{:?}", seen.park());
        }
        assert!(seen.park() > longest / 2, "{:?}", seen.park());
    }
}
