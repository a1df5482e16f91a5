//! Transfer engine: one copy between host and GPU over every PCIe link of the server.
//!
//! ```text
//! ffi ─► runtime ─► glake-transfer ─► tiers ─► tiers/device ─► libcuda | simulated device
//!
//!   engine     the public interface, and the thread that creates and releases resources
//!   copies     one file or folder per kind of copy: forked to the links, joined back, errors reported
//!   traffic    priorities, contention, and drift of the link rates
//!   links      GPUs that relay, the lanes of each stream, and the work in flight there
//!   paths      pure: link rates, and the division of a copy among paths
//!   calibrate  measurement of the link rates
//!   mover      copies of regions, on eviction and refill
//!
//! Each layer uses the ones below it: engine ─► copies ─► traffic ─► links ─► paths.
//! ```

pub mod calibrate;
mod copies;
mod engine;
mod error;
mod links;
mod mover;
mod options;
pub mod paths;
mod traffic;

pub use copies::handle::CopyHandle;
pub use engine::Engine;
pub use error::{Result, TransferError};
pub use links::suspension::{UnsuspendedRelay, WhyUnsuspended};
pub use mover::LinkMover;
pub use options::{
    Benefit, CopyOptions, EngineOptions, PathStatistics, Priority, RelayCost, Statistics, UserStream,
};
