//! What a process has of its GPUs' memory: pools, regions, copies, sharing with others; and what a user can configure of that.

pub mod backend;
pub mod calibrations;
pub mod config;
pub mod log;
pub mod metrics;
pub mod pool;
pub mod process;
pub mod share;
mod sync;
