//! Conformance suite that every driver passes, simulated or real.
//!
//! ```text
//!   checks() ──► run(driver, check)          must pass, and leave the device as it was
//!            ──► run_failing(faults, ..)     calls fail on purpose: a check may fail, nothing may leak
//! ```
//!
//! A check gets a [`Harness`], which remembers all objects created through it and destroys those that the check did not. The checks call
//! the raw verbs, some of which are unsafe, so they live in this crate.

mod contexts;
mod harness;
mod kernels;
mod memory;
mod reach;
mod streams;

use std::fmt;
use std::sync::Arc;

use glake_device::{DeviceId, Driver, DriverError, Fault, Faults};
use glake_units::Bytes;

pub use harness::Harness;

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
    [memory::CHECKS, streams::CHECKS, reach::CHECKS, kernels::CHECKS, contexts::CHECKS].concat()
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

/// Outcome of a check.
pub type Outcome = std::result::Result<Verdict, Failure>;

/// Verdict of a check that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The checked property holds.
    Passed,
    /// The check does not apply to this driver, for this reason.
    Skipped(&'static str),
}

/// Reason why a check failed.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// A verb failed unexpectedly.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The driver violated its contract.
    #[error("{what}: {found}")]
    Wrong {
        /// Description of the violated property.
        what: &'static str,
        /// Value that was found.
        found: String,
    },
}

impl Failure {
    pub(super) fn wrong(what: &'static str, found: impl fmt::Debug) -> Self {
        Failure::Wrong { what, found: format!("{found:?}") }
    }
}

/// Asserts that two values are equal.
pub(super) fn same<T: PartialEq + fmt::Debug>(
    what: &'static str,
    found: T,
    expected: T,
) -> std::result::Result<(), Failure> {
    match found == expected {
        true => Ok(()),
        false => Err(Failure::wrong(what, (found, "instead of", expected))),
    }
}

/// Asserts that all bytes have the expected value.
pub(super) fn all(what: &'static str, bytes: &[u8], expected: u8) -> std::result::Result<(), Failure> {
    match bytes.iter().position(|byte| *byte != expected) {
        None => Ok(()),
        Some(at) => Err(Failure::wrong(what, (bytes[at], "at", at, "instead of", expected))),
    }
}

/// Asserts that a call is refused and that the device stays usable.
pub(super) fn refused<T: fmt::Debug>(
    what: &'static str,
    result: glake_device::Result<T>,
) -> std::result::Result<(), Failure> {
    match result {
        Ok(value) => Err(Failure::wrong(what, value)),
        Err(error) if error.is_sticky() => Err(Failure::Driver(error)),
        Err(_) => Ok(()),
    }
}
