//! Parameters of the arbiter's policy.

use std::time::Duration;

use glake_units::Bytes;

use crate::Preempt;

/// Retry interval of a want whose gang is incomplete, or whose memory is held by unmanaged processes.
pub(crate) const RETRY: Duration = Duration::from_secs(1);

/// Parameters of the policy; the defaults are those of the product.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Settings {
    /// Assumed link rate in bytes per second, until measured.
    pub link: Bytes,
    /// Minimum time between a refill and the next park.
    pub least_quantum: Duration,
    /// Length of the quantum in multiples of the worker's refill time.
    pub quantum_refills: u32,
    /// Number of parks after which turns of alternately parked workers stop growing.
    pub longest_turn: u32,
    /// Time for which the want of a parked worker waits behind newer wants of its class.
    pub resume_after: Duration,
    /// Timeout of a command in multiples of its predicted duration, before another victim is chosen.
    pub late: u32,
    /// Minimum timeout of a command.
    pub least_late: Duration,
    /// Minimum timeout of the first shrink of a worker, which pins host memory and creates contexts and page tables.
    pub first_late: Duration,
    /// Timeout of a command whose uses must run to their end.
    pub drain: Duration,
    /// Timeout of a start.
    pub start: Duration,
    /// Longest wait of a want without its own deadline.
    pub longest_wait: Duration,
    /// Initial exclusion of a worker that missed a deadline; doubles each time.
    pub distrust: Duration,
    /// Upper bound on every worker's own `preempt`.
    pub preempt: Preempt,
    /// Whether a victim gives only the needed bytes, instead of all.
    pub partial: bool,
    /// Whether a GPU serves one gang at a time.
    pub exclusive: bool,
    /// Pinned host memory of all workers: above 90 % copies go to files, and demotion ends at 80 %.
    pub host_budget: Bytes,
    /// Whether copies may go to idle GPUs.
    pub peers: bool,
    /// Idle time after which the driver checkpoints a worker without leases; `None`: never.
    pub checkpoint_after: Option<Duration>,
    /// Predicted duration of a restore by the driver.
    pub restore: Duration,
}

impl Settings {
    /// Returns the longest predicted parking time: its timeout is then `longest_wait`.
    pub(crate) fn longest_park(&self) -> Duration {
        self.longest_wait / self.late.max(1)
    }
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            link: Bytes::new(50_000_000_000),
            least_quantum: Duration::from_millis(300),
            quantum_refills: 2,
            longest_turn: 4,
            resume_after: Duration::from_secs(1),
            late: 4,
            least_late: Duration::from_millis(200),
            // The slowest first shrink that was measured moved 3.7 GB/s: four times what its first 512 MiB took.
            first_late: Duration::from_secs(2),
            drain: Duration::from_secs(30),
            start: Duration::from_secs(600),
            longest_wait: Duration::from_secs(300),
            distrust: Duration::from_secs(60),
            preempt: Preempt::Step,
            partial: true,
            exclusive: false,
            host_budget: Bytes::MAX,
            peers: false,
            checkpoint_after: None,
            // A shrunk worker on one H200: docs/lab.
            restore: Duration::from_millis(560),
        }
    }
}
