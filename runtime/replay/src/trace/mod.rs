//! Recorded allocator calls of a program, read from GLake's text traces and from torch's snapshots.
//!
//! ```text
//! file ─► open ─► text      (trace v1 and v2, gzip or plain) ─┐
//!               └ pickle ─► snapshot (torch's _dump_snapshot) ┴► build ─► Trace: events, blocks, streams, peaks
//! ```
//!
//! Invariants of a [`Trace`], whatever its source: a block is allocated once, before its other events; its free is requested at most once
//! and completed at most once, in that order; time never decreases; blocks and streams are numbered from zero in order of first appearance.

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
