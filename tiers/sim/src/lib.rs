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
//! Device memory is a sparse file; an extent is a range of it; mapping is `mmap` at fixed addresses. So stitched and
//! aliased ranges hold real bytes, fresh memory reads zero, and a server of a terabyte costs nothing until it is
//! touched. The simulator moves bytes through a mapping of its own and never through the program's addresses, so that
//! no verb can fault.
//!
//! What CUDA leaves undefined is refused by name ([`glake_device::Refusal`]): access before it is set, unmapping under
//! queued work, uses on two streams that no event orders, uses at two addresses that no completion orders, a peer
//! without access, a second release, a handle in another context than its own (but for waits). It is stricter than
//! CUDA in two things that CUDA defines: unmapping what is not mapped, and asking in one context after an event of
//! another.
//!
//! A context is the primary one of its device, one of our own, or one that the program made: each has streams,
//! events, modules and losses of its own; memory and addresses are the server's. What the program allocates without
//! GLake is reached as CUDA has it: plain memory by its own GPU and by primary contexts of peers that were enabled, a
//! pool's by its own GPU, managed memory by everyone. On demand a kernel that touches anything else kills its context
//! ([`SimOptions::faults_kill`]), streams hold so much work only ([`SimOptions::queue`]), and share queues of the
//! hardware ([`SimOptions::hardware_queues`]).
//!
//! Limits: a kernel is a closure that runs at its end, so kernels never see each other half done; in wall time work
//! happens when a verb is called next, so a program that only looks at its own memory sees nothing move; a batch of
//! copies is not checked against itself.
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
