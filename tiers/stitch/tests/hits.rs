//! A hit never allocates on the heap, however many blocks become live: its tables have spare capacity, which is made when memory grows and
//! when completion points pass. A free allocates only if more pieces of one size are free than ever before.

#![allow(clippy::expect_used, clippy::panic)]

use std::hint::black_box;

use allocation_counter::measure;
use glake_stitch::{Allocator, Outcome, Request, Settings, StreamKey};
use glake_units::Bytes;

/// Number of blocks that a thread makes between two completion points.
const BETWEEN: usize = 8192;

struct Program {
    core: Allocator,
    live: Vec<Bytes>,
    in_hits: Allocations,
    in_frees: Allocations,
}

/// Heap allocations by this thread, and the number of calls that made any. The test runner has threads of its own, which allocate at any
/// time.
#[derive(Clone, Copy, Debug, Default)]
struct Allocations {
    made: u64,
    calls: u64,
}

impl Allocations {
    /// Makes one call, and counts its allocations if `counts` accepts its result.
    fn count<T>(&mut self, call: impl FnOnce() -> T, counts: impl FnOnce(&T) -> bool) -> T {
        let mut returned = None;
        let made = measure(|| returned = Some(call())).count_total;
        let returned = returned.expect("it was called");
        if counts(&returned) {
            self.made += made;
            self.calls += 1;
        }
        returned
    }
}

impl Program {
    fn new() -> Self {
        let core = Allocator::new(Settings::for_memory(Bytes::gib(80))).expect("the settings make sense");
        Program {
            core,
            live: Vec::with_capacity(1 << 20),
            in_hits: Allocations::default(),
            in_frees: Allocations::default(),
        }
    }

    fn allocate(&mut self, size: Bytes, stream: u64) {
        let request = Request { size, stream: StreamKey(stream), domain: Allocator::default_domain() };
        loop {
            if let Some(grant) = self.in_hits.count(|| self.core.take(&request), Option::is_some) {
                return self.live.push(grant.offset);
            }
            match self.core.plan(&request, true).expect("there is room") {
                Outcome::Ready(grant) => return self.live.push(grant.offset),
                Outcome::Work(plan) => {
                    if let Some(grant) = self.core.commit(plan.id) {
                        return self.live.push(grant.offset);
                    }
                }
                Outcome::Wait(point) => panic!("{point:?} of nothing"),
            }
        }
    }

    fn free(&mut self, at: usize) {
        let block = self.live.swap_remove(at);
        self.in_frees.count(|| self.core.free(block), Result::is_ok).expect("it is live");
    }

    fn pass(&mut self) {
        let point = self.core.close_point();
        self.core.pass_point(point);
    }

    /// Frees everything, and fills the same memory with blocks of another size.
    fn refill(&mut self, count: usize, size: Bytes, streams: u64) {
        while !self.live.is_empty() {
            self.free(self.live.len() / 2);
            if self.live.len().is_multiple_of(BETWEEN) {
                self.pass();
            }
        }
        self.pass();
        for n in 0..count {
            self.allocate(size, n as u64 % streams);
            if n % BETWEEN == BETWEEN - 1 {
                self.pass();
            }
        }
        self.pass();
    }
}

#[test]
fn a_hit_allocates_nothing_and_a_free_next_to_nothing() {
    assert_eq!(measure(|| drop(black_box(Box::new(1)))).count_total, 1, "allocations are counted");
    for streams in [1, 3] {
        let mut program = Program::new();
        // Ever smaller blocks in the same bytes: each round has eight times as many live blocks as the last.
        for (count, kib) in [(256, 512), (2_000, 64), (16_000, 8), (128_000, 1)] {
            program.refill(count, Bytes::kib(kib), streams);
        }
        // Large blocks at an increasing number of addresses.
        for (count, mib) in [(64, 64), (512, 8), (2_048, 2)] {
            program.refill(count, Bytes::mib(mib), streams);
        }
        let Program { in_hits, in_frees, .. } = program;
        assert_eq!(in_hits.made, 0, "with {streams} streams: {in_hits:?}");
        assert!(in_frees.made < in_frees.calls / 200, "with {streams} streams: {in_frees:?}");
    }
}
