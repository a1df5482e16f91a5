//! Models of other allocators, for comparison. Pure arithmetic: no device and no part of the product.
//!
//! ```text
//! rules ─► blocks ─┬► caching      torch's allocator with its default configuration
//! (torch's sizes)  ├► expandable   torch's allocator with expandable_segments:True
//!                  └► gmlake       the paper's stitching allocator (small requests use torch's small pool)
//! ```
//!
//! Each model follows its authors' documentation and publications, and is not tuned to any trace. Tests compare the models with recordings
//! of the real allocators (`tests/traces`).

mod blocks;
mod caching;
mod costs;
mod expandable;
mod gmlake;
mod live;
#[cfg(test)]
mod properties;
mod rules;

pub use caching::Caching;
pub use expandable::Expandable;
pub use gmlake::{Fit, GmLake, Knobs};
