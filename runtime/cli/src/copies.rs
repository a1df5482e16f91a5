//! Copies by a rig's own engine, next to the driver's, for `glake demo` and for `glake bench copy` in the virtual time of a model.
//!
//! ```text
//! native   the driver's: one copy, or one for each block or GPU    host ══link 0══► GPU 0
//! engine   one call of the engine's                                host ══links 0 to 3══► GPU 0
//! limit    each GPU its own share to its own memory                host ══link k══► GPU k, all at once
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use fastrand::Rng;
use glake_device::owned::{self, Buffer, DeviceSet, OwnedStream, Pages, Registration, Span};
use glake_device::{DeviceId, Driver, DriverError};
use glake_sim::pattern::{fill, matching};
use glake_tiers::{HostBlock, HostError};
use glake_transfer::{CopyOptions, TransferError, UserStream};
use glake_units::Bytes;

use crate::bench::{CopyDirection, CopyMemory};
use crate::rig::{ForeignMemory, Rig};

/// Timeout for a stream's paths, which are set up in the background after the first large copy.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Shape of a copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) memory: CopyMemory,
    pub(crate) size: Bytes,
    /// Block size of scattered copies.
    pub(crate) block: Bytes,
}

/// Rig with one stream per GPU, the target's first.
pub(crate) struct Copies<'a> {
    rig: &'a Rig,
    on: Vec<(UserStream, OwnedStream)>,
}

/// Memory of a copy on both sides.
pub(crate) struct Ends<'a> {
    copies: &'a Copies<'a>,
    host: HostMemory,
    /// Memory of the target, or of every GPU in a broadcast.
    gpus: Vec<GpuMemory>,
    shape: Shape,
    /// Offset on the host, offset on the GPU and size of each block; one block unless scattered.
    blocks: Vec<(Bytes, Bytes, Bytes)>,
}

/// Pinned memory of the host.
enum HostMemory {
    Block(HostBlock),
    /// Registered memory that is never accessed, for models that move no bytes.
    Untouched(Arc<Registration>),
}

/// Memory of a GPU.
enum GpuMemory {
    Pool(Arc<Buffer>),
    /// Memory from one of the driver's allocators.
    Foreign(ForeignMemory),
}

/// Error of a copy.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CopyError {
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error(transparent)]
    Transfer(#[from] TransferError),
    #[error(transparent)]
    Host(#[from] HostError),
}

type Result<T> = std::result::Result<T, CopyError>;

impl<'a> Copies<'a> {
    /// Creates a stream of the target only.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(crate) fn of_target(rig: &'a Rig) -> Result<Self> {
        Self::on(rig, DeviceSet::EMPTY)
    }

    /// Creates one stream per GPU whose link takes part.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(crate) fn of_all(rig: &'a Rig) -> Result<Self> {
        Self::on(rig, rig.relays())
    }

    fn on(rig: &'a Rig, others: DeviceSet) -> Result<Self> {
        let stream = |device: DeviceId| {
            let stream = OwnedStream::new(rig.driver(), device)?;
            Ok((UserStream::of(&**rig.driver(), device, stream.id())?, stream))
        };
        let on = std::iter::once(rig.target().id).chain(others.iter()).map(stream);
        Ok(Copies { rig, on: on.collect::<Result<_>>()? })
    }

    /// Allocates memory for copies.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(crate) fn ends(&'a self, shape: Shape) -> Result<Ends<'a>> {
        let size = shape.size;
        let mut gpus = vec![match shape.memory.allocator() {
            Some(by) => GpuMemory::Foreign(self.rig.foreign_memory(size, by)?),
            None => GpuMemory::Pool(self.rig.buffer(size)?),
        }];
        if shape.memory == CopyMemory::Broadcast {
            for (on, _) in &self.on[1..] {
                gpus.push(GpuMemory::Pool(self.memory_of(on.device, size)?));
            }
        }
        let blocks = match shape.memory {
            CopyMemory::Scattered => scattered(size, shape.block),
            _ => vec![(Bytes::ZERO, Bytes::ZERO, size)],
        };
        let host = match self.rig.moves_bytes() {
            true => HostMemory::Block(self.rig.host()?.take(size)?),
            false => HostMemory::Untouched(Arc::new(Registration::new(
                self.rig.completion_events(),
                Pages::new(size, 0)?,
            )?)),
        };
        Ok(Ends { copies: self, host, gpus, shape, blocks })
    }

    /// Allocates memory of another GPU that the target can access.
    fn memory_of(&self, device: DeviceId, size: Bytes) -> Result<Arc<Buffer>> {
        let reach = self.rig.relays().union(DeviceSet::of(self.rig.target().id));
        Ok(Arc::new(Buffer::new(self.rig.completion_events(), device, size, reach)?))
    }

    fn driver(&self) -> &dyn Driver {
        &**self.rig.driver()
    }

    /// Returns the time from the first call until all streams are done.
    fn timed(&self, work: impl FnOnce() -> Result<()>) -> Result<Duration> {
        let begin = self.rig.now();
        let enqueued = work();
        for (on, _) in &self.on {
            self.driver().stream_synchronize(on.device, on.raw)?;
        }
        enqueued?;
        Ok(self.rig.now().saturating_sub(begin))
    }
}

impl Ends<'_> {
    /// Times the driver's copy.
    pub(crate) fn native(&self, direction: CopyDirection) -> Result<Duration> {
        self.copies.timed(|| {
            for ((on, _), gpu) in self.copies.on.iter().zip(&self.gpus) {
                for (to, from) in self.pairs(gpu, direction) {
                    owned::copy(self.copies.driver(), on.device, on.raw, &to, &from)?;
                }
            }
            Ok(())
        })
    }

    /// Times the engine's copy.
    pub(crate) fn engine(&self, direction: CopyDirection) -> Result<Duration> {
        let (engine, on) = (self.copies.rig.engine(), self.copies.on[0].0);
        let options = CopyOptions { waited: false, ..CopyOptions::default() };
        self.copies.timed(|| {
            match self.shape.memory {
                CopyMemory::Broadcast => {
                    let to: Vec<Span> =
                        self.gpus.iter().filter_map(|gpu| gpu.part(Bytes::ZERO, self.shape.size)).collect();
                    if let Some(host) = self.host(Bytes::ZERO, self.shape.size) {
                        drop(engine.copy_to_all(&to, &host, on, options)?);
                    }
                }
                CopyMemory::Scattered => {
                    let pairs: Vec<_> = self.pairs(&self.gpus[0], direction).collect();
                    drop(engine.copy_list(&pairs, on, options)?);
                }
                _ => {
                    for (to, from) in self.pairs(&self.gpus[0], direction) {
                        drop(engine.copy(&to, &from, on, options)?);
                    }
                }
            }
            Ok(())
        })
    }

    /// Times all GPUs copying their own shares at once.
    pub(crate) fn limit(&self, direction: CopyDirection) -> Result<Duration> {
        let streams = &self.copies.on;
        let share = Bytes::new(self.shape.size.get().div_ceil(streams.len() as u64));
        let shares = streams.iter().map(|(on, _)| Ok((*on, self.copies.memory_of(on.device, share)?)));
        let shares = shares.collect::<Result<Vec<_>>>()?;
        self.copies.timed(|| {
            for (number, (on, memory)) in (0..).zip(&shares) {
                let offset = Bytes::new(share.get() * number);
                let size = share.min(self.shape.size.saturating_sub(offset));
                if let (false, Some(gpu), Some(host)) =
                    (size.is_zero(), memory.span(Bytes::ZERO, size), self.host(offset, size))
                {
                    let (to, from) = ordered(direction, host, gpu);
                    owned::copy(self.copies.driver(), on.device, on.raw, &to, &from)?;
                }
            }
            Ok(())
        })
    }

    /// Copies until other links take part, or until a timeout.
    pub(crate) fn warm_up(&self, direction: CopyDirection) -> Result<()> {
        let (rig, begin) = (self.copies.rig, Instant::now());
        let split = rig.engine().statistics().split_copies;
        while !rig.relays().is_empty()
            && rig.engine().statistics().split_copies == split
            && begin.elapsed() < TIMEOUT
        {
            self.engine(direction)?;
        }
        Ok(())
    }

    /// Returns the number of host bytes that match the pattern of [`Ends::verify`], up to the first differing word.
    fn matching(&self, seed: u64) -> Bytes {
        Bytes::new(matching(self.host.as_slice(), 0, seed))
    }

    /// Copies a pattern with the engine. Returns the number of matching bytes, of the GPU that has fewest.
    ///
    /// # Errors
    /// Errors of the driver and the engine.
    pub(crate) fn verify(&mut self, direction: CopyDirection, seed: u64) -> Result<Bytes> {
        self.host.write(|bytes| fill(bytes, 0, seed));
        match direction {
            CopyDirection::H2d => self.engine(direction)?,
            CopyDirection::D2h => self.native(CopyDirection::H2d)?,
        };
        let mut least = Bytes::MAX;
        for number in 0..self.gpus.len() {
            self.host.write(|bytes| bytes.fill(0));
            match direction {
                CopyDirection::H2d => self.back(number)?,
                CopyDirection::D2h => self.engine(direction)?,
            };
            least = least.min(self.matching(seed));
        }
        Ok(least)
    }

    /// Copies from one GPU to the host with the driver.
    fn back(&self, number: usize) -> Result<Duration> {
        let on = self.copies.on[number].0;
        self.copies.timed(|| {
            self.pairs(&self.gpus[number], CopyDirection::D2h).try_for_each(|(to, from)| {
                Ok(owned::copy(self.copies.driver(), on.device, on.raw, &to, &from)?)
            })
        })
    }

    fn pairs<'m>(
        &'m self,
        gpu: &'m GpuMemory,
        direction: CopyDirection,
    ) -> impl Iterator<Item = (Span, Span)> + 'm {
        self.blocks.iter().filter_map(move |&(here, there, size)| {
            Some(ordered(direction, self.host(here, size)?, gpu.part(there, size)?))
        })
    }

    fn host(&self, offset: Bytes, size: Bytes) -> Option<Span> {
        match &self.host {
            HostMemory::Block(block) => block.span(offset, size),
            HostMemory::Untouched(memory) => Span::pinned(memory, offset, size),
        }
    }
}

impl HostMemory {
    /// Returns the bytes; empty for models that move none.
    fn as_slice(&self) -> &[u8] {
        match self {
            HostMemory::Block(block) => block.as_slice(),
            HostMemory::Untouched(_) => &[],
        }
    }

    fn write(&mut self, write: impl FnOnce(&mut [u8])) {
        if let HostMemory::Block(block) = self
            && let Some(bytes) = block.as_mut_slice()
        {
            write(bytes);
        }
    }
}

impl GpuMemory {
    fn part(&self, offset: Bytes, size: Bytes) -> Option<Span> {
        match self {
            GpuMemory::Pool(buffer) => buffer.span(offset, size),
            GpuMemory::Foreign(memory) => memory.part(offset, size),
        }
    }
}

/// Orders a pair as destination and source.
fn ordered(direction: CopyDirection, host: Span, gpu: Span) -> (Span, Span) {
    match direction {
        CopyDirection::H2d => (gpu, host),
        CopyDirection::D2h => (host, gpu),
    }
}

/// Returns offset on the host, offset on the GPU and size of each block. The last one may be shorter.
pub(crate) fn scattered(size: Bytes, block: Bytes) -> Vec<(Bytes, Bytes, Bytes)> {
    let (size, block) = (size.get(), block.get().max(1));
    let whole = size / block;
    let mut places: Vec<u64> = (0..whole).collect();
    Rng::with_seed(1).shuffle(&mut places);
    let mut blocks: Vec<_> =
        (0..).zip(places).map(|(here, there): (u64, u64)| (here * block, there * block, block)).collect();
    if !size.is_multiple_of(block) {
        blocks.push((whole * block, whole * block, size % block));
    }
    blocks
        .into_iter()
        .map(|(here, there, size)| (Bytes::new(here), Bytes::new(there), Bytes::new(size)))
        .collect()
}
