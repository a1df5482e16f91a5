//! A minimal driver for unit tests: no memory, no time, every event complete.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use glake_units::Bytes;
use parking_lot::Mutex;

use crate::owned::DeviceSet;
use crate::*;

/// Driver that answers every verb with success.
#[derive(Debug, Default)]
pub(crate) struct Stub {
    next: AtomicU64,
    reserved: AtomicU64,
    pub(crate) live_handles: AtomicU64,
    pub(crate) mapped: Mutex<std::collections::BTreeMap<u64, u64>>,
    pub(crate) pending: std::sync::atomic::AtomicBool,
    pub(crate) events: AtomicU64,
    /// Lock taken by event waits, so that a test can make them block.
    pub(crate) waits: Mutex<()>,
    /// Devices that have no context; initially none.
    pub(crate) without_context: AtomicU64,
}

pub(crate) fn extent_properties() -> ExtentProperties {
    ExtentProperties { place: Place::Gpu(DeviceId(0)), exportable: false, gpu_direct: false }
}

pub(crate) fn read_write(gpus: u32) -> Vec<Access> {
    (0..gpus).map(|i| Access { device: DeviceId(i), protection: Protection::ReadWrite }).collect()
}

impl Stub {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Stub::default())
    }

    /// Returns the number of live reservations.
    pub(crate) fn reserved(&self) -> u64 {
        self.reserved.load(Relaxed)
    }

    fn fresh(&self) -> u64 {
        (self.next.fetch_add(1, Relaxed) + 1) << 40
    }
}

impl Driver for Stub {
    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        Ok((0..2)
            .map(|i| DeviceInfo {
                id: DeviceId(i),
                name: "stub".to_owned(),
                memory: Bytes::gib(1),
                pci: None,
                exportable: true,
                gpu_direct: true,
            })
            .collect())
    }
    fn memory_info(&self, _: DeviceId) -> Result<MemoryInfo> {
        Ok(MemoryInfo { free: Bytes::gib(1), total: Bytes::gib(1) })
    }
    fn granularity(&self, _: ExtentProperties) -> Result<Bytes> {
        Ok(Bytes::mib(2))
    }
    fn reserve(&self, _: Bytes) -> Result<Address> {
        self.reserved.fetch_add(1, Relaxed);
        Ok(Address(self.fresh()))
    }
    unsafe fn unreserve(&self, _: Address, _: Bytes) -> Result<()> {
        self.reserved.fetch_sub(1, Relaxed);
        Ok(())
    }
    fn create(&self, _: Bytes, _: ExtentProperties) -> Result<Handle> {
        self.live_handles.fetch_add(1, Relaxed);
        Ok(Handle(self.fresh()))
    }
    unsafe fn release(&self, _: Handle) -> Result<()> {
        self.live_handles.fetch_sub(1, Relaxed);
        Ok(())
    }
    fn alloc_plain(&self, _: DeviceId, _: Bytes) -> Result<Address> {
        self.live_handles.fetch_add(1, Relaxed);
        Ok(Address(self.fresh()))
    }
    unsafe fn free_plain(&self, _: DeviceId, _: Address) -> Result<()> {
        self.live_handles.fetch_sub(1, Relaxed);
        Ok(())
    }
    unsafe fn map(&self, start: Address, size: Bytes, _: Handle) -> Result<()> {
        self.mapped.lock().insert(start.0, size.get());
        Ok(())
    }
    unsafe fn unmap(&self, start: Address, size: Bytes) -> Result<()> {
        self.mapped.lock().retain(|at, _| *at < start.0 || *at >= start.0 + size.get());
        Ok(())
    }
    unsafe fn set_access(&self, _: Address, _: Bytes, _: &[Access]) -> Result<()> {
        Ok(())
    }
    fn export(&self, _: Handle) -> Result<OwnedFd> {
        Err(DriverError::Unsupported { verb: Verb::Export, code: DriverError::UNSUPPORTED })
    }
    fn import(&self, _: BorrowedFd<'_>) -> Result<Handle> {
        Err(DriverError::Unsupported { verb: Verb::Import, code: DriverError::UNSUPPORTED })
    }
    unsafe fn copy(&self, _: DeviceId, _: CopyRequest, _: Stream) -> Result<()> {
        Ok(())
    }
    unsafe fn copy_on(&self, _: CopyRequest, _: Stream) -> Result<()> {
        Ok(())
    }
    unsafe fn copy_between(&self, _: DeviceId, _: CopyRequest, _: CopyDevices, _: Stream) -> Result<()> {
        Ok(())
    }
    unsafe fn copy_batch(&self, _: DeviceId, _: &[CopyRequest], _: Stream) -> Result<()> {
        Ok(())
    }
    unsafe fn fill(&self, _: DeviceId, _: Address, _: Bytes, _: u8, _: Stream) -> Result<()> {
        Ok(())
    }
    fn read_now(&self, _: DeviceId, _: Address, into: &mut [u8]) -> Result<()> {
        into.fill(0);
        Ok(())
    }
    unsafe fn write_now(&self, _: DeviceId, _: Address, _: &[u8]) -> Result<()> {
        Ok(())
    }
    fn stream_create(&self, _: DeviceId, _: Priority) -> Result<Stream> {
        Ok(Stream(self.fresh()))
    }
    unsafe fn stream_destroy(&self, _: DeviceId, _: Stream) -> Result<()> {
        Ok(())
    }
    fn stream_device(&self, _: Stream) -> Result<DeviceId> {
        Ok(DeviceId(0))
    }
    fn stream_id(&self, _: DeviceId, stream: Stream) -> Result<StreamId> {
        Ok(StreamId(stream.0))
    }
    fn stream_synchronize(&self, _: DeviceId, _: Stream) -> Result<()> {
        Ok(())
    }
    fn stream_wait_event(&self, _: DeviceId, _: Stream, _: Event) -> Result<()> {
        Ok(())
    }
    unsafe fn stream_wait_value(&self, _: DeviceId, _: Stream, _: Address, _: u32, _: Compare) -> Result<()> {
        Ok(())
    }
    unsafe fn stream_write_value(&self, _: DeviceId, _: Stream, _: Address, _: u32) -> Result<()> {
        Ok(())
    }
    fn capture_state(&self, _: DeviceId, _: Stream) -> Result<CaptureState> {
        Ok(CaptureState::None)
    }
    fn event_create(&self, _: DeviceId, _: EventKind) -> Result<Event> {
        self.events.fetch_add(1, Relaxed);
        Ok(Event(self.fresh()))
    }
    unsafe fn event_destroy(&self, _: DeviceId, _: Event) -> Result<()> {
        self.events.fetch_sub(1, Relaxed);
        Ok(())
    }
    fn event_record(&self, _: DeviceId, _: Event, _: Stream) -> Result<()> {
        Ok(())
    }
    fn event_record_context(&self, _: DeviceId, _: Event) -> Result<()> {
        Ok(())
    }
    fn event_query(&self, _: DeviceId, _: Event) -> Result<bool> {
        Ok(!self.pending.load(Relaxed))
    }
    fn event_synchronize(&self, _: DeviceId, _: Event) -> Result<()> {
        drop(self.waits.lock());
        Ok(())
    }
    fn event_elapsed(&self, _: DeviceId, _: Event, _: Event) -> Result<f64> {
        Ok(0.0)
    }
    fn context_synchronize(&self, _: DeviceId) -> Result<()> {
        Ok(())
    }
    fn own_contexts(&self) -> Result<Arc<dyn Driver>> {
        Ok(Stub::new())
    }
    fn primary_of(&self, _: Stream) -> Result<Option<DeviceId>> {
        Ok(Some(DeviceId(0)))
    }
    fn has_context(&self, device: DeviceId) -> Result<bool> {
        Ok(!DeviceSet::from_bits(self.without_context.load(Relaxed)).contains(device))
    }
    fn release_context(&self, device: DeviceId) -> Result<()> {
        let events = self.events.load(Relaxed);
        if events > 0 {
            let living = Living { events, ..Living::default() };
            return Err(DriverError::ContextInUse { device, living });
        }
        self.without_context.fetch_or(DeviceSet::of(device).bits(), Relaxed);
        Ok(())
    }
    fn module_load(&self, _: DeviceId, _: &ModuleSource) -> Result<Module> {
        Ok(Module(self.fresh()))
    }
    unsafe fn module_unload(&self, _: DeviceId, _: Module) -> Result<()> {
        Ok(())
    }
    fn kernel_find(&self, _: DeviceId, _: Module, _: &str) -> Result<Kernel> {
        Ok(Kernel(self.fresh()))
    }
    unsafe fn launch(&self, _: DeviceId, _: &LaunchRequest<'_>, _: Stream) -> Result<()> {
        Ok(())
    }
    fn can_access_peer(&self, device: DeviceId, peer: DeviceId) -> Result<bool> {
        Ok(device != peer)
    }
    fn enable_peer_access(&self, _: DeviceId, _: DeviceId) -> Result<()> {
        Ok(())
    }
    fn pointer_attributes(&self, _: Address) -> Result<PointerAttributes> {
        Ok(PointerAttributes { kind: PointerKind::Pageable, range: None })
    }
    unsafe fn host_register(&self, _: Address, _: Bytes) -> Result<()> {
        Ok(())
    }
    unsafe fn host_unregister(&self, _: Address) -> Result<()> {
        Ok(())
    }
}
