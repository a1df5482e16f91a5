//! Every byte arrives, and no other is touched: any size, any start, any stream, any memory.

use glake_device::owned::{DeviceSet, Span};
use glake_device::{DeviceId, Stream};
use glake_units::Bytes;

use super::bed::{Bed, GPU, ends, fill};
use crate::graph::{Direction, Way};
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
fn round_trip(bed: &Bed, gpu: &Span, on: UserStream, (start, size): (u64, u64)) {
    let to_gpu = bed.pinned(ROOM, start + size);
    let back = bed.pinned(ROOM, 77);
    let (offset, size) = (Bytes::new(start), Bytes::new(size));
    let part = |span: &Span| span.part(offset, size).unwrap();
    let [source, sink] = [&to_gpu, &back].map(|memory| Span::pinned(memory, Bytes::ZERO, ROOM).unwrap());
    let before = bed.read(gpu);
    bed.copy(&part(gpu), &part(&source), on);
    // In stream order, with no wait between.
    bed.copy(&part(&sink), &part(gpu), on);
    bed.wait(on);
    let range = usize::try_from(offset.get()).unwrap();
    let range = range..range + usize::try_from(size.get()).unwrap();
    let mut expected = before;
    expected[range.clone()].copy_from_slice(&to_gpu.as_slice()[range.clone()]);
    assert!(bed.read(gpu) == expected, "{size} from {offset} to the GPU");
    let mut untouched = vec![0; back.as_slice().len()];
    fill(&mut untouched, 77);
    untouched[range.clone()].copy_from_slice(&to_gpu.as_slice()[range]);
    assert!(back.as_slice() == &untouched[..], "{size} from {offset} to the host");
}

#[test]
fn pool_memory_of_every_gpu_over_every_kind_of_stream() {
    let bed = Bed::new("h200x4");
    let streams = [bed.stream(GPU), bed.stream(DeviceId(2))];
    for target in [GPU, DeviceId(3)] {
        let gpu = bed.mapped(target, ROOM);
        let span = gpu.span(Bytes::ZERO, ROOM).unwrap();
        let users = [
            bed.user(GPU, streams[0].id()),
            bed.user(DeviceId(2), streams[1].id()),
            bed.user(target, Stream::LEGACY),
            bed.user(target, Stream::PER_THREAD),
            bed.user(target, Stream(0)),
        ];
        for (index, size) in SIZES.into_iter().enumerate() {
            let start = [0, 1, 4096, 4097][index % 4];
            round_trip(&bed, &span, users[index % users.len()], (start, size));
        }
        for on in users {
            round_trip(&bed, &span, on, (3, 9 << 20));
        }
    }
    assert!(bed.carried(Way::ZeroStaging) > Bytes::mib(100));
    assert_eq!(bed.carried(Way::Staged), Bytes::ZERO);
    drop(streams);
    bed.end();
}

#[test]
fn plain_memory_goes_through_slots() {
    let bed = Bed::new("h200x4");
    let [own, elsewhere] = [GPU, DeviceId(1)].map(|gpu| bed.stream(gpu));
    let plain = bed.plain(GPU, ROOM);
    // The slots' other end is a stream of its GPU, which other GPUs' streams do not hold up.
    for (on, staged) in [(&elsewhere, 0..1), (&own, 50 << 20..u64::MAX)] {
        for (index, size) in SIZES.into_iter().enumerate() {
            let user = bed.user(on.device(), on.id());
            round_trip(&bed, &plain.span, user, ([0, 1, 4097][index % 3], size));
        }
        assert!(staged.contains(&bed.carried(Way::Staged).get()), "{:?}", bed.carried(Way::Staged));
    }
    assert_eq!(bed.carried(Way::ZeroStaging), Bytes::ZERO);
    drop((own, elsewhere, plain));
    bed.end();
}

#[test]
fn memory_that_only_some_reach_is_relayed_by_those() {
    let bed = Bed::new("h200x4");
    let on = bed.stream(GPU);
    let reach = DeviceSet::of(DeviceId(2));
    let gpu = glake_device::owned::Buffer::new(&bed.epochs, GPU, ROOM, reach).unwrap();
    let gpu = std::sync::Arc::new(gpu);
    round_trip(&bed, &gpu.span(Bytes::ZERO, ROOM).unwrap(), bed.user(GPU, on.id()), (0, 16 << 20));
    let relays: DeviceSet = bed.engine().statistics().paths.iter().map(|path| path.relay).collect();
    assert_eq!(relays, reach.union(DeviceSet::of(GPU)));
    drop((on, gpu));
    bed.end();
}

#[test]
fn what_is_no_copy_between_host_and_gpu_is_native() {
    let bed = Bed::new("h200x4");
    let stream = bed.stream(GPU);
    let on = bed.user(GPU, stream.id());
    let buffers = [bed.mapped(GPU, ROOM), bed.mapped(DeviceId(1), ROOM)];
    let [a, b] = [&buffers[0], &buffers[1]].map(|buffer| buffer.span(Bytes::ZERO, ROOM).unwrap());
    let host = bed.pinned(ROOM, 5);
    let host = Span::pinned(&host, Bytes::ZERO, ROOM).unwrap();
    bed.copy(&a, &host, on);
    bed.copy(&b, &a, on);
    bed.wait(on);
    assert!(bed.read(&a) == bed.read(&b));
    assert_eq!(bed.engine().statistics().native_copies, 1);
    let short = a.part(Bytes::ZERO, Bytes::mib(1)).unwrap();
    let refused = bed.engine().copy(&short, &host, on, CopyOptions::default()).unwrap_err();
    assert_eq!(refused.to_string(), "a copy of 24.00 MiB to 1.00 MiB: both ends must be of one size");
    drop((a, b, short, buffers, host, stream));
    bed.end();
}

#[test]
fn without_relays_every_copy_is_native() {
    let bed = Bed::with("h200x4", EngineOptions { relays: DeviceSet::of(GPU), ..EngineOptions::default() });
    let stream = bed.stream(GPU);
    let gpu = bed.mapped(GPU, ROOM);
    let span = gpu.span(Bytes::ZERO, ROOM).unwrap();
    round_trip(&bed, &span, bed.user(GPU, stream.id()), (0, 16 << 20));
    bed.engine().set_relays(bed.gpus);
    bed.engine().stop();
    round_trip(&bed, &span, bed.user(GPU, stream.id()), (0, 16 << 20));
    assert_eq!(bed.engine().statistics().split_copies, 0);
    drop((stream, gpu, span));
    bed.end();
}

#[test]
fn synchronous_copies_are_there_when_they_return() {
    let bed = Bed::new("h200x4");
    let stream = bed.stream(GPU);
    let on = bed.user(GPU, stream.id());
    let gpu = bed.mapped(GPU, ROOM);
    let span = gpu.span(Bytes::ZERO, ROOM).unwrap();
    let options = CopyOptions { verify: true, ..CopyOptions::default() };
    for (direction, seed) in [(Direction::ToGpu, 1), (Direction::FromGpu, 2), (Direction::ToGpu, 3)] {
        let memory = bed.pinned(ROOM, seed);
        let host = Span::pinned(&memory, Bytes::ZERO, ROOM).unwrap();
        let (to, from) = ends(direction, &host, &span);
        bed.engine().copy_blocking(to, from, on, options).unwrap();
        assert!(bed.read(&span) == memory.as_slice());
    }
    drop((stream, gpu, span));
    bed.end();
}
