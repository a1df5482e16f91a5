//! Runs the program on an allocator and times its pairs.

use std::time::{Duration, Instant};

use super::BenchError;
use super::program::Program;

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
