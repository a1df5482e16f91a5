//! Pools on simulated GPUs: what their tests have in common.

mod fixture;
mod ledger;
mod picture;
mod stamp;

pub use fixture::{Fixture, Lane, Shape};
pub use ledger::Ledger;
pub use picture::{Picture, assert_empty};
pub use stamp::{Stamp, Verdicts};
