//! Test bed of copy measurements: GPUs, one stream per GPU, and the memory of one measurement.

use glake_client::{
    Enqueued, GLAKE_OUT_OF_MEMORY, Gmlake, GpuMemory, HostMemory, Libcuda, LoadError, On, Part,
};
use glake_sim::pattern::{fill, matching};
use glake_units::Bytes;

use super::{BenchError, CopyDirection, CopyMemory, CopyOptions};
use crate::scattered::scattered;

/// Configuration of one measurement.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) memory: CopyMemory,
    pub(super) direction: CopyDirection,
    pub(super) size: Bytes,
    /// Block size of scattered copies.
    pub(super) block: Bytes,
}

/// The GPUs that take part, the measured one first.
pub(super) struct Harness<'a> {
    pub(super) library: &'a Gmlake,
    pub(super) cuda: Option<&'a Libcuda>,
    on: Vec<On>,
}

/// The memory of one measurement.
pub(super) struct Field<'a> {
    case: Case,
    harness: &'a Harness<'a>,
    host: HostMemory<'a>,
    /// Pinned, where the copies' own is not.
    pinned: Option<HostMemory<'a>>,
    /// Memory on each GPU: the first holds all bytes, the others their shares, or all bytes in a broadcast.
    gpus: Vec<GpuMemory<'a>>,
    /// Offsets on the host and on the GPU, of scattered blocks.
    blocks: Vec<(usize, usize, usize)>,
}

/// Copies with the streams they run on.
pub(super) type Work<'m> = Vec<(On, Enqueued<'m>)>;

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
    pub(super) fn new(
        library: &'a Gmlake,
        cuda: Option<&'a Libcuda>,
        options: &CopyOptions,
    ) -> Result<Self, BenchError> {
        let count = library.device_count()?;
        let others = (0..count).filter(|device| *device != options.target);
        let most = usize::try_from(options.paths.unwrap_or(u32::MAX).max(1)).unwrap_or(usize::MAX);
        let devices = std::iter::once(options.target).chain(others).take(most);
        let on = devices.map(|device| {
            let stream = library.stream(i32::try_from(device).unwrap_or(i32::MAX))?;
            Ok(On { device, stream })
        });
        Ok(Harness { library, cuda, on: on.collect::<Result<_, BenchError>>()? })
    }

    /// Returns the number of GPUs that take part.
    pub(super) fn gpus(&self) -> usize {
        self.on.len()
    }

    /// Memory for a measurement.
    pub(super) fn field(&'a self, case: Case) -> Result<Field<'a>, BenchError> {
        let size = case.bytes();
        let gpu = |on: &On, size: usize, memory: CopyMemory| match (memory.allocator(), self.cuda) {
            (Some(by), Some(cuda)) => Ok(self.library.foreign_memory(cuda, on.device, size.max(1), by)?),
            (Some(_), None) => Err(BenchError::NoForeignMemory),
            (None, _) => {
                let device = i32::try_from(on.device).unwrap_or(i32::MAX);
                self.library
                    .pool_memory(device, size.max(1), on.stream)
                    .map_err(|error| no_room(error, &case))
            }
        };
        let share = size.div_ceil(self.on.len());
        let gpus = self.on.iter().enumerate().map(|(number, on)| match (number, case.memory) {
            (0, memory) => gpu(on, size, memory),
            (_, CopyMemory::Broadcast) => gpu(on, size, CopyMemory::Pool),
            _ => gpu(on, share, CopyMemory::Pool),
        });
        let gpus = gpus.collect::<Result<Vec<_>, BenchError>>()?;
        let pageable = case.memory == CopyMemory::Pageable;
        let pinned = if pageable { Some(self.library.host_memory(size, true)?) } else { None };
        let host = self.library.host_memory(size, !pageable)?;
        let blocks = if case.memory == CopyMemory::Scattered { case.blocks() } else { Vec::new() };
        Ok(Field { case, harness: self, host, pinned, gpus, blocks })
    }
}

impl Field<'_> {
    /// Returns the driver's copies: one, or one per block or GPU.
    pub(super) fn native(&self) -> Work<'_> {
        self.native_way(self.case.direction)
    }

    pub(super) fn size(&self) -> Bytes {
        self.case.size
    }

    /// Returns the engine's copy.
    pub(super) fn engine(&self) -> Work<'_> {
        let (size, direction) = (self.case.bytes(), self.case.direction);
        let mut work = Vec::new();
        for (on, gpu) in self.places().take(1) {
            let host = self.host.part(0, size);
            let enqueued = match self.case.memory {
                CopyMemory::Scattered => Enqueued::List(self.pairs(gpu, direction)),
                CopyMemory::Broadcast => {
                    Enqueued::ToAll(self.gpus.iter().map(|gpu| gpu.part(0, size)).collect(), host)
                }
                _ => {
                    let (to, from) = ordered(direction, host, gpu.part(0, size));
                    Enqueued::Copy(to, from)
                }
            };
            work.push((on, enqueued));
        }
        work
    }

    /// Each GPU's own share.
    pub(super) fn limit(&self) -> Work<'_> {
        let size = self.case.bytes();
        let share = size.div_ceil(self.harness.on.len());
        let host = self.pinned.as_ref().unwrap_or(&self.host);
        let shares = self.harness.on.iter().zip(&self.gpus).enumerate().map(|(number, (on, gpu))| {
            let offset = (share * number).min(size);
            let length = share.min(size - offset);
            let pair = ordered(self.case.direction, host.part(offset, length), gpu.part(0, length));
            (*on, Enqueued::Native(vec![pair]))
        });
        shares.collect()
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
                self.run(&self.engine())?;
                let copies = if self.case.memory == CopyMemory::Broadcast { self.gpus.len() } else { 1 };
                for gpu in 0..copies {
                    self.host.bytes().fill(0);
                    self.run(&self.back(gpu))?;
                    compare(&mut self.host, &self.case)?;
                }
            }
            CopyDirection::D2h => {
                self.run(&self.native_way(CopyDirection::H2d))?;
                self.host.bytes().fill(0);
                self.run(&self.engine())?;
                compare(&mut self.host, &self.case)?;
            }
        }
        Ok(())
    }

    fn run(&self, work: &Work<'_>) -> Result<(), BenchError> {
        self.harness.library.timed(self.harness.cuda, work, 0)?;
        Ok(())
    }

    /// Returns the driver's copies from one GPU to the host.
    fn back(&self, number: usize) -> Work<'_> {
        let one = self.places().skip(number).take(1);
        one.map(|(on, gpu)| (on, Enqueued::Native(self.pairs(gpu, CopyDirection::D2h)))).collect()
    }

    fn native_way(&self, direction: CopyDirection) -> Work<'_> {
        let copies = if self.case.memory == CopyMemory::Broadcast { self.gpus.len() } else { 1 };
        let some = self.places().take(copies);
        some.map(|(on, gpu)| (on, Enqueued::Native(self.pairs(gpu, direction)))).collect()
    }

    fn places(&self) -> impl Iterator<Item = (On, &GpuMemory<'_>)> {
        self.harness.on.iter().copied().zip(&self.gpus)
    }

    /// Returns pairs of destination and source that cover all bytes, block by block.
    fn pairs<'m>(&'m self, gpu: &'m GpuMemory<'m>, direction: CopyDirection) -> Vec<(Part<'m>, Part<'m>)> {
        let whole = [(0, 0, self.case.bytes())];
        let blocks = if self.case.memory == CopyMemory::Scattered { &*self.blocks } else { &whole };
        let pair = |&(here, there, size): &(usize, usize, usize)| {
            ordered(direction, self.host.part(here, size), gpu.part(there, size))
        };
        blocks.iter().map(pair).collect()
    }
}

/// The library tells of a shortage in PyTorch's words, for programs that look for them: here they would mislead.
fn no_room(error: LoadError, case: &Case) -> BenchError {
    match error {
        LoadError::Refused { status: GLAKE_OUT_OF_MEMORY, .. } => BenchError::NoRoom { case: case.name() },
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
