//! What is sealed strictly cannot be written to, and what is pinned stays.

use glake_device::Refusal;

use super::*;

fn sealed_fixture(copy: CopyPolicy) -> Fixture {
    let mut fixture = fixture_of(Policy::Sealed, copy, Bytes::MAX);
    fixture.furnish();
    fixture.region.seal(true).unwrap();
    fixture
}

impl Fixture {
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
        let fixture = sealed_fixture(copy);
        fixture.assert_read_only(true);
        fixture.assert_bytes();
        for round in 0..2 {
            let copied = fixture.shrink().unwrap().copied;
            let kept = round > 0 && copy == CopyPolicy::Retain;
            assert_eq!(copied, if kept { Bytes::ZERO } else { fixture.live_bytes() });
            fixture.refill().unwrap();
            fixture.assert_read_only(true);
            fixture.assert_bytes();
        }
        // Of what was opened for a copy and stayed nothing is open.
        fixture.shrink_by(EXTENT).unwrap();
        fixture.assert_sound();
        fixture.refill().unwrap();
        fixture.assert_read_only(true);
        fixture.region.seal(false).unwrap();
        fixture.assert_read_only(false);
        fixture.region.seal(true).unwrap();
        fixture.region.unseal().unwrap();
        fixture.assert_read_only(false);
        fixture.assert_bytes();
        fixture.end();
    }
}

#[test]
fn what_could_not_leave_stays_read_only() {
    let mut fixture = fixture_of(Policy::Sealed, CopyPolicy::Drop, Bytes::mib(4));
    for _ in 0..4 {
        fixture.add(EXTENT);
    }
    fixture.region.seal(true).unwrap();
    let stopped = fixture.shrink().unwrap_err();
    assert!(
        matches!(stopped, RegionError::Stopped { resident, .. } if resident == Bytes::mib(4)),
        "{stopped}"
    );
    let (here, evicted) = (fixture.live.split_off(2), fixture.live.clone());
    fixture.live = here;
    fixture.assert_read_only(true);
    fixture.live.splice(0..0, evicted);
    fixture.refill().unwrap();
    fixture.assert_read_only(true);
    fixture.assert_bytes();
    fixture.region.unseal().unwrap();
    fixture.end();
}

#[test]
fn what_is_fixed_stays() {
    let mut fixture = fixture();
    fixture.furnish();
    let stitched = fixture.live[4].0;
    let reserved = fixture.pool.reserved();
    // By any address in it, twice.
    let inside = Address(stitched.address.0 + 5000);
    fixture.region.fix(inside).unwrap();
    fixture.region.fix(stitched.address).unwrap();
    for _ in 0..2 {
        let report = fixture.shrink().unwrap();
        assert!(report.skipped.iter().all(|skipped| skipped.reason == SkipReason::Fixed));
        let stayed: Bytes = report.skipped.iter().map(|skipped| skipped.size).sum();
        assert_eq!((report.skipped.len(), stayed), (4, report.resident));
        assert_eq!(report.freed, reserved.saturating_sub(report.resident));
        assert_eq!(fixture.pool.reserved(), report.resident);
        let all = fixture.live.clone();
        fixture.live.retain(|(block, _)| *block == stitched);
        fixture.assert_bytes();
        fixture.live = all;
        let evicted = fixture.live[0].0.address;
        let refused = fixture.region.fix(evicted);
        assert!(matches!(refused, Err(RegionError::Pool(PoolError::Evicted { .. }))));
        fixture.refill().unwrap();
        fixture.assert_bytes();
        fixture.region.unfix(inside).unwrap();
    }
    assert!(fixture.region.unfix(inside).is_err(), "as often as it was pinned");
    let other = fixture.pool.malloc(Bytes::kib(4), fixture.here).unwrap();
    assert!(fixture.region.fix(other.address).is_err(), "a block of another domain");
    fixture.pool.free(other.address).unwrap();
    // A pin ends with its block.
    fixture.region.fix(stitched.address).unwrap();
    fixture.free(4);
    let report = fixture.shrink().unwrap();
    assert_eq!((report.resident, report.skipped.len()), (Bytes::ZERO, 0));
    fixture.region.unfix(stitched.address).unwrap();
    fixture.refill().unwrap();
    fixture.assert_bytes();
    fixture.end();
}
