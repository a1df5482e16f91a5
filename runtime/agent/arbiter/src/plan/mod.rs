//! Capacity planner: the arbiter in virtual time, with simulated workers and links.
//!
//! ```text
//! NodeFile ─► Machine ─► Arbiter::step ─► Figures of each policy ─► density
//! Trace ─► Load (seed) ─► requests ┘  workers, a link, a shared GPU
//! ```
//!
//! A request waits until its worker's memory is resident and the worker's current step has ended. Then its prompt is read at
//! `prefill_tok_s`, one prompt at a time, while the worker generates no token. The answer takes `decode_ms` a token; concurrent requests of
//! a worker cost nothing extra, as far as the KV cache has room. Running workers share a GPU in proportion to their compute, or do not
//! contend at all. Memory with a copy is unmapped before another worker gets any of it. As on a real node, the arbiter sees a worker's
//! whole cache, because its dead part is known only at a shrink, and the link rate of the file. Not modelled: batching limits, slowdown of
//! kernels by copies, the delay of an agent in detecting an idle worker (at most 10 ms), host memory, sampling.

use std::ops::Range;

use crate::node::{NodeFile, Worker};

mod figures;
mod load;
mod machine;
mod model;
mod policy;
#[cfg(test)]
mod tests;

pub use figures::{Figures, Tally};
pub use load::{Load, MOST_REQUESTS, Request, Row, Trace, TraceError};
pub use machine::run;
pub use policy::{Calibration, CalibrationError, Policy, UnknownPolicy};

/// Reason why a plan is not computed.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The load has too many requests.
    #[error(
        "there are about {found} requests in all seeds together, and a plan takes at most {MOST_REQUESTS}: give a lower \
         --rate, a shorter --duration or fewer --seeds"
    )]
    TooManyRequests {
        /// Expected number of requests.
        found: f64,
    },
    /// The simulation takes too long.
    #[error(
        "the plan was stopped at {at_s:.0} s of its own time, with {left} requests left: it takes too many decisions; give \
         a shorter --duration, fewer workers or shorter --lengths"
    )]
    TooLong {
        /// Simulated time in seconds.
        at_s: f64,
        /// Number of requests that were not served yet.
        left: usize,
    },
}

/// Maximum work of a run: each simulated event counts its workers and their running requests, and each decision of the
/// arbiter counts [`PER_STEP`] and [`PER_WORKER`] for each worker.
const MOST_WORK: u64 = 1 << 31;
const PER_STEP: u64 = 256;
const PER_WORKER: u64 = 4;

/// Upper bound of the search for a density.
pub const MOST_WORKERS: usize = 256;

/// Search for the number of workers that a server can serve.
#[derive(Clone, Debug)]
pub struct Density<'a> {
    /// Description of the workers, which are copied in turn.
    pub file: &'a NodeFile,
    /// Speed of memory moves.
    pub calibration: &'a Calibration,
    /// Trace from which lengths are drawn.
    pub trace: &'a Trace,
    /// Load whose rate is that of the file's workers: each copy gets as many requests as the average worker, at random times.
    pub load: Load,
    /// Seeds of the random draws.
    pub seeds: Range<u64>,
    /// Whether running workers share a GPU in time.
    pub contention: bool,
}

impl Density<'_> {
    /// Returns the largest number of workers without a denied request and with the first token of 99 % within `slo` seconds. Calls `trying`
    /// with each number tried.
    ///
    /// # Errors
    /// [`PlanError`].
    pub fn most(&self, policy: Policy, slo: f64, trying: &mut dyn FnMut(usize)) -> Result<usize, PlanError> {
        let mut holds = |count| {
            trying(count);
            self.holds(policy, slo, count)
        };
        // Find the first failing number by doubling, then by bisection.
        let (mut good, mut bad) = (0, 1);
        while bad <= MOST_WORKERS && holds(bad)? {
            (good, bad) = (bad, bad * 2);
        }
        bad = bad.min(MOST_WORKERS + 1);
        while bad - good > 1 {
            let middle = good.midpoint(bad);
            *(if holds(middle)? { &mut good } else { &mut bad }) = middle;
        }
        Ok(good)
    }

    #[allow(clippy::cast_precision_loss)] // counts of workers and requests
    fn holds(&self, policy: Policy, slo: f64, count: usize) -> Result<bool, PlanError> {
        let length = self.load.duration.unwrap_or(self.trace.span()).as_secs_f64().max(1.0);
        let told =
            || self.trace.rows.iter().filter(|row| row.at.as_secs_f64() <= length).count() as f64 / length;
        let each = self.load.rate.unwrap_or_else(told) / self.file.workers.len() as f64;
        let copied = copies(self.file, count);
        // Stopped workers occupy no memory.
        if policy != Policy::StartStop && copied.check_fit().is_err() {
            return Ok(false);
        }
        let zipf = self.load.zipf.or(Some(0.0));
        let load = Load { rate: Some(each * count as f64), zipf, ..self.load };
        let names: Vec<&str> = copied.workers.iter().map(|worker| worker.name.as_str()).collect();
        let mut tally = Tally::default();
        load.check_count(self.trace, self.seeds.end - self.seeds.start)?;
        for seed in self.seeds.clone() {
            let requests = load.draw(self.trace, &names, seed)?;
            tally.add(run(&copied, self.calibration, &requests, policy, self.contention)?);
        }
        Ok(tally.holds(slo))
    }
}

fn copies(file: &NodeFile, count: usize) -> NodeFile {
    let named = |place: usize, worker: &Worker| match place / file.workers.len() {
        0 => worker.name.clone(),
        copy => format!("{}.{}", worker.name, copy + 1),
    };
    let workers = file.workers.iter().cycle().take(count).enumerate();
    let workers =
        workers.map(|(place, worker)| Worker { name: named(place, worker), ..worker.clone() }).collect();
    NodeFile { node: file.node.clone(), workers }
}
