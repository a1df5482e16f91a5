//! Relays that are lost after they took their part: no success is told of bytes that did not arrive.

use glake_device::owned::{DeviceSet, Span};
use glake_device::{DeviceId, DriverError, Fault, Injected, Verb, When};
use glake_units::Bytes;

use super::fixture::{Fixture, GPU};
use crate::paths::Way;
use crate::{CopyHandle, CopyOptions, TransferError};

const SIZE: Bytes = Bytes::mib(8);

/// Of a copy over four links, the first call of `copy` is for the own share.
fn lose(fixture: &Fixture, n: u64) {
    fixture.faults.set(&[Fault {
        verb: Some(Verb::Copy),
        when: When::Nth(n),
        error: Injected::Damaged(700),
    }]);
}

/// The relay whose loss was told of.
fn lost(answer: crate::Result<()>) -> (DeviceId, u64) {
    match answer {
        Err(TransferError::Lost { relay, copies }) => (relay, copies),
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_handle_and_the_next_call_tell_of_a_loss() {
    // The first copy of a relay's lane, directly or into a slot, which another copy empties.
    let copies =
        [2, 3, 4].map(|n| (Way::ZeroStaging, n)).into_iter().chain([2, 4, 6].map(|n| (Way::Staged, n)));
    for (way, n) in copies {
        let fixture = Fixture::new("h200x4");
        let stream = fixture.stream(GPU);
        let on = fixture.user(GPU, stream.id());
        let (mapped, plain) = (fixture.mapped(GPU, SIZE), fixture.plain(GPU, SIZE));
        let span = match way {
            Way::Staged => plain.span.clone(),
            _ => mapped.span(Bytes::ZERO, SIZE).unwrap(),
        };
        let host = fixture.pinned(SIZE, n);
        let from = Span::pinned(&host, Bytes::ZERO, SIZE).unwrap();
        let copy = || fixture.engine().copy(&span, &from, on, CopyOptions::default());
        fixture.faults.set(&[Fault {
            verb: Some(Verb::Copy),
            when: When::Nth(n),
            error: Injected::Lost(700),
        }]);
        let handle = copy().unwrap();
        let (relay, copies) = lost(handle.wait());
        assert_eq!(copies, 1);
        assert!(!fixture.holds(&span, host.as_slice()));
        assert_eq!(fixture.engine().relays(), fixture.gpus.without(DeviceSet::of(relay)));
        // Also a small copy is told, which takes no relay; once.
        let word = |span: &Span| span.part(Bytes::ZERO, Bytes::new(4)).unwrap();
        let small =
            || fixture.engine().copy(&word(&span), &word(&from), on, CopyOptions::default()).map(drop);
        assert_eq!(lost(small()), (relay, 1));
        small().unwrap();
        copy().unwrap().wait().unwrap();
        assert!(fixture.holds(&span, host.as_slice()));
        let statistics = fixture.engine().statistics();
        assert_eq!(statistics.lost_copies, 1);
        assert!(statistics.paths.iter().all(|path| path.fenced == (path.relay == relay)));
        fixture.faults.set(&[]);
        drop((stream, mapped, plain, span, from, host));
        fixture.end();
    }
}

#[test]
fn a_loss_that_nobody_waited_for_is_told_by_the_next_copy() {
    let fixture = Fixture::new("h200x4");
    let stream = fixture.stream(GPU);
    let on = fixture.user(GPU, stream.id());
    let mapped = fixture.mapped(GPU, SIZE);
    let span = mapped.span(Bytes::ZERO, SIZE).unwrap();
    let host = fixture.pinned(SIZE, 8);
    let from = Span::pinned(&host, Bytes::ZERO, SIZE).unwrap();
    let unwaited = CopyOptions { waited: false, ..CopyOptions::default() };
    let copy = || fixture.engine().copy(&span, &from, on, unwaited).map(drop);
    copy().unwrap();
    lose(&fixture, 3);
    copy().unwrap();
    copy().unwrap();
    fixture.wait(on);
    let (_, copies) = lost(copy());
    assert_eq!(copies, 3, "none of them was seen to arrive");
    copy().unwrap();
    fixture.wait(on);
    assert!(fixture.holds(&span, host.as_slice()));
    fixture.faults.set(&[]);
    drop((stream, mapped, span, from, host));
    fixture.end();
}

#[test]
fn a_copy_that_is_waited_for_makes_its_own_losses_good() {
    for (n, direction) in [(2, 0), (3, 0), (4, 0), (2, 1), (4, 1)] {
        let fixture = Fixture::new("h200x4");
        let stream = fixture.stream(GPU);
        let on = fixture.user(GPU, stream.id());
        let mapped = fixture.mapped(GPU, SIZE);
        let span = mapped.span(Bytes::ZERO, SIZE).unwrap();
        let [a, b] = [1, 2].map(|seed| fixture.pinned(SIZE, seed));
        let [from, back] = [&a, &b].map(|memory| Span::pinned(memory, Bytes::ZERO, SIZE).unwrap());
        let options = CopyOptions { verify: true, ..CopyOptions::default() };
        if direction == 0 {
            lose(&fixture, n);
        }
        fixture.engine().copy_blocking(&span, &from, on, options).unwrap();
        if direction == 1 {
            lose(&fixture, n);
        }
        fixture.engine().copy_blocking(&back, &span, on, options).unwrap();
        assert!(fixture.holds(&span, a.as_slice()) && a.as_slice() == b.as_slice());
        assert_eq!(fixture.engine().relays().len(), 3);
        assert_eq!(fixture.engine().statistics().lost_copies, 0);
        fixture.faults.set(&[]);
        drop((stream, mapped, span, from, back, a, b));
        fixture.end();
    }
}

#[test]
fn the_user_s_own_device_is_the_user_s_to_know_of() {
    let fixture = Fixture::new("h200x4");
    let stream = fixture.stream(GPU);
    let on = fixture.user(GPU, stream.id());
    let mapped = fixture.mapped(GPU, SIZE);
    let span = mapped.span(Bytes::ZERO, SIZE).unwrap();
    let host = fixture.pinned(SIZE, 8);
    let from = Span::pinned(&host, Bytes::ZERO, SIZE).unwrap();
    lose(&fixture, 1);
    let waited = fixture.engine().copy(&span, &from, on, CopyOptions::default()).and_then(CopyHandle::wait);
    assert!(
        matches!(waited, Err(TransferError::Driver(DriverError::Sticky { code: 700, .. }))),
        "{waited:?}"
    );
    assert!(fixture.driver.stream_synchronize(GPU, on.raw).is_err());
    fixture.faults.set(&[]);
    drop((stream, mapped, span, from, host));
    fixture.end();
}
