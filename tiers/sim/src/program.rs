//! What a program does besides GLake's verbs: its contexts, the memory that it allocates, its peers, its graphs.

use glake_units::Bytes;

use super::context::{ContextId, ContextKind, Current, SimContext};
use super::extent::Kind;
use super::graph::Graph;
use super::simulator::Simulator;
use glake_device::{Address, DeviceId, Driver, Priority, Result, Stream, Verb};

impl Simulator {
    /// The program makes a context besides the primary one.
    pub fn make_context(&self, device: DeviceId) -> Result<SimContext> {
        self.ask(Verb::HasContext, |state| state.make_context(device))
    }

    /// The same server through a context that the program made: for its own calls, which name that context's device.
    pub fn within(&self, context: SimContext) -> Simulator {
        Simulator { server: self.server.clone(), kind: context.kind() }
    }

    /// A stream of a context that the program made; its verbs are those of [`Simulator::within`].
    pub fn stream_create_in(&self, context: SimContext) -> Result<Stream> {
        self.within(context).stream_create(context.device(), Priority::Normal)
    }

    /// A stream that the legacy default stream waits for, and that waits for it.
    pub fn stream_create_blocking(&self, device: DeviceId) -> Result<Stream> {
        let context = self.context(device);
        self.ask(Verb::StreamCreate, |state| state.add_stream(context, true))
    }

    /// The calling thread enters a context, as `cuCtxSetCurrent` does, or leaves it. In none it is as in the first
    /// device's primary one.
    pub fn set_current(&self, current: Option<Current>) -> Result<()> {
        self.ask(Verb::PrimaryOf, |state| state.set_current(current.map(Current::context)))
    }

    /// The program holds a device's context besides: it stays, whatever the driver gives up.
    pub fn hold_context(&self, device: DeviceId) -> Result<()> {
        self.ask(Verb::HasContext, |state| state.hold_context(device))
    }

    /// The program lets a device into plain memory of a peer, as `cudaDeviceEnablePeerAccess` does. CUDA's number: 0,
    /// or 704 where it was enabled before, by whomever.
    pub fn program_enable_peer(&self, device: DeviceId, peer: DeviceId) -> u32 {
        self.locked().program_enable_peer(device, peer)
    }

    /// The program takes a device out of plain memory of a peer, as `cudaDeviceDisablePeerAccess` does, whoever let it
    /// in. CUDA's number: 0, or 705 where it was not enabled.
    pub fn program_disable_peer(&self, device: DeviceId, peer: DeviceId) -> u32 {
        self.locked().program_disable_peer(device, peer)
    }

    /// Plain memory, as `cuMemAlloc` makes it: the owner has access, peers once they were enabled, and copies by
    /// other devices go over the owner's link.
    pub fn plain_alloc(&self, device: DeviceId, size: Bytes) -> Result<Address> {
        self.alloc(Kind::Plain, device, size)
    }

    /// Memory of a pool, as `cudaMallocAsync` makes it: its own GPU has access, in every context, and no peer gets it
    /// by being enabled. Copies by other devices go over the owner's link.
    pub fn async_alloc(&self, device: DeviceId, size: Bytes) -> Result<Address> {
        self.alloc(Kind::Pool, device, size)
    }

    /// Managed memory, as `cudaMallocManaged` makes it: every context has access. It lies on a device, and stays there.
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

    /// Gives plain memory, a pool's or managed memory back. It waits for the primary context of its device first, as
    /// CUDA does.
    pub fn plain_free(&self, start: Address) -> Result<()> {
        let owner = self.locked().world.memory.owner(start);
        if let Some(device) = owner {
            let context = ContextId { device, kind: ContextKind::Primary };
            self.wait_for(Verb::Release, |state| Ok(state.points_of(context)))?;
        }
        self.ask(Verb::Release, |state| state.world.memory.free(start))
    }

    /// Whether memory can be registered for RDMA, as `CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE` tells of memory that was mapped
    /// by handle; `None` where nothing is mapped.
    pub fn is_gpu_direct(&self, address: Address) -> Option<bool> {
        self.locked().world.memory.is_gpu_direct(address)
    }

    /// Begins to record a stream's work instead of running it, in relaxed mode.
    pub fn begin_capture(&self, device: DeviceId, stream: Stream) -> Result<()> {
        let context = self.context(device);
        self.ask(Verb::CaptureState, |state| state.begin_capture(context, stream))
    }

    /// Ends a capture on the stream that it began on. [`glake_device::DriverError::Failed`] with CUDA's number where it was broken.
    pub fn end_capture(&self, device: DeviceId, stream: Stream) -> Result<Graph> {
        let context = self.context(device);
        self.ask(Verb::CaptureState, |state| state.end_capture(context, stream))
    }

    /// Enqueues what a capture recorded.
    pub fn launch_graph(&self, graph: &Graph, device: DeviceId, stream: Stream) -> Result<()> {
        let context = self.context(device);
        self.ask_on(Verb::Launch, context, stream, |state| state.launch_graph(graph, context, stream))?;
        self.server.wake.notify_all();
        Ok(())
    }
}
