//! The pool as the program's allocator, with its driver calls counted.

use std::sync::Arc;

use glake_device::owned::OwnedStream;
use glake_device::{Address, Recorder};
use glake_stitch::Settings;
use glake_tiers::{GpuPool, PoolOptions, PoolStream};
use glake_units::Bytes;

use super::BenchError;
use super::measure::Allocates;
use crate::machine::Machine;

/// A pool, and the streams that its blocks are for.
#[derive(Debug)]
pub(super) struct PoolUnderTest {
    pool: GpuPool,
    recorder: Arc<Recorder>,
    streams: Vec<PoolStream>,
    _streams: Vec<OwnedStream>,
}

impl PoolUnderTest {
    pub(super) fn new(machine: &Machine, settings: Settings, streams: u32) -> Result<Self, BenchError> {
        let recorder = Arc::new(machine.recorder());
        let owned: Vec<OwnedStream> = (0..streams)
            .map(|_| OwnedStream::new(machine.driver(), machine.id()))
            .collect::<Result<_, _>>()?;
        let streams =
            owned.iter().map(|stream| PoolStream::of(&**machine.driver(), machine.id(), stream.id()));
        let streams = streams.collect::<Result<_, _>>()?;
        let pool = GpuPool::new(
            recorder.clone(),
            machine.id(),
            PoolOptions { settings: Some(settings), ..PoolOptions::default() },
        )?;
        Ok(PoolUnderTest { pool, recorder, streams, _streams: owned })
    }

    pub(super) fn free_ranges(&self) -> u32 {
        u32::try_from(self.pool.free_ranges()).unwrap_or(u32::MAX)
    }
}

impl Allocates for PoolUnderTest {
    #[inline]
    fn malloc(&mut self, size: u64, stream: usize) -> Result<u64, BenchError> {
        Ok(self.pool.malloc(Bytes::new(size), self.streams[stream])?.address.0)
    }

    #[inline]
    fn free(&mut self, at: u64) -> Result<(), BenchError> {
        self.pool.free(Address(at))?;
        Ok(())
    }

    /// The epochs go on, as on the pool's own thread.
    fn pause(&mut self) -> Result<(), BenchError> {
        Ok(self.pool.tick()?)
    }

    fn driver_calls(&self) -> u64 {
        self.recorder.counters().calls()
    }
}
