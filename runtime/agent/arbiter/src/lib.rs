//! Arbiter of a server's GPU memory: the decisions of the node agent, without any I/O.
//!
//! ```text
//!  what workers and the meter say            what the agent does
//!  want, returned, parked, died, …  ─► Arbiter::step(event, now) ─► grant, park, shrink, admit, deny, …
//!                                        │ ledger      who has what of each GPU
//!                                        │ gangs       what is under way with whom, and by when it ends
//!                                        │ victims     whose memory leaves, pure
//!                                        └ log         what was decided, and why
//!  plan: workers, links and time made up ─► the same step ─► how long requests would wait
//! ```
//!
//! No clock, no I/O, no thread, no randomness: the same events at the same times give the same actions.
//!
//! ```
//! use std::time::Duration;
//! use glake_arbiter::{Action, Arbiter, Event, GangId, GpuId, Holding, Joined, Settings, WorkerId};
//! use glake_units::Bytes;
//!
//! let (gpu, worker) = (GpuId(0), WorkerId(7));
//! let mut arbiter = Arbiter::new(Settings::default());
//! arbiter.step(Event::Capacity { gpu, budget: Bytes::gib(23), total: Bytes::gib(140) }, Duration::ZERO);
//! let evicted = Holding { evicted: Bytes::gib(8), ..Holding::nothing(gpu, Bytes::mib(640)) };
//! arbiter.step(Event::Joined(Joined::alone(worker, vec![evicted])), Duration::ZERO);
//! let actions = arbiter.step(Event::Want { worker, deadline: None }, Duration::from_secs(1));
//! assert_eq!(actions[0], Action::Grant { worker, gpu, bytes: Bytes::gib(8) });
//! assert_eq!(actions[1], Action::Admit { worker });
//! ```

#![allow(missing_docs, reason = "an internal crate: most fields and variants need no comment beyond their names")]

mod action;
mod answers;
mod arbiter;
mod away;
mod duty;
mod event;
mod gang;
mod growth;
mod ids;
mod ledger;
mod log;
pub mod node;
pub mod plan;
mod planner;
mod predictions;
mod server;
mod settings;
#[cfg(test)]
mod tests;
mod victims;
mod want;

pub use action::{Action, Denied, Tier};
pub use arbiter::{Arbiter, Footprint};
pub use event::{Activity, Contexts, Event, Holding, Joined, Preempt, Profile, Task};
pub use ids::{GangId, GpuId, WorkerId};
pub use log::{Decision, Outcome, Taken};
pub use settings::Settings;
pub use victims::Why;
