//! Lists of blocks: bytes, order, faults, speed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use glake_device::owned::{self, OwnedStream, Registration, Span};
use glake_device::{Address, CopyRequest, DeviceId, Driver, Fault, Injected, Refusal, Touch, Verb, When};
use glake_sim::pattern;
use glake_units::Bytes;

use super::fixture::{Fixture, GPU, Plain, ends, length};
use crate::paths::Direction;
use crate::{CopyHandle, CopyOptions, TransferError, UserStream};

/// Host memory and a GPU's, both with patterns, and a stream.
struct Scene {
    fixture: Fixture,
    stream: OwnedStream,
    host: Arc<Registration>,
    gpu: Span,
    _plain: Option<Plain>,
    size: Bytes,
}

impl Scene {
    fn new(mapped: bool, size: Bytes) -> Scene {
        Scene::on_server(Fixture::new("h200x4"), mapped, size)
    }

    fn on_server(fixture: Fixture, mapped: bool, size: Bytes) -> Scene {
        let stream = fixture.stream(GPU);
        let (host, first) = (fixture.pinned(size, 1), fixture.pinned(size, 2));
        let (gpu, plain) = match mapped {
            true => (fixture.mapped(GPU, size).span(Bytes::ZERO, size).unwrap(), None),
            false => {
                let plain = fixture.plain(GPU, size);
                (plain.span.clone(), Some(plain))
            }
        };
        let from = Span::pinned(&first, Bytes::ZERO, size).unwrap();
        owned::copy(&*fixture.driver, GPU, stream.id(), &gpu, &from).unwrap();
        stream.synchronize().unwrap();
        Scene { fixture, stream, host, gpu, _plain: plain, size }
    }

    fn on(&self) -> UserStream {
        self.fixture.user(GPU, self.stream.id())
    }

    fn host_span(&self) -> Span {
        Span::pinned(&self.host, Bytes::ZERO, self.size).unwrap()
    }

    fn copy(&self, direction: Direction, blocks: &[CopyRequest]) -> crate::Result<CopyHandle> {
        self.copy_on(self.on(), direction, blocks)
    }

    fn copy_on(
        &self,
        on: UserStream,
        direction: Direction,
        blocks: &[CopyRequest],
    ) -> crate::Result<CopyHandle> {
        let host = self.host_span();
        let (to, from) = ends(direction, &host, &self.gpu);
        let blocks: Vec<_> = blocks.iter().map(|block| pair(block, to, from)).collect();
        self.fixture.engine().copy_list(&blocks, on, CopyOptions::default())
    }

    /// The bytes of the target before, with the blocks put into them.
    fn expected(&self, direction: Direction, blocks: &[CopyRequest]) -> Vec<u8> {
        let (host, gpu) = (self.host.as_slice().to_vec(), self.fixture.read(&self.gpu));
        let whole = self.host_span();
        let (to, from) = ends(direction, &whole, &self.gpu);
        let (source, mut target) = if direction == Direction::ToGpu { (host, gpu) } else { (gpu, host) };
        for block in blocks {
            let at = |start: Address, span: &Span| length(start.0 - span.start().0);
            let (into, out, size) = (at(block.to, to), at(block.from, from), length(block.size.get()));
            target[into..into + size].copy_from_slice(&source[out..out + size]);
        }
        target
    }

    fn found(&self, direction: Direction) -> Vec<u8> {
        match direction {
            Direction::ToGpu => self.fixture.read(&self.gpu),
            Direction::FromGpu => self.host.as_slice().to_vec(),
        }
    }

    fn end(self) {
        let Scene { fixture, stream, host, gpu, _plain, .. } = self;
        drop((stream, host, gpu, _plain));
        fixture.end();
    }

    /// Blocks of sizes in turn, shuffled at both ends, with gaps.
    fn blocks(&self, direction: Direction, count: u64, sizes: &[u64]) -> Vec<CopyRequest> {
        let host = self.host_span();
        let (to, from) = ends(direction, &host, &self.gpu);
        let stride = self.size.get() / count;
        assert!(sizes.iter().all(|size| *size <= stride));
        (0..count)
            .map(|index| {
                // Both factors have no part in common with any count that is used.
                let place = |factor: u64| (index * factor % count) * stride;
                CopyRequest {
                    to: Address(to.start().0 + place(7919)),
                    from: Address(from.start().0 + place(104_729)),
                    size: Bytes::new(sizes[usize::try_from(index).unwrap() % sizes.len()]),
                }
            })
            .collect()
    }
}

/// A block of two spans.
fn pair(block: &CopyRequest, to: &Span, from: &Span) -> (Span, Span) {
    let part =
        |span: &Span, start: Address| span.part(Bytes::new(start.0 - span.start().0), block.size).unwrap();
    (part(to, block.to), part(from, block.from))
}

#[test]
fn every_block_arrives_and_nothing_beside_it() {
    for mapped in [true, false] {
        for direction in Direction::BOTH {
            let scene = Scene::new(mapped, Bytes::mib(48));
            for (count, sizes) in [
                (1000, &[16 << 10][..]),
                // Of any size, nothing too.
                (601, &[1, 40_001, 0, 16 << 10, 7, 65_536, 70_003][..]),
                // Large ones: copy engines where the memory is mapped.
                (20, &[2 << 20, 1 << 20, 2_000_003]),
            ] {
                let blocks = scene.blocks(direction, count, sizes);
                let expected = scene.expected(direction, &blocks);
                let before = scene.fixture.engine().statistics();
                scene.copy(direction, &blocks).unwrap().wait().unwrap();
                assert!(scene.found(direction) == expected, "{mapped} {direction:?} {count}");
                let after = scene.fixture.engine().statistics();
                // Small blocks of memory that is not ours are copied over its GPU's own link: by its own kernels, or the driver. Large
                // ones go through slots.
                let is_large = sizes.iter().all(|size| *size >= 1 << 20);
                assert_eq!(after.split_copies - before.split_copies, u64::from(mapped || is_large));
                assert!(after.native_copies == before.native_copies || !mapped);
                let relayed = |path: &&crate::PathStatistics| path.relay != GPU && !path.bytes.is_zero();
                assert_eq!(after.paths.iter().filter(relayed).count() % 3, 0, "all links took part");
            }
            let paths = scene.fixture.engine().statistics().paths;
            let carried: Bytes = paths.iter().map(|path| path.bytes).sum();
            assert!(carried > Bytes::mib(if mapped { 50 } else { 10 }), "{carried}");
            scene.end();
        }
    }
}

#[test]
fn few_and_small_blocks_are_the_driver_s() {
    let scene = Scene::new(true, Bytes::mib(16));
    for (count, size) in [(63, 200 << 10), (100, 10 << 10), (1, 16 << 20)] {
        let blocks = scene.blocks(Direction::ToGpu, count, &[size]);
        let expected = scene.expected(Direction::ToGpu, &blocks);
        let before = scene.fixture.engine().statistics();
        scene.copy(Direction::ToGpu, &blocks).unwrap().wait().unwrap();
        assert!(scene.found(Direction::ToGpu) == expected);
        let after = scene.fixture.engine().statistics();
        // One large block is worth several links.
        let native = if count == 1 { 0 } else { count };
        assert_eq!(after.native_copies - before.native_copies, native);
    }
    scene.copy(Direction::ToGpu, &[]).unwrap().wait().unwrap();
    scene.end();
}

#[test]
fn a_list_may_be_of_all_kinds() {
    let fixture = Fixture::new("h200x4");
    let stream = fixture.stream(GPU);
    let on = fixture.user(GPU, stream.id());
    let size = Bytes::mib(16);
    let buffers = [0, 1].map(|device| fixture.mapped(DeviceId(device), size));
    let [a, b] = buffers.each_ref().map(|buffer| buffer.span(Bytes::ZERO, size).unwrap());
    let (out, back) = (fixture.pinned(size, 1), fixture.pinned(size, 2));
    let [out_span, back_span] = [&out, &back].map(|memory| Span::pinned(memory, Bytes::ZERO, size).unwrap());
    let mut loose = vec![0_u8; 1 << 20];
    pattern::fill(&mut loose, 0, 3);
    let loose_span = fixture.sim.span(
        Address(loose.as_ptr() as u64),
        Bytes::mib(1),
        glake_device::owned::DeviceSet::EMPTY,
    );
    let copy = |to: &Span, from: &Span, at: u64, size: u64| {
        let part = |span: &Span| span.part(Bytes::new(at), Bytes::new(size)).unwrap();
        (part(to), part(from))
    };
    let mut first = Vec::new();
    for block in 0..400 {
        first.push(copy(&a, &out_span, block * 20_000, 16_384));
        first.push(copy(&b, &out_span, block * 20_000, 16_384));
    }
    // Pageable memory, and one GPU's to another's.
    let loose_span = loose_span.unwrap();
    first.push(copy(&a, &loose_span, 0, 0));
    first.push((a.part(Bytes::mib(15), Bytes::mib(1)).unwrap(), loose_span.clone()));
    let engine = fixture.engine();
    engine.copy_list(&first, on, CopyOptions::default()).unwrap();
    let mut second = vec![copy(&b, &a, 15 << 20, 1 << 20)];
    second.extend((0..400).map(|block| copy(&back_span, &a, block * 20_000, 16_384)));
    engine.copy_list(&second, on, CopyOptions::default()).unwrap().wait().unwrap();
    let found = [fixture.read(&a), fixture.read(&b)];
    for block in (0..400).map(|block| block * 20_000..block * 20_000 + 16_384) {
        let expected = &out.as_slice()[block.clone()];
        assert!(found.iter().all(|found| &found[block.clone()] == expected));
        assert!(&back.as_slice()[block] == expected);
    }
    assert!(found.iter().all(|found| found[15 << 20..] == loose[..]));
    assert_eq!(engine.statistics().split_copies, 3);
    drop((first, second));
    drop((stream, buffers, a, b, out, back, out_span, back_span, loose_span));
    fixture.end();
}

#[test]
fn a_block_whose_ends_differ_in_size_is_refused_before_anything_is_done() {
    let scene = Scene::new(true, Bytes::mib(16));
    let host = scene.host_span();
    let part = |span: &Span, at: u64, size: u64| span.part(Bytes::kib(at), Bytes::kib(size)).unwrap();
    let mut blocks: Vec<_> =
        (0..100).map(|at| (part(&scene.gpu, at * 64, 64), part(&host, at * 64, 64))).collect();
    blocks.push((part(&scene.gpu, 0, 64), part(&host, 0, 65)));
    let expected = scene.found(Direction::ToGpu);
    let answer = scene.fixture.engine().copy_list(&blocks, scene.on(), CopyOptions::default());
    assert!(matches!(answer, Err(TransferError::SizesDiffer { to, from }) if to < from));
    scene.fixture.wait(scene.on());
    assert!(scene.found(Direction::ToGpu) == expected);
    drop((host, blocks));
    scene.end();
}

#[test]
fn lists_keep_the_order_of_their_stream() {
    let scene = Scene::new(true, Bytes::mib(16));
    let paint = |byte: u8| {
        let touch = Touch { address: scene.gpu.start(), size: scene.size };
        let (start, size) = (scene.gpu.start(), length(scene.size.get()));
        let took = Duration::from_micros(200);
        let paint = move |memory: &mut dyn glake_device::KernelMemory| {
            memory.write(start, &vec![byte; size]).unwrap();
        };
        scene.fixture.sim.enqueue_kernel(GPU, scene.stream.id(), &[], &[touch], took, paint).unwrap();
    };
    let blocks = scene.blocks(Direction::FromGpu, 500, &[16 << 10]);
    // The simulator refuses work that no event orders; the bytes tell the rest.
    paint(1);
    scene.copy(Direction::FromGpu, &blocks).unwrap();
    paint(2);
    scene.fixture.wait(scene.on());
    let stride = length(scene.size.get() / 500);
    assert!(
        (0..500).all(|at| scene.host.as_slice()[at * stride..][..16 << 10].iter().all(|byte| *byte == 1))
    );
    assert!(scene.found(Direction::ToGpu).iter().all(|byte| *byte == 2));
    let blocks = scene.blocks(Direction::ToGpu, 500, &[16 << 10]);
    paint(3);
    scene.copy(Direction::ToGpu, &blocks).unwrap();
    scene.copy(Direction::FromGpu, &scene.blocks(Direction::FromGpu, 100, &[64 << 10])).unwrap();
    paint(4);
    scene.fixture.wait(scene.on());
    assert!(scene.found(Direction::ToGpu).iter().all(|byte| *byte == 4));
    assert_eq!(scene.fixture.engine().statistics().split_copies, 3);
    scene.end();
}

#[test]
fn streams_of_any_device_and_kind_take_lists() {
    let scene = Scene::new(true, Bytes::mib(16));
    let other = scene.fixture.stream(DeviceId(2));
    let legacy = glake_device::Stream(0);
    for (device, raw) in [
        (DeviceId(2), other.id()),
        (GPU, legacy),
        (DeviceId(3), legacy),
        (GPU, glake_device::Stream::PER_THREAD),
    ] {
        let on = scene.fixture.user(device, raw);
        for direction in Direction::BOTH {
            let blocks = scene.blocks(direction, 301, &[32 << 10]);
            let expected = scene.expected(direction, &blocks);
            scene.copy_on(on, direction, &blocks).unwrap().wait().unwrap();
            assert!(scene.found(direction) == expected, "{device} {raw:?} {direction:?}");
        }
    }
    assert_eq!(scene.fixture.engine().statistics().split_copies, 8);
    drop(other);
    scene.end();
}

#[test]
fn where_no_list_is_free_the_driver_copies() {
    let scene = Scene::new(true, Bytes::mib(8));
    let word = scene.fixture.pinned(Bytes::mib(2), 9);
    scene.fixture.sim.enqueue_wait(GPU, scene.stream.id(), word.start(), 4242).unwrap();
    let blocks = scene.blocks(Direction::ToGpu, 128, &[16 << 10]);
    let expected = scene.expected(Direction::ToGpu, &blocks);
    for _ in 0..80 {
        scene.copy(Direction::ToGpu, &blocks).unwrap();
    }
    let statistics = scene.fixture.engine().statistics();
    assert!(statistics.native_copies > 0 && statistics.split_copies == 80, "{statistics:?}");
    let other = scene.fixture.stream(GPU);
    scene.fixture.sim.enqueue_signal(GPU, other.id(), word.start(), 4242).unwrap();
    scene.fixture.wait(scene.on());
    assert!(scene.found(Direction::ToGpu) == expected);
    scene.fixture.sim.stream_synchronize(GPU, other.id()).unwrap();
    scene.copy(Direction::ToGpu, &blocks).unwrap();
    assert_eq!(scene.fixture.engine().statistics().native_copies, statistics.native_copies);
    scene.fixture.wait(scene.on());
    drop((other, word));
    scene.end();
}

/// Copies a list with a fault in one call; how often it was injected.
fn trial(direction: Direction, fault: Fault) -> u64 {
    let scene = Scene::new(true, Bytes::mib(16));
    // Two turns for each GPU.
    let blocks = scene.blocks(direction, 14_003, &[1000]);
    let expected = scene.expected(direction, &blocks);
    scene.fixture.faults.set(&[fault]);
    let answer = scene.copy(direction, &blocks).map(drop);
    let injected = scene.fixture.faults.injected();
    scene.fixture.faults.set(&[]);
    scene.fixture.wait(scene.on());
    match answer {
        Ok(()) => assert!(scene.found(direction) == expected, "{fault:?}"),
        // The handle's mark is asked for once, after everything is enqueued.
        Err(TransferError::Driver(_)) if fault.verb == Some(Verb::EventRecord) => {
            assert!(scene.found(direction) == expected, "{fault:?}");
        }
        Err(error) => panic!("{fault:?}: {error}"),
    }
    scene.end();
    injected
}

#[test]
fn every_call_may_fail_once() {
    let errors = [Injected::Failed(1), Injected::OutOfMemory, Injected::Refused(Refusal::InvalidValue)];
    let mut error = errors.iter().cycle();
    for (direction, verb) in [
        (Direction::ToGpu, Verb::Launch),
        (Direction::FromGpu, Verb::Launch),
        (Direction::ToGpu, Verb::EventRecord),
        (Direction::ToGpu, Verb::StreamWaitEvent),
        (Direction::ToGpu, Verb::CaptureState),
    ] {
        for n in 1.. {
            let fault = Fault { verb: Some(verb), when: When::Nth(n), error: *error.next().unwrap() };
            if trial(direction, fault) == 0 {
                assert!(n > 4, "{verb}");
                break;
            }
        }
    }
}

#[test]
fn a_relay_that_is_lost_is_told_of_or_made_good() {
    for (n, error) in [
        (2, Injected::Sticky(700)),
        (6, Injected::Sticky(700)),
        (2, Injected::Lost(700)),
        (7, Injected::Lost(700)),
    ] {
        let scene = Scene::new(true, Bytes::mib(16));
        let blocks = scene.blocks(Direction::ToGpu, 14_003, &[1000]);
        let expected = scene.expected(Direction::ToGpu, &blocks);
        scene.fixture.faults.set(&[Fault { verb: Some(Verb::Launch), when: When::Nth(n), error }]);
        let answer = scene.copy(Direction::ToGpu, &blocks).and_then(CopyHandle::wait);
        match answer {
            Ok(()) => assert!(scene.found(Direction::ToGpu) == expected, "{n} {error:?}"),
            Err(TransferError::Lost { relay, .. }) => assert_ne!(relay, GPU),
            Err(error) => panic!("{error}"),
        }
        assert_eq!(scene.fixture.engine().relays().len(), 3, "{n} {error:?}");
        scene.fixture.faults.set(&[]);
        scene.end();
    }
}

#[test]
fn a_list_comes_near_to_the_links_together() {
    for direction in Direction::BOTH {
        let scene = Scene::on_server(Fixture::of_times("h200x4"), true, Bytes::mib(320));
        let blocks = scene.blocks(direction, 20_011, &[16 << 10]);
        let start = scene.fixture.sim.now();
        scene.copy(direction, &blocks).unwrap().wait().unwrap();
        let took = scene.fixture.sim.now() - start;
        let rate = 20_011.0 * 16_384.0 / took.as_secs_f64() / 1e9;
        println!("{direction:?}: {rate:.1} GB/s");
        assert!(rate > 120.0, "{direction:?}: {rate} GB/s");
        scene.end();
    }
}

/// Prints what the host does for a long list: `cargo test --release -p glake-transfer host_time -- --ignored --nocapture`. The
/// simulator's own work is most of it; that of the list alone is printed beside it.
#[test]
#[ignore = "a measurement"]
fn host_time_of_a_long_list() {
    let scene = Scene::new(true, Bytes::mib(64));
    let blocks = scene.blocks(Direction::ToGpu, 100_003, &[512]);
    for _ in 0..3 {
        let start = Instant::now();
        scene.copy(Direction::ToGpu, &blocks).unwrap();
        println!("enqueued on the simulator in {:?}", start.elapsed());
        scene.fixture.wait(scene.on());
    }
    scene.end();
}
