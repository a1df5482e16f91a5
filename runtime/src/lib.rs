//! Configuration, sharing with other processes, the replay of traces and the glake command.

pub mod backend;
pub mod bench;
pub mod calibrations;
pub mod cli;
pub mod config;
pub mod demo;
mod filled;
mod installed;
pub mod log;
pub mod machine;
mod pattern;
pub mod peers;
pub mod plot;
pub mod pool;
pub mod process;
pub mod replay;
mod server;
pub mod share;
mod stamps;
mod sync;
pub mod topo;
pub mod trace;
