//! Environment of a check: verbs that remember the objects they created.
//!
//! Invariant: every object that was created and not yet destroyed is in the list, also if verbs fail in between.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::sync::Arc;
use std::time::Duration;

use glake_units::Bytes;
use parking_lot::Mutex;

use super::Failure;
use glake_device::{
    Access, Address, Compare, CopyRequest, DeviceId, Driver, DriverError, Event, EventKind, ExtentProperties,
    Handle, Module, ModuleSource, Place, Priority, Protection, Refusal, Result, Stream, Touch, Verb,
};

/// Object created by a check.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Thing {
    Reservation(Address, Bytes),
    Handle(Handle),
    Plain(DeviceId, Address),
    Mapping(Address, Bytes),
    Stream(DeviceId, Stream),
    Event(DeviceId, Event),
    Module(DeviceId, Module),
    Registration(Address),
}

/// Environment in which a check runs.
#[derive(Debug)]
pub struct Harness {
    driver: Arc<dyn Driver>,
    things: Mutex<Vec<Thing>>,
    blocks: Mutex<Vec<Block>>,
    /// Words in registered memory that hold streams back; all are released at cleanup.
    flags: Mutex<Vec<Address>>,
    /// Environments on the same devices with private contexts.
    own: Mutex<Vec<Arc<Harness>>>,
}

/// Host memory of a check, on pages of its own.
#[derive(Debug)]
struct Block {
    start: Address,
    layout: Layout,
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and nothing uses it: the ground let go of it last.
        unsafe { dealloc(pointer(self.start), self.layout) };
    }
}

fn pointer(at: Address) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(at.0 as usize)
}

/// Value that every held stream waits for.
const GO: u32 = 1 << 30;

impl Harness {
    pub(super) fn new(driver: Arc<dyn Driver>) -> Self {
        Harness {
            driver,
            things: Mutex::default(),
            blocks: Mutex::default(),
            flags: Mutex::default(),
            own: Mutex::default(),
        }
    }

    /// Creates an environment on the same devices with private contexts, which cleanup releases with everything in them.
    pub(super) fn own(&self) -> Result<Arc<Harness>> {
        let own = Arc::new(Harness::new(self.driver.own_contexts()?));
        self.own.lock().push(own.clone());
        Ok(own)
    }

    /// Returns the driver, for verbs that create nothing.
    pub(super) fn driver(&self) -> &dyn Driver {
        &*self.driver
    }

    // Memory.

    pub(super) fn properties(device: DeviceId) -> ExtentProperties {
        ExtentProperties { place: Place::Gpu(device), exportable: false, gpu_direct: false }
    }

    /// Returns the memory granularity of the device under test.
    pub(super) fn unit(&self) -> Result<Bytes> {
        self.driver.granularity(Self::properties(super::GPU))
    }

    pub(super) fn reserve(&self, size: Bytes) -> Result<Address> {
        let start = self.driver.reserve(size)?;
        self.made(Thing::Reservation(start, size));
        Ok(start)
    }

    pub(super) fn unreserve(&self, start: Address, size: Bytes) -> Result<()> {
        // SAFETY: a check gives back only what it made and waits for its work first.
        unsafe { self.driver.unreserve(start, size) }?;
        self.unmade(Thing::Reservation(start, size));
        Ok(())
    }

    pub(super) fn create(&self, size: Bytes, properties: ExtentProperties) -> Result<Handle> {
        let handle = self.driver.create(size, properties)?;
        self.made(Thing::Handle(handle));
        Ok(handle)
    }

    pub(super) fn alloc_plain(&self, device: DeviceId, size: Bytes) -> Result<Address> {
        let start = self.driver.alloc_plain(device, size)?;
        self.made(Thing::Plain(device, start));
        Ok(start)
    }

    pub(super) fn free_plain(&self, device: DeviceId, start: Address) -> Result<()> {
        // SAFETY: as for `unreserve`; no other device knows of it.
        unsafe { self.driver.free_plain(device, start) }?;
        self.unmade(Thing::Plain(device, start));
        Ok(())
    }

    pub(super) fn import(&self, shared: std::os::fd::BorrowedFd<'_>) -> Result<Handle> {
        let handle = self.driver.import(shared)?;
        self.made(Thing::Handle(handle));
        Ok(handle)
    }

    pub(super) fn release(&self, handle: Handle) -> Result<()> {
        // SAFETY: as for `unreserve`.
        unsafe { self.driver.release(handle) }?;
        self.unmade(Thing::Handle(handle));
        Ok(())
    }

    pub(super) fn map(&self, start: Address, size: Bytes, handle: Handle) -> Result<()> {
        // SAFETY: the addresses are of a reservation of this ground.
        unsafe { self.driver.map(start, size, handle) }?;
        self.made(Thing::Mapping(start, size));
        Ok(())
    }

    pub(super) fn unmap(&self, start: Address, size: Bytes) -> Result<()> {
        // SAFETY: as for `unreserve`.
        unsafe { self.driver.unmap(start, size) }?;
        let gone = start.0..start.0 + size.get();
        self.things.lock().retain(|thing| !matches!(thing, Thing::Mapping(at, _) if gone.contains(&at.0)));
        Ok(())
    }

    pub(super) fn set_access(&self, start: Address, size: Bytes, devices: &[DeviceId]) -> Result<()> {
        let all = |device: &DeviceId| Access { device: *device, protection: Protection::ReadWrite };
        let access: Vec<Access> = devices.iter().map(all).collect();
        // SAFETY: access is only given.
        unsafe { self.driver.set_access(start, size, &access) }
    }

    /// Allocates mapped memory of the device under test, accessible to that device.
    pub(super) fn memory(&self, size: Bytes) -> Result<Address> {
        self.memory_for(size, &[super::GPU])
    }

    /// Allocates mapped memory of the device under test, accessible to `devices`.
    pub(super) fn memory_for(&self, size: Bytes, devices: &[DeviceId]) -> Result<Address> {
        let handle = self.create(size, Self::properties(super::GPU))?;
        let start = self.reserve(size)?;
        self.map(start, size, handle)?;
        self.set_access(start, size, devices)?;
        self.release(handle)?;
        Ok(start)
    }

    /// Allocates zeroed, page-aligned host memory unknown to the driver.
    pub(super) fn pageable(&self, size: Bytes) -> Result<Address> {
        const PAGE: usize = 4096;
        let bytes = usize::try_from(size.get()).ok().filter(|bytes| *bytes > 0);
        let layout = bytes.and_then(|bytes| Layout::from_size_align(bytes, PAGE).ok());
        let short = DriverError::OutOfMemory { verb: Verb::HostRegister, wanted: size };
        let Some(layout) = layout else { return Err(short) };
        // SAFETY: the layout is of more than no bytes.
        let start = unsafe { alloc_zeroed(layout) };
        if start.is_null() {
            return Err(short);
        }
        let start = Address(start.expose_provenance() as u64);
        self.blocks.lock().push(Block { start, layout });
        Ok(start)
    }

    /// Allocates zeroed, page-aligned pinned host memory.
    pub(super) fn pinned(&self, size: Bytes) -> Result<Address> {
        let start = self.pageable(size)?;
        self.register(start, size)?;
        Ok(start)
    }

    pub(super) fn register(&self, start: Address, size: Bytes) -> Result<()> {
        // SAFETY: whole pages of this ground, which live longer than their registration.
        unsafe { self.driver.host_register(start, size) }?;
        self.made(Thing::Registration(start));
        Ok(())
    }

    pub(super) fn unregister(&self, start: Address) -> Result<()> {
        // SAFETY: as for `unreserve`.
        unsafe { self.driver.host_unregister(start) }?;
        self.unmade(Thing::Registration(start));
        Ok(())
    }

    /// Reads host memory of the check that no work is using.
    pub(super) fn host_bytes(&self, start: Address, size: Bytes) -> Vec<u8> {
        let mut bytes = vec![0; size.get() as usize];
        // SAFETY: a check asks for ranges of its own blocks, and has waited for what works on them.
        unsafe { std::ptr::copy_nonoverlapping(pointer(start), bytes.as_mut_ptr(), bytes.len()) };
        bytes
    }

    /// Writes host memory of the check that no work is using.
    pub(super) fn set_host_bytes(&self, start: Address, bytes: &[u8]) {
        // SAFETY: as for `host_bytes`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), pointer(start), bytes.len()) };
    }

    // Work.

    pub(super) fn stream(&self, device: DeviceId) -> Result<Stream> {
        self.stream_of(device, Priority::Normal)
    }

    pub(super) fn stream_of(&self, device: DeviceId, priority: Priority) -> Result<Stream> {
        let stream = self.driver.stream_create(device, priority)?;
        self.made(Thing::Stream(device, stream));
        Ok(stream)
    }

    pub(super) fn destroy_stream(&self, device: DeviceId, stream: Stream) -> Result<()> {
        // SAFETY: a check does not use it again.
        unsafe { self.driver.stream_destroy(device, stream) }?;
        self.unmade(Thing::Stream(device, stream));
        Ok(())
    }

    pub(super) fn event(&self, device: DeviceId, kind: EventKind) -> Result<Event> {
        let event = self.driver.event_create(device, kind)?;
        self.made(Thing::Event(device, event));
        Ok(event)
    }

    pub(super) fn destroy_event(&self, device: DeviceId, event: Event) -> Result<()> {
        // SAFETY: a check does not use it again.
        unsafe { self.driver.event_destroy(device, event) }?;
        self.unmade(Thing::Event(device, event));
        Ok(())
    }

    pub(super) fn module(&self, device: DeviceId, source: &ModuleSource) -> Result<Module> {
        let module = self.driver.module_load(device, source)?;
        self.made(Thing::Module(device, module));
        Ok(module)
    }

    pub(super) fn copy(
        &self,
        device: DeviceId,
        to: Address,
        from: Address,
        size: Bytes,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: memory of this ground, ordered by the check.
        unsafe { self.driver.copy(device, CopyRequest { to, from, size }, stream) }
    }

    pub(super) fn fill(&self, start: Address, size: Bytes, byte: u8, stream: Stream) -> Result<()> {
        // SAFETY: as for `copy`.
        unsafe { self.driver.fill(super::GPU, start, size, byte, stream) }
    }

    pub(super) fn read(&self, from: Address, size: Bytes) -> Result<Vec<u8>> {
        let mut bytes = vec![0xa5; size.get() as usize];
        self.driver.read_now(super::GPU, from, &mut bytes)?;
        Ok(bytes)
    }

    pub(super) fn write(&self, to: Address, bytes: &[u8]) -> Result<()> {
        // SAFETY: as for `copy`.
        unsafe { self.driver.write_now(super::GPU, to, bytes) }
    }

    pub(super) fn launch(&self, stream: Stream, request: &glake_device::LaunchRequest<'_>) -> Result<()> {
        // SAFETY: the check declares what its kernels touch, in memory of this ground.
        unsafe { self.driver.launch(super::GPU, request, stream) }
    }

    // Holding streams back.

    /// Allocates a zeroed word in pinned memory.
    pub(super) fn flag(&self) -> Result<Address> {
        let flag = self.pinned(Bytes::kib(4))?;
        self.flags.lock().push(flag);
        Ok(flag)
    }

    /// Holds a stream back until the flag is raised.
    pub(super) fn hold(&self, stream: Stream, flag: Address) -> Result<()> {
        self.wait_value(stream, flag, GO, Compare::AtLeast)
    }

    pub(super) fn wait_value(&self, stream: Stream, at: Address, value: u32, compare: Compare) -> Result<()> {
        // SAFETY: a word of this ground, which outlives the work.
        unsafe { self.driver.stream_wait_value(super::GPU, stream, at, value, compare) }
    }

    pub(super) fn write_value(&self, stream: Stream, at: Address, value: u32) -> Result<()> {
        // SAFETY: as for `wait_value`.
        unsafe { self.driver.stream_write_value(super::GPU, stream, at, value) }
    }

    /// Releases the streams held by a flag, from the host.
    pub(super) fn raise(&self, flag: Address) {
        let word = pointer(flag).cast::<u32>();
        // SAFETY: a flag is an aligned word of a live block; atomic, since devices read it meanwhile.
        let word = unsafe { std::sync::atomic::AtomicU32::from_ptr(word) };
        word.store(GO, std::sync::atomic::Ordering::Release);
    }

    fn made(&self, thing: Thing) {
        self.things.lock().push(thing);
    }

    fn unmade(&self, thing: Thing) {
        let mut things = self.things.lock();
        if let Some(at) = things.iter().rposition(|other| *other == thing) {
            things.remove(at);
        }
    }

    /// Destroys all remaining objects in reverse order.
    pub(super) fn clean(self) -> std::result::Result<(), Failure> {
        let own = std::mem::take(&mut *self.own.lock());
        let flags = |harness: &Harness| harness.flags.lock().iter().for_each(|flag| harness.raise(*flag));
        own.iter().for_each(|harness| flags(harness));
        flags(&self);
        for harness in own {
            harness.unmake()?;
            for info in harness.driver.devices()? {
                harness.driver.release_context(info.id)?;
            }
        }
        self.unmake()
    }

    fn unmake(&self) -> std::result::Result<(), Failure> {
        for info in self.driver.devices()? {
            self.driver.context_synchronize(info.id)?;
        }
        for thing in std::mem::take(&mut *self.things.lock()).into_iter().rev() {
            // SAFETY: each was made here and not given back, and all work is done.
            unsafe {
                match thing {
                    Thing::Reservation(start, size) => self.driver.unreserve(start, size)?,
                    Thing::Handle(handle) => self.driver.release(handle)?,
                    Thing::Plain(device, start) => self.driver.free_plain(device, start)?,
                    Thing::Mapping(start, size) => self.driver.unmap(start, size)?,
                    Thing::Stream(device, stream) => self.driver.stream_destroy(device, stream)?,
                    Thing::Event(device, event) => self.driver.event_destroy(device, event)?,
                    Thing::Module(device, module) => self.driver.module_unload(device, module)?,
                    Thing::Registration(start) => self.driver.host_unregister(start)?,
                }
            }
        }
        self.blocks.lock().clear();
        Ok(())
    }
}

/// Declares a range of memory.
pub(super) fn touch(address: Address, size: Bytes) -> Touch {
    Touch { address, size }
}

/// Returns the address `size` bytes after `start`.
pub(super) fn after(start: Address, size: Bytes) -> Result<Address> {
    let wrong = DriverError::Refused { verb: Verb::Map, address: start, reason: Refusal::InvalidValue };
    start.checked_add(size.get()).ok_or(wrong)
}

/// Returns the processor time used by the calling thread.
pub(super) fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: an out-parameter of this frame; the clock is there on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}
