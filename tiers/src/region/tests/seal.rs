//! What is sealed strictly cannot be written to, and what is pinned stays.

use glake_device::Refusal;

use super::*;

fn sealed_bed(copy: CopyPolicy) -> Bed {
    let mut bed = bed_of(Policy::Sealed, copy, Bytes::MAX);
    bed.furnish();
    bed.region.seal(true).unwrap();
    bed
}

impl Bed {
    /// A kernel of a device writes to every block, at its address; each tells whether it was refused for being read only.
    fn refuses_writes(&self, device: DeviceId) -> Vec<bool> {
        let stream = OwnedStream::new(&self.mover.driver, device).unwrap();
        let refused = self.live.iter().map(|(block, _)| {
            let writes = [Touch { address: block.address, size: block.size }];
            let time = Duration::from_micros(1);
            match self.sim.enqueue_kernel(device, stream.id(), &[], &writes, time, |_| {}) {
                Ok(()) => false,
                Err(DriverError::Refused { reason: Refusal::ReadOnly, .. }) => true,
                Err(error) => panic!("{error}"),
            }
        });
        let refused = refused.collect();
        stream.synchronize().unwrap();
        refused
    }

    pub(super) fn assert_read_only(&self, read_only: bool) {
        for device in [GPU, PEER] {
            assert_eq!(self.refuses_writes(device), vec![read_only; self.live.len()], "{device}");
        }
        let (block, seed) = self.live[0];
        let bytes = pattern(seed, block.size);
        assert_eq!(self.pool.write(block.address, &bytes).is_err(), read_only);
    }
}

#[test]
fn a_write_faults_at_every_address() {
    for copy in [CopyPolicy::Drop, CopyPolicy::Retain] {
        let bed = sealed_bed(copy);
        bed.assert_read_only(true);
        bed.assert_bytes();
        for round in 0..2 {
            let copied = bed.shrink().unwrap().copied;
            let kept = round > 0 && copy == CopyPolicy::Retain;
            assert_eq!(copied, if kept { Bytes::ZERO } else { bed.live_bytes() });
            bed.refill().unwrap();
            bed.assert_read_only(true);
            bed.assert_bytes();
        }
        // Of what was opened for a copy and stayed nothing is open.
        bed.shrink_by(EXTENT).unwrap();
        bed.assert_sound();
        bed.refill().unwrap();
        bed.assert_read_only(true);
        bed.region.seal(false).unwrap();
        bed.assert_read_only(false);
        bed.region.seal(true).unwrap();
        bed.region.unseal().unwrap();
        bed.assert_read_only(false);
        bed.assert_bytes();
        bed.end();
    }
}

#[test]
fn what_could_not_leave_stays_read_only() {
    let mut bed = bed_of(Policy::Sealed, CopyPolicy::Drop, Bytes::mib(4));
    for _ in 0..4 {
        bed.add(EXTENT);
    }
    bed.region.seal(true).unwrap();
    let stopped = bed.shrink().unwrap_err();
    assert!(matches!(stopped, RegionError::Stopped { left, .. } if left == Bytes::mib(4)), "{stopped}");
    let (here, away) = (bed.live.split_off(2), bed.live.clone());
    bed.live = here;
    bed.assert_read_only(true);
    bed.live.splice(0..0, away);
    bed.refill().unwrap();
    bed.assert_read_only(true);
    bed.assert_bytes();
    bed.region.unseal().unwrap();
    bed.end();
}

#[test]
fn what_is_pinned_stays() {
    let mut bed = bed();
    bed.furnish();
    let stitched = bed.live[4].0;
    let reserved = bed.pool.reserved();
    // By any address in it, twice.
    let inside = Address(stitched.address.0 + 5000);
    bed.region.pin(inside).unwrap();
    bed.region.pin(stitched.address).unwrap();
    for _ in 0..2 {
        let report = bed.shrink().unwrap();
        assert!(report.skipped.iter().all(|skipped| skipped.reason == SkipReason::Pinned));
        let stayed: Bytes = report.skipped.iter().map(|skipped| skipped.size).sum();
        assert_eq!((report.skipped.len(), stayed), (4, report.left));
        assert_eq!(report.freed, reserved.saturating_sub(report.left));
        assert_eq!(bed.pool.reserved(), report.left);
        let all = bed.live.clone();
        bed.live.retain(|(block, _)| *block == stitched);
        bed.assert_bytes();
        bed.live = all;
        let away = bed.live[0].0.address;
        let refused = bed.region.pin(away);
        assert!(matches!(refused, Err(RegionError::Pool(PoolError::Away { .. }))));
        bed.refill().unwrap();
        bed.assert_bytes();
        bed.region.unpin(inside).unwrap();
    }
    assert!(bed.region.unpin(inside).is_err(), "as often as it was pinned");
    let other = bed.pool.malloc(Bytes::kib(4), bed.here).unwrap();
    assert!(bed.region.pin(other.address).is_err(), "a block of another domain");
    bed.pool.free(other.address).unwrap();
    // A pin ends with its block.
    bed.region.pin(stitched.address).unwrap();
    bed.free(4);
    let report = bed.shrink().unwrap();
    assert_eq!((report.left, report.skipped.len()), (Bytes::ZERO, 0));
    bed.region.unpin(stitched.address).unwrap();
    bed.refill().unwrap();
    bed.assert_bytes();
    bed.end();
}
