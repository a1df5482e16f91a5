//! Program of the hot path's measurement: its blocks and sizes, and a run of it on an allocator. Every allocator runs the same program.

use std::path::Path;
use std::time::{Duration, Instant};

use fastrand::Rng;
use glake_replay::trace::{Event, Trace};

use super::BenchError;

/// Requests of a training run of OPT-1.3B with low-rank adapters: bytes and how often.
const SIZES: &str = include_str!("opt13_LR.sizes");

/// Any number would do: programs are the same from run to run.
const SEED: u64 = 0x676c_616b_6531;

/// Distribution of request sizes, from which sizes are drawn as a program requested them.
#[derive(Clone, Debug)]
pub(super) struct Sizes {
    /// Sizes, and how many requests were not larger.
    upto: Vec<(u64, u64)>,
}

/// Program of a measurement: a fill, holes in it, and pairs of a free and a malloc.
#[derive(Clone, Debug)]
pub(super) struct Program {
    /// Sizes of the initial allocations.
    pub(super) fill: Vec<u64>,
    /// Then freed, one after the other: a place among the live blocks, filled by the last of them.
    pub(super) holes: Vec<usize>,
    /// Measured pairs of calls: the block at the index is freed, and a block of the given size replaces it.
    pub(super) pairs: Vec<(usize, u64)>,
    /// The mallocs go to so many streams in turn.
    pub(super) streams: usize,
}

impl Sizes {
    /// Returns the sizes of a trace, or the built-in ones.
    pub(super) fn of(trace: Option<&Path>) -> Result<Sizes, BenchError> {
        let Some(path) = trace else {
            let lines = SIZES.lines().filter_map(|line| line.split_once(' '));
            return Ok(Sizes::counted(lines.filter_map(|(b, n)| Some((b.parse().ok()?, n.parse().ok()?)))));
        };
        let trace = Trace::open(path)?;
        let mut sizes: Vec<u64> = (trace.events().iter())
            .filter_map(|event| match event {
                Event::Allocate { bytes, .. } => Some(bytes.get()),
                _ => None,
            })
            .collect();
        sizes.sort_unstable();
        Ok(Sizes::counted(sizes.into_iter().map(|size| (size, 1))))
    }

    fn counted(sizes: impl Iterator<Item = (u64, u64)>) -> Sizes {
        let mut sum = 0;
        let upto = sizes.map(|(size, count)| {
            sum += count;
            (size, sum)
        });
        Sizes { upto: upto.collect() }
    }

    fn draw(&self, random: &mut Rng, most: u64) -> u64 {
        let all = self.upto.last().map_or(0, |(_, sum)| *sum);
        let which = random.u64(..all.max(1));
        let place = self.upto.partition_point(|(_, sum)| *sum <= which);
        self.upto.get(place).map_or(1, |(size, _)| *size).min(most)
    }
}

impl Program {
    /// A program of `live` blocks and about `holes` free ranges between them, on no more than `memory`: larger sizes
    /// are cut.
    pub(super) fn new(
        sizes: &Sizes,
        live: u32,
        holes: u32,
        pairs: usize,
        streams: u32,
        memory: u64,
    ) -> Program {
        let mut random = Rng::with_seed(SEED);
        let (live, holes) = (live.max(1) as usize, holes as usize);
        let most = (memory / 2 / (live + holes) as u64).max(512);
        let fill = (0..live + holes).map(|_| sizes.draw(&mut random, most)).collect();
        let holes = (0..holes).map(|done| random.usize(..live + holes - done)).collect();
        let pairs = (0..pairs).map(|_| (random.usize(..live), sizes.draw(&mut random, most))).collect();
        Program { fill, holes, pairs, streams: streams.max(1) as usize }
    }
}

/// Pairs between two pauses: about what a thread does in the 500 us between two completion points.
const SLICE: usize = 4096;

/// Interface of an allocator under measurement.
pub(super) trait Allocates {
    /// Handle of a block.
    type Block: Copy;

    fn malloc(&mut self, size: u64, stream: usize) -> Result<Self::Block, BenchError>;
    fn free(&mut self, block: Self::Block) -> Result<(), BenchError>;

    /// Runs work that accompanies the program outside of the measurement.
    fn pause(&mut self) -> Result<(), BenchError> {
        Ok(())
    }

    /// Calls of the driver so far.
    fn driver_calls(&self) -> Result<u64, BenchError> {
        Ok(0)
    }

    /// Allocations on the heap so far.
    fn heap_allocations(&self) -> u64 {
        0
    }
}

/// Result of one run over all pairs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Round {
    pub(super) pair_ns: f64,
    pub(super) driver_calls: u64,
    pub(super) heap_allocations: u64,
}

/// An allocator in the middle of a program.
#[derive(Debug)]
pub(super) struct Run<'a, A: Allocates> {
    pub(super) allocator: A,
    program: &'a Program,
    live: Vec<A::Block>,
}

impl<'a, A: Allocates> Run<'a, A> {
    /// Fills the allocator and makes the holes.
    pub(super) fn new(mut allocator: A, program: &'a Program) -> Result<Self, BenchError> {
        let mut live = Vec::with_capacity(program.fill.len());
        for (place, &size) in program.fill.iter().enumerate() {
            live.push(allocator.malloc(size, place % program.streams)?);
        }
        for &hole in &program.holes {
            allocator.free(live.swap_remove(hole))?;
        }
        Ok(Run { allocator, program, live })
    }

    /// Runs all pairs once.
    #[allow(clippy::cast_precision_loss)] // a time for people
    pub(super) fn round(&mut self) -> Result<Round, BenchError> {
        let (mut time, mut calls, mut allocations) = (Duration::ZERO, 0, 0);
        for slice in self.program.pairs.chunks(SLICE) {
            let before = (self.allocator.driver_calls()?, self.allocator.heap_allocations());
            let begin = Instant::now();
            self.run(slice)?;
            time += begin.elapsed();
            allocations += self.allocator.heap_allocations() - before.1;
            calls += self.allocator.driver_calls()? - before.0;
            self.allocator.pause()?;
        }
        let pair_ns = time.as_nanos() as f64 / self.program.pairs.len().max(1) as f64;
        Ok(Round { pair_ns, driver_calls: calls, heap_allocations: allocations })
    }

    /// Gives all blocks back.
    pub(super) fn finish(mut self) -> Result<(), BenchError> {
        self.live.into_iter().try_for_each(|block| self.allocator.free(block))
    }

    fn run(&mut self, pairs: &[(usize, u64)]) -> Result<(), BenchError> {
        let streams = self.program.streams;
        let mut stream = 0;
        for &(place, size) in pairs {
            self.allocator.free(self.live[place])?;
            self.live[place] = self.allocator.malloc(size, stream)?;
            stream = if stream + 1 == streams { 0 } else { stream + 1 };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_drawn_as_often_as_they_were_asked_for() {
        let sizes = Sizes::counted([(10, 1), (20, 0), (30, 3)].into_iter());
        let mut random = Rng::with_seed(1);
        let drawn: Vec<u64> = (0..4000).map(|_| sizes.draw(&mut random, 25)).collect();
        assert!(drawn.iter().all(|size| [10, 25].contains(size)));
        let tens = drawn.iter().filter(|size| **size == 10).count();
        assert!((900..1100).contains(&tens), "{tens}");
    }

    #[test]
    fn the_built_in_sizes_are_those_of_the_trace() {
        let trace = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/traces/opt13_LR.trace.gz"));
        let (built_in, read) = (Sizes::of(None).unwrap(), Sizes::of(Some(trace)).unwrap());
        let (mut a, mut b) = (Rng::with_seed(3), Rng::with_seed(3));
        assert!((0..10_000).all(|_| built_in.draw(&mut a, u64::MAX) == read.draw(&mut b, u64::MAX)));
    }
}
