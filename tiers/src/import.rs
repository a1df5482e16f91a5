//! Memory of another process, mapped into this one.
//!
//! ```text
//! descriptors, some at a time ─► extents side by side in one address range ─► access for a device and its peers
//! ```

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use glake_device::owned::{CompletionEvents, DeviceSet, Extent, Mapping, Reservation};
use glake_device::{
    Access, Address, DeviceId, Driver, DriverError, ExtentProperties, Place, Protection, Refusal, Result,
    Verb,
};
use glake_units::Bytes;
use parking_lot::Mutex;

/// Attempts of an import that runs out of descriptors; other threads may be importing too. Half a second in total with the pauses.
const ATTEMPTS: u32 = 50;
const PAUSE: Duration = Duration::from_millis(10);

/// Block exported by another process ([`crate::GpuPool::export`]), mapped at an address of this one.
///
/// Dropping it waits on the host for all work of the devices that may access it, which breaks an open capture: call [`Import::close`] first
/// if one may be open.
#[derive(Debug)]
pub struct Import {
    completion_events: Arc<CompletionEvents>,
    reservation: Reservation,
    mappings: Vec<Mapping>,
    /// Devices whose work may access the memory. Locked while that changes, and during a close.
    devices: Mutex<DeviceSet>,
}

impl Import {
    /// Maps extents of these sizes side by side for work of `device` and of `peers`. `descriptors` returns the descriptors of the extents
    /// from an index on, at least one and at most all that are left; each is closed once its extent is mapped, before further ones are
    /// requested. If the process runs out of descriptors, the others are closed and requested again.
    ///
    /// # Errors
    /// The error of `descriptors` or of the driver: above all, a descriptor that is not device memory, a size that is not the exporter's,
    /// or a device that cannot access the memory. Nothing stays mapped.
    pub fn open<E: From<DriverError>>(
        completion_events: &Arc<CompletionEvents>,
        device: DeviceId,
        peers: DeviceSet,
        sizes: &[Bytes],
        mut descriptors: impl FnMut(usize) -> std::result::Result<Vec<OwnedFd>, E>,
    ) -> std::result::Result<Self, E> {
        let wrong = || DriverError::Refused {
            verb: Verb::Import,
            address: Address(0),
            reason: Refusal::InvalidValue,
        };
        let total = sizes.iter().try_fold(Bytes::ZERO, |total, size| total.checked_add(*size));
        let total = total.filter(|total| !total.is_zero()).ok_or_else(wrong)?;
        let reservation = Reservation::new(completion_events, device, total)?;
        let mut mappings = Vec::with_capacity(sizes.len());
        let (mut offset, mut most, mut refused) = (Bytes::ZERO, usize::MAX, 0);
        while mappings.len() < sizes.len() {
            let left = &sizes[mappings.len()..];
            let mut batch = descriptors(mappings.len())?;
            if batch.is_empty() || batch.len() > left.len() {
                return Err(wrong().into());
            }
            batch.truncate(most);
            for (descriptor, size) in batch.into_iter().zip(left) {
                match Self::map(completion_events.driver(), &reservation, offset, descriptor, *size) {
                    Ok(mapping) => mappings.push(mapping),
                    Err(DriverError::TooManyFiles { .. }) if refused < ATTEMPTS => {
                        (most, refused) = (1, refused + 1);
                        break;
                    }
                    Err(error) => return Err(error.into()),
                }
                (offset, refused) = (offset.saturating_add(*size), 0);
            }
            if refused > 1 {
                std::thread::sleep(PAUSE);
            }
        }
        let devices = DeviceSet::of(device).union(peers);
        reservation.set_access(Bytes::ZERO, total, &read_write(devices))?;
        Ok(Import {
            completion_events: completion_events.clone(),
            reservation,
            mappings,
            devices: Mutex::new(devices),
        })
    }

    fn map(
        driver: &Arc<dyn Driver>,
        reservation: &Reservation,
        offset: Bytes,
        descriptor: OwnedFd,
        size: Bytes,
    ) -> Result<Mapping> {
        // Only the exporting process knows its other properties.
        let properties =
            ExtentProperties { place: Place::Gpu(reservation.device()), exportable: true, gpu_direct: false };
        reservation.map(offset, &Extent::import(driver, descriptor.as_fd(), size, properties)?)
    }

    /// Returns the address of the first byte.
    pub fn base(&self) -> Address {
        self.reservation.start()
    }

    /// Returns the size of the mapping.
    pub fn size(&self) -> Bytes {
        self.reservation.size()
    }

    /// Returns the device of the memory.
    pub fn device(&self) -> DeviceId {
        self.reservation.device()
    }

    /// Gives the work of one more device access. Repeated calls are no error.
    ///
    /// # Errors
    /// The driver's error; nothing changes.
    pub fn enable_peer(&self, peer: DeviceId) -> Result<()> {
        let mut devices = self.devices.lock();
        if devices.contains(peer) {
            return Ok(());
        }
        self.reservation.set_access(Bytes::ZERO, self.size(), &read_write(DeviceSet::of(peer)))?;
        *devices = devices.union(DeviceSet::of(peer));
        Ok(())
    }

    /// Unmaps the memory after waiting for all work enqueued before this call on every device with access. Later work must not access it.
    /// Repeated calls are no error.
    ///
    /// # Errors
    /// [`DriverError::Capturing`] while a capture is open, or another error of the driver: the memory stays mapped and can be closed later.
    pub fn close(&self) -> Result<()> {
        let devices = self.devices.lock();
        if self.reservation.mappings() == 0 {
            return Ok(());
        }
        let mut point = self.completion_events.record(*devices)?;
        let passed = point.wait()?;
        self.reservation.retire(&self.mappings, passed.sequence())?;
        let unmapped = self.reservation.unmap(&self.mappings, &passed);
        if unmapped.is_err() {
            self.reservation.revive(&self.mappings)?;
        }
        unmapped
    }

    /// Copies bytes to the host and waits for completion. The caller orders the copy after the work that wrote the bytes.
    ///
    /// # Errors
    /// The driver's error, above all outside the mapped range.
    pub fn read(&self, offset: Bytes, into: &mut [u8]) -> Result<()> {
        self.reservation.read(offset, into)
    }

    /// Copies bytes of the host into the memory and waits for completion.
    ///
    /// # Errors
    /// The same as [`Import::read`].
    pub fn write(&self, offset: Bytes, bytes: &[u8]) -> Result<()> {
        self.reservation.write(offset, bytes)
    }
}

fn read_write(devices: DeviceSet) -> Vec<Access> {
    devices.iter().map(|device| Access { device, protection: Protection::ReadWrite }).collect()
}

#[cfg(test)]
mod tests {
    use glake_device::owned::OwnedStream;
    use glake_device::{Stream, Touch};
    use glake_sim::{Census, SimOptions, SimTopology, Simulator};
    use glake_stitch::Settings;

    use super::*;
    use crate::{Block, Exported, GpuPool, PoolError, PoolOptions, PoolStream};

    const GPU: DeviceId = DeviceId(0);
    const FOUR: Bytes = Bytes::mib(4);

    struct Fixture {
        sim: Arc<Simulator>,
        pool: GpuPool,
        completion_events: Arc<CompletionEvents>,
        stream: PoolStream,
    }

    fn fixture(exportable: bool) -> Fixture {
        fixture_on(exportable, SimTopology::uniform(2, Bytes::mib(64)))
    }

    fn fixture_on(exportable: bool, topology: SimTopology) -> Fixture {
        let sim = Arc::new(Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap());
        let driver: Arc<dyn Driver> = sim.clone();
        let completion_events = CompletionEvents::new(driver.clone());
        let limit = Bytes::mib(32);
        let settings = Settings { extent: FOUR, limit, ..Settings::for_memory(Bytes::mib(64)) };
        let (settings, clock) = (Some(settings), Some(completion_events.clone()));
        let options =
            PoolOptions { settings, completion_events: clock, exportable, ..PoolOptions::default() };
        let pool = GpuPool::new(driver.clone(), GPU, options).unwrap();
        Fixture {
            stream: PoolStream::of(&*driver, GPU, Stream::LEGACY).unwrap(),
            sim,
            pool,
            completion_events,
        }
    }

    /// Imports all extents with one batch of descriptors.
    fn open(events: &Arc<CompletionEvents>, sizes: &[Bytes], descriptors: Vec<OwnedFd>) -> Result<Import> {
        let mut all = Some(descriptors);
        Import::open(events, GPU, DeviceSet::EMPTY, sizes, |_| Ok(all.take().unwrap_or_default()))
    }

    impl Fixture {
        fn malloc(&self, size: Bytes) -> Block {
            self.pool.malloc(size, self.stream).unwrap()
        }

        /// Allocates a block over fragments of the pool. Returns it and the neighbours of the fragments.
        fn stitched(&self) -> (Block, Vec<Block>) {
            let blocks: Vec<Block> = (0..8).map(|_| self.malloc(FOUR)).collect();
            for block in blocks.iter().step_by(2) {
                self.pool.free(block.address).unwrap();
            }
            let block = self.malloc(Bytes::mib(10));
            assert_eq!(self.pool.counters().stitches, 1);
            (block, blocks.into_iter().skip(1).step_by(2).collect())
        }

        fn open(&self, exported: Exported) -> Import {
            let Exported { sizes, descriptors, .. } = exported;
            open(&self.completion_events, &sizes, descriptors).unwrap()
        }

        /// Checks that bytes written on one side are read on the other.
        fn compare(&self, block: Block) {
            let exported =
                self.pool.export(Address(block.address.0 + block.size.get() / 2), 0..usize::MAX).unwrap();
            assert_eq!((exported.base, exported.size), (block.address, block.size));
            let offset = exported.offset;
            let import = self.open(exported);
            let size = usize::try_from(block.size.get()).unwrap();
            let ours: Vec<u8> = (0..size).map(|at| ((at * 7 + at / 4099) % 256).to_le_bytes()[0]).collect();
            self.pool.write(block.address, &ours).unwrap();
            let mut bytes = vec![0; size];
            import.read(offset, &mut bytes).unwrap();
            assert!(bytes == ours, "{block:?}");
            let theirs: Vec<u8> = ours.iter().rev().copied().collect();
            import.write(offset, &theirs).unwrap();
            self.pool.read(block.address, &mut bytes).unwrap();
            assert!(bytes == theirs, "{block:?}");
            import.close().unwrap();
            import.close().unwrap();
        }
    }

    #[test]
    fn both_sides_see_the_same_bytes() {
        let fixture = fixture(true);
        let (stitched, mut blocks) = fixture.stitched();
        fixture.compare(stitched);
        let tail = fixture.malloc(Bytes::kib(700));
        blocks.extend([tail, fixture.malloc(Bytes::new(3)), fixture.malloc(Bytes::mib(2))]);
        blocks.iter().for_each(|block| fixture.compare(*block));
        for block in blocks.into_iter().chain([stitched]) {
            fixture.pool.free(block.address).unwrap();
        }
        let Fixture { sim, pool, completion_events, .. } = fixture;
        drop((pool, completion_events));
        assert_eq!(sim.census(), Census::default());
    }

    #[test]
    fn an_import_keeps_its_memory_when_the_exporter_lets_go() {
        let fixture = fixture(true);
        let block = fixture.malloc(Bytes::mib(9));
        fixture.pool.write(block.address, &[5; 100]).unwrap();
        let exported = fixture.pool.export(block.address, 0..usize::MAX).unwrap();
        let held: u64 = exported.sizes.iter().map(|size| size.get()).sum();
        assert_eq!(held, fixture.pool.reserved().get());
        let import = fixture.open(exported);
        fixture.pool.free(block.address).unwrap();
        fixture.pool.settle().unwrap();
        assert_eq!(fixture.pool.trim(Bytes::ZERO).unwrap().get(), held);
        let mut bytes = [0; 100];
        import.read(Bytes::ZERO, &mut bytes).unwrap();
        assert_eq!(bytes, [5; 100]);
        let Fixture { sim, pool, completion_events, .. } = fixture;
        drop((import, pool, completion_events));
        assert_eq!(sim.census(), Census::default());
    }

    #[test]
    fn closing_waits_for_work_and_not_in_a_capture() {
        let fixture = fixture(true);
        let driver: Arc<dyn Driver> = fixture.sim.clone();
        let peer = DeviceId(1);
        let import = fixture.open(fixture.pool.export(fixture.malloc(FOUR).address, 0..usize::MAX).unwrap());
        import.enable_peer(peer).unwrap();
        import.enable_peer(peer).unwrap();
        let stream = OwnedStream::new(&driver, peer).unwrap();
        let writes = [Touch { address: import.base(), size: FOUR }];
        let time = Duration::from_millis(1);
        fixture.sim.enqueue_kernel(peer, stream.id(), &[], &writes, time, |_| {}).unwrap();
        let hold = fixture.pool.clock().hold();
        assert!(matches!(import.close(), Err(DriverError::Capturing { .. })));
        drop(hold);
        assert_eq!(fixture.sim.now(), Duration::ZERO);
        import.close().unwrap();
        assert!(fixture.sim.now() >= time);
        assert!(import.read(Bytes::ZERO, &mut [0]).is_err());
    }

    #[test]
    fn a_device_without_descriptors_serves_and_shares_nothing() {
        let mut topology = SimTopology::uniform(2, Bytes::mib(64));
        topology.gpus[0].exportable = false;
        let fixture = fixture_on(true, topology);
        let block = fixture.malloc(FOUR);
        fixture.pool.write(block.address, &[3; 9]).unwrap();
        let error = fixture.pool.export(block.address, 0..usize::MAX).unwrap_err();
        assert!(matches!(error, PoolError::NoDescriptors { .. }), "{error}");
        assert!(error.to_string().contains("pool.exportable"), "{error}");
    }

    #[test]
    fn memory_is_made_for_rdma_where_the_device_can() {
        for can in [true, false] {
            let mut topology = SimTopology::uniform(2, Bytes::mib(64));
            topology.gpus[0].gpu_direct = can;
            let fixture = fixture_on(true, topology);
            let blocks = [FOUR, Bytes::kib(700), Bytes::mib(9)].map(|size| fixture.malloc(size));
            let region = fixture.pool.add_domain(glake_stitch::DomainOptions::region(FOUR), None);
            let of_region = fixture.pool.malloc_in(region, FOUR, fixture.stream).unwrap();
            let of_peer = fixture.pool.peer_blocks().alloc(DeviceId(1), FOUR).unwrap();
            for block in blocks.into_iter().chain([of_region, of_peer]) {
                let last = Address(block.address.0 + block.size.get() - 1);
                let told = [block.address, last].map(|at| fixture.sim.is_gpu_direct(at));
                assert_eq!(told, [Some(can); 2], "{block:?}");
            }
        }
    }

    #[test]
    fn what_cannot_be_shared_is_refused() {
        let plain = fixture(false);
        let block = plain.malloc(FOUR);
        let error = plain.pool.export(block.address, 0..usize::MAX).unwrap_err();
        assert!(
            matches!(error, PoolError::NotExportable { .. }) && error.to_string().contains("pool.exportable")
        );
        let fixture = fixture(true);
        let block = fixture.malloc(FOUR);
        let unknown = [Address(block.address.0 - 1), Address(block.address.0 + block.size.get()), Address(0)];
        for address in unknown {
            assert!(
                matches!(fixture.pool.export(address, 0..usize::MAX), Err(PoolError::UnknownAddress { .. })),
                "{address}"
            );
        }
        let open = |parts: Vec<(OwnedFd, Bytes)>| {
            let (descriptors, sizes): (_, Vec<Bytes>) = parts.into_iter().unzip();
            open(&fixture.completion_events, &sizes, descriptors).map(drop)
        };
        assert!(open(Vec::new()).is_err(), "nothing");
        let fd = || fixture.pool.export(block.address, 0..1).unwrap().descriptors.remove(0);
        assert!(open(vec![(fd(), Bytes::mib(2))]).is_err(), "another size");
        assert!(open(vec![(fd(), FOUR), (fd(), Bytes::MAX)]).is_err(), "no address space");
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(open(vec![(fd(), FOUR), (file.into(), FOUR)]).is_err(), "no memory");
        open(vec![(fd(), FOUR), (fd(), FOUR)]).unwrap();
        assert_eq!(fixture.sim.census().reservations, 1, "nothing is left of what failed");
    }
}
