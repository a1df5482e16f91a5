//! NVIDIA's driver.
//!
//! Every verb is one call of libcuda, made in the device's primary context under relaxed capture mode. Both are restored afterwards, and
//! every result is checked. Nothing here panics: a missing driver, or one that lacks a call, is an error.

use std::ffi::CStr;
use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use api::{Api, Code};
use context::{Context, Owners};
use cudarc::driver::sys::CUdevice_attribute;
use glake_units::Bytes;

use crate::{
    Access, Address, CaptureState, Compare, CopyDevices, CopyRequest, DeviceId, DeviceInfo, Driver,
    DriverError, Event, EventKind, ExtentProperties, Handle, Kernel, LaunchRequest, MemoryInfo, Module,
    ModuleSource, PointerAttributes, Priority, Result, Stream, StreamId, Verb,
};

pub use checkpoint::CudaCheckpoint;

mod api;
mod checkpoint;
mod context;
mod host;
mod memory;
mod stream;
mod work;

/// The GPUs of this machine. Contexts are created at first use: opening takes no device memory.
pub struct Cuda {
    api: Api,
    kind: ContextKind,
    contexts: Vec<Context>,
    /// Number of contexts retained so far.
    retained: AtomicU64,
    extents: Owners<Handle>,
    registrations: Owners<Address>,
    mapped: Mapped,
}

/// Kind of the contexts that a driver's calls run in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ContextKind {
    /// Primary contexts, shared with the runtime and every library of the program.
    Primary,
    /// Contexts of our own ([`Driver::own_contexts`]).
    Own,
}

impl Cuda {
    /// Opens the driver of this machine.
    ///
    /// # Errors
    /// [`DriverError::NoDriver`] where there is no library, or no GPU behind it.
    pub fn open() -> Result<Cuda> {
        Cuda::of(ContextKind::Primary)
    }

    fn of(kind: ContextKind) -> Result<Cuda> {
        let none = |found| DriverError::NoDriver { library: "libcuda.so.1", found };
        let api = Api::open().ok_or_else(|| none("could not be loaded"))?;
        // SAFETY: the flags must be zero, and are.
        match unsafe { api.cuInit(0) } {
            Code::NO_DEVICE => return Err(none("finds no GPU")),
            Code::STUB_LIBRARY => return Err(none("is a stub for linking only")),
            Code::MISSING => return Err(none("is not a CUDA driver")),
            code => code.of(Verb::Devices)?,
        }
        let mut count = 0;
        // SAFETY: an out-parameter of this frame.
        unsafe { api.cuDeviceGetCount(&mut count) }.of(Verb::Devices)?;
        if count < 1 {
            return Err(none("finds no GPU"));
        }
        let contexts = (0..count).map(|_| Context::default()).collect();
        let (extents, registrations) = (Owners::new(), Owners::new());
        let retained = AtomicU64::new(0);
        Ok(Cuda { api, kind, contexts, retained, extents, registrations, mapped: Mapped::new() })
    }

    fn describe(&self, id: DeviceId) -> Result<DeviceInfo> {
        let device = self.device(id, Verb::Devices)?;
        let text = |call: &dyn Fn(*mut std::ffi::c_char, i32) -> Code| {
            let mut bytes = [0_u8; 256];
            call(bytes.as_mut_ptr().cast(), 256).of(Verb::Devices)?;
            let text = CStr::from_bytes_until_nul(&bytes).unwrap_or_default();
            Ok(text.to_string_lossy().into_owned())
        };
        // SAFETY: 256 bytes that CUDA fills and ends with a zero.
        let name = text(&|to, len| unsafe { self.api.cuDeviceGetName(to, len, device) })?;
        // SAFETY: as above.
        let pci = text(&|to, len| unsafe { self.api.cuDeviceGetPCIBusId(to, len, device) })?;
        let mut memory = 0;
        // SAFETY: an out-parameter of this frame.
        unsafe { self.api.cuDeviceTotalMem_v2(&mut memory, device) }.of(Verb::Devices)?;
        let has = |attribute| {
            let mut value = 0;
            // SAFETY: as above.
            unsafe { self.api.cuDeviceGetAttribute(&mut value, attribute, device) }.of(Verb::Devices)?;
            Ok(value != 0)
        };
        let exportable =
            has(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)?;
        let gpu_direct =
            has(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)?;
        let (memory, pci) = (Bytes::new(memory as u64), Some(pci.to_ascii_lowercase()));
        Ok(DeviceInfo { id, name, memory, pci, exportable, gpu_direct })
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cuda").field("contexts", &self.contexts).finish_non_exhaustive()
    }
}

impl Driver for Cuda {
    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        let count = u32::try_from(self.contexts.len()).unwrap_or(u32::MAX);
        (0..count).map(|i| self.describe(DeviceId(i))).collect()
    }
    fn memory_info(&self, device: DeviceId) -> Result<MemoryInfo> {
        memory::info(self, device)
    }

    fn granularity(&self, properties: ExtentProperties) -> Result<Bytes> {
        memory::granularity(self, properties)
    }
    fn reserve(&self, size: Bytes) -> Result<Address> {
        memory::reserve(self, size)
    }
    unsafe fn unreserve(&self, start: Address, size: Bytes) -> Result<()> {
        // SAFETY: the caller's promise is passed on.
        unsafe { memory::unreserve(self, start, size) }
    }
    fn create(&self, size: Bytes, properties: ExtentProperties) -> Result<Handle> {
        memory::create(self, size, properties)
    }
    unsafe fn release(&self, handle: Handle) -> Result<()> {
        // SAFETY: the caller's promise is passed on.
        unsafe { memory::release(self, handle) }
    }
    fn alloc_plain(&self, device: DeviceId, size: Bytes) -> Result<Address> {
        memory::alloc_plain(self, device, size)
    }
    unsafe fn free_plain(&self, device: DeviceId, start: Address) -> Result<()> {
        // SAFETY: the caller's promise is passed on.
        unsafe { memory::free_plain(self, device, start) }
    }
    unsafe fn map(&self, start: Address, size: Bytes, handle: Handle) -> Result<()> {
        // SAFETY: the caller's promise is passed on.
        unsafe { memory::map(self, start, size, handle) }
    }
    unsafe fn unmap(&self, start: Address, size: Bytes) -> Result<()> {
        // SAFETY: the caller's promise is passed on.
        unsafe { memory::unmap(self, start, size) }
    }
    unsafe fn set_access(&self, start: Address, size: Bytes, access: &[Access]) -> Result<()> {
        // SAFETY: the caller's promise is passed on.
        unsafe { memory::set_access(self, start, size, access) }
    }
    fn export(&self, handle: Handle) -> Result<OwnedFd> {
        memory::export(self, handle)
    }
    fn import(&self, shared: BorrowedFd<'_>) -> Result<Handle> {
        memory::import(self, shared)
    }

    unsafe fn copy(&self, device: DeviceId, request: CopyRequest, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise is passed on.
        unsafe { work::copy(self, device, request, stream) }
    }
    unsafe fn copy_on(&self, request: CopyRequest, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise is passed on.
        unsafe { work::copy_on(self, request, stream) }
    }
    unsafe fn copy_between(
        &self,
        device: DeviceId,
        request: CopyRequest,
        owners: CopyDevices,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the caller's promise is passed on.
        unsafe { work::copy_between(self, device, request, owners, stream) }
    }
    unsafe fn copy_batch(&self, device: DeviceId, requests: &[CopyRequest], stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise is passed on.
        unsafe { work::copy_batch(self, device, requests, stream) }
    }
    unsafe fn fill(
        &self,
        device: DeviceId,
        start: Address,
        size: Bytes,
        byte: u8,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the caller's promise is passed on.
        unsafe { work::fill(self, device, start, size, byte, stream) }
    }
    fn read_now(&self, device: DeviceId, from: Address, into: &mut [u8]) -> Result<()> {
        work::read_now(self, device, from, into)
    }
    unsafe fn write_now(&self, device: DeviceId, to: Address, bytes: &[u8]) -> Result<()> {
        // SAFETY: the caller's promise is passed on.
        unsafe { work::write_now(self, device, to, bytes) }
    }

    fn stream_create(&self, device: DeviceId, priority: Priority) -> Result<Stream> {
        stream::create(self, device, priority)
    }
    unsafe fn stream_destroy(&self, device: DeviceId, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise is passed on.
        unsafe { stream::destroy(self, device, stream) }
    }
    fn stream_id(&self, device: DeviceId, stream: Stream) -> Result<StreamId> {
        stream::id(self, device, stream)
    }
    fn stream_device(&self, stream: Stream) -> Result<DeviceId> {
        stream::device(self, stream)
    }
    fn stream_synchronize(&self, device: DeviceId, stream: Stream) -> Result<()> {
        stream::synchronize(self, device, stream)
    }
    fn stream_wait_event(&self, device: DeviceId, stream: Stream, event: Event) -> Result<()> {
        stream::wait_event(self, device, stream, event)
    }
    unsafe fn stream_wait_value(
        &self,
        device: DeviceId,
        stream: Stream,
        address: Address,
        value: u32,
        compare: Compare,
    ) -> Result<()> {
        // SAFETY: the caller's promise is passed on.
        unsafe { stream::wait_value(self, device, stream, address, value, compare) }
    }
    unsafe fn stream_write_value(
        &self,
        device: DeviceId,
        stream: Stream,
        address: Address,
        value: u32,
    ) -> Result<()> {
        // SAFETY: the caller's promise is passed on.
        unsafe { stream::write_value(self, device, stream, address, value) }
    }
    fn capture_state(&self, device: DeviceId, stream: Stream) -> Result<CaptureState> {
        stream::capture_state(self, device, stream)
    }

    fn event_create(&self, device: DeviceId, kind: EventKind) -> Result<Event> {
        stream::create_event(self, device, kind)
    }
    unsafe fn event_destroy(&self, device: DeviceId, event: Event) -> Result<()> {
        // SAFETY: the caller's promise is passed on.
        unsafe { stream::destroy_event(self, device, event) }
    }
    fn event_record(&self, device: DeviceId, event: Event, stream: Stream) -> Result<()> {
        stream::record(self, device, event, stream)
    }
    fn event_record_context(&self, device: DeviceId, event: Event) -> Result<()> {
        stream::record_context(self, device, event)
    }
    fn event_query(&self, device: DeviceId, event: Event) -> Result<bool> {
        stream::query(self, device, event)
    }
    fn event_synchronize(&self, device: DeviceId, event: Event) -> Result<()> {
        stream::synchronize_event(self, device, event)
    }
    fn event_elapsed(&self, device: DeviceId, from: Event, to: Event) -> Result<f64> {
        stream::elapsed(self, device, from, to)
    }
    fn context_synchronize(&self, device: DeviceId) -> Result<()> {
        stream::context_synchronize(self, device)
    }

    fn own_contexts(&self) -> Result<Arc<dyn Driver>> {
        Ok(Arc::new(Cuda::of(ContextKind::Own)?))
    }
    fn primary_of(&self, stream: Stream) -> Result<Option<DeviceId>> {
        stream::primary_of(self, stream)
    }
    fn has_context(&self, device: DeviceId) -> Result<bool> {
        Cuda::has_context(self, device, Verb::HasContext)
    }
    fn release_context(&self, device: DeviceId) -> Result<()> {
        self.give_back(device)
    }

    fn module_load(&self, device: DeviceId, source: &ModuleSource) -> Result<Module> {
        work::load(self, device, source)
    }
    unsafe fn module_unload(&self, device: DeviceId, module: Module) -> Result<()> {
        // SAFETY: the caller's promise is passed on.
        unsafe { work::unload(self, device, module) }
    }
    fn kernel_find(&self, device: DeviceId, module: Module, name: &str) -> Result<Kernel> {
        work::find(self, device, module, name)
    }
    unsafe fn launch(&self, device: DeviceId, request: &LaunchRequest<'_>, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise is passed on.
        unsafe { work::launch(self, device, request, stream) }
    }

    fn can_access_peer(&self, device: DeviceId, peer: DeviceId) -> Result<bool> {
        host::can_access_peer(self, device, peer)
    }
    fn enable_peer_access(&self, device: DeviceId, peer: DeviceId) -> Result<()> {
        host::enable_peer_access(self, device, peer)
    }
    fn pointer_attributes(&self, address: Address) -> Result<PointerAttributes> {
        host::pointer_attributes(self, address)
    }
    unsafe fn host_register(&self, start: Address, size: Bytes) -> Result<()> {
        // SAFETY: the caller's promise is passed on.
        unsafe { host::register(self, start, size) }
    }
    unsafe fn host_unregister(&self, start: Address) -> Result<()> {
        // SAFETY: the caller's promise is passed on.
        unsafe { host::unregister(self, start) }
    }
}

/// Number of cached answers.
const PLACES: usize = 64;

pub(super) struct Mapped([AtomicU64; PLACES]);

impl Mapped {
    pub(super) fn new() -> Mapped {
        Mapped([const { AtomicU64::new(0) }; PLACES])
    }

    pub(super) fn known(&self, number: u64) -> Option<bool> {
        let word = self.place(number).load(Ordering::Relaxed);
        (number > 0 && word >> 1 == number).then_some(word & 1 == 1)
    }

    pub(super) fn remember(&self, number: u64, mapped: bool) {
        if number > 0 && number < 1 << 63 {
            self.place(number).store(number << 1 | u64::from(mapped), Ordering::Relaxed);
        }
    }

    fn place(&self, number: u64) -> &AtomicU64 {
        // The remainder is less than the length, so it fits.
        &self.0[(number % PLACES as u64) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_driver_gets_an_error() {
        match Cuda::open() {
            Ok(cuda) => assert!(!cuda.devices().unwrap().is_empty()),
            Err(error) => {
                assert!(matches!(error, DriverError::NoDriver { .. }), "{error:?}");
                assert!(error.to_string().contains("--device sim"), "{error}");
            }
        }
    }
}

#[cfg(test)]
mod mapped_tests {
    use super::*;

    #[test]
    fn answers_belong_to_one_allocation() {
        let mapped = Mapped::new();
        mapped.remember(5, true);
        mapped.remember(6, false);
        assert_eq!(
            [5, 6, 7, 5 + 64].map(|number| mapped.known(number)),
            [Some(true), Some(false), None, None]
        );
        mapped.remember(5 + 64, false);
        assert_eq!([5, 5 + 64].map(|number| mapped.known(number)), [None, Some(false)]);
        for number in [0, 1 << 63] {
            mapped.remember(number, true);
            assert_eq!(mapped.known(number), None);
        }
    }
}
