//! Bytes in flight of other copies.

use std::sync::atomic::{AtomicU64, Ordering};

use glake_device::DeviceId;
use glake_units::Bytes;

use super::{Direction, MOST_GPUS};

/// Bytes in flight by target, link and direction. Enqueuing adds to the counters, completion subtracts.
///
/// Invariant: the bytes of a link are the sum over its targets, except while a thread updates both.
#[derive(Debug, Default)]
pub struct Load {
    links: [[AtomicU64; 2]; MOST_GPUS],
    targets: [[[AtomicU64; 2]; MOST_GPUS]; MOST_GPUS],
}

impl Load {
    /// Creates empty counters.
    pub fn new() -> Self {
        Load::default()
    }

    /// Adds `size` bytes of `target` on the link of `relay`.
    pub fn begin(&self, target: DeviceId, relay: DeviceId, direction: Direction, size: Bytes) {
        for counter in self.counters(target, relay, direction).into_iter().flatten() {
            counter.fetch_add(size.get(), Ordering::Relaxed);
        }
    }

    /// Removes `size` completed bytes; the counters saturate at zero.
    pub fn end(&self, target: DeviceId, relay: DeviceId, direction: Direction, size: Bytes) {
        for counter in self.counters(target, relay, direction).into_iter().flatten() {
            let less = |bytes: u64| Some(bytes.saturating_sub(size.get()));
            // The closure always answers, so the update cannot fail.
            let _ = counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
    }

    /// Returns the bytes in flight on the link of `relay`.
    pub fn link(&self, relay: DeviceId, direction: Direction) -> Bytes {
        let bytes = usize::try_from(relay.0).ok().and_then(|relay| self.links.get(relay));
        Bytes::new(bytes.map_or(0, |link| link[direction.index()].load(Ordering::Relaxed)))
    }

    /// Returns those of them that belong to `target`.
    pub fn target(&self, target: DeviceId, relay: DeviceId, direction: Direction) -> Bytes {
        let [_, of_target] = self.counters(target, relay, direction);
        Bytes::new(of_target.map_or(0, |bytes| bytes.load(Ordering::Relaxed)))
    }

    fn counters(&self, target: DeviceId, relay: DeviceId, direction: Direction) -> [Option<&AtomicU64>; 2] {
        let (target, relay) = (usize::try_from(target.0), usize::try_from(relay.0));
        let (Ok(target @ 0..MOST_GPUS), Ok(relay @ 0..MOST_GPUS)) = (target, relay) else { return [None; 2] };
        let way = direction.index();
        [Some(&self.links[relay][way]), Some(&self.targets[target][relay][way])]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_by_link_and_target() {
        let load = Load::new();
        let (a, b, far) = (DeviceId(0), DeviceId(3), DeviceId(40));
        load.begin(a, b, Direction::ToGpu, Bytes::mib(3));
        load.begin(b, b, Direction::ToGpu, Bytes::mib(1));
        load.begin(a, far, Direction::ToGpu, Bytes::mib(1));
        assert_eq!(load.link(b, Direction::ToGpu), Bytes::mib(4));
        assert_eq!(load.target(a, b, Direction::ToGpu), Bytes::mib(3));
        assert_eq!(load.link(b, Direction::FromGpu), Bytes::ZERO);
        assert_eq!(load.link(far, Direction::ToGpu), Bytes::ZERO);
        load.end(a, b, Direction::ToGpu, Bytes::mib(9));
        load.end(b, b, Direction::ToGpu, Bytes::mib(1));
        assert_eq!(load.link(b, Direction::ToGpu), Bytes::ZERO);
    }
}
