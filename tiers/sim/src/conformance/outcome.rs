//! What a check finds.

use std::fmt;

use glake_device::{DriverError, Result};

/// How a check went.
pub type Outcome = std::result::Result<Verdict, Failure>;

/// A check that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It holds.
    Passed,
    /// It says nothing about this driver, and why.
    Skipped(&'static str),
}

/// A check that failed.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// A verb failed that should not have.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The driver did something else than it promises.
    #[error("{what}: {found}")]
    Wrong {
        /// What it should not have done.
        what: &'static str,
        /// What was found.
        found: String,
    },
}

impl Failure {
    pub(super) fn wrong(what: &'static str, found: impl fmt::Debug) -> Self {
        Failure::Wrong { what, found: format!("{found:?}") }
    }
}

/// Demands that two things are equal.
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

/// Demands that bytes are all the same.
pub(super) fn all(what: &'static str, bytes: &[u8], expected: u8) -> std::result::Result<(), Failure> {
    match bytes.iter().position(|byte| *byte != expected) {
        None => Ok(()),
        Some(at) => Err(Failure::wrong(what, (bytes[at], "at", at, "instead of", expected))),
    }
}

/// Demands that a call is refused, and that the device goes on.
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
