//! Memory for what other GPUs gave up.
//!
//! Invariant: it is a domain of its own, whose blocks no program has. What was freed there is handed out again only after all work that
//! was enqueued before, of every device that may touch it.

use glake_device::{Address, DeviceId, Stream};
use glake_stitch::{DomainId, DomainOptions, StreamKey};
use glake_units::Bytes;

use super::{Block, GpuPool, PoolStream, Result};

/// Copies are as large as what they are copies of.
const EXTENT: Bytes = Bytes::mib(128);
/// A stream that nobody has: what it is said to have used waits for an epoch.
const NOBODY: PoolStream = PoolStream { raw: Stream::LEGACY, key: StreamKey(u64::MAX) };

impl GpuPool {
    /// Memory that the work of another device may touch.
    pub(crate) fn lodge(&self, guest: DeviceId, size: Bytes) -> Result<Block> {
        self.enable_peer(guest)?;
        let stream = PoolStream::of(&*self.driver, self.device, Stream::LEGACY)?;
        self.malloc_in(self.guests(), size, stream)
    }

    /// Takes it back.
    pub(crate) fn dislodge(&self, address: Address) -> Result<Bytes> {
        self.record_stream(address, NOBODY);
        self.free(address)
    }

    /// Gives back to the driver what no guest has any more and no work touches. Never waits.
    pub(crate) fn sweep_guests(&self) -> Result<Bytes> {
        self.guests.get().map_or(Ok(Bytes::ZERO), |domain| self.trim_domain(*domain))
    }

    fn guests(&self) -> DomainId {
        // Extents of at most a sixteenth of the device, so that a small one holds several.
        let extent = || {
            let core = self.core.lock();
            let (unit, memory) = (core.settings().granularity, core.settings().memory);
            let units = memory.get() / 16 / unit.get().max(1);
            EXTENT.min(Bytes::new(units.saturating_mul(unit.get()))).max(unit)
        };
        *self.guests.get_or_init(|| self.add_domain(DomainOptions::region(extent()), None))
    }
}
