//! Configuration, the replay of traces and the glake command.

pub mod config;
pub mod replay;
pub mod trace;
