//! Arbiter of a server's GPU memory: the decisions of the node agent, without any I/O.
//!
//! ```text
//!  reports of workers and the meter           actions of the agent
//!  want, returned, parked, died, …  ─► Arbiter::step(event, now) ─► grant, park, shrink, admit, deny, …
//!                                        │ ledger      memory of each gang on each GPU, operations under way
//!                                        │ planner     distribution of free bytes, order of wants
//!                                        │ victims     choice of the memory that leaves, pure
//!                                        ├ overview    a copy of all of it for people
//!                                        └ log         decisions and their reasons, and times of waits and switches
//!  plan: simulated workers, links and time ─► the same step ─► waiting times of requests
//! ```
//!
//! No clock, no I/O, no thread, no randomness: the same events at the same times give the same actions.
//!
//! ```
//! use std::time::Duration;
//! use glake_arbiter::{Action, Arbiter, Event, GangId, GpuId, Account, Joined, Settings, WorkerId};
//! use glake_units::Bytes;
//!
//! let (gpu, worker) = (GpuId(0), WorkerId(7));
//! let mut arbiter = Arbiter::new(Settings::default());
//! arbiter.step(Event::Capacity { gpu, budget: Bytes::gib(23), total: Bytes::gib(140) }, Duration::ZERO);
//! let evicted = Account { evicted: Bytes::gib(8), ..Account::nothing(gpu, Bytes::mib(640)) };
//! arbiter.step(Event::Joined(Joined::alone(worker, vec![evicted])), Duration::ZERO);
//! let actions = arbiter.step(Event::Want { worker, deadline: None }, Duration::from_secs(1));
//! assert_eq!(actions[0], Action::Grant { worker, gpu, bytes: Bytes::gib(8) });
//! assert_eq!(actions[1], Action::Admit { worker });
//! ```

#![allow(
    missing_docs,
    reason = "an internal crate: most fields and variants need no comment beyond their names"
)]

mod arbiter;
mod commands;
mod contexts;
mod events;
mod gang;
mod gpu;
mod interface;
mod ledger;
mod log;
pub mod node;
mod overview;
pub mod plan;
mod planner;
mod predictions;
#[cfg(test)]
mod tests;
mod victims;

pub use crate::interface::Settings;
pub use arbiter::{Arbiter, Footprint};
pub use glake_wire::Denied;
pub use interface::{
    Account, Action, Contexts, Event, GangId, GpuId, Joined, Preempt, Profile, Task, Tier, UseState, WorkerId,
};
pub use log::{Decision, LoggedDecision, OPERATIONS, Outcome, Timings, Victim};
pub use overview::{
    GpuAccount, Operation, OperationTask, Overview, Pending, Request, RequestKind, ShareAccount,
    WorkerAccount,
};
pub use victims::Why;
