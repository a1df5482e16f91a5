//! Capacity planner: the arbiter in virtual time, with simulated workers and links.
//!
//! ```text
//! NodeFile ─► Machine ─► Arbiter::step ─► Figures of each policy ─► density
//! Trace ─► Load (seed) ─► requests ┘  workers, a link, a shared GPU
//! ```
//!
//! A request waits until its worker's memory is resident and the worker's current step has ended. Then its prompt is read at
//! `prefill_tok_s`, one prompt at a time, while the worker generates no token. The answer takes `decode_ms` a token; concurrent requests of
//! a worker cost nothing extra, as far as the KV cache has room. Running workers share a GPU in proportion to their compute, or do not
//! contend at all. Memory with a copy is unmapped before another worker gets any of it. As on a real node, the arbiter sees a worker's
//! whole cache, because its dead part is known only at a shrink, and the link rate of the file. Not modelled: batching limits, slowdown of
//! kernels by copies, the delay of an agent in detecting an idle worker (at most 10 ms), host memory, sampling.

mod figures;
mod load;
mod machine;
mod model;
mod policy;
#[cfg(test)]
mod tests;

pub use figures::{Density, Figures, MOST_WORKERS, Tally};
pub use load::{Load, Request, Row, Trace, TraceError};
pub use machine::run;
pub use policy::{Calibration, CalibrationError, Policy, UnknownPolicy};
