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
mod aliases;
mod allocator;
mod bin;
mod bins;
mod claim;
mod domain;
mod domains;
mod error;
mod evictions;
mod extent;
mod free_list;
mod free_lists;
mod heap;
mod holds;
mod home;
mod ids;
mod live;
mod piece;
mod plan;
mod plans;
mod points;
mod room;
mod run;
mod segments;
mod settings;
mod sizes;
mod stats;
mod stitched;
mod tally;
mod view;
mod want;
mod zone;

pub use allocator::Allocator;
pub use claim::{Claim, Restored};
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
    Backing, BlockInfo, Blocks, Broken, ExtentView, ExtentViews, HomeRange, LiveBlock, Report, Segment,
    SegmentKind,
};
