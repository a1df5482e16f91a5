//! The node agent: it decides whose memory is on a server's GPUs, and says so to workers.
//!
//! ```text
//! workers ─ Unix stream ─► link ─┐                             ┌─► link ─► grant, park, shrink, …
//! meter ─────────────────────────┼─► Agent ─► Arbiter ─► Agent ┼─► meter
//! pidfd, clock, operators ───────┘   pure: who is who          ├─► journal
//!                                                              └─► a command that asks the driver
//! ```
//!
//! Workers hold the truth, the agent a copy: it has no CUDA context, no handle of memory and none of its bytes, and when
//! it dies they go on. What they hold then is in their next `hello`; of those that are silent the journal tells.
//!
//! The agent is one thread. While no worker wants anything it wakes only for what workers say.

mod agent;
mod beside;
mod client;
mod contexts;
mod driver;
mod family;
mod host;
mod inherited;
mod journal;
mod launch;
mod link;
mod listener;
mod messages;
mod meters;
mod metrics;
mod operators;
mod peer;
mod readings;
mod roster;
mod rows;
mod server;
mod starts;
mod supervise;
mod supervisor;
mod translate;

pub use agent::{Agent, Broken, Seen};
pub use beside::{open_private, read_whole, write_whole};
pub use client::{ClientError, ask};
pub use contexts::{DriverAction, DriverAsk};
pub use driver::{DriverCommand, LOST, NO_ROOM, UNTOUCHED};
pub use inherited::close_inherited;
pub use journal::{Entry, Journalled};
pub use launch::{LaunchError, Launcher};
pub use listener::{ListenError, check_folder, private_folder};
pub use metrics::METRICS;
pub use peer::{Identity, PeerError};
pub use roster::Refusal;
pub use server::{Options, ServeError, serve};
