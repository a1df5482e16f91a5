//! Recent allocation events of a process, kept while history is enabled.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use glake_device::{DeviceId, Stream};
use parking_lot::Mutex;

use super::PoolId;

/// Kind of an event, with torch's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// A block was allocated.
    Alloc,
    /// A block was freed by the program.
    FreeRequested,
    /// A freed block may be reused by its stream.
    FreeCompleted,
    /// Physical memory was mapped.
    SegmentMap,
    /// Physical memory is about to be unmapped.
    SegmentUnmap,
    /// A request failed; the address field holds the device's free memory.
    OutOfMemory,
    /// A snapshot was taken.
    Snapshot,
}

/// One recorded event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) action: Action,
    pub(super) address: u64,
    pub(super) size: u64,
    pub(super) stream: Stream,
    pub(super) pool: PoolId,
    pub(super) time_us: u64,
}

/// Events of all devices, a ring buffer each.
#[derive(Debug)]
pub(super) struct History {
    on: AtomicBool,
    rings: Vec<Mutex<Ring>>,
}

#[derive(Debug, Default)]
struct Ring {
    most: usize,
    entries: VecDeque<Entry>,
}

impl Action {
    /// Returns torch's name of the event.
    pub(super) fn name(self) -> &'static str {
        match self {
            Action::Alloc => "alloc",
            Action::FreeRequested => "free_requested",
            Action::FreeCompleted => "free_completed",
            Action::SegmentMap => "segment_map",
            Action::SegmentUnmap => "segment_unmap",
            Action::OutOfMemory => "oom",
            Action::Snapshot => "snapshot",
        }
    }
}

impl History {
    pub(super) fn new(devices: usize) -> Self {
        let rings = std::iter::repeat_with(Mutex::default).take(devices);
        History { on: AtomicBool::new(false), rings: rings.collect() }
    }

    /// Enables or disables history, with the last `most` events of each device; earlier events stay unless `clear` is set.
    pub(super) fn keep(&self, on: bool, most: u64, clear: bool) {
        for ring in &self.rings {
            let mut ring = ring.lock();
            if clear {
                ring.entries = VecDeque::new();
            }
            if on {
                ring.most = usize::try_from(most).unwrap_or(usize::MAX).max(1);
                let excess = ring.entries.len().saturating_sub(ring.most);
                ring.entries.drain(..excess);
            }
        }
        self.on.store(on, Ordering::Release);
    }

    /// Returns whether history is enabled.
    #[inline]
    pub(super) fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Records an event if history is enabled.
    #[cold]
    pub(super) fn note(
        &self,
        action: Action,
        device: DeviceId,
        (address, size): (u64, u64),
        stream: Stream,
        pool: PoolId,
    ) {
        let Some(ring) = self.rings.get(device.0 as usize) else { return };
        let mut ring = ring.lock();
        if !self.on.load(Ordering::Acquire) {
            return;
        }
        while ring.entries.len() >= ring.most {
            ring.entries.pop_front();
        }
        // Timestamp under the lock, so that the ring is in the order of time.
        let time_us = now_us();
        ring.entries.push_back(Entry { action, address, size, stream, pool, time_us });
    }

    /// Returns the events of a device, oldest first.
    pub(super) fn of(&self, device: DeviceId) -> Vec<Entry> {
        let ring = self.rings.get(device.0 as usize).map(Mutex::lock);
        ring.map_or_else(Vec::new, |ring| ring.entries.iter().copied().collect())
    }
}

/// Returns the microseconds since 1970, as torch records them.
fn now_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(history: &History, address: u64) {
        history.note(Action::Alloc, DeviceId(0), (address, 1), Stream(0), PoolId(0, 0));
    }

    #[test]
    fn keeps_the_last_ones_while_it_is_on() {
        let history = History::new(2);
        note(&history, 1);
        assert!(!history.is_on() && history.of(DeviceId(0)).is_empty());
        history.keep(true, 3, false);
        (2..7).for_each(|address| note(&history, address));
        let kept = || history.of(DeviceId(0)).iter().map(|entry| entry.address).collect::<Vec<_>>();
        assert_eq!(kept(), [4, 5, 6]);
        history.note(Action::Snapshot, DeviceId(1), (0, 0), Stream(0), PoolId(0, 0));
        assert_eq!((kept().len(), history.of(DeviceId(1)).len(), history.of(DeviceId(2)).len()), (3, 1, 0));
        history.keep(false, 0, false);
        note(&history, 7);
        assert_eq!(kept(), [4, 5, 6]);
        history.keep(true, 2, false);
        assert_eq!(kept(), [5, 6]);
        history.keep(true, 2, true);
        assert!(kept().is_empty());
    }
}
