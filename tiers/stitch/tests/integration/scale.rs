//! Many blocks: the time of an operation on one extent depends on the blocks in it, not on other extents.

#![allow(clippy::expect_used, clippy::panic)]

use std::time::{Duration, Instant};

use glake_stitch::{
    Allocator, DomainId, DomainOptions, ExtentState, Grant, Outcome, Request, Settings, StreamKey,
};
use glake_units::Bytes;

const BLOCKS: u64 = 10_000;

fn take(core: &mut Allocator, size: Bytes) -> Grant {
    take_in(core, Allocator::default_domain(), size)
}

fn take_in(core: &mut Allocator, domain: DomainId, size: Bytes) -> Grant {
    let request = Request { size, stream: StreamKey(0), domain };
    loop {
        if let Some(grant) = core.take(&request) {
            return grant;
        }
        match core.plan(&request, true).expect("there is room") {
            Outcome::Ready(grant) => return grant,
            Outcome::Work(plan) => {
                if let Some(grant) = core.commit(plan.id) {
                    return grant;
                }
            }
            Outcome::Wait(point) => panic!("{point:?} of nothing"),
        }
    }
}

/// Evicts and refills every extent of a device with large and small blocks, every third of them freed.
#[test]
fn ten_thousand_blocks_are_evicted_and_refilled() {
    let settings = Settings { extent: Bytes::mib(16), ..Settings::for_memory(Bytes::gib(80)) };
    let mut core = Allocator::new(settings).expect("the settings make sense");
    let large: Vec<Grant> = (0..BLOCKS).map(|n| take(&mut core, Bytes::kib(1025 + n * 37 % 9000))).collect();
    let small: Vec<Grant> = (0..BLOCKS).map(|n| take(&mut core, Bytes::kib(1 + n * 37 % 400))).collect();
    for grant in large.iter().chain(&small).step_by(3) {
        core.free(grant.offset).expect("it is live");
    }
    let point = core.close_point();
    core.pass_point(point);
    let live = core.stats().all.allocated_bytes.current;
    let begin = Instant::now();
    let extents = core.extents().of(Allocator::default_domain());
    assert!(extents.len() > 500, "{}", extents.len());
    let mut kept = Bytes::ZERO;
    for view in &extents {
        core.evictions().begin(view.extent).expect("nothing is withheld");
        kept =
            kept.saturating_add(core.extents().kept_ranges(view.extent).iter().map(|range| range.size).sum());
        core.evictions().finish(view.extent).expect("it moves");
    }
    assert_eq!(kept.get(), live);
    assert_eq!(core.reserved_bytes(), Bytes::ZERO);
    for view in &extents {
        core.evictions().begin_refill(view.extent).expect("there is room");
        core.evictions().refill_made(view.extent, true);
        core.evictions().finish_refill(view.extent).expect("it moves");
    }
    let after = core.extents().of(Allocator::default_domain());
    assert!(after.iter().all(|view| view.state == ExtentState::Resident));
    let took = begin.elapsed();
    assert!(took < Duration::from_secs(1), "{took:?} for {} extents", extents.len());
    core.check().unwrap_or_else(|broken| panic!("{broken}"));
}

/// Reads statistics between pairs of malloc and free of the default pool and completion points, without and with 4,000 private pools, each with a small and a large
/// block.
#[test]
fn statistics_cost_the_same_with_four_thousand_pools() {
    let mut core = Allocator::new(Settings::for_memory(Bytes::gib(80))).expect("the settings make sense");
    let read = |core: &mut Allocator| {
        let mut best = Duration::MAX;
        for _ in 0..20 {
            let grant = take(core, Bytes::mib(3));
            core.free(grant.offset).expect("it is live");
            let point = core.close_point();
            core.pass_point(point);
            let begin = Instant::now();
            std::hint::black_box(core.stats());
            best = best.min(begin.elapsed());
        }
        best
    };
    let alone = read(&mut core);
    for _ in 0..4000 {
        let domain = core.add_domain(DomainOptions::own_pool());
        for size in [Bytes::kib(8), Bytes::mib(3)] {
            let grant = take_in(&mut core, domain, size);
            core.free(grant.offset).expect("it is live");
        }
    }
    let among = read(&mut core);
    // Sums over all pools took 90 ms.
    assert!(among < alone * 20 + Duration::from_millis(1), "{among:?} with 4,000 pools, {alone:?} with none");
    core.check().unwrap_or_else(|broken| panic!("{broken}"));
}
