//! Short-lived streams: each takes a block, frees it, and is never seen again.

#![allow(missing_docs)]
// A panic fails the test.
#![allow(clippy::expect_used, clippy::panic)]

use std::time::{Duration, Instant};

use glake_stitch::{Allocator, Outcome, Request, Settings, StreamKey};
use glake_units::Bytes;

const SIZES: [Bytes; 3] = [Bytes::kib(1), Bytes::kib(600), Bytes::mib(10)];

fn block(core: &mut Allocator, size: Bytes, stream: u64) -> Bytes {
    let request = Request { size, stream: StreamKey(stream), domain: Allocator::default_domain() };
    loop {
        if let Some(grant) = core.take(&request) {
            return grant.offset;
        }
        match core.plan(&request, true).expect("there is room") {
            Outcome::Ready(grant) => return grant.offset,
            Outcome::Work(plan) => match core.commit(plan.id) {
                Some(grant) => return grant.offset,
                None => continue,
            },
            other => panic!("{other:?}"),
        }
    }
}

/// Returns the minimum time of a hit among some hundred thousand.
fn hit(core: &mut Allocator, stream: u64) -> Duration {
    let request = Request { size: SIZES[0], stream: StreamKey(stream), domain: Allocator::default_domain() };
    let first = block(core, SIZES[0], stream);
    core.free(first).expect("it is live");
    let round = |_| {
        let begin = Instant::now();
        for _ in 0..1000 {
            let grant = core.take(&request).expect("it is free");
            core.free(grant.offset).expect("it is live");
        }
        begin.elapsed() / 1000
    };
    (0..200).map(round).min().expect("there are some")
}

fn come_and_go(streams: u64, live: u64) -> Allocator {
    let mut core = Allocator::new(Settings::for_memory(Bytes::gib(64))).expect("the settings are in range");
    let mut kept = std::collections::VecDeque::new();
    for stream in 1..=streams {
        kept.push_back(SIZES.map(|size| block(&mut core, size, stream)));
        if kept.len() as u64 > live {
            let blocks = kept.pop_front().expect("there are some");
            for block in blocks {
                core.free(block).expect("it is live");
            }
        }
        let closed = core.close_point();
        core.pass_point(closed);
    }
    for block in kept.into_iter().flatten() {
        core.free(block).expect("it is live");
    }
    let closed = core.close_point();
    core.pass_point(closed);
    core
}

#[test]
fn memory_of_old_streams_serves_new_ones() {
    for live in [0, 40] {
        let (few, many) = (come_and_go(100 + live, live), come_and_go(20_000, live));
        assert!(
            many.reserved_bytes() <= few.reserved_bytes(),
            "{} of many streams, {} of few",
            many.reserved_bytes(),
            few.reserved_bytes()
        );
        many.check().expect("it holds");
    }
}

#[test]
fn all_memory_is_released_and_hits_stay_fast() {
    let (mut few, mut many) = (come_and_go(1, 0), come_and_go(100_000, 0));
    let times = [hit(&mut few, 1), hit(&mut many, 200_000)];
    println!("a hit and a free: {:?} of one stream, {:?} after 100,000", times[0], times[1]);
    // Times vary with the load of the machine: only a search through all streams would exceed this bound.
    assert!(times[1] <= 3 * times[0].max(Duration::from_nanos(20)), "{times:?}");
    for core in [&mut few, &mut many] {
        let closed = core.close_point();
        core.pass_point(closed);
        while let Some(plan) = core.plan_trim(Bytes::ZERO) {
            core.commit(plan.id);
        }
        assert_eq!(core.reserved_bytes(), Bytes::ZERO);
    }
}
