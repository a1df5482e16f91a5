//! The stitching allocator's pure core: requests in, plans out.
//!
//! ```text
//! ffi ─► runtime ─► transfer ─► tiers ─► glake-stitch        no unsafe, no operating system, no clock, no driver
//!
//!              home (an address range of twice the device's memory, packed at 512 B)
//!            ┌──────────┬──────────┬──────────┬──────────┬─ ─ ─
//!  extents   │    e0    │    e1    │    e2    │    e3    │  grown at the end
//!            └──────────┴──────────┴──────────┴──────────┴─ ─ ─
//!  pieces     live  free      live  free            live
//!                   ▀▀▀▀            ▀▀▀▀▀▀▀▀▀▀▀▀▀▀▀
//!  alias            ┌──────────┬──────────┬──────────┐
//!                   │    e0    │    e2    │    e3    │       the same bytes side by side: a block larger than any free run
//!                   └──────────┴──────────┴──────────┘
//! ```
//!
//! The allocator follows GMLake (Guo et al., ASPLOS 2024) in stitching free memory through virtual memory mappings. It stitches whole
//! extents of 16 MiB instead of chunks of 2 MiB, and so needs tens of mappings where GMLake needs thousands. All bookkeeping is at home; an
//! alias is only another view of it.
//!
//! A caller first calls [`Allocator::take`]. On a miss, [`Allocator::plan`] returns work for the driver, and [`Allocator::commit`] or
//! [`Allocator::abort`] ends it:
//!
//! ```
//! use glake_stitch::{Allocator, Outcome, Request, Settings, StreamKey};
//! use glake_units::Bytes;
//!
//! let mut allocator = Allocator::new(Settings::for_memory(Bytes::gib(1)))?;
//! let request = Request { size: Bytes::mib(20), stream: StreamKey(7), domain: Allocator::default_domain() };
//! assert!(allocator.take(&request).is_none(), "nothing is reserved yet");
//! let Outcome::Work(plan) = allocator.plan(&request, true)? else { unreachable!() };
//! assert_eq!(plan.steps.len(), 5, "two extents are created and mapped, and access is set once");
//! let block = allocator.commit(plan.id).expect("the plan was for a block");
//! allocator.free(block.offset)?;
//! assert_eq!(allocator.take(&request).map(|again| again.offset), Some(block.offset), "a hit");
//! # Ok::<(), glake_stitch::StitchError>(())
//! ```

mod alias;
mod allocator;
mod bins;
mod domain;
mod error;
mod evictions;
mod extent;
mod free_list;
mod heap;
mod holds;
mod home;
mod ids;
mod piece;
mod plan;
mod plans;
mod settings;
mod stats;
mod view;

pub use allocator::Allocator;
pub use domain::DomainOptions;
pub use error::{Obstacle, StitchError};
pub use evictions::Evictions;
pub use extent::ExtentState;
pub use heap::SMALL_LIMIT;
pub use holds::StreamUse;
pub use ids::{AliasId, DomainId, ExtentId, HoldId, PlanId, PointNumber, StreamKey};
pub use plan::{Grant, Outcome, Plan, Request, Step, Stitch, Wait};
pub use settings::{Borrow, Settings};
pub use stats::{Counters, Gauge, Inactive, PoolGauges, Stats, Waste};
pub use view::{
    Backing, BlockInfo, Blocks, Broken, Claim, ExtentView, ExtentViews, HomeRange, LiveBlock, Report,
    Restored, Segment, SegmentKind,
};

mod room {
    //! Spare capacity of growing tables, made ahead by calls that may allocate for calls that may not.

    /// Maximum number of entries that a thread adds to a device's tables between two completion points: 0.5 ms of hits.
    pub(crate) const OF_DEVICE: usize = 8192;
    /// Maximum number of entries that a thread adds to one free list between two completion points; there may be thousands of lists.
    pub(crate) const OF_LIST: usize = 256;

    /// Reserves capacity in a table if fewer than `spare` entries fit.
    pub(crate) fn make(len: usize, capacity: usize, spare: usize, reserve: impl FnOnce(usize)) {
        if capacity - len < spare {
            reserve((len / 2).max(2 * spare));
        }
    }
}
