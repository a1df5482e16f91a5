//! Output of `glake topo`: a picture, tables, and one JSON object. Pure: [`Topology`](glake_device::topology::Topology) in, text out.
//!
//! ```text
//! a100x8 (simulated), bandwidths in GB/s
//! host memory
//! ├─ NUMA node 0
//! │  ├─ switch 0: 24.3 to the GPUs, 24.3 from them
//! │  │  ├─ GPU 0, Simulated A100, 80.00 GiB: 24.3 to it, 24.3 from it
//! ```

mod picture;
mod rows;

pub use picture::picture;
pub use rows::{Rows, devices, json, paths, peers};

use glake_device::topology::HostLink;

/// A bandwidth for people: one digit after the point.
fn rate(gigabytes: f64) -> String {
    format!("{gigabytes:.1}")
}

/// Both ways of a link; what is only nominal is marked as a bound.
fn both_ways(link: &HostLink) -> (String, String) {
    let bound = if link.nominal { "≤ " } else { "" };
    (format!("{bound}{}", rate(link.to_gpu.0)), format!("{bound}{}", rate(link.from_gpu.0)))
}
