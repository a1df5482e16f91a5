//! GPU memory of a process: pools, regions, copies and sharing with other processes; and the configuration of all of these.

pub mod backend;
pub mod calibrations;
pub mod config;
pub mod log;
pub mod metrics;
pub mod pool;
pub mod process;
pub mod share;
mod sync;
