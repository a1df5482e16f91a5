//! Checks of `glake doctor`: what this machine supports, and what to change.
//!
//! ```text
//! device   driver, GPUs, their memory and peer access         ─┐
//! host     huge pages, limits, free memory                     ├► a list of checks: ok, note or problem, each with advice
//! program  libraries, PyTorch, variables, the settings' file  ─┘
//! ```
//!
//! A note costs speed or a feature; with a problem GLake does not work.

mod device;
mod host;
mod program;

use serde::Serialize;

pub(crate) use device::checks as device;
pub(crate) use host::checks as host;
pub(crate) use program::checks as program;

/// State of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// No action is needed.
    Ok,
    /// Something could be better, or is worth knowing.
    Note,
    /// GLake does not work so.
    Problem,
}

/// Check and its outcome.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// Subject of the check, in a word or two.
    pub check: &'static str,
    /// State of the check.
    pub state: State,
    /// Finding of the check.
    pub found: String,
    /// Advice; if all is well, the benefit.
    pub advice: String,
}

impl Check {
    fn ok(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Check { check, state: State::Ok, found: found.into(), advice: advice.into() }
    }

    fn note(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Check { state: State::Note, ..Check::ok(check, found, advice) }
    }

    fn problem(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Check { state: State::Problem, ..Check::ok(check, found, advice) }
    }
}
