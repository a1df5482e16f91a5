//! What becomes of each item, under a budget.
//!
//! ```text
//! Tape, Request ─► Course       the pass in numbers: cells, times, where items are held and needed
//!                   │
//!   verdicts ───────┼─► Curve      what must be on the GPU in each cell, whatever links do; over the budget: no plan
//!                   ├─► Schedule   which reload begins at which position, which copy out must have ended by then
//!                   └─► Timing     the pass in virtual time over two queues of a link
//!   Search ◄────────┘  of few items all verdicts, else orders by value and cost, then a sweep ─► Plan
//! ```
//!
//! Invariants: what a schedule says holds by positions alone, whatever the copies take: time is estimated, memory is
//! not. The same tape and request give the same plan.

mod course;
mod curve;
mod error;
mod exhaustive;
mod links;
#[cfg(test)]
pub(crate) mod oracle;
mod order;
#[allow(clippy::module_inception)] // the folder's noun has a file
mod plan;
mod queues;
mod request;
mod schedule;
mod search;
mod sweep;
mod timing;
mod trial;
mod verdict;

pub use error::PlanError;
pub use links::Links;
pub use plan::Plan;
pub use request::{Preset, Request};
pub use verdict::Verdict;
