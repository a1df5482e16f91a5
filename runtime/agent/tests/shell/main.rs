//! Tests of the agent as a process with worker processes that speak the protocol. Numbers replace memory, and a meter counts them in a
//! folder.

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
mod watched;
