//! The verbs of [`Driver`], each in a line or two over the state.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use glake_units::Bytes;

use super::denial::Checked;
use super::order::Order;
use super::request::{KernelRequest, Request};
use super::resolve::{Piece, Use};
use super::simulator::Simulator;
use super::state::State;
use super::system;
use crate::{
    Access, Address, CaptureState, Compare, CopyRequest, DeviceId, DeviceInfo, Driver, DriverError, Event,
    EventKind, ExtentProperties, Handle, Kernel, LaunchRequest, MemoryInfo, Module, ModuleSource, Place,
    PointerAttributes, Priority, Refusal, Result, Stream, StreamId, Usage, Verb,
};

impl Driver for Simulator {
    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        Ok(self.infos.clone())
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
            let handle = state.world.memory.create(size.get(), properties)?;
            match properties.place {
                Place::Gpu(device) => state.enter(device).map(|()| handle),
                Place::HostNuma(_) => Ok(handle),
            }
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
        self.ask(Verb::SetAccess, |state| state.world.memory.set_access(start.0, size.get(), access))
    }

    fn export(&self, handle: Handle) -> Result<OwnedFd> {
        self.ask(Verb::Export, |state| state.world.memory.export(handle))
    }

    fn import(&self, shared: BorrowedFd<'_>) -> Result<Handle> {
        self.ask(Verb::Import, |state| state.world.memory.import(shared))
    }

    unsafe fn copy(&self, device: DeviceId, request: CopyRequest, stream: Stream) -> Result<()> {
        self.enqueue(Verb::Copy, device, stream, Request::Copy(vec![request]))
    }

    unsafe fn copy_on(&self, request: CopyRequest, stream: Stream) -> Result<()> {
        let device = self.stream_device(stream)?;
        // SAFETY: the caller's promise is passed on.
        unsafe { self.copy(device, request, stream) }
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
        self.ask(Verb::ReadNow, |state| {
            state.enter(device)?;
            let pieces = state.touch_now(device, from, into.len() as u64, Use::Read)?;
            let mut rest = into;
            for piece in pieces {
                let (part, next) = rest.split_at_mut(piece.size as usize);
                // SAFETY: the piece is device or registered memory, which nothing takes away under the lock.
                unsafe { system::read_bytes(piece.pointer, part) };
                rest = next;
            }
            Ok(())
        })
    }

    unsafe fn write_now(&self, device: DeviceId, to: Address, bytes: &[u8]) -> Result<()> {
        self.ask(Verb::WriteNow, |state| {
            state.enter(device)?;
            let pieces = state.touch_now(device, to, bytes.len() as u64, Use::Write)?;
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
        self.ask(Verb::StreamCreate, |state| state.add_stream(device, false))
    }

    unsafe fn stream_destroy(&self, device: DeviceId, stream: Stream) -> Result<()> {
        self.ask(Verb::StreamDestroy, |state| state.remove_stream(device, stream))
    }

    fn stream_id(&self, device: DeviceId, stream: Stream) -> Result<StreamId> {
        self.ask(Verb::StreamId, |state| state.lane(device, stream).map(StreamId))
    }

    fn stream_device(&self, stream: Stream) -> Result<DeviceId> {
        self.ask(Verb::StreamDevice, |state| state.streams.device(stream))
    }

    fn stream_synchronize(&self, device: DeviceId, stream: Stream) -> Result<()> {
        let verb = Verb::StreamSynchronize;
        let lane = self.ask(verb, |state| {
            let lane = state.lane(device, stream)?;
            state.not_capturing(lane).map(|()| lane)
        })?;
        self.wait_for(verb, |state| {
            let mut points = state.implied_points(lane);
            points.push(state.timeline.last(lane));
            Ok(points)
        })?;
        self.locked().streams.observe_lane(lane);
        self.stray(verb, device)
    }

    fn stream_wait_event(&self, device: DeviceId, stream: Stream, event: Event) -> Result<()> {
        self.ask(Verb::StreamWaitEvent, |state| state.wait_event(device, stream, event))
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
        self.ask(Verb::CaptureState, |state| state.capture_state(device, stream))
    }

    fn event_create(&self, device: DeviceId, kind: EventKind) -> Result<Event> {
        self.ask(Verb::EventCreate, |state| {
            state.enter(device)?;
            Ok(state.world.events.create(device, kind == EventKind::Timed))
        })
    }

    unsafe fn event_destroy(&self, device: DeviceId, event: Event) -> Result<()> {
        self.ask(Verb::EventDestroy, |state| state.world.events.destroy(device, event))
    }

    fn event_record(&self, device: DeviceId, event: Event, stream: Stream) -> Result<()> {
        self.ask(Verb::EventRecord, |state| state.record_event(device, event, stream))
    }

    fn event_record_context(&self, device: DeviceId, event: Event) -> Result<()> {
        self.ask(Verb::EventRecordContext, |state| state.record_context(device, event))
    }

    fn event_query(&self, device: DeviceId, event: Event) -> Result<bool> {
        self.ask(Verb::EventQuery, |state| state.query(device, event))
    }

    fn event_synchronize(&self, device: DeviceId, event: Event) -> Result<()> {
        let verb = Verb::EventSynchronize;
        let points = self.ask(verb, |state| state.event_points(device, event))?;
        self.wait_for(verb, |_| Ok(points.0))?;
        self.locked().streams.observe(&points.1);
        self.stray(verb, device)
    }

    fn event_elapsed(&self, device: DeviceId, from: Event, to: Event) -> Result<f64> {
        self.ask(Verb::EventElapsed, |state| state.elapsed(device, from, to))
    }

    fn context_synchronize(&self, device: DeviceId) -> Result<()> {
        let verb = Verb::ContextSynchronize;
        let (points, clock) = self.ask(verb, |state| {
            state.world.memory.device(device)?;
            state.no_capture(device)?;
            Ok((state.points_of(device), state.streams.clock_of(device)))
        })?;
        self.wait_for(verb, |_| Ok(points))?;
        self.locked().streams.observe(&clock);
        self.stray(verb, device)
    }

    fn own_contexts(&self) -> Result<Arc<dyn Driver>> {
        Err(DriverError::Unsupported { verb: Verb::OwnContexts, code: DriverError::UNSUPPORTED })
    }

    fn primary_of(&self, stream: Stream) -> Result<Option<DeviceId>> {
        self.stream_device(stream).map(Some)
    }

    fn has_context(&self, device: DeviceId) -> Result<bool> {
        self.ask(Verb::HasContext, |state| state.has_context(device))
    }

    fn release_context(&self, device: DeviceId) -> Result<()> {
        let verb = Verb::ReleaseContext;
        let points = self.ask(verb, |state| {
            state.may_leave(device)?;
            Ok(state.points_of(device))
        })?;
        self.wait_for(verb, |_| Ok(points))?;
        self.ask(verb, |state| state.leave(device))
    }

    fn module_load(&self, device: DeviceId, source: &ModuleSource) -> Result<Module> {
        self.ask(Verb::ModuleLoad, |state| {
            state.enter(device)?;
            Ok(state.modules.load(device, source.host))
        })
    }

    unsafe fn module_unload(&self, device: DeviceId, module: Module) -> Result<()> {
        self.ask(Verb::ModuleUnload, |state| state.modules.unload(device, module))
    }

    fn kernel_find(&self, device: DeviceId, module: Module, name: &str) -> Result<Kernel> {
        self.ask(Verb::KernelFind, |state| state.modules.find(device, module, name))
    }

    unsafe fn launch(&self, device: DeviceId, request: &LaunchRequest<'_>, stream: Stream) -> Result<()> {
        let kernel = self.ask(Verb::Launch, |state| state.modules.get(device, request.kernel))?;
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
            state.world.memory.enable_peer_access(device, peer)?;
            state.enter(device)?;
            state.enter(peer)
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
    /// A kernel's stray touch, told to the first who waits for its device.
    fn stray(&self, verb: Verb, device: DeviceId) -> Result<()> {
        let mut state = self.locked();
        let strays = &mut state.world.strays;
        match strays.iter().position(|(of, _)| *of == device) {
            None => Ok(()),
            Some(at) => {
                let (_, address) = strays.swap_remove(at);
                Err(DriverError::Refused { verb, address, reason: Refusal::NoAccess })
            }
        }
    }
}

impl State {
    /// The pieces of memory that the host itself reads or writes now: everything that uses it must be seen done.
    fn touch_now(&self, device: DeviceId, start: Address, size: u64, usage: Use) -> Checked<Vec<Piece>> {
        let pieces = self.reachable(device, start, size, usage)?;
        if self.strict {
            for piece in &pieces {
                self.world.memory.check_order(piece, usage, &Order::default(), &self.streams.seen)?;
            }
        }
        Ok(pieces)
    }
}
