//! The pool as the program's allocator, without the C interface before it.

use glake_device::Address;
use glake_device::owned::OwnedStream;
use glake_stitch::Settings;
use glake_tiers::{GpuPool, PoolOptions, PoolStream};
use glake_units::Bytes;

use super::BenchError;
use super::measure::Allocates;
use glake_replay::machine::Machine;

/// A pool, and the streams that its blocks are for.
#[derive(Debug)]
pub(super) struct PoolUnderTest {
    pool: GpuPool,
    streams: Vec<PoolStream>,
    _streams: Vec<OwnedStream>,
}

impl PoolUnderTest {
    pub(super) fn new(machine: &Machine, settings: Settings, streams: u32) -> Result<Self, BenchError> {
        let owned: Vec<OwnedStream> = (0..streams)
            .map(|_| OwnedStream::new(machine.driver(), machine.id()))
            .collect::<Result<_, _>>()?;
        let streams =
            owned.iter().map(|stream| PoolStream::of(&**machine.driver(), machine.id(), stream.id()));
        let streams = streams.collect::<Result<_, _>>()?;
        let pool = GpuPool::new(
            machine.driver().clone(),
            machine.id(),
            PoolOptions { settings: Some(settings), ..PoolOptions::default() },
        )?;
        Ok(PoolUnderTest { pool, streams, _streams: owned })
    }
}

impl Allocates for PoolUnderTest {
    type Block = Address;

    #[inline]
    fn malloc(&mut self, size: u64, stream: usize) -> Result<Address, BenchError> {
        Ok(self.pool.malloc(Bytes::new(size), self.streams[stream])?.address)
    }

    #[inline]
    fn free(&mut self, block: Address) -> Result<(), BenchError> {
        self.pool.free(block)?;
        Ok(())
    }

    /// The completion points go on, as on the pool's own thread.
    fn pause(&mut self) -> Result<(), BenchError> {
        Ok(self.pool.tick()?)
    }
}
