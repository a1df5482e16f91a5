//! The only interface between GLake and hardware.
//!
//! ```text
//! ffi ─► runtime ─► transfer ─► tiers ─► glake-device ─► libcuda
//!
//!             ┌ fault ┐ ┌ record ┐ ┌ lag ┐          decorators: each wraps any driver
//!  owned ───► │       │►│        │►│     │► cuda | glake_sim::Simulator
//!             └───────┘ └────────┘ └─────┘
//! ```
//!
//! [`Driver`] holds the raw verbs; [`owned`] wraps them in safe types.

mod cuda;
mod decorate;
mod driver;
mod error;
mod fault;
mod ids;
mod lag;
pub mod owned;
mod record;
#[cfg(test)]
mod stub;
pub mod topology;

pub use cuda::{Cuda, CudaCheckpoint};
pub use decorate::Call;
pub use driver::{
    Access, CaptureState, Compare, CopyDevices, CopyRequest, DeviceInfo, Driver, EventKind, ExtentProperties,
    HostKernel, KernelMemory, LaunchRequest, MemoryInfo, ModuleSource, Place, PointerAttributes, PointerKind,
    Priority, Protection, Touch, Touched, Touches, Usage,
};
pub use error::{DriverError, Living, Refusal, Result};
pub use fault::{Fault, Faults, Injected, When};
pub use ids::{Address, DeviceId, Event, Handle, Kernel, Module, Stream, StreamId, Verb};
pub use lag::Lag;
pub use record::{CostTable, Count, Counters, Logged, Recorder};
