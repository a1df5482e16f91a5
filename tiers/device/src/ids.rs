//! The names of things on a device: `Copy` integers, meaningful only to the driver that gave them.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Which GPU, as the driver counts them (after `CUDA_VISIBLE_DEVICES`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DeviceId(pub u32);

/// A virtual address, of a device or of the host (one address space, as CUDA's unified addressing has it).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address(pub u64);

/// A piece of physical memory that [`crate::Driver::create`] made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Handle(pub u64);

/// A raw stream: `CUstream` as an integer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream(pub u64);

/// Which stream this really is: unique for the life of the process, also where two handles name one stream or
/// one handle names a stream for each thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(pub u64);

/// An event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Event(pub u64);

/// A loaded module of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Module(pub u64);

/// A kernel of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kernel(pub u64);

impl Stream {
    /// The legacy default stream, which synchronises with every blocking stream of its context.
    pub const LEGACY: Stream = Stream(1);
    /// The calling thread's own default stream.
    pub const PER_THREAD: Stream = Stream(2);
}

impl Address {
    /// The address `bytes` further on; `None` past the end of the address space.
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
