//! Path graph: link rates, ceilings, and the division of a copy among links.
//!
//! ```text
//!              host memory                 ceilings: what links give together,
//!        ┌────────┬────────┬────────┐      for every target or for one
//!      link 0   link 1   link 2   link 3   rates: alone, and beside each other
//!        │        │        │        │
//!       GPU 0 ── GPU 1 ── GPU 2 ── GPU 3   a relay's link serves GPU 0 too, over NVLink: its way
//!
//!   PathGraph ─► split(ask) ─► shares: which bytes go over which link
//! ```
//!
//! Pure: no driver, no clock, no threads of its own; time and what was measured are arguments.

pub mod cache;
mod ceilings;
mod conservative;
mod fluid;
mod given_up;
mod load;
mod observations;
mod outcomes;
mod path_graph;
mod rates;
mod shares;
mod split;
mod table;
mod target;
pub mod trials;
mod way;

use glake_units::{Bandwidth, Bytes};

pub(crate) use given_up::GivenUp;
pub use load::Load;
pub use observations::Observations;
pub use path_graph::PathGraph;
pub use shares::{Ask, Share, Shares};
pub use split::{GRAIN, SLICE, split};
pub(crate) use split::{LEAST_STAGED, MANY_RELAYS};
pub use table::{Ceiling, GpuLinks, LinkRate, Paths, RelayRate};
pub use way::{Direction, PathRate, Way};

/// Maximum number of GPUs in a graph. Copies of further GPUs use their own links.
pub const MOST_GPUS: usize = 16;

/// Bytes per microsecond at 1 GB/s.
const GIGABYTE: f64 = 1000.0;

fn bytes_a_micro(rate: Bandwidth) -> f64 {
    rate.0 * GIGABYTE
}

fn gigabytes(bytes_a_micro: f64) -> Bandwidth {
    Bandwidth(bytes_a_micro / GIGABYTE)
}

/// Converts bytes to a float; exact up to 2^53, far above any copy.
fn float(bytes: Bytes) -> f64 {
    bytes.get() as f64
}

/// Returns the integer part, or 0 for a negative number.
#[allow(clippy::cast_possible_truncation)]
fn whole(number: f64) -> u64 {
    number as u64
}

/// Rounds bytes to the nearest multiple of [`GRAIN`].
fn grains(bytes: f64) -> Bytes {
    let grain = float(GRAIN);
    Bytes::new(whole((bytes / grain).round()).saturating_mul(GRAIN.get()))
}
