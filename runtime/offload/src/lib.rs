//! Planning of activation offload: which tensors of a training pass stay on the GPU, are offloaded to pinned host memory or are recomputed,
//! and when each copy begins. Decisions only.
//!
//! ```text
//!  events of a pass                    result
//!  packed, unpacked, … ─► Recorder ─► Tape ──┐
//!  budget, links, host room ─► Request ──────┴─► Plan::new ─► Plan: keep, offload or recompute, per item
//!  packed, unpacked of later passes ───────────► Clock ─────► Orders: copies to begin, copies to wait for
//!  uses of frozen weights ─────────────────────► Uses ──────► UseOrders: copies to begin, memory to free
//! ```
//!
//! A pass begins with its first pack and ends when no packed handle is alive, also with gradient accumulation, DPO or GRPO. No driver, I/O,
//! thread or host clock: positions in the recorded order of packs and unpacks determine when copies begin, so that the memory limits of a
//! plan hold however long copies take.
//!
//! ```
//! use std::sync::Arc;
//! use glake_offload::{Clock, Links, Pack, Plan, Recorder, Request, Verdict};
//! use glake_units::{Bandwidth, Bytes};
//!
//! let mut recorder = Recorder::new();
//! let pack = Pack::new(Bytes::mib(64));
//! let items: Vec<_> = (0..8).map(|_| recorder.packed(pack)).collect();
//! for &item in items.iter().rev() {
//!     recorder.unpacked(item)?;
//!     recorder.dropped(item)?;
//! }
//! let links = Links::new(Bandwidth(55.0), Bandwidth(55.0));
//! let plan = Plan::new(&Arc::new(recorder.finish()), &Request::new(Bytes::mib(256), links))?;
//! assert!(plan.peak() <= Bytes::mib(256));
//!
//! let mut clock = Clock::new(Arc::new(plan));
//! let (first, orders) = clock.packed(&pack);
//! assert_eq!((first, orders.verdict), (items[0], Verdict::Offload));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod clock;
mod ids;
mod plan;
mod site;
mod tape;
#[cfg(test)]
mod tests;
mod uses;

pub use clock::{Clock, Orders};
pub use ids::{ItemId, Position, ScopeId};
pub use plan::{Links, Plan, PlanError, Preset, Request, Verdict};
pub use site::{Measured, Site};
pub use tape::{Follower, Item, LeafPart, Pack, Recompute, Recorder, ShapeClass, Step, Tape, TapeError};
pub use uses::{Place, UseOrders, UsePhase, Uses};
