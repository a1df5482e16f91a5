//! Node agent: it decides which workers hold the memory of a server's GPUs, and tells them.
//!
//! ```text
//! workers ─ Unix stream ─► link ─┐                             ┌─► link ─► grant, park, shrink, …
//! meter ─────────────────────────┼─► Agent ─► Arbiter ─► Agent ┼─► meter
//! pidfd, clock, operators ───────┘   core without I/O          ├─► journal
//!                                                              └─► a command that calls the driver
//! ```
//!
//! Workers have the authoritative state, and the agent a copy. The agent has no CUDA context, no memory handle and none of the workers'
//! bytes; workers continue when it dies. Their next `hello` reports what they hold; the journal describes workers that have not
//! reconnected.
//!
//! The agent runs on one thread. While no worker waits for memory, only messages wake it.

#![allow(
    missing_docs,
    reason = "an internal crate: most fields and variants need no comment beyond their names"
)]

mod agent;
mod checkpoints;
mod contexts;
mod daemon;
mod host;
mod journal;
mod launch;
mod link;
mod listener;
mod logs;
mod messages;
mod meters;
mod metrics;
mod operators;
mod roster;
mod snapshot;
mod supervise;
mod supervisor;
mod watch;

pub use crate::checkpoints::{DriverCommand, LOST, NO_ROOM, UNTOUCHED};
pub use crate::daemon::{Options, ServeError, read_file, serve};
pub use crate::host::{close_inherited, open_private, read_whole, write_whole};
pub use crate::link::{ClientError, ask};
pub use crate::listener::{Identity, PeerError};
pub use agent::{Agent, ConnectionError, PageReading};
pub use contexts::{DriverAction, DriverRequest};
pub use journal::{Entry, JournalRecord};
pub use launch::{LaunchError, Launcher};
pub use listener::{ListenError, check_folder, private_folder};
pub use metrics::METRICS;
pub use roster::Refusal;
pub use supervise::{StopError, stop_started};
pub use watch::Watch;
