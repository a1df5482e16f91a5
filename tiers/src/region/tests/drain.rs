//! Work of devices that the pool was not told of, before memory leaves.

use glake_device::{Fault, Injected, Verb, When};

use super::*;

const OTHER: DeviceId = DeviceId(2);
const UNUSED: DeviceId = DeviceId(3);
/// Longer than anything else takes.
const LONG: Duration = Duration::from_secs(100);

/// A stream of another device, with long work on it.
fn working(fixture: &Fixture) -> OwnedStream {
    let stream = OwnedStream::new(&fixture.mover.driver, OTHER).unwrap();
    fixture.sim.enqueue_kernel(OTHER, stream.id(), &[], &[], LONG, |_| {}).unwrap();
    stream
}

#[test]
fn every_device_with_a_context_is_waited_for_and_none_is_made() {
    let mut fixture = fixture();
    fixture.furnish();
    fixture.shrink().unwrap();
    fixture.refill().unwrap();
    let contexts =
        |fixture: &Fixture| [GPU, PEER, OTHER, UNUSED].map(|device| fixture.sim.has_context(device).unwrap());
    assert_eq!(contexts(&fixture)[2..], [false, false]);
    assert!(fixture.sim.now() < LONG);
    let stream = working(&fixture);
    fixture.shrink().unwrap();
    assert!(fixture.sim.now() >= LONG);
    assert_eq!(contexts(&fixture)[2..], [true, false]);
    fixture.refill().unwrap();
    fixture.assert_bytes();
    drop(stream);
    fixture.end();
}

#[test]
fn while_a_capture_is_open_nothing_is_waited_for_and_nothing_changes() {
    let mut fixture = fixture();
    fixture.furnish();
    fixture.pool.settle().unwrap();
    let before = fixture.pool.reserved();
    let (hold, stream) = (fixture.pool.clock().hold(), working(&fixture));
    let refused = fixture.shrink().unwrap_err();
    assert!(
        matches!(refused, RegionError::Pool(PoolError::Driver(DriverError::Capturing { .. }))),
        "{refused}"
    );
    assert!(fixture.sim.now() < LONG && fixture.pool.reserved() == before);
    fixture.assert_bytes();
    drop((hold, stream));
    fixture.end();
}

/// Its work is over, and the pool is none of its own.
#[test]
fn a_lost_device_keeps_nothing_where_it_is() {
    let mut fixture = fixture();
    fixture.furnish();
    let stream = OwnedStream::new(&fixture.mover.driver, OTHER).unwrap();
    let lost = Fault { verb: Some(Verb::StreamSynchronize), when: When::Nth(1), error: Injected::Lost(700) };
    fixture.faults.set(&[lost]);
    assert!(stream.synchronize().is_err_and(|error| error.is_sticky()));
    fixture.shrink().unwrap();
    fixture.refill().unwrap();
    fixture.assert_bytes();
    fixture.faults.set(&[]);
    drop(stream);
    fixture.end();
}
