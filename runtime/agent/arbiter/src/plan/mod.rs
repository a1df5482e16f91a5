//! The capacity planner: the arbiter in virtual time, over workers and links that are made up.
//!
//! ```text
//! NodeFile ─► Machine ─► Arbiter::step ─► Figures of each policy ─► density
//! Trace ─► Load (seed) ─► requests ┘  workers, a link, a shared GPU
//! ```
//!
//! A request is held until its worker's memory is there, then read at `prefill_tok_s` and answered at `decode_ms` a
//! token; requests of one worker run beside each other for nothing, as far as its KV cache has room. Workers that run
//! share a GPU in time, or do not contend at all: what is true lies between. Left out: limits of batching, kernels that
//! copies slow down, host memory, sampling.

mod density;
mod figures;
mod load;
mod machine;
mod model;
mod policy;
mod speeds;
#[cfg(test)]
mod tests;
mod trace;

pub use density::{Density, MOST_WORKERS};
pub use figures::{Figures, Tally};
pub use load::{Load, Request};
pub use machine::run;
pub use policy::{Policy, UnknownPolicy};
pub use speeds::{Calibration, CalibrationError};
pub use trace::{Row, Trace, TraceError};
