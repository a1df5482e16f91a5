//! What relays copy between the host and other GPUs' memory with no staging. A GPU has one engine for that, whichever way: what is there of
//! one stream is done before it turns to another's (docs/lab/duplex.md).

use std::sync::atomic::{AtomicU64, Ordering};

use glake_device::DeviceId;
use glake_units::Bytes;

use crate::paths::{Direction, MOST_GPUS};

/// Bytes that were enqueued and not seen done, by relay and direction. Counters only.
#[derive(Debug, Default)]
pub(crate) struct Crossings {
    bytes: [[AtomicU64; 2]; MOST_GPUS],
}

impl Crossings {
    /// So many bytes more.
    pub(crate) fn begin(&self, relay: DeviceId, direction: Direction, size: Bytes) {
        if let Some(bytes) = self.at(relay, direction) {
            bytes.fetch_add(size.get(), Ordering::Relaxed);
        }
    }

    /// They are done; those that never began are not counted below nothing.
    pub(crate) fn end(&self, relay: DeviceId, direction: Direction, size: Bytes) {
        if let Some(bytes) = self.at(relay, direction) {
            let less = |bytes: u64| Some(bytes.saturating_sub(size.get()));
            // The closure always answers, so the update cannot fail.
            let _ = bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
    }

    /// What a relay has of a direction.
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
