//! Counters of the agent's decisions and messages since its start; not persistent.

use std::collections::BTreeMap;
use std::time::Duration;

use glake_arbiter::{Action, Denied, GpuId};
use glake_units::Bytes;

/// Upper ends of the buckets of decision times, in microseconds.
const BUCKETS: [u32; 9] = [5, 10, 20, 50, 100, 200, 500, 1000, 10_000];

/// Reasons for denials, as label values.
pub(crate) const WHY: &[&str] = &["too_large", "deadline", "incomplete", "lost"];
/// Operations that workers failed to carry out, as label values.
pub(crate) const WHAT: &[&str] = &["park", "shrink", "refill", "other"];

/// Counters of the agent.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) gpus: BTreeMap<GpuId, GpuCounts>,
    pub(crate) parks: u64,
    /// Failures by operation; see [`WHAT`].
    pub(crate) failed: BTreeMap<&'static str, u64>,
    /// Denials by reason; see [`WHY`].
    pub(crate) denied: BTreeMap<&'static str, u64>,
    pub(crate) distrusted: u64,
    pub(crate) given_up: u64,
    pub(crate) decisions: Decisions,
}

/// Counters of one GPU.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GpuCounts {
    pub(crate) grants: u64,
    pub(crate) granted: Bytes,
    pub(crate) shrinks: u64,
    pub(crate) growths_denied: u64,
}

/// Histogram of decision times.
#[derive(Debug, Default)]
pub(crate) struct Decisions {
    pub(crate) count: u64,
    pub(crate) took: Duration,
    within: [u64; BUCKETS.len()],
}

impl Counts {
    /// Counts an action of the arbiter.
    pub(crate) fn decided(&mut self, action: &Action) {
        match *action {
            Action::Grant { gpu, bytes, .. } => {
                let of = self.gpus.entry(gpu).or_default();
                of.grants += 1;
                of.granted = of.granted.saturating_add(bytes);
            }
            Action::Shrink { gpu, .. } => self.gpus.entry(gpu).or_default().shrinks += 1,
            Action::DenyGrowth { gpu, .. } => self.gpus.entry(gpu).or_default().growths_denied += 1,
            Action::Park { .. } => self.parks += 1,
            Action::Deny { why, .. } => *self.denied.entry(word(why)).or_default() += 1,
            Action::StopCountingOn { .. } => self.distrusted += 1,
            Action::Admit { .. }
            | Action::Unpark { .. }
            | Action::Demote { .. }
            | Action::Measure { .. }
            | Action::Checkpoint { .. }
            | Action::Restore { .. } => {}
        }
    }

    /// Counts a worker's failure to carry out an operation. Unknown operations of other versions count as "other".
    pub(crate) fn failed(&mut self, what: &str) {
        let known = WHAT.iter().find(|known| **known == what);
        *self.failed.entry(known.copied().unwrap_or("other")).or_default() += 1;
    }
}

impl Decisions {
    pub(crate) fn add(&mut self, took: Duration) {
        self.count += 1;
        self.took = self.took.saturating_add(took);
        let within = BUCKETS.iter().zip(&mut self.within);
        within.filter(|(most, _)| took.as_micros() <= u128::from(**most)).for_each(|(_, count)| *count += 1);
    }

    /// Returns the upper end of each bucket in seconds, and its cumulative count.
    pub(crate) fn within(&self) -> impl Iterator<Item = (f64, u64)> {
        BUCKETS.iter().map(|most| f64::from(*most) / 1e6).zip(self.within)
    }
}

/// Returns the label value of a reason.
fn word(why: Denied) -> &'static str {
    match why {
        Denied::TooLarge => "too_large",
        Denied::Deadline => "deadline",
        Denied::Incomplete => "incomplete",
        Denied::Lost => "lost",
    }
}
