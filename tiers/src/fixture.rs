//! Test support for regions and stores: four simulated GPUs, the driver's own copies, blocks with known contents.

use std::sync::Arc;

use glake_device::owned::{self, CompletionEvents, OwnedEvent, OwnedStream, Span};
use glake_device::{DeviceId, Driver, EventKind, Faults, Stream};
use glake_sim::{SimOptions, SimTopology, Simulator};
use glake_stitch::Settings;
use glake_units::Bytes;
use parking_lot::Mutex;

use crate::{Block, Budget, GpuPool, HostOptions, HostPool, Mark, MoveError, Mover, Moving};

pub(crate) const GPU: DeviceId = DeviceId(0);
pub(crate) const PEER: DeviceId = DeviceId(1);
/// Memory of each simulated GPU.
const MEMORY: Bytes = Bytes::mib(64);

/// Hook that runs before copies are enqueued; gets pairs of source and destination.
pub(crate) type Meddle = Box<dyn FnMut(&[(Span, Span)]) -> Result<(), MoveError> + Send>;

/// Mover that uses the driver's own copies, on one stream.
pub(crate) struct Native {
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) stream: Arc<OwnedStream>,
    pub(crate) meddle: Mutex<Option<Meddle>>,
}

/// Creates the simulated GPUs and the handle that makes their calls fail.
pub(crate) fn machine() -> (Arc<Simulator>, Arc<Faults>) {
    let topology = SimTopology::uniform(4, MEMORY);
    let sim = Arc::new(Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap());
    (sim.clone(), Arc::new(Faults::new(sim)))
}

/// Returns pool settings with a single extent size, up to the limit.
pub(crate) fn settings(extent: Bytes, limit: Bytes) -> Settings {
    Settings { extent, extent_near_limit: extent, limit, near_limit: 1.0, ..Settings::for_memory(MEMORY) }
}

/// Creates a host pool that pins memory in small pieces.
pub(crate) fn host(completion_events: &Arc<CompletionEvents>, budget: Bytes) -> Arc<HostPool> {
    let (spare, arena) = (Bytes::ZERO, Bytes::mib(4));
    let options =
        HostOptions { budget: Budget::new(budget), arena, spare, threads: 1, ..HostOptions::default() };
    HostPool::new(completion_events, options).unwrap()
}

/// Returns the used memory of a GPU.
pub(crate) fn used(sim: &Simulator, device: DeviceId) -> Bytes {
    let info = sim.memory_info(device).unwrap();
    info.total.saturating_sub(info.free)
}

/// Returns bytes in which no two neighbouring 512-byte pieces are equal.
pub(crate) fn pattern(seed: u8, size: Bytes) -> Vec<u8> {
    let mut state = u64::from(seed) + 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state.to_le_bytes()[7]
    };
    let mut bytes = vec![0; usize::try_from(size.get()).unwrap()];
    bytes.chunks_mut(512).for_each(|part| part.fill(next()));
    bytes
}

/// Counts the bytes of blocks that differ from the pattern of their seeds.
pub(crate) fn wrong_bytes(pool: &GpuPool, live: &[(Block, u8)]) -> usize {
    let wrong = |(block, seed): &(Block, u8)| {
        let mut bytes = vec![0; usize::try_from(block.size.get()).unwrap()];
        pool.read(block.address, &mut bytes).unwrap();
        let right = pattern(*seed, block.size);
        if bytes == right {
            0
        } else {
            bytes.iter().zip(right).filter(|(found, byte)| **found != *byte).count()
        }
    };
    live.iter().map(wrong).sum()
}

impl Native {
    pub(crate) fn new(driver: &Arc<dyn Driver>) -> Native {
        let stream = Arc::new(OwnedStream::new(driver, GPU).unwrap());
        Native { driver: driver.clone(), stream, meddle: Mutex::default() }
    }
}

impl std::fmt::Debug for Native {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Native")
    }
}

impl Mover for Native {
    fn enqueue(&self, copies: &[(Span, Span)]) -> Result<Box<dyn Moving>, MoveError> {
        if let Some(meddle) = &mut *self.meddle.lock() {
            meddle(copies)?;
        }
        for (to, from) in copies {
            owned::copy(&*self.driver, GPU, self.stream.id(), to, from)?;
        }
        Ok(Box::new(Waiting(self.stream.clone())))
    }

    fn mark(&self) -> Result<Arc<dyn Mark>, MoveError> {
        let event = OwnedEvent::new(&self.driver, GPU, EventKind::Plain)?;
        event.record(self.stream.id())?;
        Ok(Arc::new(Behind(self.driver.clone(), event)))
    }
}

#[derive(Debug)]
struct Behind(Arc<dyn Driver>, OwnedEvent);

impl Mark for Behind {
    fn follow(&self, device: DeviceId, stream: Stream) -> Result<(), MoveError> {
        Ok(self.0.stream_wait_event(device, stream, self.1.id())?)
    }
}

#[derive(Debug)]
struct Waiting(Arc<OwnedStream>);

impl Moving for Waiting {
    fn wait(self: Box<Self>) -> Result<(), MoveError> {
        Ok(self.0.synchronize()?)
    }
}
