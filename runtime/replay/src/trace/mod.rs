//! What a program asked of its allocator, in order: read from our own text traces and from torch's snapshots.
//!
//! ```text
//! file ─► open ─► text      (trace v1 and v2, gzip or plain) ─┐
//!               └ pickle ─► snapshot (torch's _dump_snapshot) ┴► build ─► Trace: events, blocks, streams, peaks
//! ```
//!
//! Invariants of a [`Trace`], whatever it was read from: a block is allocated once, before anything else happens to
//! it; it is requested back at most once and completed at most once, in that order; time never goes backwards;
//! blocks and streams are numbered from zero in order of first appearance.

mod build;
mod error;
mod event;
mod open;
mod pickle;
mod recording;
mod snapshot;
mod text;

pub use error::{Fault, SnapshotFault, TraceError};
pub use event::{BlockId, Event, StreamIndex};
pub use pickle::PickleFault;
pub use recording::{Peaks, Recorded, Trace};
