//! Copies on simulated servers: what their tests have in common.

mod copies;
mod lane;
mod litmus;
mod place;
mod plain;
mod server;

pub use litmus::{Litmus, Tally};
pub use server::{Server, ServerShape};
