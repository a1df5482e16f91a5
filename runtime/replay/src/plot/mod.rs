//! Pictures of memory over time: one panel per trace, one line per policy, live memory shaded below.
//!
//! ```text
//!  GiB │      ┌──────────────  caching      peak 47.71
//!      │  ┌───┘ ┌────────────  expandable   peak 27.74
//!      │ ┌┘░░┌──┘░░░░░░░░░░░░  glake        peak 26.72
//!      │┌┘░░░░░░░░░░░░░░░░░░░  live         peak 26.47
//!      └────────────────────
//!        seconds
//! ```
//!
//! A second kind of picture shows the distribution of waiting times: one line per policy.
//!
//! Drawn as SVG with the viewer's fonts. A PNG would need a font of this machine, and is refused.

mod distribution;
mod draw;
mod error;
mod file;
mod palette;
mod panel;

pub use distribution::Distribution;
pub use error::PlotError;
pub use file::{check, write, write_distributions};
pub use panel::{Curve, Panel};
