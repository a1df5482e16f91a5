//! Events: points of a stream or of a whole context.

use std::ptr::null_mut;

use cudarc::driver::sys;

use super::Cuda;
use super::code::Code;
use super::stream::raw;
use crate::{DeviceId, Event, EventKind, Result, Stream, Verb};

const DISABLE_TIMING: u32 = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
const BLOCKING_SYNC: u32 = sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32;

pub(super) fn raw_event(event: Event) -> sys::CUevent {
    event.0 as usize as sys::CUevent
}

pub(super) fn create(cuda: &Cuda, device: DeviceId, kind: EventKind) -> Result<Event> {
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
pub(super) unsafe fn destroy(cuda: &Cuda, device: DeviceId, event: Event) -> Result<()> {
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

pub(super) fn synchronize(cuda: &Cuda, device: DeviceId, event: Event) -> Result<()> {
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
