//! How bytes move: one copy between host and GPU over every PCIe link of the server.
//!
//! ```text
//! ffi ─► runtime ─► glake-transfer ─► tiers ─► tiers/device ─► libcuda | simulated device
//!
//!   graph   pure: what the server's links give, and which part of a copy goes over which of them
//! ```

mod error;
pub mod graph;

pub use error::TransferError;
