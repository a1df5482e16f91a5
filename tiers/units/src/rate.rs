//! How fast, and how long.

use serde::{Deserialize, Serialize};

/// Gigabytes (10^9 bytes) a second.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bandwidth(pub f64);

impl Bandwidth {
    /// What stands for no ceiling at all: more than any memory gives.
    pub const NO_CEILING: Bandwidth = Bandwidth(1e6);

    /// The ceiling, where there is one.
    pub fn ceiling(self) -> Option<Bandwidth> {
        (self < Self::NO_CEILING).then_some(self)
    }
}

/// Microseconds.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Micros(pub f64);
