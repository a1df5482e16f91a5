//! One suite of checks that every driver passes, simulated or real.
//!
//! ```text
//!   checks() ──► run(driver, check)          must pass, and leave the device as it was
//!            ──► run_failing(faults, ..)     calls fail on purpose: a check may fail, nothing may be left
//! ```
//!
//! A check gets a [`Harness`], which remembers all that was made on it, so that whatever a check did not come to give
//! back is given back for it. The checks call the raw verbs, some of which are unsafe; that is why they live here.

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

/// One named check.
#[derive(Clone, Copy, Debug)]
pub struct Check {
    /// What it is about: the sentence that it proves.
    pub name: &'static str,
    run: fn(&Harness) -> Outcome,
}

/// The device that the checks are about; peers come after it.
pub const GPU: DeviceId = DeviceId(0);

/// Every check.
pub fn checks() -> Vec<Check> {
    [memory::CHECKS, bytes::CHECKS, streams::CHECKS, reach::CHECKS, kernels::CHECKS, contexts::CHECKS]
        .concat()
}

/// How much free memory may have changed on the way: a driver keeps some for itself when it first does a thing.
#[derive(Clone, Copy, Debug)]
pub struct Slack(pub Bytes);

/// Runs a check, which must leave free memory as it was.
pub fn run(driver: &Arc<dyn Driver>, check: &Check, slack: Slack) -> Outcome {
    let harness = Harness::new(Arc::clone(driver));
    // With it comes the context, which stays.
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

/// Runs a check while calls fail by rule; what was made is then given back with nothing failing, which must succeed.
/// Says whether any call was made to fail.
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
