//! How long a worker's memory takes to leave and to come back: bytes over a link's rate, corrected by what was seen.

use std::time::Duration;

use glake_units::Bytes;

/// What a driver call for a GiB of clean memory costs, and what a switch costs beside its bytes: one H200, docs/lab.
const CLEAN_GIB: Duration = Duration::from_micros(530);
const FIXED: Duration = Duration::from_millis(6);

/// What is foretold of one worker. Corrected by 0.3 of each error, copies between a quarter and 16 times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Predictions {
    /// Thousandths of what the rate says.
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

    /// A refill of `copied` bytes took `took`.
    pub(crate) fn saw_refill(&mut self, copied: Bytes, link: Bytes, took: Duration) {
        self.refill = corrected(self.refill, FIXED + over(copied, link), took);
    }

    /// A shrink of `leaving` bytes took `took`.
    pub(crate) fn saw_shrink(&mut self, leaving: Bytes, dirty: Bytes, link: Bytes, took: Duration) {
        let plain = Predictions { shrink: 1000, ..*self }.shrink(leaving, dirty, link);
        self.shrink = corrected(self.shrink, plain, took);
        self.has_shrunk = true;
    }

    /// Whether a shrink has ended: the first one may take longer than any after it.
    pub(crate) fn has_shrunk(&self) -> bool {
        self.has_shrunk
    }

    /// Parking took `took`, or was not over by then: each time that it is not, it is waited for longer. More than
    /// `longest` is never foretold.
    pub(crate) fn saw_park(&mut self, took: Duration, longest: Duration) {
        self.park = (self.park.min(longest) * 7 + took.min(longest) * 3) / 10;
    }
}

/// How long a link takes.
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
    fn come_near_to_what_is_seen() {
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
    fn what_never_ends_is_foretold_to_take_the_longest_there_is() {
        let (mut seen, longest) = (Predictions::default(), Duration::from_secs(75));
        for _ in 0..1_000 {
            seen.saw_park(seen.park() * 4, longest);
            assert!(seen.park() <= longest, "{:?}", seen.park());
        }
        assert!(seen.park() > longest / 2, "{:?}", seen.park());
    }
}
