//! The agent as a process, with workers that are processes: they speak the protocol and hold numbers instead of memory,
//! counted by a meter in a folder.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod crash;
mod driver;
mod hostile;
mod many;
mod meter;
mod processes;
mod puppet;
mod started;
mod together;
