//! Work of devices that the pool was not told of, before memory leaves.

use glake_device::{Fault, Injected, Verb, When};

use super::*;

const OTHER: DeviceId = DeviceId(2);
const UNUSED: DeviceId = DeviceId(3);
/// Longer than anything else takes.
const LONG: Duration = Duration::from_secs(100);

/// A stream of another device, with long work on it.
fn working(bed: &Bed) -> OwnedStream {
    let stream = OwnedStream::new(&bed.mover.driver, OTHER).unwrap();
    bed.sim.enqueue_kernel(OTHER, stream.id(), &[], &[], LONG, |_| {}).unwrap();
    stream
}

#[test]
fn every_device_with_a_context_is_waited_for_and_none_is_made() {
    let mut bed = bed();
    bed.furnish();
    bed.shrink().unwrap();
    bed.refill().unwrap();
    let contexts = |bed: &Bed| [GPU, PEER, OTHER, UNUSED].map(|device| bed.sim.has_context(device).unwrap());
    assert_eq!(contexts(&bed)[2..], [false, false]);
    assert!(bed.sim.now() < LONG);
    let stream = working(&bed);
    bed.shrink().unwrap();
    assert!(bed.sim.now() >= LONG);
    assert_eq!(contexts(&bed)[2..], [true, false]);
    bed.refill().unwrap();
    bed.assert_bytes();
    drop(stream);
    bed.end();
}

#[test]
fn while_a_capture_is_open_nothing_is_waited_for_and_nothing_changes() {
    let mut bed = bed();
    bed.furnish();
    bed.pool.settle().unwrap();
    let before = bed.pool.reserved();
    let (hold, stream) = (bed.pool.hold_epochs(), working(&bed));
    let refused = bed.shrink().unwrap_err();
    assert!(
        matches!(refused, RegionError::Pool(PoolError::Driver(DriverError::Capturing { .. }))),
        "{refused}"
    );
    assert!(bed.sim.now() < LONG && bed.pool.reserved() == before);
    bed.assert_bytes();
    drop((hold, stream));
    bed.end();
}

/// Its work is over, and the pool is none of its own.
#[test]
fn a_lost_device_keeps_nothing_where_it_is() {
    let mut bed = bed();
    bed.furnish();
    let stream = OwnedStream::new(&bed.mover.driver, OTHER).unwrap();
    let lost = Fault { verb: Some(Verb::StreamSynchronize), when: When::Nth(1), error: Injected::Lost(700) };
    bed.faults.set(&[lost]);
    assert!(stream.synchronize().is_err_and(|error| error.is_sticky()));
    bed.shrink().unwrap();
    bed.refill().unwrap();
    bed.assert_bytes();
    bed.faults.set(&[]);
    drop(stream);
    bed.end();
}
