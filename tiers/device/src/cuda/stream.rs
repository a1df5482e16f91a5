//! Streams and events: creation, identity, records, waits and capture state.

use std::ptr::null_mut;

use cudarc::driver::sys;

use super::Cuda;
use super::api::Code;
use crate::{
    Address, CaptureState, Compare, DeviceId, DriverError, Event, EventKind, Priority, Result, Stream,
    StreamId, Verb,
};

/// Bit that marks an id derived from a stream's handle; CUDA's own ids are small numbers.
const STAND_IN: u64 = 1 << 55;

const NON_BLOCKING: u32 = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;

pub(super) fn raw(stream: Stream) -> sys::CUstream {
    stream.0 as usize as sys::CUstream
}

/// Returns whether a handle is a default stream, which each context has its own of.
pub(super) fn is_default(stream: Stream) -> bool {
    is_legacy(stream) || stream == Stream::PER_THREAD
}

pub(super) fn is_legacy(stream: Stream) -> bool {
    stream.0 == 0 || stream == Stream::LEGACY
}

pub(super) fn create(cuda: &Cuda, device: DeviceId, priority: Priority) -> Result<Stream> {
    let verb = Verb::StreamCreate;
    let _guard = cuda.make_current(device, verb)?;
    let stream = match priority {
        Priority::Normal => create_here(cuda, verb)?,
        Priority::High => create_first(cuda, verb)?,
    };
    cuda.slot(device)?.alive.streams.more();
    Ok(stream)
}

/// Creates a high-priority stream in the current context.
fn create_first(cuda: &Cuda, verb: Verb) -> Result<Stream> {
    let (mut least, mut greatest) = (0, 0);
    // SAFETY: out-parameters of this frame.
    unsafe { cuda.api.cuCtxGetStreamPriorityRange(&mut least, &mut greatest) }.of(verb)?;
    let mut stream = null_mut();
    // SAFETY: an out-parameter of this frame.
    unsafe { cuda.api.cuStreamCreateWithPriority(&mut stream, NON_BLOCKING, greatest) }.of(verb)?;
    Ok(Stream(stream as u64))
}

/// Creates a normal-priority stream in the current context.
pub(super) fn create_here(cuda: &Cuda, verb: Verb) -> Result<Stream> {
    let mut stream = null_mut();
    // SAFETY: an out-parameter of this frame.
    unsafe { cuda.api.cuStreamCreate(&mut stream, NON_BLOCKING) }.of(verb)?;
    Ok(Stream(stream as u64))
}

/// # Safety
/// As [`crate::Driver::stream_destroy`].
pub(super) unsafe fn destroy(cuda: &Cuda, device: DeviceId, stream: Stream) -> Result<()> {
    let _guard = cuda.make_current(device, Verb::StreamDestroy)?;
    // SAFETY: the caller's promise.
    unsafe { cuda.api.cuStreamDestroy_v2(raw(stream)) }.of(Verb::StreamDestroy)?;
    cuda.slot(device)?.alive.streams.less();
    Ok(())
}

/// Returns CUDA's id of a stream. For default streams the id is unique only within a context; the device in the upper bits makes it unique
/// in the process.
pub(super) fn id(cuda: &Cuda, device: DeviceId, stream: Stream) -> Result<StreamId> {
    let _guard = cuda.make_current(device, Verb::StreamId)?;
    let own = u64::from(device.0) << 56;
    if !is_legacy(stream) && capture_here(cuda, stream, Verb::StreamId)? != CaptureState::None {
        // The query would invalidate the capture.
        return match stream {
            Stream::PER_THREAD => {
                Err(DriverError::Capturing { verb: Verb::StreamId, code: DriverError::CAPTURING })
            }
            Stream(handle) => Ok(StreamId(STAND_IN | handle & !(0xff << 56) ^ own)),
        };
    }
    let mut id = 0;
    // SAFETY: an out-parameter of this frame; the stream is the caller's to name.
    unsafe { cuda.api.cuStreamGetId(raw(stream), &mut id) }.of(Verb::StreamId)?;
    Ok(StreamId(id ^ own))
}

/// Returns the device of a stream. Default handles have no context of their own: they belong to the current one.
pub(super) fn device(cuda: &Cuda, stream: Stream) -> Result<DeviceId> {
    let verb = Verb::StreamDevice;
    let mut context = cuda.current(verb)?;
    // Every capture mode allows the query.
    let _guard = if context.is_null() { Some(cuda.make_any_current(verb)?) } else { None };
    if context.is_null() || !is_default(stream) {
        // SAFETY: an out-parameter of this frame; the stream is the caller's to name.
        unsafe { cuda.api.cuStreamGetCtx(raw(stream), &mut context) }.of(verb)?;
    }
    cuda.device_of(context, verb)
}

/// Returns the primary context that a call on this stream would run in. `None` if the stream belongs to another context than the current
/// one: then neither decides. A thread without a current context uses the one that [`device`] returns.
pub(super) fn primary_of(cuda: &Cuda, stream: Stream) -> Result<Option<DeviceId>> {
    let verb = Verb::PrimaryOf;
    let current = cuda.current(verb)?;
    if current.is_null() && is_default(stream) {
        return device(cuda, stream).map(Some);
    }
    let own = if current.is_null() { None } else { cuda.primary_device(current, verb)? };
    if is_default(stream) || !current.is_null() && own.is_none() {
        return Ok(own);
    }
    let mut of = null_mut();
    // Every capture mode allows the query.
    let _guard = if current.is_null() { Some(cuda.make_any_current(verb)?) } else { None };
    // SAFETY: an out-parameter of this frame; the stream is the caller's to name.
    unsafe { cuda.api.cuStreamGetCtx(raw(stream), &mut of) }.of(verb)?;
    if of == current { Ok(own) } else { cuda.primary_device(of, verb) }
}

pub(super) fn synchronize(cuda: &Cuda, device: DeviceId, stream: Stream) -> Result<()> {
    let _guard = cuda.make_current(device, Verb::StreamSynchronize)?;
    // SAFETY: the stream is the caller's to name.
    unsafe { cuda.api.cuStreamSynchronize(raw(stream)) }.of(Verb::StreamSynchronize)
}

pub(super) fn wait_event(cuda: &Cuda, device: DeviceId, stream: Stream, event: Event) -> Result<()> {
    let _guard = cuda.make_current_for(device, stream, Verb::StreamWaitEvent)?;
    // SAFETY: stream and event are the caller's to name.
    unsafe { cuda.api.cuStreamWaitEvent(raw(stream), raw_event(event), 0) }.of(Verb::StreamWaitEvent)
}

/// # Safety
/// As [`crate::Driver::stream_wait_value`].
pub(super) unsafe fn wait_value(
    cuda: &Cuda,
    device: DeviceId,
    stream: Stream,
    address: Address,
    value: u32,
    compare: Compare,
) -> Result<()> {
    let _guard = cuda.make_current(device, Verb::StreamWaitValue)?;
    let flags = match compare {
        Compare::AtLeast => sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ,
        Compare::Equal => sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_EQ,
    };
    // SAFETY: the caller's promise.
    unsafe { cuda.api.cuStreamWaitValue32_v2(raw(stream), address.0, value, flags as u32) }.at(
        Verb::StreamWaitValue,
        address,
        glake_units::Bytes::ZERO,
    )
}

/// # Safety
/// As [`crate::Driver::stream_write_value`].
pub(super) unsafe fn write_value(
    cuda: &Cuda,
    device: DeviceId,
    stream: Stream,
    address: Address,
    value: u32,
) -> Result<()> {
    let _guard = cuda.make_current(device, Verb::StreamWriteValue)?;
    // SAFETY: the caller's promise.
    unsafe { cuda.api.cuStreamWriteValue32_v2(raw(stream), address.0, value, 0) }.at(
        Verb::StreamWriteValue,
        address,
        glake_units::Bytes::ZERO,
    )
}

pub(super) fn capture_state(cuda: &Cuda, device: DeviceId, stream: Stream) -> Result<CaptureState> {
    let _guard = cuda.make_current(device, Verb::CaptureState)?;
    capture_here(cuda, stream, Verb::CaptureState)
}

/// Returns the capture state of a stream of the current context. Drivers before CUDA 12.3 have no capture ids and report 0 for each.
pub(super) fn capture_here(cuda: &Cuda, stream: Stream, verb: Verb) -> Result<CaptureState> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let mut id = 0;
    let (graph, nodes, edges, count) = (null_mut(), null_mut(), null_mut(), null_mut());
    // SAFETY: out-parameters of this frame; the last four are optional.
    let mut code = unsafe {
        cuda.api.cuStreamGetCaptureInfo_v3(raw(stream), &mut status, &mut id, graph, nodes, edges, count)
    };
    if code == Code::MISSING {
        // SAFETY: an out-parameter of this frame.
        code = unsafe { cuda.api.cuStreamIsCapturing(raw(stream), &mut status) };
    }
    code.of(verb)?;
    Ok(match status {
        sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => CaptureState::None,
        sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE => CaptureState::Active(id),
        sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED => CaptureState::Invalidated,
    })
}

const DISABLE_TIMING: u32 = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
const BLOCKING_SYNC: u32 = sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32;

pub(super) fn raw_event(event: Event) -> sys::CUevent {
    event.0 as usize as sys::CUevent
}

pub(super) fn create_event(cuda: &Cuda, device: DeviceId, kind: EventKind) -> Result<Event> {
    let _guard = cuda.make_current(device, Verb::EventCreate)?;
    let flags = match kind {
        EventKind::Plain => DISABLE_TIMING,
        EventKind::Timed => 0,
        EventKind::Sleeping => DISABLE_TIMING | BLOCKING_SYNC,
    };
    let mut event = null_mut();
    // SAFETY: an out-parameter of this frame.
    unsafe { cuda.api.cuEventCreate(&mut event, flags) }.of(Verb::EventCreate)?;
    cuda.slot(device)?.alive.events.more();
    Ok(Event(event as u64))
}

/// # Safety
/// As [`crate::Driver::event_destroy`].
pub(super) unsafe fn destroy_event(cuda: &Cuda, device: DeviceId, event: Event) -> Result<()> {
    let _guard = cuda.make_current(device, Verb::EventDestroy)?;
    // SAFETY: the caller's promise.
    unsafe { cuda.api.cuEventDestroy_v2(raw_event(event)) }.of(Verb::EventDestroy)?;
    cuda.slot(device)?.alive.events.less();
    Ok(())
}

pub(super) fn record(cuda: &Cuda, device: DeviceId, event: Event, stream: Stream) -> Result<()> {
    let _guard = cuda.make_current_for(device, stream, Verb::EventRecord)?;
    // SAFETY: stream and event are the caller's to name.
    unsafe { cuda.api.cuEventRecord(raw_event(event), raw(stream)) }.of(Verb::EventRecord)
}

pub(super) fn record_context(cuda: &Cuda, device: DeviceId, event: Event) -> Result<()> {
    let verb = Verb::EventRecordContext;
    let _guard = cuda.make_current(device, verb)?;
    let (context, _hold) = cuda.keep(device, verb)?;
    // SAFETY: a retained context, which is kept; the event is the caller's to name.
    unsafe { cuda.api.cuCtxRecordEvent(context, raw_event(event)) }.of(verb)
}

pub(super) fn query(cuda: &Cuda, device: DeviceId, event: Event) -> Result<bool> {
    let _guard = cuda.make_current(device, Verb::EventQuery)?;
    // SAFETY: the event is the caller's to name.
    match unsafe { cuda.api.cuEventQuery(raw_event(event)) } {
        Code::NOT_READY => Ok(false),
        code => code.of(Verb::EventQuery).map(|()| true),
    }
}

pub(super) fn synchronize_event(cuda: &Cuda, device: DeviceId, event: Event) -> Result<()> {
    let _guard = cuda.make_current(device, Verb::EventSynchronize)?;
    // SAFETY: the event is the caller's to name.
    unsafe { cuda.api.cuEventSynchronize(raw_event(event)) }.of(Verb::EventSynchronize)
}

pub(super) fn elapsed(cuda: &Cuda, device: DeviceId, from: Event, to: Event) -> Result<f64> {
    let _guard = cuda.make_current(device, Verb::EventElapsed)?;
    let mut milliseconds = 0.0;
    // SAFETY: an out-parameter of this frame; the events are the caller's to name.
    unsafe { cuda.api.cuEventElapsedTime_v2(&mut milliseconds, raw_event(from), raw_event(to)) }
        .of(Verb::EventElapsed)?;
    Ok(f64::from(milliseconds) * 1000.0)
}

pub(super) fn context_synchronize(cuda: &Cuda, device: DeviceId) -> Result<()> {
    // Creating a context would take memory of an unused device.
    let Some(_guard) = cuda.make_current_if_made(device, Verb::ContextSynchronize)? else { return Ok(()) };
    // SAFETY: a call without parameters, in the context that was entered.
    unsafe { cuda.api.cuCtxSynchronize() }.of(Verb::ContextSynchronize)
}
