//! Replays a trace on an allocator and reports how much memory it took.
//!
//! ```text
//! Trace ─► replay ─► Subject (the product, or a baseline) ─► Report, timeline
//!            └► find_limit: the smallest limit under which the trace completes
//! ```
//!
//! No event touches payload bytes, and no clock but the trace's is passed on: a model replays the same every time.

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
