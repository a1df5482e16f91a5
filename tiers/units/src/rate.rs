//! Rates and durations.

use serde::{Deserialize, Serialize};

/// Rate in gigabytes (10^9 bytes) per second.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bandwidth(pub f64);

impl Bandwidth {
    /// Stands for the absence of a ceiling: above the rate of any memory.
    pub const NO_CEILING: Bandwidth = Bandwidth(1e6);

    /// Returns the ceiling; `None` for [`Bandwidth::NO_CEILING`].
    pub fn ceiling(self) -> Option<Bandwidth> {
        (self < Self::NO_CEILING).then_some(self)
    }
}

/// Amount of time in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Micros(pub f64);
