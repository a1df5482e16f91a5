//! Allocators under measurement: `libgmlake.so` through the C interface, and the pool without it.

use std::path::Path;

use glake_abi::client::{Block, Gmlake, Stream};
use glake_device::Address;
use glake_device::owned::OwnedStream;
use glake_replay::machine::Machine;
use glake_runtime::backend::Backend;
use glake_runtime::config::{Config, DeviceChoice};
use glake_stitch::Settings;
use glake_tiers::{GpuPool, PoolOptions, PoolStream};
use glake_units::Bytes;

use super::BenchError;
use super::program::Allocates;
use crate::installed::LIBGMLAKE;

/// Device on which allocations are measured.
pub(super) const DEVICE: i32 = 0;

/// Library in use by one measurement, with its streams.
#[derive(Debug)]
pub(super) struct LibraryUnderTest<'a> {
    library: &'a Gmlake,
    streams: Vec<Stream>,
}

/// Starts the library on a backend for all measurements of the process. `file`: path of the library; `None`: the one beside the program.
pub(super) fn start(
    file: Option<&Path>,
    backend: &Backend,
    mut config: Config,
) -> Result<Gmlake, BenchError> {
    // The library uses a simulator only if it is configured.
    if let (DeviceChoice::Auto, Backend::Sim { .. }) = (&config.device.choice, backend) {
        config.device.choice = DeviceChoice::Sim { topology: None, shared: None };
    }
    let file = LIBGMLAKE.find(file).map_err(|looked_for| BenchError::NoLibrary { looked_for })?;
    Ok(Gmlake::start(&file, &config.to_toml())?)
}

impl<'a> LibraryUnderTest<'a> {
    /// Creates the given number of streams on the measured device.
    pub(super) fn new(library: &'a Gmlake, streams: u32) -> Result<Self, BenchError> {
        let streams = (0..streams).map(|_| library.stream(0)).collect::<Result<_, _>>()?;
        Ok(LibraryUnderTest { library, streams })
    }

    pub(super) fn free_ranges(&self) -> Result<u32, BenchError> {
        Ok(self.library.free_ranges(DEVICE)?)
    }
}

impl Allocates for LibraryUnderTest<'_> {
    type Block = Block;

    #[inline]
    fn malloc(&mut self, size: u64, stream: usize) -> Result<Block, BenchError> {
        // Every size fits: programs are 64-bit.
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        Ok(self.library.alloc(size, self.streams[stream])?)
    }

    #[inline]
    fn free(&mut self, block: Block) -> Result<(), BenchError> {
        Ok(self.library.free(block)?)
    }

    fn pause(&mut self) -> Result<(), BenchError> {
        Ok(self.library.trim(DEVICE, u64::MAX)?)
    }

    fn driver_calls(&self) -> Result<u64, BenchError> {
        Ok(self.library.driver_calls()?)
    }

    fn heap_allocations(&self) -> u64 {
        self.library.heap_allocations()
    }
}

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
