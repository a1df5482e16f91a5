//! Zero-staging copies of relays between the host and other GPUs' memory. A GPU has one engine for these, in both directions: it completes
//! one stream's queued work before it switches to another's.

use std::sync::atomic::{AtomicU64, Ordering};

use glake_device::DeviceId;
use glake_units::Bytes;

use crate::paths::{Direction, MOST_GPUS};

/// Bytes enqueued and not known to be complete, by relay and direction.
#[derive(Debug, Default)]
pub(crate) struct Crossings {
    bytes: [[AtomicU64; 2]; MOST_GPUS],
}

impl Crossings {
    /// Adds bytes in flight.
    pub(crate) fn begin(&self, relay: DeviceId, direction: Direction, size: Bytes) {
        if let Some(bytes) = self.at(relay, direction) {
            bytes.fetch_add(size.get(), Ordering::Relaxed);
        }
    }

    /// Removes completed bytes; the counter saturates at zero.
    pub(crate) fn end(&self, relay: DeviceId, direction: Direction, size: Bytes) {
        if let Some(bytes) = self.at(relay, direction) {
            let less = |bytes: u64| Some(bytes.saturating_sub(size.get()));
            // The closure always answers, so the update cannot fail.
            let _ = bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
    }

    /// Returns a relay's bytes in flight in a direction.
    pub(crate) fn of(&self, relay: DeviceId, direction: Direction) -> Bytes {
        Bytes::new(self.at(relay, direction).map_or(0, |bytes| bytes.load(Ordering::Relaxed)))
    }

    fn at(&self, relay: DeviceId, direction: Direction) -> Option<&AtomicU64> {
        let relay = usize::try_from(relay.0).ok().and_then(|relay| self.bytes.get(relay));
        relay.map(|relay| &relay[direction.index()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_counted_by_relay_and_direction() {
        let crossings = Crossings::default();
        let [relay, far] = [3, 400].map(DeviceId);
        for relay in [relay, far] {
            crossings.begin(relay, Direction::ToGpu, Bytes::mib(3));
            crossings.begin(relay, Direction::ToGpu, Bytes::mib(1));
        }
        assert_eq!(crossings.of(relay, Direction::ToGpu), Bytes::mib(4));
        assert_eq!(
            [crossings.of(relay, Direction::FromGpu), crossings.of(far, Direction::ToGpu)],
            [Bytes::ZERO; 2]
        );
        crossings.end(relay, Direction::ToGpu, Bytes::mib(3));
        assert_eq!(crossings.of(relay, Direction::ToGpu), Bytes::mib(1));
        crossings.end(relay, Direction::ToGpu, Bytes::mib(9));
        assert_eq!(crossings.of(relay, Direction::ToGpu), Bytes::ZERO);
    }
}
