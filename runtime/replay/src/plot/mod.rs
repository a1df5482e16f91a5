//! Pictures. Memory over time: one panel a trace, one line a policy, what was live shaded below.
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
//! And how many of a policy's requests had waited how long at most: a line a policy.
//!
//! Drawn as SVG, whose letters are the viewer's; a PNG would need a font of this machine, and is refused.

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
