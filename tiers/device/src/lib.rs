//! The only seam between GLake and hardware.
//!
//! ```text
//! ffi ─► runtime ─► transfer ─► tiers ─► glake-device ─► libcuda | simulated device
//!
//!             ┌ fault ┐ ┌ record ┐ ┌ lag ┐          decorators: each wraps any driver
//!  owned ───► │       │►│        │►│     │► cuda | sim
//!             └───────┘ └────────┘ └─────┘
//! ```
//!
//! [`Driver`] holds the raw verbs.

mod driver;
mod error;
mod ids;
mod verb;

pub use driver::{
    Access, CaptureState, Compare, CopyRequest, DeviceInfo, Driver, ExtentProperties, HostKernel,
    KernelMemory, LaunchRequest, MemoryInfo, ModuleSource, Place, PointerKind, Protection, Touch,
};
pub use error::{DriverError, Refusal, Result};
pub use ids::{Address, DeviceId, Event, Handle, Kernel, Module, Stream, StreamId};
pub use verb::Verb;
