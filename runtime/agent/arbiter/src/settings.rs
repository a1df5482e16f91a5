//! The numbers of the policy.

use std::time::Duration;

use glake_units::Bytes;

use crate::Preempt;

/// The numbers of the policy; the defaults are those of the product.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Settings {
    /// What a link moves a second, until it was measured.
    pub link: Bytes,
    /// The least time between a refill and the next park.
    pub least_quantum: Duration,
    /// The quantum, in refills of the worker.
    pub quantum_refills: u32,
    /// Turns of workers whose uses are parked in turn get no longer after so many parks.
    pub longest_turn: u32,
    /// How long the want of a worker that was parked waits behind newer ones of its class.
    pub resume_after: Duration,
    /// How often the predicted time a command may take before another victim is looked for.
    pub late: u32,
    /// And the least that is.
    pub least_late: Duration,
    /// And of a worker that has carried out no such command yet: it pins host memory, and makes contexts and page tables.
    pub first_late: Duration,
    /// How long uses that cannot be parked may take to end before a command is late.
    pub drain: Duration,
    /// How long a start may take.
    pub start: Duration,
    /// How long a want waits at most where it names no deadline.
    pub longest_wait: Duration,
    /// How long a worker that did not answer is no victim: doubled each time.
    pub distrust: Duration,
    /// The most that anybody may be asked: below it, what each worker's profile says.
    pub preempt: Preempt,
    /// Only as much leaves as is needed; else all of a victim.
    pub partial: bool,
    /// Pinned host memory of all workers; copies go to files from 90 % on, and are demoted to 80 %.
    pub host_budget: Bytes,
    /// Copies may go to idle GPUs.
    pub peers: bool,
    /// How long nothing is under way with a worker that holds nothing before the driver checkpoints it; none: never.
    pub checkpoint_after: Option<Duration>,
    /// How long the driver takes to restore one.
    pub restore: Duration,
}

impl Settings {
    /// The longest that parking is foretold to take: what is late then was waited for `longest_wait`.
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
            host_budget: Bytes::MAX,
            peers: false,
            checkpoint_after: None,
            // A shrunk worker on one H200: docs/lab.
            restore: Duration::from_millis(560),
        }
    }
}
