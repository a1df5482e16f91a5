//! Conformance suite that every driver passes, simulated or real.
//!
//! ```text
//!   checks() ──► run(driver, check)          must pass, and leave the device as it was
//!            ──► run_failing(faults, ..)     calls fail on purpose: a check may fail, nothing may leak
//! ```
//!
//! A check gets a [`Harness`], which remembers all objects created through it and destroys those that the check did not. The checks call
//! the raw verbs, some of which are unsafe, so they live in this crate.

mod bytes;
mod contexts;
mod harness;
mod kernels;
mod memory;
mod outcome;
mod reach;
mod streams;

use std::sync::Arc;

use glake_units::Bytes;

use glake_device::{DeviceId, Driver, Fault, Faults};

pub use harness::Harness;
pub use outcome::{Failure, Outcome, Verdict};

/// A named conformance check.
#[derive(Clone, Copy, Debug)]
pub struct Check {
    /// Sentence that the check proves.
    pub name: &'static str,
    run: fn(&Harness) -> Outcome,
}

/// The device under test; its peers come after it.
pub const GPU: DeviceId = DeviceId(0);

/// Returns all checks of the suite.
pub fn checks() -> Vec<Check> {
    [memory::CHECKS, bytes::CHECKS, streams::CHECKS, reach::CHECKS, kernels::CHECKS, contexts::CHECKS]
        .concat()
}

/// Allowed change of free memory: a driver keeps some memory for itself at the first use of a feature.
#[derive(Clone, Copy, Debug)]
pub struct Slack(pub Bytes);

/// Runs a check, which must leave free memory unchanged.
pub fn run(driver: &Arc<dyn Driver>, check: &Check, slack: Slack) -> Outcome {
    let harness = Harness::new(Arc::clone(driver));
    // Creates the context, which stays alive during the check.
    let stream = harness.stream(GPU)?;
    harness.destroy_stream(GPU, stream)?;
    let before = driver.memory_info(GPU)?.free;
    let outcome = (check.run)(&harness);
    let cleaned = harness.clean();
    let verdict = outcome?;
    cleaned?;
    let after = driver.memory_info(GPU)?.free;
    if after.saturating_add(slack.0) < before {
        return Err(Failure::wrong("memory was left behind", before.saturating_sub(after)));
    }
    Ok(verdict)
}

/// Runs a check while calls fail by rule; cleanup then runs without faults and must succeed. Returns whether any fault was injected.
pub fn run_failing(faults: &Arc<Faults>, check: &Check, rules: &[Fault]) -> Result<bool, Failure> {
    let harness = Harness::new(Arc::clone(faults) as Arc<dyn Driver>);
    let before = faults.injected();
    faults.set(rules);
    let outcome = (check.run)(&harness);
    faults.set(&[]);
    let injected = faults.injected() > before;
    let cleaned = harness.clean();
    if !injected {
        outcome?;
    }
    cleaned?;
    Ok(injected)
}
