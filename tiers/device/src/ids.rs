//! Names of objects on a device (`Copy` integers, meaningful only to the driver that issued them) and of the driver's verbs.
//!
//! Sets of devices as bit masks.

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

macro_rules! verbs {
    ($($variant:ident = $name:literal),+ $(,)?) => {
        /// Names of the methods of [`crate::Driver`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[allow(missing_docs)]
        pub enum Verb { $($variant),+ }

        impl Verb {
            /// Every verb, in order of declaration.
            pub const ALL: &[Verb] = &[$(Verb::$variant),+];

            /// Returns the name of the trait's method.
            pub const fn name(self) -> &'static str {
                match self { $(Verb::$variant => $name),+ }
            }
        }
    };
}

verbs! {
    Devices = "devices", MemoryInfo = "memory_info",
    Granularity = "granularity", Reserve = "reserve", Unreserve = "unreserve", Create = "create",
    Release = "release", Map = "map", Unmap = "unmap", SetAccess = "set_access", Export = "export",
    Import = "import", AllocPlain = "alloc_plain", FreePlain = "free_plain",
    Copy = "copy", CopyBetween = "copy_between", CopyBatch = "copy_batch", Fill = "fill", ReadNow = "read_now", WriteNow = "write_now",
    StreamCreate = "stream_create", StreamDestroy = "stream_destroy", StreamId = "stream_id",
    StreamDevice = "stream_device",
    StreamSynchronize = "stream_synchronize", StreamWaitEvent = "stream_wait_event",
    StreamWaitValue = "stream_wait_value", StreamWriteValue = "stream_write_value",
    CaptureState = "capture_state",
    EventCreate = "event_create", EventDestroy = "event_destroy", EventRecord = "event_record",
    EventRecordContext = "event_record_context", EventQuery = "event_query",
    EventSynchronize = "event_synchronize", EventElapsed = "event_elapsed",
    ContextSynchronize = "context_synchronize",
    OwnContexts = "own_contexts", PrimaryOf = "primary_of",
    HasContext = "has_context", ReleaseContext = "release_context",
    ModuleLoad = "module_load", ModuleUnload = "module_unload", KernelFind = "kernel_find", Launch = "launch",
    CanAccessPeer = "can_access_peer", EnablePeerAccess = "enable_peer_access", PointerAttributes = "pointer_attributes",
    HostRegister = "host_register", HostUnregister = "host_unregister",
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A set of devices with ids below 64, more than any server has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct DeviceSet(u64);

impl DeviceSet {
    /// The empty set of devices.
    pub const EMPTY: DeviceSet = DeviceSet(0);
    /// The set of all 64 devices.
    pub const ALL: DeviceSet = DeviceSet(u64::MAX);

    /// Returns the set of one device; empty if its id is above 63.
    pub const fn of(device: DeviceId) -> DeviceSet {
        if device.0 < 64 { DeviceSet(1 << device.0) } else { DeviceSet(0) }
    }

    /// Returns the union of both sets.
    pub const fn union(self, other: DeviceSet) -> DeviceSet {
        DeviceSet(self.0 | other.0)
    }

    /// Returns the intersection of both sets.
    pub const fn intersection(self, other: DeviceSet) -> DeviceSet {
        DeviceSet(self.0 & other.0)
    }

    /// Returns the devices that are not in `other`.
    pub const fn without(self, other: DeviceSet) -> DeviceSet {
        DeviceSet(self.0 & !other.0)
    }

    /// Returns whether the set contains the device.
    pub const fn contains(self, device: DeviceId) -> bool {
        device.0 < 64 && self.0 >> device.0 & 1 == 1
    }

    /// Returns whether `other` contains every device of this set.
    pub const fn is_subset(self, other: DeviceSet) -> bool {
        self.0 & !other.0 == 0
    }

    /// Returns whether the set is empty.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the set as bits, one per device, for atomics.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Returns the set with these bits ([`DeviceSet::bits`]).
    pub const fn from_bits(bits: u64) -> DeviceSet {
        DeviceSet(bits)
    }

    /// Returns the number of devices.
    pub const fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// Iterates over the devices in ascending order.
    pub fn iter(self) -> impl Iterator<Item = DeviceId> {
        let mut left = self.0;
        std::iter::from_fn(move || {
            let device = DeviceId(left.trailing_zeros());
            // Clears the lowest bit; an empty set has none.
            left &= left.checked_sub(1)?;
            Some(device)
        })
    }
}

impl FromIterator<DeviceId> for DeviceSet {
    fn from_iter<I: IntoIterator<Item = DeviceId>>(devices: I) -> DeviceSet {
        devices.into_iter().fold(DeviceSet::EMPTY, |set, device| set.union(DeviceSet::of(device)))
    }
}

#[cfg(test)]
mod devices_tests {
    use super::*;

    #[test]
    fn set_operations() {
        let set: DeviceSet = [DeviceId(3), DeviceId(0), DeviceId(3), DeviceId(99)].into_iter().collect();
        assert_eq!(set.iter().collect::<Vec<_>>(), [DeviceId(0), DeviceId(3)]);
        assert!(DeviceSet::of(DeviceId(3)).is_subset(set) && !set.is_subset(DeviceSet::of(DeviceId(3))));
        assert_eq!(set.without(DeviceSet::of(DeviceId(0))), DeviceSet::of(DeviceId(3)));
        assert!(!set.contains(DeviceId(99)) && DeviceSet::of(DeviceId(64)).is_empty());
        assert_eq!((set.len(), DeviceSet::ALL.iter().count(), DeviceSet::EMPTY.iter().count()), (2, 64, 0));
        assert_eq!(DeviceSet::from_bits(set.bits()), set);
        assert_eq!(set.intersection(DeviceSet::of(DeviceId(3))), DeviceSet::of(DeviceId(3)));
    }
}
