//! Replays a trace on an allocator and reports how much memory it took.
//!
//! ```text
//! Trace ─► replay ─► Subject (the product, or a model of a peer) ─► Report, timeline
//!            └► find_limit: the smallest limit under which the trace completes
//! ```
//!
//! No event touches payload bytes, and no clock but the trace's is passed on: a model replays the same every time.

mod frame;
pub mod glake;
mod limit;
mod report;
mod subject;
mod timeline;

pub use frame::{FirstOom, Outcome, Progress, replay};
pub use limit::{FitError, find_limit};
pub use report::{Report, Setting};
pub use subject::{Counters, Refusal, Subject};
pub use timeline::{Point, Timeline};
