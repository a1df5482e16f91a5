//! Statistics of offloading: bytes, times and checks.

use std::sync::atomic::Ordering;

use glake_transfer::paths::Direction;
use glake_units::Bytes;

use super::super::device::DeviceMemory;
use super::Offload;
use crate::metrics::{OffloadStats, micros};

impl Offload {
    /// Returns the statistics of offloading: bytes, times and checks.
    pub fn statistics(&self) -> OffloadStats {
        if !self.registry.is_stopped() {
            self.checks.poll();
        }
        let compared = self.checks.compared();
        let (out, back) = (self.queues.moved(Direction::FromGpu), self.queues.moved(Direction::ToGpu));
        let (mut pinned, mut live) = (Bytes::ZERO, Bytes::ZERO);
        for (all, own) in self.known_hosts().map(|host| host.bytes()) {
            pinned = pinned.saturating_add(all);
            live = live.saturating_add(own);
        }
        let pools =
            || self.registry.devices.iter().filter_map(DeviceMemory::started).map(|started| &started.pool);
        OffloadStats {
            entries: self.entries.count() as u64,
            host_bytes: live.get(),
            host_pinned_bytes: pinned.get(),
            copies_out: out.copies,
            bytes_out: out.bytes.get(),
            busy_us_out: micros(out.busy),
            timed_bytes_out: out.timed.get(),
            copies_in: back.copies,
            bytes_in: back.bytes.get(),
            busy_us_in: micros(back.busy),
            timed_bytes_in: back.timed.get(),
            refused: self.refused.load(Ordering::Relaxed),
            unchanged: compared.same,
            changed: compared.changed,
            unchecked: compared.missed,
            held_bytes: pools().map(|pool| pool.read_holds().freed_bytes()).sum::<Bytes>().get(),
            hold_waits: pools().map(|pool| pool.counters().hold_waits).sum(),
        }
    }
}
