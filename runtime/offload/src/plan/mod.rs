//! Choice of each item's verdict under a budget.
//!
//! ```text
//! Tape, Request ─► Course       numeric pass: cells, times, where items are held and needed
//!                   │
//!   verdicts ───────┼─► Curve      memory that must be on the GPU in each cell; above the budget: no plan
//!                   ├─► Schedule   position at which each reload begins, and by which each copy out must have completed
//!                   └─► Timing     pass in virtual time over the two directions of a link
//!   Search ◄────────┘  few items: all verdicts; otherwise orders by value and cost, then a sweep ─► Plan
//! ```
//!
//! Invariants: a schedule holds by positions alone, whatever the copies take: time is estimated, memory is not. The same tape and request
//! give the same plan.

mod course;
#[cfg(test)]
pub(crate) mod oracle;
mod order;
#[allow(clippy::module_inception)] // the folder's noun has a file
mod plan;
mod queues;
mod request;
mod schedule;
mod search;
mod trial;

pub use plan::Plan;
pub use request::{Links, PlanError, Preset, Request, Verdict};
