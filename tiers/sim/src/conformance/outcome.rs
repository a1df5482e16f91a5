//! Outcomes of checks, and assertions for them.

use std::fmt;

use glake_device::{DriverError, Result};

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
    result: Result<T>,
) -> std::result::Result<(), Failure> {
    match result {
        Ok(value) => Err(Failure::wrong(what, value)),
        Err(error) if error.is_sticky() => Err(Failure::Driver(error)),
        Err(_) => Ok(()),
    }
}
