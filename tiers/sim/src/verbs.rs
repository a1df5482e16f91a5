//! Verbs of [`Driver`], each in a line or two over the state.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use glake_units::Bytes;

use super::arena::Kind;
use super::context::{ContextId, ContextKind};
use super::denial::{Checked, Denial};
use super::kernel::{KernelRequest, Request};
use super::order::Order;
use super::resolve::{Piece, Use};
use super::simulator::Simulator;
use super::state::State;
use super::system;
use glake_device::{
    Access, Address, CaptureState, Compare, CopyDevices, CopyRequest, DeviceId, DeviceInfo, Driver,
    DriverError, Event, EventKind, ExtentProperties, Handle, Kernel, LaunchRequest, MemoryInfo, Module,
    ModuleSource, Place, PointerAttributes, Priority, Refusal, Result, Stream, StreamId, Usage, Verb,
};

/// Time to set access to one mapping of any size while copies leave the GPU over its link: the call waits until their writes have arrived.
/// 1.06 ms on an H100, and 0.02 ms without such copies.
const FLUSH: Duration = Duration::from_micros(1060);

impl Driver for Simulator {
    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        Ok(self.infos().to_vec())
    }

    fn memory_info(&self, device: DeviceId) -> Result<MemoryInfo> {
        let (free, total) = self.ask(Verb::MemoryInfo, |state| state.world.memory.info(device))?;
        Ok(MemoryInfo { free, total })
    }

    fn granularity(&self, properties: ExtentProperties) -> Result<Bytes> {
        self.ask(Verb::Granularity, |state| state.world.memory.granularity(properties))
    }

    fn reserve(&self, size: Bytes) -> Result<Address> {
        self.ask(Verb::Reserve, |state| state.world.memory.space.reserve(size.get()))
    }

    unsafe fn unreserve(&self, start: Address, size: Bytes) -> Result<()> {
        self.ask(Verb::Unreserve, |state| state.world.memory.space.unreserve(start.0, size.get()))
    }

    fn create(&self, size: Bytes, properties: ExtentProperties) -> Result<Handle> {
        self.ask(Verb::Create, |state| {
            let context = match properties.place {
                Place::Gpu(device) => Some(self.context(device)),
                Place::HostNuma(_) => None,
            };
            context.map_or(Ok(()), |context| state.use_context(context))?;
            let handle = state.world.memory.create(size.get(), properties)?;
            if let Some(context) = context {
                state.world.memory.note_made(handle, context);
            }
            Ok(handle)
        })
    }

    unsafe fn release(&self, handle: Handle) -> Result<()> {
        self.ask(Verb::Release, |state| state.world.memory.release(handle))
    }

    unsafe fn map(&self, start: Address, size: Bytes, handle: Handle) -> Result<()> {
        self.ask(Verb::Map, |state| state.world.memory.map(start.0, size.get(), handle))
    }

    unsafe fn unmap(&self, start: Address, size: Bytes) -> Result<()> {
        self.ask(Verb::Unmap, |state| state.world.memory.unmap(start.0, size.get()))
    }

    unsafe fn set_access(&self, start: Address, size: Bytes, access: &[Access]) -> Result<()> {
        let set = |state: &mut State| state.world.memory.set_access(start.0, size.get(), access);
        let mappings = self.ask(Verb::SetAccess, set)?;
        for _ in 0..mappings {
            if !self.locked().is_any_leaving(access) {
                break;
            }
            self.advance(FLUSH);
        }
        Ok(())
    }

    fn export(&self, handle: Handle) -> Result<OwnedFd> {
        self.ask(Verb::Export, |state| state.world.memory.export(handle))
    }

    fn import(&self, shared: BorrowedFd<'_>) -> Result<Handle> {
        self.ask(Verb::Import, |state| state.world.memory.import(shared))
    }

    fn alloc_plain(&self, device: DeviceId, size: Bytes) -> Result<Address> {
        let context = self.context(device);
        self.ask(Verb::AllocPlain, |state| {
            state.world.memory.device(device)?;
            state.use_context(context)?;
            let start = state.world.memory.alloc(Kind::Plain, device, size.get())?;
            state.world.memory.note_made_at(start, context);
            Ok(start)
        })
    }

    unsafe fn free_plain(&self, device: DeviceId, start: Address) -> Result<()> {
        let context = self.context(device);
        self.ask(Verb::FreePlain, |state| state.no_capture(context))?;
        self.wait_for(Verb::FreePlain, |state| Ok(state.points_of(context)))?;
        self.ask(Verb::FreePlain, |state| state.world.memory.free(start))
    }

    unsafe fn copy(&self, device: DeviceId, request: CopyRequest, stream: Stream) -> Result<()> {
        self.enqueue(Verb::Copy, device, stream, Request::Copy(vec![request]))
    }

    unsafe fn copy_on(&self, request: CopyRequest, stream: Stream) -> Result<()> {
        let context = self.context_of(Verb::Copy, stream)?;
        if context.kind.is_own() != self.context(context.device).kind.is_own() {
            return Err(Denial::Refused(Address(0), Refusal::UnknownHandle).of(Verb::Copy));
        }
        self.enqueue_in(Verb::Copy, context, stream, Request::Copy(vec![request]))
    }

    unsafe fn copy_between(
        &self,
        device: DeviceId,
        request: CopyRequest,
        owners: CopyDevices,
        stream: Stream,
    ) -> Result<()> {
        let verb = Verb::CopyBetween;
        [owners.to, owners.from].into_iter().try_for_each(|owner| {
            self.ask(verb, |state| {
                state.world.memory.device(owner)?;
                state.use_context(self.context(owner))
            })
        })?;
        self.enqueue(verb, device, stream, Request::CopyBetween(request, owners))
    }

    unsafe fn copy_batch(&self, device: DeviceId, requests: &[CopyRequest], stream: Stream) -> Result<()> {
        self.enqueue(Verb::CopyBatch, device, stream, Request::Copy(requests.to_vec()))
    }

    unsafe fn fill(
        &self,
        device: DeviceId,
        start: Address,
        size: Bytes,
        byte: u8,
        stream: Stream,
    ) -> Result<()> {
        self.enqueue(Verb::Fill, device, stream, Request::Fill { start, size, byte })
    }

    fn read_now(&self, device: DeviceId, from: Address, into: &mut [u8]) -> Result<()> {
        let context = self.context(device);
        self.ask(Verb::ReadNow, |state| {
            state.use_context(context)?;
            let pieces = state.touch_now(context, from, into.len() as u64, Use::Read)?;
            let mut rest = into;
            for piece in pieces {
                let (part, next) = rest.split_at_mut(piece.size as usize);
                // SAFETY: the piece is device or registered memory, which stays in place under the lock.
                unsafe { system::read_bytes(piece.pointer, part) };
                rest = next;
            }
            Ok(())
        })
    }

    unsafe fn write_now(&self, device: DeviceId, to: Address, bytes: &[u8]) -> Result<()> {
        let context = self.context(device);
        self.ask(Verb::WriteNow, |state| {
            state.use_context(context)?;
            let pieces = state.touch_now(context, to, bytes.len() as u64, Use::Write)?;
            let mut rest = bytes;
            for piece in pieces {
                let (part, next) = rest.split_at(piece.size as usize);
                // SAFETY: as for reads, and the caller owns the range.
                unsafe { system::write_bytes(piece.pointer, part) };
                rest = next;
            }
            Ok(())
        })
    }

    fn stream_create(&self, device: DeviceId, _: Priority) -> Result<Stream> {
        let context = self.context(device);
        self.ask(Verb::StreamCreate, |state| state.add_stream(context, false))
    }

    unsafe fn stream_destroy(&self, device: DeviceId, stream: Stream) -> Result<()> {
        let context = self.context(device);
        self.ask(Verb::StreamDestroy, |state| state.remove_stream(context, stream))
    }

    fn stream_id(&self, device: DeviceId, stream: Stream) -> Result<StreamId> {
        let context = self.context(device);
        self.ask(Verb::StreamId, |state| state.lane(context, stream).map(StreamId))
    }

    fn stream_device(&self, stream: Stream) -> Result<DeviceId> {
        self.context_of(Verb::StreamDevice, stream).map(|context| context.device)
    }

    fn stream_synchronize(&self, device: DeviceId, stream: Stream) -> Result<()> {
        let context = self.context(device);
        let verb = Verb::StreamSynchronize;
        let lane = self.ask(verb, |state| {
            let lane = state.lane(context, stream)?;
            state.not_capturing(lane).map(|()| lane)
        })?;
        self.wait_for(verb, |state| {
            let mut points = state.implied_points(lane);
            points.push(state.timeline.last(lane));
            Ok(points)
        })?;
        self.locked().streams.observe_lane(lane);
        self.stray(verb, context)
    }

    fn stream_wait_event(&self, device: DeviceId, stream: Stream, event: Event) -> Result<()> {
        let context = self.context(device);
        self.ask_on(Verb::StreamWaitEvent, context, stream, |state| state.wait_event(context, stream, event))
    }

    unsafe fn stream_wait_value(
        &self,
        device: DeviceId,
        stream: Stream,
        address: Address,
        value: u32,
        compare: Compare,
    ) -> Result<()> {
        let request = Request::WaitValue { address, value, compare };
        self.enqueue(Verb::StreamWaitValue, device, stream, request)
    }

    unsafe fn stream_write_value(
        &self,
        device: DeviceId,
        stream: Stream,
        address: Address,
        value: u32,
    ) -> Result<()> {
        self.enqueue(Verb::StreamWriteValue, device, stream, Request::WriteValue { address, value })
    }

    fn capture_state(&self, device: DeviceId, stream: Stream) -> Result<CaptureState> {
        let context = self.context(device);
        self.ask(Verb::CaptureState, |state| state.capture_state(context, stream))
    }

    fn event_create(&self, device: DeviceId, kind: EventKind) -> Result<Event> {
        let context = self.context(device);
        self.ask(Verb::EventCreate, |state| {
            state.use_context(context)?;
            Ok(state.world.events.create(context, kind == EventKind::Timed))
        })
    }

    unsafe fn event_destroy(&self, device: DeviceId, event: Event) -> Result<()> {
        let context = self.context(device);
        self.ask(Verb::EventDestroy, |state| {
            state.world.events.destroy(context, event)?;
            // The object is destroyed even if the context is lost.
            state.alive(context)
        })
    }

    fn event_record(&self, device: DeviceId, event: Event, stream: Stream) -> Result<()> {
        let context = self.context(device);
        self.ask_on(Verb::EventRecord, context, stream, |state| state.record_event(context, event, stream))
    }

    fn event_record_context(&self, device: DeviceId, event: Event) -> Result<()> {
        let context = self.context(device);
        self.ask_in(Verb::EventRecordContext, context, |state| state.record_context(context, event))
    }

    fn event_query(&self, device: DeviceId, event: Event) -> Result<bool> {
        let context = self.context(device);
        self.ask_in(Verb::EventQuery, context, |state| state.query(context, event))
    }

    fn event_synchronize(&self, device: DeviceId, event: Event) -> Result<()> {
        let context = self.context(device);
        let verb = Verb::EventSynchronize;
        let points = self.ask_in(verb, context, |state| state.event_points(context, event))?;
        self.wait_for(verb, |_| Ok(points.0))?;
        self.locked().streams.observe(&points.1);
        self.stray(verb, context)
    }

    fn event_elapsed(&self, device: DeviceId, from: Event, to: Event) -> Result<f64> {
        let context = self.context(device);
        self.ask_in(Verb::EventElapsed, context, |state| state.elapsed(context, from, to))
    }

    fn context_synchronize(&self, device: DeviceId) -> Result<()> {
        let context = self.context(device);
        let verb = Verb::ContextSynchronize;
        let (points, clock) = self.ask(verb, |state| {
            state.world.memory.device(device)?;
            state.alive(context)?;
            state.no_capture(context)?;
            Ok((state.points_of(context), state.streams.clock_of(context)))
        })?;
        self.wait_for(verb, |_| Ok(points))?;
        self.locked().streams.observe(&clock);
        self.stray(verb, context)
    }

    fn own_contexts(&self) -> Result<Arc<dyn Driver>> {
        Ok(Arc::new(self.own()))
    }

    fn primary_of(&self, stream: Stream) -> Result<Option<DeviceId>> {
        let context = self.context_of(Verb::PrimaryOf, stream)?;
        let current = self.locked().current();
        let primary = |context: ContextId| context.kind == ContextKind::Primary;
        Ok((primary(current) && primary(context)).then_some(context.device))
    }

    fn has_context(&self, device: DeviceId) -> Result<bool> {
        let context = self.context(device);
        self.ask(Verb::HasContext, |state| state.has_context(context))
    }

    fn release_context(&self, device: DeviceId) -> Result<()> {
        let verb = Verb::ReleaseContext;
        let context = self.context(device);
        let (points, clock) = self.ask(verb, |state| {
            state.may_release(context)?;
            Ok((state.points_of(context), state.streams.clock_of(context)))
        })?;
        self.wait_for(verb, |_| Ok(points))?;
        self.ask(verb, |state| {
            state.streams.observe(&clock);
            state.release_context(context)
        })
    }

    fn module_load(&self, device: DeviceId, source: &ModuleSource) -> Result<Module> {
        let context = self.context(device);
        self.ask(Verb::ModuleLoad, |state| {
            state.use_context(context)?;
            Ok(state.modules.load(context, source.host))
        })
    }

    unsafe fn module_unload(&self, device: DeviceId, module: Module) -> Result<()> {
        let context = self.context(device);
        self.ask(Verb::ModuleUnload, |state| {
            state.modules.unload(context, module)?;
            state.alive(context)
        })
    }

    fn kernel_find(&self, device: DeviceId, module: Module, name: &str) -> Result<Kernel> {
        let context = self.context(device);
        self.ask_in(Verb::KernelFind, context, |state| state.modules.find(context, module, name))
    }

    unsafe fn launch(&self, device: DeviceId, request: &LaunchRequest<'_>, stream: Stream) -> Result<()> {
        let context = self.context(device);
        let kernel =
            self.ask_in(Verb::Launch, context, |state| state.modules.get(context, request.kernel))?;
        if request.grid.iter().chain(&request.block).any(|count| *count == 0) {
            let reason = Refusal::InvalidValue;
            return Err(DriverError::Refused { verb: Verb::Launch, address: Address(0), reason });
        }
        let arguments = request.arguments.to_vec();
        let (mut reads, mut writes) = (Vec::new(), Vec::new());
        request.touches.each(&mut |usage, touch| match usage {
            Usage::Read => reads.push(touch),
            Usage::Write => writes.push(touch),
        });
        let kernel = KernelRequest {
            reads,
            writes,
            duration: None,
            body: Arc::new(move |memory| (kernel.body)(memory, &arguments)),
        };
        self.enqueue(Verb::Launch, device, stream, Request::Kernel(kernel))
    }

    fn can_access_peer(&self, device: DeviceId, peer: DeviceId) -> Result<bool> {
        self.ask(Verb::CanAccessPeer, |state| {
            state.world.memory.device(device)?;
            state.world.memory.device(peer)?;
            Ok(device != peer)
        })
    }

    fn enable_peer_access(&self, device: DeviceId, peer: DeviceId) -> Result<()> {
        self.ask(Verb::EnablePeerAccess, |state| {
            state.world.memory.enable_peer_access(self.context(device), peer)?;
            state.use_context(self.context(device))?;
            state.use_context(self.context(peer))
        })
    }

    fn pointer_attributes(&self, address: Address) -> Result<PointerAttributes> {
        self.ask(Verb::PointerAttributes, |state| {
            let memory = &state.world.memory;
            Ok(PointerAttributes { kind: memory.kind(address), range: memory.range(address) })
        })
    }

    unsafe fn host_register(&self, start: Address, size: Bytes) -> Result<()> {
        self.ask(Verb::HostRegister, |state| state.world.memory.host_table.register(start.0, size.get()))
    }

    unsafe fn host_unregister(&self, start: Address) -> Result<()> {
        self.ask(Verb::HostUnregister, |state| state.world.memory.host_table.unregister(start.0))
    }
}

impl Simulator {
    /// Returns the error of a wait on the host: a lost context, or, to the first waiter, a kernel's stray access.
    fn stray(&self, verb: Verb, context: ContextId) -> Result<()> {
        let mut state = self.locked();
        state.alive(context).map_err(|denial| denial.of(verb))?;
        let strays = &mut state.world.strays;
        match strays.iter().position(|(of, _)| *of == context) {
            None => Ok(()),
            Some(at) => {
                let (_, address) = strays.swap_remove(at);
                Err(DriverError::Refused { verb, address, reason: Refusal::NoAccess })
            }
        }
    }
}

impl State {
    /// Resolves memory that the host itself reads or writes now: all work that uses it must have been observed as done.
    fn touch_now(&self, context: ContextId, start: Address, size: u64, usage: Use) -> Checked<Vec<Piece>> {
        let pieces = self.reachable(context, start, size, usage)?;
        if self.strict {
            for piece in &pieces {
                self.world.memory.check_order(piece, usage, &Order::default(), &self.streams.seen)?;
            }
        }
        Ok(pieces)
    }
}
