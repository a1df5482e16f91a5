//! Scenarios over the public API.

pub mod pool;
pub mod transfer;
