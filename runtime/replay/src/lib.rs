//! Replays a trace on an allocator and reports the memory that it needed.
//!
//! ```text
//! Trace ─► replay ─► Subject (GLake, or a baseline) ─► Report, timeline
//!            └► find_limit: the smallest limit under which the trace completes
//! ```
//!
//! Events touch no payload bytes, and subjects see no clock but the trace's: every replay of a model has the same result.

pub mod baselines;
mod frame;
pub mod glake;
mod limit;
pub mod machine;
pub mod plot;
mod report;
pub mod stamps;
mod subject;
mod timeline;
pub mod trace;

pub use frame::{FirstOom, Outcome, Progress, replay};
pub use limit::{FitError, find_limit};
pub use report::{Report, Setting};
pub use subject::{Counters, Refusal, Subject};
pub use timeline::{Point, Timeline};
