//! Transfer engine: one copy between host and GPU over every PCIe link of the server.
//!
//! ```text
//! ffi ─► runtime ─► glake-transfer ─► tiers ─► tiers/device ─► libcuda | simulated device
//!
//!   engine     copies in full stream order: forked to the links, joined back, errors reported
//!   kinds      one file or folder per kind of copy
//!   links      GPUs that relay, the lanes of each stream, and their release
//!   traffic    priorities, contention, and drift of the link rates
//!   paths      pure: link rates, and the division of a copy among paths
//!   calibrate  measurement of the link rates
//!   mover      copies of regions, on eviction and refill
//! ```

pub mod calibrate;
mod engine;
mod error;
mod kinds;
mod links;
mod mover;
pub mod paths;
mod traffic;

pub use engine::{
    Benefit, CopyHandle, CopyOptions, Engine, EngineOptions, PathStatistics, Priority, RelayCost, Statistics,
    UserStream,
};
pub use error::{Result, TransferError};
pub use links::suspension::{UnsuspendedRelay, WhyUnsuspended};
pub use mover::LinkMover;
