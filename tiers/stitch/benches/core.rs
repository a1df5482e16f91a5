//! Costs of the pure core without a driver: a hit, a stitch, a free and an eviction.

#![allow(missing_docs)]
// A panic is a bug of the bench.
#![allow(clippy::expect_used, clippy::panic)]

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use glake_stitch::{Allocator, Outcome, Request, Settings, StreamKey};
use glake_units::Bytes;

const BLOCKS: u64 = 1000;

fn core() -> Allocator {
    Allocator::new(Settings::for_memory(Bytes::gib(80))).expect("the settings make sense")
}

fn request(size: Bytes) -> Request {
    Request { size, stream: StreamKey(0), domain: Allocator::default_domain() }
}

/// Returns the offset of a new block.
fn block(core: &mut Allocator, size: Bytes) -> Bytes {
    let request = request(size);
    loop {
        if let Some(grant) = core.take(&request) {
            return grant.offset;
        }
        match core.plan(&request, true).expect("there is room") {
            Outcome::Ready(grant) => return grant.offset,
            Outcome::Work(plan) => {
                if let Some(grant) = core.commit(plan.id) {
                    return grant.offset;
                }
            }
            Outcome::Wait(point) => panic!("{point:?} of nothing"),
        }
    }
}

/// Creates many live blocks of many sizes, every third freed.
fn used() -> (Allocator, Vec<Bytes>) {
    let mut core = core();
    let sizes = (0..BLOCKS).flat_map(|n| [Bytes::kib(1 + n * 37 % 400), Bytes::kib(1025 + n * 37 % 9000)]);
    let blocks: Vec<Bytes> = sizes.map(|size| block(&mut core, size)).collect();
    for &freed in blocks.iter().step_by(3) {
        core.free(freed).expect("it is live");
    }
    (core, blocks)
}

/// Creates free extents of which no two touch, so that only an alias can join them.
fn scattered() -> Allocator {
    let mut core = core();
    let blocks: Vec<Bytes> = (0..32).map(|_| block(&mut core, Bytes::mib(16))).collect();
    for &freed in blocks.iter().step_by(2) {
        core.free(freed).expect("it is live");
    }
    core
}

fn hits(c: &mut Criterion) {
    for (name, size) in [("hit pair, 4 KiB", Bytes::kib(4)), ("hit pair, 4 MiB", Bytes::mib(4))] {
        let (mut core, _) = used();
        let request = request(size);
        let first = block(&mut core, size);
        core.free(first).expect("it is live");
        c.bench_function(name, |bench| {
            bench.iter(|| {
                let grant = core.take(&request).expect("it is free");
                core.free(grant.offset).expect("it is live")
            });
        });
    }
}

fn misses(c: &mut Criterion) {
    let request = request(Bytes::mib(64));
    c.bench_function("miss with a stitch of 64 MiB", |bench| {
        bench.iter_batched_ref(
            scattered,
            |core| match core.plan(&request, true).expect("there is room") {
                Outcome::Work(plan) => core.commit(plan.id),
                other => panic!("{other:?}"),
            },
            BatchSize::SmallInput,
        );
    });
}

fn frees(c: &mut Criterion) {
    c.bench_function("free that merges with both neighbours", |bench| {
        bench.iter_batched_ref(
            || {
                let mut core = core();
                let blocks = [(); 3].map(|()| block(&mut core, Bytes::mib(4)));
                core.free(blocks[0]).expect("it is live");
                core.free(blocks[2]).expect("it is live");
                (core, blocks[1])
            },
            |(core, middle)| core.free(*middle),
            BatchSize::SmallInput,
        );
    });
}

fn evictions(c: &mut Criterion) {
    let (mut core, _) = used();
    let point = core.close_point();
    core.pass_point(point);
    let extent = core.extents().of(Allocator::default_domain())[0].extent;
    c.bench_function("one extent evicted and refilled", |bench| {
        bench.iter(|| {
            let mut evictions = core.evictions();
            evictions.begin(extent).expect("it is resident");
            evictions.finish(extent).expect("it moves");
            evictions.begin_refill(extent).expect("there is room");
            evictions.refill_made(extent, true);
            evictions.finish_refill(extent).expect("it moves");
        });
    });
}

criterion_group!(core_benches, hits, misses, frees, evictions);
criterion_main!(core_benches);
