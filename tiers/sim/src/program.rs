//! Actions of the program besides GLake's verbs: its contexts, allocations, peers and graphs.

use glake_units::Bytes;

use super::arena::Kind;
use super::capture::Graph;
use super::context::{ContextId, ContextKind, Current, SimContext};
use super::denial::Denial;
use super::simulator::Simulator;
use glake_device::{Address, DeviceId, Driver, Priority, Refusal, Result, Stream, Verb};

impl Simulator {
    /// Creates a context for the program besides the primary one.
    pub fn make_context(&self, device: DeviceId) -> Result<SimContext> {
        self.ask(Verb::HasContext, |state| state.make_context(device))
    }

    /// Returns the same server through a context that the program created, for calls that name that context's device.
    pub fn within(&self, context: SimContext) -> Simulator {
        Simulator { server: self.server.clone(), kind: context.kind() }
    }

    /// Creates a stream in a context that the program created; its verbs are those of [`Simulator::within`].
    pub fn stream_create_in(&self, context: SimContext) -> Result<Stream> {
        self.within(context).stream_create(context.device(), Priority::Normal)
    }

    /// Creates a blocking stream: it and the legacy default stream wait for each other.
    pub fn stream_create_blocking(&self, device: DeviceId) -> Result<Stream> {
        let context = self.context(device);
        self.ask(Verb::StreamCreate, |state| state.add_stream(context, true))
    }

    /// Sets the calling thread's current context, like `cuCtxSetCurrent`, or clears it. Without one, the first device's primary context is
    /// used.
    pub fn set_current(&self, current: Option<Current>) -> Result<()> {
        self.ask(Verb::PrimaryOf, |state| state.set_current(current.map(Current::context)))
    }

    /// Gives the program its own hold on a device's context, which then survives a release by the driver.
    pub fn hold_context(&self, device: DeviceId) -> Result<()> {
        self.ask(Verb::HasContext, |state| state.hold_context(device))
    }

    /// Gives a device access to plain memory of a peer, like `cudaDeviceEnablePeerAccess`. Returns CUDA's number: 0, or 704 if it was
    /// enabled already, by anyone.
    pub fn program_enable_peer(&self, device: DeviceId, peer: DeviceId) -> u32 {
        self.locked().program_enable_peer(device, peer)
    }

    /// Revokes a device's access to plain memory of a peer, like `cudaDeviceDisablePeerAccess`, whoever granted it. Returns CUDA's number:
    /// 0, or 705 if it was not enabled.
    pub fn program_disable_peer(&self, device: DeviceId, peer: DeviceId) -> u32 {
        self.locked().program_disable_peer(device, peer)
    }

    /// Allocates plain memory, like `cuMemAlloc`: accessible to its owner and to enabled peers. Copies by other devices go over the owner's
    /// link.
    pub fn plain_alloc(&self, device: DeviceId, size: Bytes) -> Result<Address> {
        self.alloc(Kind::Plain, device, size)
    }

    /// Allocates pool memory, like `cudaMallocAsync`: accessible to its own GPU in every context, never to peers. Copies by other devices
    /// go over the owner's link.
    pub fn async_alloc(&self, device: DeviceId, size: Bytes) -> Result<Address> {
        self.alloc(Kind::Pool, device, size)
    }

    /// Allocates managed memory, like `cudaMallocManaged`: accessible in every context. It stays on one device.
    pub fn managed_alloc(&self, device: DeviceId, size: Bytes) -> Result<Address> {
        self.alloc(Kind::Managed, device, size)
    }

    fn alloc(&self, kind: Kind, device: DeviceId, size: Bytes) -> Result<Address> {
        self.ask(Verb::Create, |state| {
            state.world.memory.device(device)?;
            state.charge_context(ContextId { device, kind: ContextKind::Primary })?;
            state.world.memory.alloc(kind, device, size.get())
        })
    }

    /// Frees plain, pool or managed memory. Like CUDA, waits for the primary context of its device first.
    pub fn plain_free(&self, start: Address) -> Result<()> {
        let owner = self.locked().world.memory.owner(start);
        if let Some(device) = owner {
            let context = ContextId { device, kind: ContextKind::Primary };
            self.wait_for(Verb::Release, |state| Ok(state.points_of(context)))?;
        }
        self.ask(Verb::Release, |state| state.world.memory.free(start))
    }

    /// Returns the allocation that a legacy IPC handle of an address names, as `cuIpcGetMemHandle` and `cuMemGetAddressRange` would: plain
    /// memory only.
    ///
    /// # Errors
    /// [`glake_device::Refusal::InvalidValue`] for all other memory, as CUDA answers 1 for mapped memory.
    pub fn ipc_handle(&self, address: Address) -> Result<(Address, Bytes)> {
        self.ask(Verb::Export, |state| {
            let range = state.world.memory.ipc_range(address);
            range.ok_or(Denial::Refused(address, Refusal::InvalidValue))
        })
    }

    /// Returns whether memory can be registered for RDMA, as `CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE` reports of memory mapped by
    /// handle; `None` if nothing is mapped.
    pub fn is_gpu_direct(&self, address: Address) -> Option<bool> {
        self.locked().world.memory.is_gpu_direct(address)
    }

    /// Begins to capture a stream in relaxed mode.
    pub fn begin_capture(&self, device: DeviceId, stream: Stream) -> Result<()> {
        let context = self.context(device);
        self.ask(Verb::CaptureState, |state| state.begin_capture(context, stream))
    }

    /// Ends a capture on the stream that it began on. [`glake_device::DriverError::Failed`] with CUDA's number if it was invalidated.
    pub fn end_capture(&self, device: DeviceId, stream: Stream) -> Result<Graph> {
        let context = self.context(device);
        self.ask(Verb::CaptureState, |state| state.end_capture(context, stream))
    }

    /// Enqueues the work of a captured graph.
    pub fn launch_graph(&self, graph: &Graph, device: DeviceId, stream: Stream) -> Result<()> {
        let context = self.context(device);
        self.ask_on(Verb::Launch, context, stream, |state| state.launch_graph(graph, context, stream))?;
        self.server.wake.notify_all();
        Ok(())
    }
}
