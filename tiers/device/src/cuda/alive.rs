//! Counts of the streams, events, modules, extents and registrations alive in each context; releasing the context would destroy them.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::{DeviceId, DriverError, Living, Result};

/// Live objects of one context. A count changes inside the call that creates or destroys an object, after the driver has succeeded.
#[derive(Debug, Default)]
pub(super) struct Alive {
    pub(super) streams: Count,
    pub(super) events: Count,
    pub(super) modules: Count,
    pub(super) extents: Count,
    pub(super) registrations: Count,
}

#[derive(Debug, Default)]
pub(super) struct Count(AtomicU64);

/// Device whose context each object was created in, for objects whose destroy call does not name it.
#[derive(Debug)]
pub(super) struct Owners<K>(Mutex<HashMap<K, DeviceId>>);

impl Alive {
    /// Returns `ContextInUse` if any object is alive.
    pub(super) fn none(&self, device: DeviceId) -> Result<()> {
        let living = Living {
            streams: self.streams.get(),
            events: self.events.get(),
            modules: self.modules.get(),
            extents: self.extents.get(),
            registrations: self.registrations.get(),
        };
        if living.is_none() { Ok(()) } else { Err(DriverError::ContextInUse { device, living }) }
    }
}

impl Count {
    pub(super) fn more(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn less(&self) {
        // Objects created by the program and destroyed here were never counted. The closure never returns `None`.
        let less = |count: u64| Some(count.saturating_sub(1));
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl<K: Eq + Hash> Owners<K> {
    pub(super) fn new() -> Owners<K> {
        Owners(Mutex::default())
    }

    pub(super) fn made(&self, what: K, device: DeviceId) {
        self.0.lock().insert(what, device);
    }

    pub(super) fn gone(&self, what: &K) -> Option<DeviceId> {
        self.0.lock().remove(what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn living_objects_are_listed() {
        let alive = Alive::default();
        alive.none(DeviceId(3)).unwrap();
        alive.streams.more();
        alive.streams.more();
        alive.extents.more();
        let refused = alive.none(DeviceId(3)).unwrap_err();
        assert!(refused.to_string().contains("2 streams, 1 extents"), "{refused}");
        (0..3).for_each(|_| alive.streams.less());
        alive.extents.less();
        alive.registrations.more();
        let refused = alive.none(DeviceId(3)).unwrap_err();
        assert!(refused.to_string().contains("1 ranges of pinned memory"), "{refused}");
        alive.registrations.less();
        let owners = Owners::new();
        owners.made(7, DeviceId(1));
        assert_eq!([owners.gone(&7), owners.gone(&7)], [Some(DeviceId(1)), None]);
        alive.none(DeviceId(3)).unwrap();
    }
}
