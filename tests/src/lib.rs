//! Scenarios over the public API.

pub mod pool;
