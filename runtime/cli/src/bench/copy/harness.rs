//! Test bed of copy measurements: GPUs, one stream per GPU, and the memory of one measurement.

use std::time::Duration;

use glake_abi::GLAKE_OUT_OF_MEMORY;
use glake_abi::client::{ClientError, CopyCall, Gmlake, GpuMemory, HostMemory, Part, Stream, Timed, Work};
use glake_sim::pattern::{fill, matching};
use glake_units::Bytes;

use super::{BenchError, CopyDirection, CopyMemory, CopyOptions};
use crate::copies::scattered;

/// Configuration of one measurement.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) memory: CopyMemory,
    pub(super) direction: CopyDirection,
    pub(super) size: Bytes,
    /// Block size of scattered copies.
    pub(super) block: Bytes,
}

/// Streams of the GPUs that take part, the measured one first.
pub(super) struct Harness<'a> {
    pub(super) library: &'a Gmlake,
    streams: Vec<Stream>,
}

/// The memory of one measurement.
pub(super) struct Field<'a> {
    case: Case,
    harness: &'a Harness<'a>,
    host: HostMemory<'a>,
    /// Pinned memory for the limit if the copies' own memory is pageable.
    pinned: Option<HostMemory<'a>>,
    /// Memory on each GPU: the first holds all bytes, the others their shares, or all bytes in a broadcast.
    gpus: Vec<GpuMemory<'a>>,
    /// Offset on the host, offset on the GPU and size of each block; one block unless scattered.
    blocks: Vec<(usize, usize, usize)>,
}

impl Case {
    pub(super) fn name(&self) -> String {
        let direction = match self.direction {
            CopyDirection::H2d => "h2d",
            CopyDirection::D2h => "d2h",
        };
        let memory = format!("{:?}", self.memory).to_lowercase();
        format!("{direction} {memory} {}", self.size)
    }

    fn bytes(&self) -> usize {
        places(self.size)
    }

    fn blocks(&self) -> Vec<(usize, usize, usize)> {
        let blocks = scattered(self.size, self.block).into_iter();
        blocks.map(|(here, there, size)| (places(here), places(there), places(size))).collect()
    }
}

impl<'a> Harness<'a> {
    pub(super) fn new(library: &'a Gmlake, options: &CopyOptions) -> Result<Self, BenchError> {
        let count = library.device_count()?;
        let others = (0..count).filter(|device| *device != options.target);
        let most = usize::try_from(options.paths.unwrap_or(u32::MAX).max(1)).unwrap_or(usize::MAX);
        let devices = std::iter::once(options.target).chain(others).take(most);
        let streams = devices.map(|device| library.stream(device)).collect::<Result<_, _>>()?;
        Ok(Harness { library, streams })
    }

    /// Returns the number of GPUs that take part.
    pub(super) fn gpus(&self) -> usize {
        self.streams.len()
    }

    /// Enqueues work and waits for it.
    pub(super) fn timed(&self, work: &[Work<'_>], flags: u32) -> Result<Timed, BenchError> {
        Ok(self.library.timed(work, flags, Duration::ZERO)?)
    }

    /// Memory for a measurement.
    pub(super) fn field(&'a self, case: Case) -> Result<Field<'a>, BenchError> {
        let size = case.bytes();
        let gpu = |stream: Stream, size: usize, memory: CopyMemory| match memory.allocator() {
            Some(by) => Ok(GpuMemory::of_driver(self.library, size.max(1), stream, by)?),
            None => {
                GpuMemory::of_pool(self.library, size.max(1), stream).map_err(|error| no_room(error, &case))
            }
        };
        let share = size.div_ceil(self.streams.len());
        let gpus = self.streams.iter().enumerate().map(|(number, &stream)| match (number, case.memory) {
            (0, memory) => gpu(stream, size, memory),
            (_, CopyMemory::Broadcast) => gpu(stream, size, CopyMemory::Pool),
            _ => gpu(stream, share, CopyMemory::Pool),
        });
        let gpus = gpus.collect::<Result<Vec<_>, BenchError>>()?;
        let pageable = case.memory == CopyMemory::Pageable;
        let pinned = if pageable { Some(HostMemory::new(self.library, size, true)?) } else { None };
        let host = HostMemory::new(self.library, size, !pageable)?;
        let blocks = if case.memory == CopyMemory::Scattered { case.blocks() } else { vec![(0, 0, size)] };
        Ok(Field { case, harness: self, host, pinned, gpus, blocks })
    }
}

impl Field<'_> {
    /// Returns the driver's copies: one, or one per block or GPU.
    pub(super) fn native(&self) -> Vec<Work<'_>> {
        self.native_way(self.case.direction)
    }

    pub(super) fn size(&self) -> Bytes {
        self.case.size
    }

    /// Returns the engine's copy.
    pub(super) fn engine(&self) -> Vec<Work<'_>> {
        let (size, host) = (self.case.bytes(), || self.host.part(0, self.case.bytes()));
        let (call, pairs) = match self.case.memory {
            CopyMemory::Broadcast => {
                (CopyCall::ToAll, self.gpus.iter().map(|gpu| (gpu.part(0, size), host())).collect())
            }
            CopyMemory::Scattered => (CopyCall::List, self.pairs(0, self.case.direction)),
            _ => (CopyCall::Async, self.pairs(0, self.case.direction)),
        };
        vec![Work { stream: self.harness.streams[0], call, pairs }]
    }

    /// Returns the copy of each GPU's own share.
    pub(super) fn limit(&self) -> Vec<Work<'_>> {
        let size = self.case.bytes();
        let share = size.div_ceil(self.gpus.len());
        let host = self.pinned.as_ref().unwrap_or(&self.host);
        let shares = self.harness.streams.iter().zip(&self.gpus).enumerate();
        let work = shares.map(|(number, (&stream, gpu))| {
            let offset = (share * number).min(size);
            let length = share.min(size - offset);
            let pair = ordered(self.case.direction, host.part(offset, length), gpu.part(0, length));
            Work { stream, call: CopyCall::Native, pairs: vec![pair] }
        });
        work.collect()
    }

    /// Copies other bytes as the engine does, and compares what arrived.
    ///
    /// # Errors
    /// [`BenchError::Differs`].
    pub(super) fn verify(&mut self, seed: u64) -> Result<(), BenchError> {
        let compare = |host: &mut HostMemory<'_>, case: &Case| match matching(host.bytes(), 0, seed) {
            all if all == host.bytes().len() as u64 => Ok(()),
            _ => Err(BenchError::Differs { case: case.name() }),
        };
        fill(self.host.bytes(), 0, seed);
        match self.case.direction {
            CopyDirection::H2d => {
                self.harness.timed(&self.engine(), 0)?;
                for gpu in 0..self.copies() {
                    self.host.bytes().fill(0);
                    self.harness.timed(&[self.native_copy(gpu, CopyDirection::D2h)], 0)?;
                    compare(&mut self.host, &self.case)?;
                }
            }
            CopyDirection::D2h => {
                self.harness.timed(&self.native_way(CopyDirection::H2d), 0)?;
                self.host.bytes().fill(0);
                self.harness.timed(&self.engine(), 0)?;
                compare(&mut self.host, &self.case)?;
            }
        }
        Ok(())
    }

    /// Returns the number of GPUs that hold all bytes.
    fn copies(&self) -> usize {
        if self.case.memory == CopyMemory::Broadcast { self.gpus.len() } else { 1 }
    }

    fn native_way(&self, direction: CopyDirection) -> Vec<Work<'_>> {
        (0..self.copies()).map(|gpu| self.native_copy(gpu, direction)).collect()
    }

    /// Returns the driver's copies between the host and one GPU.
    fn native_copy(&self, gpu: usize, direction: CopyDirection) -> Work<'_> {
        let (stream, pairs) = (self.harness.streams[gpu], self.pairs(gpu, direction));
        Work { stream, call: CopyCall::Native, pairs }
    }

    /// Returns pairs of destination and source that cover all bytes of one GPU, block by block.
    fn pairs(&self, gpu: usize, direction: CopyDirection) -> Vec<(Part<'_>, Part<'_>)> {
        let pair = |&(here, there, size): &(usize, usize, usize)| {
            ordered(direction, self.host.part(here, size), self.gpus[gpu].part(there, size))
        };
        self.blocks.iter().map(pair).collect()
    }
}

/// Replaces an out-of-memory error of the library, whose text is PyTorch's and would mislead here.
fn no_room(error: ClientError, case: &Case) -> BenchError {
    match error {
        ClientError::Refused { status: GLAKE_OUT_OF_MEMORY, .. } => BenchError::NoRoom { case: case.name() },
        error => error.into(),
    }
}

/// Converts a size to a slice length. Memory sizes fit: programs are 64-bit.
fn places(size: Bytes) -> usize {
    usize::try_from(size.get()).unwrap_or(usize::MAX)
}

/// Orders a pair as destination and source.
fn ordered<'m>(direction: CopyDirection, host: Part<'m>, gpu: Part<'m>) -> (Part<'m>, Part<'m>) {
    match direction {
        CopyDirection::H2d => (gpu, host),
        CopyDirection::D2h => (host, gpu),
    }
}
