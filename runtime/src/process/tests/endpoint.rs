//! What memory is, and when the driver is asked.

use glake_device::owned::{DeviceSet, Pages, Registration};
use glake_device::{CopyRequest, PointerKind, Verb};

use super::*;
use crate::process::copies::Endpoint;

#[test]
fn memory_is_what_holds_all_of_it() {
    let process = started("");
    let block = process.malloc(1, mib(20), STREAM).unwrap();
    let inside = Address(block.0 + 4096);
    assert_eq!(reach_of(&process, inside), [1]);
    process.sharing().enable_peer(3, 1).unwrap();
    assert_eq!(reach_of(&process, inside), [1, 3]);
    let pinned =
        Registration::new(&process.registry.completion_events, Pages::new(mib(2), 1).unwrap()).unwrap();
    let whole = process.copies().ends.end_of(pinned.start(), mib(2)).unwrap().unwrap();
    assert_eq!(whole, Endpoint { kind: PointerKind::Pinned, reach: DeviceSet::ALL, is_pool: false });
    assert!(!whole.is_other_side_of(&whole));
    let bytes = vec![0_u8; 4096];
    let pageable =
        process.copies().ends.end_of(Address(bytes.as_ptr() as u64), Bytes::new(4096)).unwrap().unwrap();
    assert_eq!(pageable, Endpoint { kind: PointerKind::Pageable, reach: DeviceSet::EMPTY, is_pool: false });
    assert_eq!(
        process.copies().ends.end_of(pinned.start(), mib(3)).unwrap(),
        None,
        "half of it is not pinned"
    );
    assert_eq!(process.copies().ends.end_of(pinned.start(), Bytes::MAX).unwrap(), None);
    // Its first and its last byte are pinned, by two registrations, whatever lies between.
    let other =
        Registration::new(&process.registry.completion_events, Pages::new(mib(2), 1).unwrap()).unwrap();
    let (first, last) = (pinned.start().min(other.start()), pinned.start().max(other.start()));
    let size = Bytes::new(last.0 + mib(2).get() - first.0);
    assert_eq!(process.copies().ends.end_of(first, size).unwrap(), None, "{size} in two registrations");
    drop(other);
    let (mut many, mut asked) = (process.copies().ends.many(), Vec::new());
    for offset in [0, 5000, 1 << 20] {
        let (to, from) = (Address(pinned.start().0 + offset), Address(block.0 + offset));
        let (there, here) = many.of(&CopyRequest { to, from, size: Bytes::kib(16) }).unwrap().unwrap();
        assert!(there == whole && here.is_pool);
        asked.push(process.reports().driver_calls().0);
    }
    assert_eq!(asked[0], asked[2], "what was found once is not asked for again");
    assert_eq!(many.of(&CopyRequest { to: pinned.start(), from: block, size: mib(3) }).unwrap(), None);
    process.free(block).unwrap();
}

#[test]
fn without_relays_pinned_memory_is_asked_for_once_in_a_while() {
    let process = started("");
    let block = process.malloc(0, mib(8), STREAM).unwrap();
    // The engine says then what a copy could gain.
    let small = CopyRequest { to: block, from: Address(4096), size: Bytes::kib(4) };
    process.copies().has_relays().unwrap();
    process.registry.engine().unwrap();
    assert_eq!(process.copies().ends.both_ends(&small, STREAM, false).unwrap(), None);
    let pinned =
        Registration::new(&process.registry.completion_events, Pages::new(mib(8), 1).unwrap()).unwrap();
    let out = CopyRequest { to: pinned.start(), from: block, size: mib(8) };
    let back = CopyRequest { to: block, from: Address(pinned.start().0 + 4096), size: mib(4) };
    let before = process.reports().driver_calls().0;
    for _ in 0..30 {
        assert_eq!(process.copies().ends.both_ends(&out, STREAM, false).unwrap(), None);
        assert_eq!(process.copies().ends.both_ends(&back, STREAM, false).unwrap(), None);
    }
    assert_eq!(process.reports().driver_calls().0, before + 1);
    assert!(
        process.copies().ends.both_ends(&out, STREAM, true).unwrap().is_some(),
        "who asks anyway is told"
    );
    // What is no longer pinned is the driver's to copy until it is asked again.
    drop(pinned);
    let pageable = vec![0_u8; 8 << 20];
    let out = CopyRequest { to: Address(pageable.as_ptr() as u64), ..out };
    assert!(
        process.copies().ends.both_ends(&out, STREAM, false).unwrap().is_some(),
        "pageable memory is the engine's"
    );
    process.free(block).unwrap();
}

#[test]
fn with_relays_pinned_memory_is_asked_for_once_in_a_while_too() {
    let process = started("");
    process.copies().multi_path(true).unwrap();
    ready(&process);
    let block = process.malloc(0, mib(8), STREAM).unwrap();
    let pinned =
        Registration::new(&process.registry.completion_events, Pages::new(mib(8), 1).unwrap()).unwrap();
    let out = CopyRequest { to: pinned.start(), from: block, size: mib(8) };
    let asked = || process.reports.recorder.counters().of(Verb::PointerAttributes).calls;
    let found = process.copies().ends.both_ends(&out, STREAM, false).unwrap();
    assert_eq!(found.map(|(to, _)| to.kind), Some(PointerKind::Pinned));
    let before = asked();
    for _ in 0..30 {
        assert_eq!(process.copies().ends.both_ends(&out, STREAM, false).unwrap(), found);
    }
    assert_eq!(asked(), before);
    assert_eq!(process.copies().ends.both_ends(&out, STREAM, true).unwrap(), found);
    assert_eq!(asked(), before + 1, "who asks anyway is told");
    process.free(block).unwrap();
}

#[test]
fn copies_that_are_told_alike_are() {
    let process = started("");
    let blocks = [0, 1].map(|device| process.malloc(device, mib(2), STREAM).unwrap());
    // More than are remembered.
    let pinned: Vec<Registration> = (0..12)
        .map(|_| {
            Registration::new(&process.registry.completion_events, Pages::new(Bytes::kib(64), 1).unwrap())
                .unwrap()
        })
        .collect();
    let pageable = vec![0_u8; 64 << 10];
    let mut places: Vec<Address> = pinned.iter().map(Registration::start).collect();
    places.extend(blocks.iter().chain(&blocks).copied());
    places.push(Address(pageable.as_ptr() as u64));
    let mut state = 7_u64;
    let mut below = |bound: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as usize % bound
    };
    for _ in 0..200 {
        let (mut to, mut from) = (places[0], places[0]);
        let requests: Vec<CopyRequest> = (0..40)
            .map(|_| {
                if below(4) == 0 {
                    (to, from) = (places[below(places.len())], places[below(places.len())]);
                }
                let at = |start: Address, offset: usize| Address(start.0 + (offset << 10) as u64);
                match below(9) {
                    0 => CopyRequest { to: Address(0), from: Address(0), size: Bytes::ZERO },
                    // Beyond the end, too.
                    _ => {
                        CopyRequest { to: at(to, below(64)), from: at(from, below(64)), size: Bytes::kib(2) }
                    }
                }
            })
            .collect();
        let (mut many, mut left) = (process.copies().ends.many(), &requests[..]);
        while !left.is_empty() {
            let (ends, count) = many.alike(left).unwrap();
            let (alike, others) = left.split_at(count);
            for request in alike.iter().filter(|request| !request.size.is_zero()) {
                let end = |start| process.copies().ends.end_of(start, request.size).unwrap();
                assert_eq!(end(request.to).zip(end(request.from)), ends, "{request:?}");
            }
            left = others;
        }
    }
    blocks.into_iter().for_each(|block| process.free(block).unwrap());
}
