//! How bytes move: one copy between host and GPU over every PCIe link of the server.
//!
//! ```text
//! ffi ─► runtime ─► glake-transfer ─► tiers ─► tiers/device ─► libcuda | simulated device
//!
//!   engine     copies in full stream order: forked to the links, joined back, faults told
//!   kinds      one file or folder a kind of copy
//!   links      which GPUs serve copies, what each stream has there, and when it is given up
//!   traffic    who goes first, who shares links, whether the links still give what they gave
//!   paths      pure: what the server's links give, and which part of a copy goes over which of them
//!   calibrate  measures what the links give
//!   mover      regions' bytes, on their way out and back
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
