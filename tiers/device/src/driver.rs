//! The seam: every verb that GLake asks of a GPU, and what each one takes and gives.
//!
//! Ids are `Copy` integers; a driver is shared as `Arc<dyn Driver>`. A verb whose misuse is undefined on CUDA is
//! an `unsafe fn`; the owners (`owned`) discharge it for everything above this crate.

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use glake_units::Bytes;

use crate::{Address, DeviceId, Event, Handle, Kernel, Module, Result, Stream, StreamId};

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// How it is asked for.
    pub id: DeviceId,
    /// Its maker's name for it.
    pub name: String,
    /// Its memory.
    pub memory: Bytes,
    /// Its PCI address (`0000:3b:00.0`), where it has one.
    pub pci: Option<String>,
    /// Whether its memory can be exported, as file descriptors: not under WSL2.
    pub exportable: bool,
    /// Whether memory made by [`Driver::create`] can be registered for RDMA ([`ExtentProperties::gpu_direct`]).
    pub gpu_direct: bool,
}

/// How a device's memory stands, counting every process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Not taken.
    pub free: Bytes,
    /// All there is.
    pub total: Bytes,
}

/// Where physical memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// On a GPU.
    Gpu(DeviceId),
    /// On a NUMA node of the host.
    HostNuma(u32),
}

/// What physical memory shall be like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExtentProperties {
    /// Where it lies.
    pub place: Place,
    /// Whether another process may import it.
    pub exportable: bool,
    /// Whether it can be registered for RDMA (GPUDirect). Only where [`DeviceInfo::gpu_direct`] says that the device can.
    pub gpu_direct: bool,
}

/// What may be done through a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protection {
    /// Nothing.
    None,
    /// Loads.
    Read,
    /// Loads and stores.
    ReadWrite,
}

/// Who may do what through a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Access {
    /// The device whose work touches it.
    pub device: DeviceId,
    /// What it may do.
    pub protection: Protection,
}

/// One copy: both ends are addresses of the unified address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRequest {
    /// Where the bytes go.
    pub to: Address,
    /// Where they come from.
    pub from: Address,
    /// How many.
    pub size: Bytes,
}

/// The devices whose memory a copy is between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyDevices {
    /// Device of the destination.
    pub to: DeviceId,
    /// Device of the source.
    pub from: DeviceId,
}

/// What a pointer points to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PointerKind {
    /// Memory of a GPU.
    Device {
        /// Whose.
        device: DeviceId,
        /// Whether it was mapped by [`Driver::map`] (so that access for peers can be given).
        mapped: bool,
    },
    /// Memory that moves between the host and GPUs as it is touched (`cudaMallocManaged`).
    Managed,
    /// Host memory that the driver pinned or was told of.
    Pinned,
    /// Host memory that the driver does not know.
    Pageable,
}

impl PointerKind {
    /// The GPU that it is memory of.
    pub fn device(self) -> Option<DeviceId> {
        match self {
            PointerKind::Device { device, .. } => Some(device),
            PointerKind::Managed | PointerKind::Pinned | PointerKind::Pageable => None,
        }
    }
}

/// What the driver tells of a pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PointerAttributes {
    /// What it points to.
    pub kind: PointerKind,
    /// The allocation or registration that it lies in: where it starts, and how long it is; `None` where the driver tells of
    /// none. Of mapped memory it may be all addresses that were set aside.
    pub range: Option<(Address, Bytes)>,
}

/// How soon a stream's kernels run where several streams want a device. Copies between host and device take no
/// notice of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Priority {
    /// When their turn comes.
    #[default]
    Normal,
    /// Before those of normal streams that have not begun.
    High,
}

/// What an event is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum EventKind {
    /// Order between streams. A wait on the host spins.
    #[default]
    Plain,
    /// The time between two such events can be measured. A wait on the host spins.
    Timed,
    /// Order between streams. A wait on the host sleeps until the device wakes it: for threads that wait long.
    Sleeping,
}

/// Whether a stream is recording a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureState {
    /// Work runs.
    None,
    /// Work is recorded into the capture of this id.
    Active(u64),
    /// The capture was broken by a call that is not allowed.
    Invalidated,
}

/// How two values are compared by [`Driver::stream_wait_value`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compare {
    /// The memory holds at least the value (cyclically, as CUDA's GEQ).
    AtLeast,
    /// The memory holds the value.
    Equal,
}

/// A range of memory that a kernel declares to touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touch {
    /// Its start.
    pub address: Address,
    /// Its length.
    pub size: Bytes,
}

/// The code of a module: both forms are given, each backend takes its own.
#[derive(Clone)]
pub struct ModuleSource {
    /// Checked-in PTX, for CUDA.
    pub ptx: &'static str,
    /// The same kernels as host code, for the simulator.
    pub host: &'static [HostKernel],
}

/// A kernel as host code, for the simulator.
#[derive(Clone, Copy)]
pub struct HostKernel {
    /// The name it has in the PTX.
    pub name: &'static str,
    /// What it does, through the memory it declared.
    pub body: fn(&mut dyn KernelMemory, &[u64]),
}

/// The memory of a simulated kernel: only what it declared can be reached.
pub trait KernelMemory {
    /// Reads `into.len()` bytes; the range must lie in a declared read or write.
    fn read(&mut self, from: Address, into: &mut [u8]) -> Result<()>;
    /// Writes `bytes`; the range must lie in a declared write.
    fn write(&mut self, to: Address, bytes: &[u8]) -> Result<()>;
}

/// What a kernel touches, told range by range to who asks: a device that checks it, or keeps its time.
pub trait Touches: fmt::Debug + Sync {
    /// Calls `see` with each range that is read, and each that is written.
    fn each(&self, see: &mut dyn FnMut(Usage, Touch));
}

/// What is done to a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Usage {
    /// It is read.
    Read,
    /// It is written, or both.
    Write,
}

/// Few ranges.
#[derive(Clone, Copy, Debug)]
pub struct Touched<'a> {
    /// What is read.
    pub reads: &'a [Touch],
    /// What is written.
    pub writes: &'a [Touch],
}

impl Touches for Touched<'_> {
    fn each(&self, see: &mut dyn FnMut(Usage, Touch)) {
        self.reads.iter().for_each(|touch| see(Usage::Read, *touch));
        self.writes.iter().for_each(|touch| see(Usage::Write, *touch));
    }
}

/// A kernel launch.
#[derive(Clone, Copy, Debug)]
pub struct LaunchRequest<'a> {
    /// Which kernel.
    pub kernel: Kernel,
    /// Thread blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Its arguments: 64-bit each.
    pub arguments: &'a [u64],
    /// What it touches. CUDA does not ask.
    pub touches: &'a dyn Touches,
}

/// Everything that GLake asks of GPUs.
///
/// A `device` argument names the context (the primary one) that a call runs in; a call leaves the caller's
/// current context as it found it. Verbs are asynchronous where CUDA's are.
pub trait Driver: Send + Sync + fmt::Debug {
    /// The devices, in order of their ids.
    fn devices(&self) -> Result<Vec<DeviceInfo>>;
    /// How a device's memory stands. Makes no context where that can be told without one.
    fn memory_info(&self, device: DeviceId) -> Result<MemoryInfo>;

    // Virtual memory.

    /// The unit of sizes and addresses for such memory.
    fn granularity(&self, properties: ExtentProperties) -> Result<Bytes>;
    /// Sets addresses aside; `size` is a multiple of the granularity.
    fn reserve(&self, size: Bytes) -> Result<Address>;
    /// Gives addresses back.
    ///
    /// # Safety
    /// Nothing enqueued or running uses the range, and nothing is mapped in it.
    unsafe fn unreserve(&self, start: Address, size: Bytes) -> Result<()>;
    /// Makes physical memory. It holds zeroes.
    fn create(&self, size: Bytes, properties: ExtentProperties) -> Result<Handle>;
    /// Gives up a handle; the memory goes once no mapping is left.
    ///
    /// # Safety
    /// The handle is alive and the caller's to release.
    unsafe fn release(&self, handle: Handle) -> Result<()>;
    /// Maps a whole handle at reserved addresses. There is no access until [`Driver::set_access`].
    ///
    /// # Safety
    /// The handle is alive; nothing else thinks that it owns these addresses.
    unsafe fn map(&self, start: Address, size: Bytes, handle: Handle) -> Result<()>;
    /// Takes whole mappings out of a range.
    ///
    /// # Safety
    /// Nothing enqueued or running uses the range: CUDA does not wait.
    unsafe fn unmap(&self, start: Address, size: Bytes) -> Result<()>;
    /// Says who may touch mapped memory.
    ///
    /// # Safety
    /// Nothing enqueued or running uses the range in a way that this takes away.
    unsafe fn set_access(&self, start: Address, size: Bytes, access: &[Access]) -> Result<()>;
    /// A file descriptor by which another process can import exportable memory.
    fn export(&self, handle: Handle) -> Result<OwnedFd>;
    /// Another process's memory; the handle is the caller's to release.
    fn import(&self, shared: BorrowedFd<'_>) -> Result<Handle>;

    // Bytes.

    /// Enqueues a copy on a stream of `device`.
    ///
    /// # Safety
    /// Both ranges are alive until the copy has run, and nothing else touches them unordered.
    unsafe fn copy(&self, device: DeviceId, request: CopyRequest, stream: Stream) -> Result<()>;
    /// Enqueues a copy on a stream of any device, which may touch both ranges; a default stream is the calling thread's
    /// current device's. In fewer calls than [`Driver::copy`].
    ///
    /// # Safety
    /// As [`Driver::copy`].
    unsafe fn copy_on(&self, request: CopyRequest, stream: Stream) -> Result<()>;
    /// Enqueues a copy between memory of two devices, which need no access to each other's: where the driver has no other way, it goes through
    /// the host. The stream is one of `device`.
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
    /// Enqueues several copies, in no order among themselves.
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
    /// Copies bytes of device memory to the host and returns when they are there. The caller orders it after
    /// the work that wrote them. Memory that is not mapped is an error, never a fault.
    fn read_now(&self, device: DeviceId, from: Address, into: &mut [u8]) -> Result<()>;
    /// Copies bytes of the host to device memory and returns when they are there.
    ///
    /// # Safety
    /// The range is the caller's to write, and nothing else touches it unordered.
    unsafe fn write_now(&self, device: DeviceId, to: Address, bytes: &[u8]) -> Result<()>;

    // Streams.

    /// A stream that does not synchronise with the legacy one.
    fn stream_create(&self, device: DeviceId, priority: Priority) -> Result<Stream>;
    /// Destroys a stream; its work still runs to its end.
    ///
    /// # Safety
    /// The stream is alive and the caller's.
    unsafe fn stream_destroy(&self, device: DeviceId, stream: Stream) -> Result<()>;
    /// Which stream a handle means, for the calling thread.
    fn stream_id(&self, device: DeviceId, stream: Stream) -> Result<StreamId>;
    /// The device whose stream a handle is; the default handles are the thread's current device's, or the first one's where
    /// it has none.
    fn stream_device(&self, stream: Stream) -> Result<DeviceId>;
    /// Waits on the host for a stream's work.
    fn stream_synchronize(&self, device: DeviceId, stream: Stream) -> Result<()>;
    /// Makes a stream wait on the device for an event.
    fn stream_wait_event(&self, device: DeviceId, stream: Stream, event: Event) -> Result<()>;
    /// Makes a stream wait until 32 bits of memory compare true.
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
    /// Writes 32 bits of memory once the stream's earlier work is done.
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
    /// Whether a stream is recording a graph.
    fn capture_state(&self, device: DeviceId, stream: Stream) -> Result<CaptureState>;

    // Events.

    /// An event.
    fn event_create(&self, device: DeviceId, kind: EventKind) -> Result<Event>;
    /// Destroys an event.
    ///
    /// # Safety
    /// The event is alive and the caller's.
    unsafe fn event_destroy(&self, device: DeviceId, event: Event) -> Result<()>;
    /// Marks a point of a stream.
    fn event_record(&self, device: DeviceId, event: Event, stream: Stream) -> Result<()>;
    /// Marks a point of a whole context: it completes when all work enqueued before, on any stream, has.
    /// [`crate::DriverError::Unsupported`] where the driver lacks the call (before CUDA 12.5).
    fn event_record_context(&self, device: DeviceId, event: Event) -> Result<()>;
    /// Whether an event's point has been passed; true for one never recorded.
    fn event_query(&self, device: DeviceId, event: Event) -> Result<bool>;
    /// Waits on the host for an event's point.
    fn event_synchronize(&self, device: DeviceId, event: Event) -> Result<()>;
    /// Microseconds from one passed event to another.
    fn event_elapsed(&self, device: DeviceId, from: Event, to: Event) -> Result<f64>;
    /// Waits on the host for all work of a context. Where the device has none yet there is no work to wait for, and none is made.
    fn context_synchronize(&self, device: DeviceId) -> Result<()>;

    // Contexts. A call that names a device makes its context where there is none, unless it says otherwise.

    /// The same devices through contexts of our own, one for each, made when first used: what is enqueued there is no work of the
    /// program's contexts, and shares no queue of the hardware with it. Streams, events and kernels belong to the driver that made
    /// them, but for waits, which take any event. Each call gives further contexts.
    fn own_contexts(&self) -> Result<Arc<dyn Driver>>;
    /// The device in whose primary context a call on a stream runs that this thread makes now, in the context that is current; none
    /// where the current context, or the stream's, is another one (`cuCtxCreate`, green contexts).
    fn primary_of(&self, stream: Stream) -> Result<Option<DeviceId>>;

    /// Whether a device has its context in this process, by whomever it was made. Makes none.
    fn has_context(&self, device: DeviceId) -> Result<bool>;
    /// Gives up this driver's hold on a device's context, once the device's work is done: the next call that needs it makes it
    /// again. Where the program holds it too it stays; where this driver holds none nothing is done. Access to mapped memory outlasts
    /// it, access to plain memory of peers does not. Host memory that was pinned in it would go with it, and counts as made there.
    /// [`crate::DriverError::ContextInUse`] while anything lives that this driver made in it, [`crate::DriverError::NotReady`]
    /// while other threads' calls run in it: it stays as it was.
    fn release_context(&self, device: DeviceId) -> Result<()>;

    // Kernels.

    /// Loads a module.
    fn module_load(&self, device: DeviceId, source: &ModuleSource) -> Result<Module>;
    /// Unloads a module.
    ///
    /// # Safety
    /// None of its kernels is enqueued or running.
    unsafe fn module_unload(&self, device: DeviceId, module: Module) -> Result<()>;
    /// A kernel of a module by name.
    fn kernel_find(&self, device: DeviceId, module: Module, name: &str) -> Result<Kernel>;
    /// Enqueues a kernel.
    ///
    /// # Safety
    /// The arguments are what the kernel takes; it touches nothing but what is declared, which is alive until it
    /// has run and touched by nothing else unordered.
    unsafe fn launch(&self, device: DeviceId, request: &LaunchRequest<'_>, stream: Stream) -> Result<()>;

    // Reach.

    /// Whether work of `device` can be given access to memory of `peer` at all. Changes nothing.
    fn can_access_peer(&self, device: DeviceId, peer: DeviceId) -> Result<bool>;
    /// Lets `device`'s work touch plain (not mapped) memory of `peer`. Doing it twice is no error. The program sees it: only for what it
    /// asked for.
    fn enable_peer_access(&self, device: DeviceId, peer: DeviceId) -> Result<()>;
    /// What an address belongs to.
    fn pointer_attributes(&self, address: Address) -> Result<PointerAttributes>;
    /// Pins host memory so that every device can copy from and to it at full speed.
    ///
    /// # Safety
    /// The range is the caller's, page-aligned and stays mapped until it is unregistered.
    unsafe fn host_register(&self, start: Address, size: Bytes) -> Result<()>;
    /// Unpins host memory.
    ///
    /// # Safety
    /// The range was registered and nothing enqueued or running uses it.
    unsafe fn host_unregister(&self, start: Address) -> Result<()>;
}
