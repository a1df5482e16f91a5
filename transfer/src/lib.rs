//! How bytes move: one copy between host and GPU over every PCIe link of the server.
//!
//! ```text
//! ffi ─► runtime ─► glake-transfer ─► tiers ─► tiers/device ─► libcuda | simulated device
//!
//!   calibrate  measures what the links give
//!   engine  copies in full stream order: forked to the links, joined back, faults told
//!   mover   regions' bytes, on their way out and back
//!   graph   pure: what the server's links give, and which part of a copy goes over which of them
//! ```

pub mod calibrate;
mod engine;
mod error;
pub mod graph;
mod mover;

pub use engine::{
    Benefit, CopyHandle, CopyOptions, Engine, EngineOptions, PathStatistics, Priority, RelayCost, Statistics,
    UnsuspendedRelay, UserStream, WhyUnsuspended,
};
pub use error::{Result, TransferError};
pub use mover::LinkMover;
