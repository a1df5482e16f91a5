//! `libgmlake.so` as the program's allocator: the pool as C programs have it.

use std::path::Path;

use glake_client::{Block, Gmlake, Stream};

use super::BenchError;
use super::measure::Allocates;
use glake_runtime::backend::Backend;
use glake_runtime::config::{Config, DeviceChoice};

/// The first device is measured.
const DEVICE: i32 = 0;

/// The library, started once for all measurements of the process.
#[derive(Debug)]
pub(super) struct Loaded {
    library: Gmlake,
}

/// Library in use by one measurement, with its streams.
#[derive(Debug)]
pub(super) struct LibraryUnderTest<'a> {
    library: &'a Gmlake,
    streams: Vec<Stream>,
}

impl Loaded {
    /// Starts the library on a device, configured as the program is. Its thread is kept from ticking while pairs are
    /// measured: a pause does what it would have done.
    pub(super) fn start(path: &Path, backend: &Backend, config: &Config) -> Result<Self, BenchError> {
        let mut config = config.clone();
        // A library takes no simulator where the choice is left open.
        if let (DeviceChoice::Auto, Backend::Sim { .. }) = (&config.device.choice, backend) {
            config.device.choice = DeviceChoice::Sim { topology: None, shared: None };
        }
        config.pool.completion_interval_us = u64::from(u32::MAX);
        let library = Gmlake::open(path)?;
        library.start(&config.to_toml())?;
        Ok(Loaded { library })
    }

    /// Gives all free memory back.
    pub(super) fn release(&self) -> Result<(), BenchError> {
        Ok(self.library.trim(DEVICE, 0)?)
    }

    /// The library with so many streams.
    pub(super) fn with_streams(&self, count: u32) -> Result<LibraryUnderTest<'_>, BenchError> {
        let streams = (0..count).map(|_| self.library.stream(DEVICE)).collect::<Result<_, _>>()?;
        Ok(LibraryUnderTest { library: &self.library, streams })
    }
}

impl LibraryUnderTest<'_> {
    pub(super) fn free_ranges(&self) -> Result<u32, BenchError> {
        Ok(self.library.free_ranges(DEVICE)?)
    }
}

impl Allocates for LibraryUnderTest<'_> {
    type Block = Block;

    #[inline]
    fn malloc(&mut self, size: u64, stream: usize) -> Result<Block, BenchError> {
        // A size of a trace fits: the library's programs are 64-bit.
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        Ok(self.library.alloc(DEVICE, size, self.streams[stream])?)
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
