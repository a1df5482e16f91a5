//! Every byte arrives, and no other is touched: any size, any start, any stream, any memory.

use glake_device::owned::{DeviceSet, Span};
use glake_device::{DeviceId, Stream};
use glake_sim::pattern;
use glake_units::Bytes;

use super::fixture::{Fixture, GPU, ends};
use crate::paths::{Direction, Way};
use crate::{CopyOptions, EngineOptions, UserStream};

const ROOM: Bytes = Bytes::mib(24);

/// Sizes around the grain, the break-even and the shares' ends.
const SIZES: [u64; 12] = [
    0,
    1,
    4095,
    65_537,
    (1 << 20) - 1,
    1 << 20,
    (1 << 20) + 1,
    (2 << 20) + 4097,
    (4 << 20) - 3,
    (7 << 20) + 12_345,
    16 << 20,
    (20 << 20) + 1,
];

/// Copies a range each way and compares all of both memories.
fn round_trip(fixture: &Fixture, gpu: &Span, on: UserStream, (start, size): (u64, u64)) {
    let to_gpu = fixture.pinned(ROOM, start + size);
    let back = fixture.pinned(ROOM, 77);
    let (offset, size) = (Bytes::new(start), Bytes::new(size));
    let part = |span: &Span| span.part(offset, size).unwrap();
    let [source, sink] = [&to_gpu, &back].map(|memory| Span::pinned(memory, Bytes::ZERO, ROOM).unwrap());
    let before = fixture.read(gpu);
    fixture.copy(&part(gpu), &part(&source), on);
    // In stream order, with no wait between.
    fixture.copy(&part(&sink), &part(gpu), on);
    fixture.wait(on);
    let range = usize::try_from(offset.get()).unwrap();
    let range = range..range + usize::try_from(size.get()).unwrap();
    let mut expected = before;
    expected[range.clone()].copy_from_slice(&to_gpu.as_slice()[range.clone()]);
    assert!(fixture.holds(gpu, &expected), "{size} from {offset} to the GPU");
    let mut untouched = vec![0; back.as_slice().len()];
    pattern::fill(&mut untouched, 0, 77);
    untouched[range.clone()].copy_from_slice(&to_gpu.as_slice()[range]);
    assert!(back.as_slice() == &untouched[..], "{size} from {offset} to the host");
}

#[test]
fn pool_memory_of_every_gpu_over_every_kind_of_stream() {
    let fixture = Fixture::new("h200x4");
    let streams = [fixture.stream(GPU), fixture.stream(DeviceId(2))];
    for target in [GPU, DeviceId(3)] {
        let gpu = fixture.mapped(target, ROOM);
        let span = gpu.span(Bytes::ZERO, ROOM).unwrap();
        let users = [
            fixture.user(GPU, streams[0].id()),
            fixture.user(DeviceId(2), streams[1].id()),
            fixture.user(target, Stream::LEGACY),
            fixture.user(target, Stream::PER_THREAD),
            fixture.user(target, Stream(0)),
        ];
        for (index, size) in SIZES.into_iter().enumerate() {
            let start = [0, 1, 4096, 4097][index % 4];
            round_trip(&fixture, &span, users[index % users.len()], (start, size));
        }
        for on in users {
            round_trip(&fixture, &span, on, (3, 9 << 20));
        }
    }
    assert!(fixture.carried(Way::ZeroStaging) > Bytes::mib(100));
    assert_eq!(fixture.carried(Way::Staged), Bytes::ZERO);
    drop(streams);
    fixture.end();
}

#[test]
fn plain_memory_goes_through_slots() {
    let fixture = Fixture::new("h200x4");
    let [own, elsewhere] = [GPU, DeviceId(1)].map(|gpu| fixture.stream(gpu));
    let plain = fixture.plain(GPU, ROOM);
    // The slots' other end is a stream of its GPU, which other GPUs' streams do not hold up.
    for (on, staged) in [(&elsewhere, 0..1), (&own, 50 << 20..u64::MAX)] {
        for (index, size) in SIZES.into_iter().enumerate() {
            let user = fixture.user(on.device(), on.id());
            round_trip(&fixture, &plain.span, user, ([0, 1, 4097][index % 3], size));
        }
        assert!(staged.contains(&fixture.carried(Way::Staged).get()), "{:?}", fixture.carried(Way::Staged));
    }
    assert_eq!(fixture.carried(Way::ZeroStaging), Bytes::ZERO);
    drop((own, elsewhere, plain));
    fixture.end();
}

#[test]
fn memory_that_only_some_reach_goes_through_the_slots_of_the_others() {
    let fixture = Fixture::new("h200x4");
    let on = fixture.stream(GPU);
    let reach = DeviceSet::of(DeviceId(2));
    let gpu = glake_device::owned::Buffer::new(&fixture.completion_events, GPU, ROOM, reach).unwrap();
    let gpu = std::sync::Arc::new(gpu);
    round_trip(&fixture, &gpu.span(Bytes::ZERO, ROOM).unwrap(), fixture.user(GPU, on.id()), (0, 16 << 20));
    let paths = fixture.engine().statistics().paths;
    let relays =
        |way| -> DeviceSet { paths.iter().filter(|path| path.way == way).map(|path| path.relay).collect() };
    assert_eq!((relays(Way::Direct), relays(Way::ZeroStaging)), (DeviceSet::of(GPU), reach));
    let others = DeviceSet::of(DeviceId(1)).union(DeviceSet::of(DeviceId(3)));
    assert!(relays(Way::Staged).is_subset(others) && !relays(Way::Staged).is_empty());
    drop((on, gpu));
    fixture.end();
}

#[test]
fn what_is_no_copy_between_host_and_gpu_is_native() {
    let fixture = Fixture::new("h200x4");
    let stream = fixture.stream(GPU);
    let on = fixture.user(GPU, stream.id());
    let buffers = [fixture.mapped(GPU, ROOM), fixture.mapped(DeviceId(1), ROOM)];
    let [a, b] = [&buffers[0], &buffers[1]].map(|buffer| buffer.span(Bytes::ZERO, ROOM).unwrap());
    let host = fixture.pinned(ROOM, 5);
    let host = Span::pinned(&host, Bytes::ZERO, ROOM).unwrap();
    fixture.copy(&a, &host, on);
    fixture.copy(&b, &a, on);
    fixture.wait(on);
    assert!(fixture.read(&a) == fixture.read(&b));
    assert_eq!(fixture.engine().statistics().native_copies, 1);
    let short = a.part(Bytes::ZERO, Bytes::mib(1)).unwrap();
    let refused = fixture.engine().copy(&short, &host, on, CopyOptions::default()).unwrap_err();
    assert_eq!(refused.to_string(), "a copy of 24.00 MiB to 1.00 MiB: both ends must be of one size");
    drop((a, b, short, buffers, host, stream));
    fixture.end();
}

#[test]
fn without_relays_every_copy_is_native() {
    let fixture =
        Fixture::with("h200x4", EngineOptions { relays: DeviceSet::of(GPU), ..EngineOptions::default() });
    let stream = fixture.stream(GPU);
    let gpu = fixture.mapped(GPU, ROOM);
    let span = gpu.span(Bytes::ZERO, ROOM).unwrap();
    round_trip(&fixture, &span, fixture.user(GPU, stream.id()), (0, 16 << 20));
    fixture.engine().set_relays(fixture.gpus);
    fixture.engine().stop();
    round_trip(&fixture, &span, fixture.user(GPU, stream.id()), (0, 16 << 20));
    assert_eq!(fixture.engine().statistics().split_copies, 0);
    drop((stream, gpu, span));
    fixture.end();
}

#[test]
fn synchronous_copies_are_there_when_they_return() {
    let fixture = Fixture::new("h200x4");
    let stream = fixture.stream(GPU);
    let on = fixture.user(GPU, stream.id());
    let gpu = fixture.mapped(GPU, ROOM);
    let span = gpu.span(Bytes::ZERO, ROOM).unwrap();
    let options = CopyOptions { verify: true, ..CopyOptions::default() };
    for (direction, seed) in [(Direction::ToGpu, 1), (Direction::FromGpu, 2), (Direction::ToGpu, 3)] {
        let memory = fixture.pinned(ROOM, seed);
        let host = Span::pinned(&memory, Bytes::ZERO, ROOM).unwrap();
        let (to, from) = ends(direction, &host, &span);
        fixture.engine().copy_blocking(to, from, on, options).unwrap();
        assert!(fixture.holds(&span, memory.as_slice()));
    }
    drop((stream, gpu, span));
    fixture.end();
}
