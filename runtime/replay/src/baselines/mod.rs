//! Baselines: models of other allocators, to compare with; arithmetic only, no device, nothing of the product.
//!
//! ```text
//! rules ─► blocks ─┬► caching      torch's allocator as it is by default
//! (torch's sizes)  ├► expandable   torch's allocator with expandable_segments:True
//!                  └► gmlake       the paper's stitching allocator (its small requests go torch's way)
//! ```
//!
//! Each is written from what its authors document and publish, and knows nothing of any trace. They are checked
//! against what the real ones were recorded to do (`tests/traces`).

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
