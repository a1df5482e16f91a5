//! Tape: record of one pass. It holds the items in pack order, the order and times of unpacks, and the other memory of the process.
//!
//! ```text
//!  position   0      1      2      3        4        5          number of packs and unpacks before
//!  step       pack a pack b pack c unpack c unpack b unpack a
//!  item a     ├─held by forward─┤ . . . . . . . . .  ├used┤     released, first and last unpack
//!  rest       memory of the process in addition to items, in each cell between two steps
//! ```
//!
//! Invariants: items are numbered in pack order; every unpack names an item packed before it; times never decrease.

mod error;
mod follower;
mod item;
mod recorder;
mod shape;
#[allow(clippy::module_inception)] // the folder's noun has a file
mod tape;

pub use error::TapeError;
pub use follower::Follower;
pub use item::{Item, LeafPart, Pack, Recompute};
pub use recorder::Recorder;
pub use shape::ShapeClass;
pub use tape::{Step, Tape};
