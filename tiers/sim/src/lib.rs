//! The simulated device: real memory, simulated time.
//!
//! ```text
//!             verbs ──► simulator (one lock)
//!                            │
//!          ┌─────────────────┼───────────────────────────┐
//!        state            timeline                     world
//!   request ► work    lanes, flows, points      what work does when due
//!     │    │              │                        │          │
//!   order  route        clock                    memory     events
//!   (who   (over which   (virtual            space   extent ► arena
//!   may?)   pipes)        or wall)      (mmap at fixed   (ranges of a
//!                                         addresses)     sparse memfd)
//! ```
//!
//! Device memory is a sparse file; an extent is a range of it; mapping is `mmap` at fixed addresses. So stitched and aliased ranges hold
//! real bytes, fresh memory reads as zeroes, and a server with a terabyte costs nothing until its memory is touched. The simulator moves
//! bytes through its own mapping and never through the program's addresses, so no verb can fault.
//!
//! Operations that CUDA leaves undefined are refused by name ([`glake_device::Refusal`]): access before access rights are set, unmapping
//! under queued work, uses on two streams that no event orders, uses at two addresses that no completion orders, a peer without access, a
//! second release, a handle used in another context than its own (except for waits). In two cases that CUDA defines, the simulator is
//! stricter: it refuses to unmap memory that is not mapped, and to query an event in another context than its own.
//!
//! A context is a device's primary one, a private one, or one that the program created. Each has its own streams, events, modules and
//! losses; memory and addresses belong to the server. Memory that the program allocates without GLake is accessible as in CUDA: plain
//! memory to its own GPU and to the primary contexts of enabled peers, pool memory to its own GPU, managed memory to every device.
//! Optionally, a kernel with an illegal access kills its context ([`SimOptions::faults_kill`]), streams have a bounded queue
//! ([`SimOptions::queue`]) and share hardware queues ([`SimOptions::hardware_queues`]).
//!
//! Limits: a kernel is a closure that runs at its end, so kernels never observe each other half done. In wall time, work is executed when
//! the next verb is called, so a program that only polls its own memory sees no progress. A batch of copies is not checked against itself.
//!
//! ```
//! use glake_sim::{SimOptions, Simulator};
//! use glake_device::{DeviceId, Driver, EventKind, Priority};
//!
//! let sim = Simulator::new(SimOptions::default())?;
//! let gpu = DeviceId(0);
//! let stream = sim.stream_create(gpu, Priority::Normal)?;
//! let event = sim.event_create(gpu, EventKind::Plain)?;
//! sim.enqueue_kernel(gpu, stream, &[], &[], std::time::Duration::from_micros(5), |_| {})?;
//! sim.event_record(gpu, event, stream)?;
//! assert!(!sim.event_query(gpu, event)?);
//! assert!(sim.step());
//! assert!(sim.event_query(gpu, event)?);
//! # Ok::<(), glake_device::DriverError>(())
//! ```

mod arena;
mod capture;
#[cfg(feature = "conformance")]
pub mod conformance;
mod context;
mod denial;
mod enqueue;
mod event;
mod file;
mod flow;
mod kernel;
mod ledger;
mod memory;
mod order;
pub mod pattern;
mod program;
mod resolve;
mod route;
mod shared;
mod simulator;
mod space;
mod state;
mod stream;
mod system;
#[cfg(test)]
mod tests;
mod timeline;
mod topology;
mod verbs;

pub use capture::Graph;
pub use context::{Current, SimContext};
pub use shared::{SimCheckpoint, SimMeter};
pub use simulator::{Census, SimOptions, Simulator};
pub use state::Clock;
pub use system::mapping_budget;
pub use topology::{Bandwidth, Micros, SimGpu, SimHost, SimLink, SimTopology, TopologyError, load};
