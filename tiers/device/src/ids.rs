//! Names of objects on a device: `Copy` integers, meaningful only to the driver that issued them.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Ordinal of a GPU, as the driver counts them (after `CUDA_VISIBLE_DEVICES`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DeviceId(pub u32);

/// A virtual address of a device or the host (one address space, as in CUDA's unified addressing).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address(pub u64);

/// Physical memory created by [`crate::Driver::create`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Handle(pub u64);

/// Raw stream handle: a `CUstream` as an integer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream(pub u64);

/// Identity of a stream, unique for the life of the process, also where two handles name one stream or one handle names a stream per
/// thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(pub u64);

/// Raw event handle: a `CUevent` as an integer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Event(pub u64);

/// Handle of a loaded module of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Module(pub u64);

/// Handle of a kernel in a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kernel(pub u64);

impl Stream {
    /// The legacy default stream, which synchronises with every blocking stream of its context.
    pub const LEGACY: Stream = Stream(1);
    /// The calling thread's own default stream.
    pub const PER_THREAD: Stream = Stream(2);
}

impl Address {
    /// Returns the address `bytes` further on; `None` past the end of the address space.
    pub const fn checked_add(self, bytes: u64) -> Option<Address> {
        match self.0.checked_add(bytes) {
            Some(address) => Some(Address(address)),
            None => None,
        }
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {}", self.0)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
