//! The capacity planner: the arbiter in virtual time, over workers and links that are made up.
//!
//! ```text
//! NodeFile ─► Machine ─► Arbiter::step ─► Figures of each policy ─► density
//! Trace ─► Load (seed) ─► requests ┘  workers, a link, a shared GPU
//! ```
//!
//! A request is held until its worker's memory is there and the worker's step has ended; then its prompt is read at
//! `prefill_tok_s`, one after the other and no token meanwhile, and it is answered at `decode_ms` a token, beside the
//! worker's other requests for nothing, as far as its KV cache has room. Workers that run share a GPU, each as far as its
//! steps compute, or do not contend at all. What memory has a copy is unmapped before any of it is another's. The arbiter
//! is told what an agent is told: a worker's whole cache, for which of it is dead is known at a shrink, and the file's
//! link. Left out: limits of batching, kernels that copies slow down, how long an agent takes to see that a worker is
//! idle (10 ms at most), host memory, sampling.

mod density;
mod figures;
mod load;
mod machine;
mod model;
mod policy;
mod speeds;
mod steps;
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
