//! Memory for what other GPUs gave up.
//!
//! Invariant: it lies in domains of its own, whose blocks no program has. What was freed there is handed out again only after all work
//! that was enqueued before, of every device that may touch it.

use std::sync::OnceLock;

use glake_device::{Address, DeviceId, Stream};
use glake_stitch::{DomainId, DomainOptions, StreamKey};
use glake_units::Bytes;

use super::{Block, GpuPool, PoolStream, Result};

/// What lodges together is as large at most as an extent of the second size: the driver takes a millisecond to open new memory, however
/// much it is. What is smaller has extents of the first size. Either is at most such a part of the device.
const EXTENTS: [(Bytes, u64); 2] = [(Bytes::mib(128), 16), (Bytes::gib(1), 4)];
/// A stream that nobody has: what it is said to have used waits for an epoch.
const NOBODY: PoolStream = PoolStream { raw: Stream::LEGACY, key: StreamKey(u64::MAX) };

/// The domains of guests, made when they are needed.
#[derive(Debug, Default)]
pub(super) struct Guests([OnceLock<DomainId>; 2]);

impl GpuPool {
    /// Memory that the work of another device may touch.
    pub(crate) fn lodge(&self, guest: DeviceId, size: Bytes) -> Result<Block> {
        self.enable_peer(guest)?;
        let stream = PoolStream::of(&*self.driver, self.device, Stream::LEGACY)?;
        let large = usize::from(size >= self.largest_lodging());
        let domain = || self.add_domain(DomainOptions::region(self.guests_extent(EXTENTS[large])), None);
        self.malloc_in(*self.guests.0[large].get_or_init(domain), size, stream)
    }

    /// How much may lodge together.
    pub(crate) fn largest_lodging(&self) -> Bytes {
        self.guests_extent(EXTENTS[1])
    }

    /// Takes it back.
    pub(crate) fn dislodge(&self, address: Address) -> Result<Bytes> {
        self.record_stream(address, NOBODY);
        self.free(address)
    }

    /// Gives back to the driver what no guest has any more and no work touches. Never waits.
    pub(crate) fn sweep_guests(&self) -> Result<Bytes> {
        let domains = self.guests.0.iter().filter_map(OnceLock::get);
        domains.map(|domain| self.trim_domain(*domain)).sum()
    }

    fn guests_extent(&self, (extent, part): (Bytes, u64)) -> Bytes {
        let core = self.core.lock();
        let (unit, memory) = (core.settings().granularity, core.settings().memory);
        let units = memory.get() / part / unit.get().max(1);
        extent.min(Bytes::new(units.saturating_mul(unit.get()))).max(unit)
    }
}
