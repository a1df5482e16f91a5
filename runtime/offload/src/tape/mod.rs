//! What one pass did: which items it packed, in which order it unpacked them, when, and what else its memory held.
//!
//! ```text
//!  position   0      1      2      3        4        5          as many packs and unpacks came before
//!  step       pack a pack b pack c unpack c unpack b unpack a
//!  item a     ├─held by forward─┤ . . . . . . . . .  ├used┤     released, first and last unpack
//!  rest       what the process has beside items, in each cell between two steps
//! ```
//!
//! Invariants of a tape: items are numbered in the order of their packs; every unpack names an item packed before it;
//! times never go back.

mod error;
mod follower;
mod item;
mod recorder;
mod rest;
mod shape;
#[allow(clippy::module_inception)] // the folder's noun has a file
mod tape;
mod times;

pub use error::TapeError;
pub use follower::Follower;
pub use item::{Item, LeafPart, Pack, Recompute};
pub use recorder::Recorder;
pub use shape::ShapeClass;
pub use tape::{Step, Tape};
