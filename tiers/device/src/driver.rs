//! The driver interface: every operation that GLake needs from a GPU, with its arguments and results.
//!
//! Ids are `Copy` integers; a driver is shared as `Arc<dyn Driver>`. A verb whose misuse is undefined behaviour in CUDA is an `unsafe fn`;
//! the owning types in `owned` uphold its contract for everything above this crate.

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use glake_units::Bytes;

use crate::{Address, DeviceId, Event, Handle, Kernel, Module, Result, Stream, StreamId};

/// Properties of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Ordinal of the device.
    pub id: DeviceId,
    /// Product name, as the vendor gives it.
    pub name: String,
    /// Total memory in bytes.
    pub memory: Bytes,
    /// PCI address (`0000:3b:00.0`), if it has one.
    pub pci: Option<String>,
    /// Whether its memory can be exported as file descriptors; false under WSL2.
    pub exportable: bool,
    /// Whether memory created by [`Driver::create`] can be registered for RDMA ([`ExtentProperties::gpu_direct`]).
    pub gpu_direct: bool,
}

/// Memory use of a device by all processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Free bytes of device memory.
    pub free: Bytes,
    /// Total bytes of device memory.
    pub total: Bytes,
}

/// Location of physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// Memory of a GPU.
    Gpu(DeviceId),
    /// A NUMA node of the host.
    HostNuma(u32),
}

/// Properties requested for physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExtentProperties {
    /// Location of the memory.
    pub place: Place,
    /// Whether another process may import the memory.
    pub exportable: bool,
    /// Whether the memory can be registered for RDMA (GPUDirect). Requires [`DeviceInfo::gpu_direct`].
    pub gpu_direct: bool,
}

/// Access rights of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protection {
    /// No access at all.
    None,
    /// Loads, but no stores.
    Read,
    /// Loads and stores allowed.
    ReadWrite,
}

/// Access rights of one device to a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Access {
    /// Device that gets the access.
    pub device: DeviceId,
    /// Rights of the device.
    pub protection: Protection,
}

/// Description of one copy; both ends are addresses in the unified address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRequest {
    /// Destination address of the copy.
    pub to: Address,
    /// Source address of the copy.
    pub from: Address,
    /// Number of bytes to copy.
    pub size: Bytes,
}

/// Devices of both ends of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyDevices {
    /// Device of the destination.
    pub to: DeviceId,
    /// Device of the source.
    pub from: DeviceId,
}

/// Kind of memory that a pointer refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PointerKind {
    /// Memory of a GPU.
    Device {
        /// Device that owns the memory.
        device: DeviceId,
        /// Whether it was mapped by [`Driver::map`], so that peers can be given access.
        mapped: bool,
    },
    /// Managed memory, which migrates between host and GPUs on access (`cudaMallocManaged`).
    Managed,
    /// Host memory that is pinned or registered with the driver.
    Pinned,
    /// Host memory unknown to the driver.
    Pageable,
}

impl PointerKind {
    /// Returns the GPU that owns the memory.
    pub fn device(self) -> Option<DeviceId> {
        match self {
            PointerKind::Device { device, .. } => Some(device),
            PointerKind::Managed | PointerKind::Pinned | PointerKind::Pageable => None,
        }
    }
}

/// The driver's description of a pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PointerAttributes {
    /// Kind of memory pointed to.
    pub kind: PointerKind,
    /// Start and size of the enclosing allocation or registration; `None` if the driver reports none. For mapped memory this may be the
    /// whole address reservation.
    pub range: Option<(Address, Bytes)>,
}

/// Scheduling priority of a stream's kernels when several streams compete for a device. It does not affect copies between host and device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Priority {
    /// Default priority of streams.
    #[default]
    Normal,
    /// Runs before work of normal streams that has not begun.
    High,
}

/// Purpose of an event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum EventKind {
    /// Orders streams without timing. Host waits spin.
    #[default]
    Plain,
    /// Time between two such events can be measured. Host waits spin.
    Timed,
    /// Orders streams without timing. Host waits sleep until the device wakes the thread: for long waits.
    Sleeping,
}

/// Graph-capture state of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureState {
    /// No capture; work is executed.
    None,
    /// Work is recorded into the capture with this id.
    Active(u64),
    /// The capture was invalidated by a forbidden call.
    Invalidated,
}

/// Comparison made by [`Driver::stream_wait_value`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compare {
    /// The memory holds at least the value (cyclically, like CUDA's GEQ).
    AtLeast,
    /// The memory holds exactly the value.
    Equal,
}

/// A range of memory that a kernel declares to access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touch {
    /// Start address of the range.
    pub address: Address,
    /// Length of the range.
    pub size: Bytes,
}

/// Code of a module in both forms; each backend uses its own.
#[derive(Clone)]
pub struct ModuleSource {
    /// Checked-in PTX, used by CUDA.
    pub ptx: &'static str,
    /// The same kernels as host code, used by the simulator.
    pub host: &'static [HostKernel],
}

/// A kernel as host code, for the simulator.
#[derive(Clone, Copy)]
pub struct HostKernel {
    /// Name of the kernel in the PTX.
    pub name: &'static str,
    /// Function that executes the kernel on its declared memory, given its arguments.
    pub body: fn(&mut dyn KernelMemory, &[u64]),
}

/// Memory of a simulated kernel, limited to the declared ranges.
pub trait KernelMemory {
    /// Reads `into.len()` bytes; the range must lie in a declared read or write.
    fn read(&mut self, from: Address, into: &mut [u8]) -> Result<()>;
    /// Writes `bytes`; the range must lie in a declared write.
    fn write(&mut self, to: Address, bytes: &[u8]) -> Result<()>;
}

/// Ranges that a kernel accesses, enumerated for devices that check or time them.
pub trait Touches: fmt::Debug + Sync {
    /// Calls `see` with each range that is read and each that is written.
    fn each(&self, see: &mut dyn FnMut(Usage, Touch));
}

/// Kind of access to a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Usage {
    /// The range is only read.
    Read,
    /// The range is written, and possibly read.
    Write,
}

/// Declared ranges as two short lists.
#[derive(Clone, Copy, Debug)]
pub struct Touched<'a> {
    /// Ranges that are read.
    pub reads: &'a [Touch],
    /// Ranges that are written.
    pub writes: &'a [Touch],
}

impl Touches for Touched<'_> {
    fn each(&self, see: &mut dyn FnMut(Usage, Touch)) {
        self.reads.iter().for_each(|touch| see(Usage::Read, *touch));
        self.writes.iter().for_each(|touch| see(Usage::Write, *touch));
    }
}

/// Parameters of a kernel launch.
#[derive(Clone, Copy, Debug)]
pub struct LaunchRequest<'a> {
    /// Kernel to be launched.
    pub kernel: Kernel,
    /// Thread blocks per dimension.
    pub grid: [u32; 3],
    /// Threads of a block per dimension.
    pub block: [u32; 3],
    /// Kernel arguments, 64 bits each.
    pub arguments: &'a [u64],
    /// Memory that the kernel accesses. CUDA ignores it; the simulator checks it.
    pub touches: &'a dyn Touches,
}

/// Every operation that GLake needs from GPUs.
///
/// A `device` argument names the context (the primary one) that a call runs in; a call leaves the caller's
/// current context as it found it. Verbs are asynchronous where CUDA's are.
pub trait Driver: Send + Sync + fmt::Debug {
    /// Returns the devices in order of their ids.
    fn devices(&self) -> Result<Vec<DeviceInfo>>;
    /// Returns a device's memory use. Creates no context if the answer is available without one.
    fn memory_info(&self, device: DeviceId) -> Result<MemoryInfo>;

    // Virtual memory.

    /// Returns the granularity of sizes and addresses for such memory.
    fn granularity(&self, properties: ExtentProperties) -> Result<Bytes>;
    /// Reserves addresses; `size` is a multiple of the granularity.
    fn reserve(&self, size: Bytes) -> Result<Address>;
    /// Releases a range of reserved addresses.
    ///
    /// # Safety
    /// Nothing enqueued or running uses the range, and nothing is mapped in it.
    unsafe fn unreserve(&self, start: Address, size: Bytes) -> Result<()>;
    /// Creates zeroed physical memory.
    fn create(&self, size: Bytes, properties: ExtentProperties) -> Result<Handle>;
    /// Releases a handle; the memory is freed once no mapping is left.
    ///
    /// # Safety
    /// The handle is alive and the caller's to release.
    unsafe fn release(&self, handle: Handle) -> Result<()>;
    /// Maps a whole handle at reserved addresses. Access is granted only by [`Driver::set_access`].
    ///
    /// # Safety
    /// The handle is alive; no other owner uses these addresses.
    unsafe fn map(&self, start: Address, size: Bytes, handle: Handle) -> Result<()>;
    /// Unmaps the whole mappings in a range.
    ///
    /// # Safety
    /// Nothing enqueued or running uses the range: CUDA does not wait.
    unsafe fn unmap(&self, start: Address, size: Bytes) -> Result<()>;
    /// Sets the access rights of mapped memory.
    ///
    /// # Safety
    /// Nothing enqueued or running needs the access that this removes.
    unsafe fn set_access(&self, start: Address, size: Bytes, access: &[Access]) -> Result<()>;
    /// Returns a file descriptor with which another process can import exportable memory.
    fn export(&self, handle: Handle) -> Result<OwnedFd>;
    /// Imports another process's memory. The caller must release the handle.
    fn import(&self, shared: BorrowedFd<'_>) -> Result<Handle>;

    /// Allocates memory of a device at an address of the driver's own choice (`cuMemAlloc`), accessible to the device's own work. Unlike
    /// mapped memory it has a legacy IPC handle, and its address range is the whole allocation.
    fn alloc_plain(&self, device: DeviceId, size: Bytes) -> Result<Address>;
    /// Frees memory of [`Driver::alloc_plain`] once the device's enqueued work is done.
    ///
    /// # Safety
    /// The allocation is alive and the caller's to free; no work of another device uses it.
    unsafe fn free_plain(&self, device: DeviceId, start: Address) -> Result<()>;

    // Bytes.

    /// Enqueues a copy on a stream of `device`.
    ///
    /// # Safety
    /// Both ranges are alive until the copy has run, and nothing else touches them unordered.
    unsafe fn copy(&self, device: DeviceId, request: CopyRequest, stream: Stream) -> Result<()>;
    /// Enqueues a copy on a stream of any device, which must be able to access both ranges. A default stream means the calling thread's
    /// current device. Needs fewer driver calls than [`Driver::copy`].
    ///
    /// # Safety
    /// As [`Driver::copy`].
    unsafe fn copy_on(&self, request: CopyRequest, stream: Stream) -> Result<()>;
    /// Enqueues a copy between memory of two devices without peer access; the driver may route it through the host. The stream belongs to
    /// `device`.
    ///
    /// # Safety
    /// As [`Driver::copy`].
    unsafe fn copy_between(
        &self,
        device: DeviceId,
        request: CopyRequest,
        owners: CopyDevices,
        stream: Stream,
    ) -> Result<()>;
    /// Enqueues several copies, unordered among themselves.
    ///
    /// # Safety
    /// As [`Driver::copy`], for each.
    unsafe fn copy_batch(&self, device: DeviceId, requests: &[CopyRequest], stream: Stream) -> Result<()>;
    /// Enqueues the filling of a range with one byte.
    ///
    /// # Safety
    /// The range is alive until the work has run, and nothing else touches it unordered.
    unsafe fn fill(
        &self,
        device: DeviceId,
        start: Address,
        size: Bytes,
        byte: u8,
        stream: Stream,
    ) -> Result<()>;
    /// Copies device memory to the host and returns when the bytes have arrived. The caller orders it after the work that wrote them.
    /// Memory that is not mapped is an error, never a fault.
    fn read_now(&self, device: DeviceId, from: Address, into: &mut [u8]) -> Result<()>;
    /// Copies host bytes to device memory and returns when they have arrived.
    ///
    /// # Safety
    /// The range is the caller's to write, and nothing else touches it unordered.
    unsafe fn write_now(&self, device: DeviceId, to: Address, bytes: &[u8]) -> Result<()>;

    // Streams.

    /// Creates a stream that does not synchronise with the legacy stream.
    fn stream_create(&self, device: DeviceId, priority: Priority) -> Result<Stream>;
    /// Destroys a stream; its enqueued work still completes.
    ///
    /// # Safety
    /// The stream is alive and owned by the caller.
    unsafe fn stream_destroy(&self, device: DeviceId, stream: Stream) -> Result<()>;
    /// Returns the identity of the stream that a handle means for the calling thread.
    fn stream_id(&self, device: DeviceId, stream: Stream) -> Result<StreamId>;
    /// Returns the device of a stream. Default handles belong to the thread's current device, or to the first device if it has none.
    fn stream_device(&self, stream: Stream) -> Result<DeviceId>;
    /// Blocks the calling thread until the stream's work is done.
    fn stream_synchronize(&self, device: DeviceId, stream: Stream) -> Result<()>;
    /// Makes a stream wait for an event on the device.
    fn stream_wait_event(&self, device: DeviceId, stream: Stream, event: Event) -> Result<()>;
    /// Makes a stream wait until a 32-bit word compares true.
    ///
    /// # Safety
    /// The address is alive until the wait is over.
    unsafe fn stream_wait_value(
        &self,
        device: DeviceId,
        stream: Stream,
        address: Address,
        value: u32,
        compare: Compare,
    ) -> Result<()>;
    /// Writes a 32-bit word once the stream's earlier work is done.
    ///
    /// # Safety
    /// The address is alive until the write has run.
    unsafe fn stream_write_value(
        &self,
        device: DeviceId,
        stream: Stream,
        address: Address,
        value: u32,
    ) -> Result<()>;
    /// Returns whether a stream is being captured into a graph.
    fn capture_state(&self, device: DeviceId, stream: Stream) -> Result<CaptureState>;

    // Events.

    /// Creates an event in the context of `device`.
    fn event_create(&self, device: DeviceId, kind: EventKind) -> Result<Event>;
    /// Destroys an event of `device`.
    ///
    /// # Safety
    /// The event is alive and owned by the caller.
    unsafe fn event_destroy(&self, device: DeviceId, event: Event) -> Result<()>;
    /// Records an event on a stream.
    fn event_record(&self, device: DeviceId, event: Event, stream: Stream) -> Result<()>;
    /// Records an event for a whole context: it completes when all work enqueued before, on any stream, has.
    /// [`crate::DriverError::Unsupported`] if the driver lacks the call (before CUDA 12.5).
    fn event_record_context(&self, device: DeviceId, event: Event) -> Result<()>;
    /// Returns whether an event has completed; true if it was never recorded.
    fn event_query(&self, device: DeviceId, event: Event) -> Result<bool>;
    /// Blocks the calling thread until an event completes.
    fn event_synchronize(&self, device: DeviceId, event: Event) -> Result<()>;
    /// Returns the microseconds between two completed events.
    fn event_elapsed(&self, device: DeviceId, from: Event, to: Event) -> Result<f64>;
    /// Blocks the calling thread until all work of a context is done. Returns at once, creating nothing, if the device has no context.
    fn context_synchronize(&self, device: DeviceId) -> Result<()>;

    // Contexts. A verb with a `device` argument creates the context if necessary, unless documented otherwise.

    /// Returns the same devices through private contexts, one per device, created at first use. Work enqueued there does not belong to the
    /// program's contexts and shares no hardware queue with them. Streams, events and kernels belong to the driver that created them,
    /// except that waits accept any event. Each call returns new contexts.
    fn own_contexts(&self) -> Result<Arc<dyn Driver>>;
    /// Returns the device whose primary context a call of this thread on this stream would run in, given the current context; `None` if the
    /// current context or the stream's is another one (`cuCtxCreate`, green contexts).
    fn primary_of(&self, stream: Stream) -> Result<Option<DeviceId>>;

    /// Returns whether a device's context exists in this process, whoever created it. Never creates one.
    fn has_context(&self, device: DeviceId) -> Result<bool>;
    /// Releases this driver's hold on a device's context once the device's work is done; the next call that needs the context creates it
    /// again. The context stays if the program holds it too; without a hold nothing happens. Access to mapped memory survives, access to
    /// plain peer memory does not. Host memory pinned in the context would go with it, and counts as created there. Fails with
    /// [`crate::DriverError::ContextInUse`] while objects created by this driver live in it, and with [`crate::DriverError::NotReady`]
    /// while other threads' calls run in it; the context then stays unchanged.
    fn release_context(&self, device: DeviceId) -> Result<()>;

    // Kernels.

    /// Loads a module in the context of `device`.
    fn module_load(&self, device: DeviceId, source: &ModuleSource) -> Result<Module>;
    /// Unloads a module from `device`.
    ///
    /// # Safety
    /// None of its kernels is enqueued or running.
    unsafe fn module_unload(&self, device: DeviceId, module: Module) -> Result<()>;
    /// Returns a kernel of a module by name.
    fn kernel_find(&self, device: DeviceId, module: Module, name: &str) -> Result<Kernel>;
    /// Enqueues a kernel launch.
    ///
    /// # Safety
    /// The arguments match the kernel's signature. It accesses only declared memory, which stays alive until the kernel has run and which
    /// no unordered work touches.
    unsafe fn launch(&self, device: DeviceId, request: &LaunchRequest<'_>, stream: Stream) -> Result<()>;

    // Access and pinning.

    /// Returns whether work of `device` can be given access to memory of `peer`. Changes nothing.
    fn can_access_peer(&self, device: DeviceId, peer: DeviceId) -> Result<bool>;
    /// Gives work of `device` access to plain (not mapped) memory of `peer`. Repeating it is not an error. The program can observe the
    /// change, so use it only for copies that the program requested.
    fn enable_peer_access(&self, device: DeviceId, peer: DeviceId) -> Result<()>;
    /// Returns the attributes of the memory at an address.
    fn pointer_attributes(&self, address: Address) -> Result<PointerAttributes>;
    /// Pins host memory, so that every device can copy from and to it at full speed.
    ///
    /// # Safety
    /// The caller owns the range; it is page-aligned and stays mapped until it is unregistered.
    unsafe fn host_register(&self, start: Address, size: Bytes) -> Result<()>;
    /// Unpins registered host memory.
    ///
    /// # Safety
    /// The range was registered and nothing enqueued or running uses it.
    unsafe fn host_unregister(&self, start: Address) -> Result<()>;
}
