//! Checks of contexts: created by the first call that needs one, released on request, and created again.

use glake_units::Bytes;

use super::harness::Harness;
use super::outcome::{Failure, Outcome, Verdict, all, same};
use super::{Check, GPU};
use glake_device::{DeviceId, DriverError, EventKind, Living, PointerKind, Stream};

pub(super) const CHECKS: &[Check] = &[
    Check { name: "asking for a context or for memory makes none, synchronizing neither", run: asked },
    Check { name: "a context is given back when nothing lives in it, and made again", run: given_back },
    Check { name: "what lives in a context keeps it", run: kept },
    Check { name: "mapped and pinned memory outlast the context of a peer", run: outlasted },
    Check { name: "work in contexts of our own is no work of the program's", run: own_work },
    Check { name: "an event of one context orders a stream of another", run: own_events },
    Check { name: "a context of our own is given back alone", run: own_given_back },
    Check { name: "mapped memory is reached by a device in all of its contexts", run: own_reach },
    Check { name: "a stream knows whether its context is a primary one", run: primary },
];

/// Returns the last device, the likeliest to have no other user; `None` if there is only one device.
fn last(harness: &Harness) -> glake_device::Result<Option<DeviceId>> {
    Ok(harness.driver().devices()?.into_iter().map(|info| info.id).rfind(|id| *id != GPU))
}

const ALONE: Verdict = Verdict::Skipped("there is one device only");
const HELD: Verdict = Verdict::Skipped("the program, or what it made, holds the context");

/// Releases a context; returns false if something else holds it.
fn gives_back(harness: &Harness, device: DeviceId) -> Result<bool, Failure> {
    match harness.driver().release_context(device) {
        Ok(()) => Ok(!harness.driver().has_context(device)?),
        Err(DriverError::ContextInUse { .. }) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn asked(harness: &Harness) -> Outcome {
    let Some(device) = last(harness)? else { return Ok(ALONE) };
    if !gives_back(harness, device)? {
        return Ok(HELD);
    }
    harness.driver().context_synchronize(device)?;
    same("after it was synchronized", harness.driver().has_context(device)?, false)?;
    harness.driver().release_context(device)?;
    harness.driver().memory_info(device)?;
    same("after its memory was asked for", harness.driver().has_context(device)?, false)?;
    let stream = harness.stream(device)?;
    same("after it was used", harness.driver().has_context(device)?, true)?;
    harness.destroy_stream(device, stream)?;
    Ok(Verdict::Passed)
}

fn given_back(harness: &Harness) -> Outcome {
    let Some(device) = last(harness)? else { return Ok(ALONE) };
    if !gives_back(harness, device)? {
        return Ok(HELD);
    }
    let size = Bytes::kib(256);
    let host = harness.pinned(size)?;
    let memory = harness.memory_for(harness.unit()?, &[GPU, device])?;
    for byte in 1..4 {
        harness.set_host_bytes(host, &vec![byte; size.get() as usize]);
        let stream = harness.stream(device)?;
        let event = harness.event(device, EventKind::Plain)?;
        harness.copy(device, memory, host, size, stream)?;
        harness.driver().event_record(device, event, stream)?;
        harness.driver().event_synchronize(device, event)?;
        all("copied by a context that was made again", &harness.read(memory, size)?, byte)?;
        harness.destroy_event(device, event)?;
        harness.destroy_stream(device, stream)?;
        harness.driver().release_context(device)?;
        same("after it was given back", harness.driver().has_context(device)?, false)?;
    }
    Ok(Verdict::Passed)
}

fn kept(harness: &Harness) -> Outcome {
    let Some(device) = last(harness)? else { return Ok(ALONE) };
    if !gives_back(harness, device)? {
        return Ok(HELD);
    }
    let refused = |what: &'static str, living: Living| match harness.driver().release_context(device) {
        Err(DriverError::ContextInUse { living: found, .. }) => same(what, found, living),
        Err(error) => Err(error.into()),
        Ok(()) => Err(Failure::wrong("a context was given back although something lives in it", what)),
    };
    let stream = harness.stream(device)?;
    refused("a stream", Living { streams: 1, ..Living::default() })?;
    let event = harness.event(device, EventKind::Timed)?;
    refused("and an event", Living { streams: 1, events: 1, ..Living::default() })?;
    harness.destroy_stream(device, stream)?;
    harness.destroy_event(device, event)?;
    let handle = harness.create(harness.unit()?, Harness::properties(device))?;
    refused("memory", Living { extents: 1, ..Living::default() })?;
    harness.release(handle)?;
    harness.driver().release_context(device)?;
    same("after all has gone", harness.driver().has_context(device)?, false)?;
    Ok(Verdict::Passed)
}

fn outlasted(harness: &Harness) -> Outcome {
    let Some(device) = last(harness)? else { return Ok(ALONE) };
    let (unit, size) = (harness.unit()?, Bytes::kib(256));
    let before = harness.memory_for(unit, &[GPU, device])?;
    let host = harness.pinned(size)?;
    if !gives_back(harness, device)? {
        return Ok(HELD);
    }
    // Granted while the peer has no context, without creating one.
    let during = harness.memory_for(unit, &[GPU, device])?;
    same("after it was given access", harness.driver().has_context(device)?, false)?;
    same("pinned memory", harness.driver().pointer_attributes(host)?.kind, PointerKind::Pinned)?;
    harness.set_host_bytes(host, &vec![0x3c; size.get() as usize]);
    let stream = harness.stream(device)?;
    for memory in [before, during] {
        harness.copy(device, memory, host, size, stream)?;
        harness.driver().stream_synchronize(device, stream)?;
        all("relayed by the new context", &harness.read(memory, size)?, 0x3c)?;
    }
    Ok(Verdict::Passed)
}

fn own_work(harness: &Harness) -> Outcome {
    let own = harness.own()?;
    let (theirs, ours) = (harness.stream(GPU)?, own.stream(GPU)?);
    let event = harness.event(GPU, EventKind::Plain)?;
    let flag = own.flag()?;
    own.hold(ours, flag)?;
    // Neither the synchronization of the context nor its legacy stream waits for held work.
    harness.driver().event_record(GPU, event, theirs)?;
    harness.driver().context_synchronize(GPU)?;
    same("an event of the program", harness.driver().event_query(GPU, event)?, true)?;
    for stream in [Stream::LEGACY, Stream::PER_THREAD] {
        harness.driver().stream_synchronize(GPU, stream)?;
    }
    match harness.driver().event_record_context(GPU, event) {
        Err(DriverError::Unsupported { .. }) => {}
        recorded => {
            recorded?;
            harness.driver().event_synchronize(GPU, event)?;
        }
    }
    own.raise(flag);
    // The same holds in the other direction, for the program's held work.
    let flag = harness.flag()?;
    harness.hold(theirs, flag)?;
    own.driver().context_synchronize(GPU)?;
    harness.raise(flag);
    harness.driver().context_synchronize(GPU)?;
    Ok(Verdict::Passed)
}

fn own_events(harness: &Harness) -> Outcome {
    let own = harness.own()?;
    let (unit, size) = (harness.unit()?, Bytes::kib(256));
    let (from, to) = (harness.memory(unit)?, harness.memory(unit)?);
    let (theirs, ours) = (harness.stream(GPU)?, own.stream(GPU)?);
    let (there, back) = (harness.event(GPU, EventKind::Plain)?, own.event(GPU, EventKind::Plain)?);
    for byte in 1..4 {
        let flag = harness.flag()?;
        harness.hold(theirs, flag)?;
        harness.fill(from, size, byte, theirs)?;
        harness.driver().event_record(GPU, there, theirs)?;
        own.driver().stream_wait_event(GPU, ours, there)?;
        own.copy(GPU, to, from, size, ours)?;
        own.driver().event_record(GPU, back, ours)?;
        harness.driver().stream_wait_event(GPU, theirs, back)?;
        harness.fill(from, size, 0xee, theirs)?;
        same("behind held work", own.driver().event_query(GPU, back)?, false)?;
        harness.raise(flag);
        harness.driver().stream_synchronize(GPU, theirs)?;
        all("what our stream copied in between", &harness.read(to, size)?, byte)?;
    }
    Ok(Verdict::Passed)
}

fn own_given_back(harness: &Harness) -> Outcome {
    let (own, other) = (harness.own()?, harness.own()?);
    let driver = own.driver();
    let held = harness.driver().has_context(GPU)?;
    same("before it is used", driver.has_context(GPU)?, false)?;
    driver.context_synchronize(GPU)?;
    driver.release_context(GPU)?;
    same("after it was synchronized", driver.has_context(GPU)?, false)?;
    for _ in 0..2 {
        let stream = own.stream(GPU)?;
        same("after it was used", driver.has_context(GPU)?, true)?;
        same("another one of ours", other.driver().has_context(GPU)?, false)?;
        match driver.release_context(GPU) {
            Err(DriverError::ContextInUse { living: Living { streams: 1, .. }, .. }) => {}
            answer => return Err(Failure::wrong("with a stream in it", answer)),
        }
        own.destroy_stream(GPU, stream)?;
        driver.release_context(GPU)?;
        same("after it was given back", driver.has_context(GPU)?, false)?;
        same("the program's", harness.driver().has_context(GPU)?, held)?;
    }
    Ok(Verdict::Passed)
}

fn own_reach(harness: &Harness) -> Outcome {
    let own = harness.own()?;
    let size = Bytes::kib(256);
    let devices: Vec<DeviceId> = harness.driver().devices()?.into_iter().map(|info| info.id).collect();
    let memory = harness.memory_for(harness.unit()?, &devices)?;
    let host = harness.pinned(size)?;
    for (device, byte) in devices.iter().zip(1..) {
        harness.set_host_bytes(host, &vec![byte; size.get() as usize]);
        let stream = own.stream(*device)?;
        own.copy(*device, memory, host, size, stream)?;
        own.driver().stream_synchronize(*device, stream)?;
        all("copied by a context of our own", &harness.read(memory, size)?, byte)?;
        harness.set_host_bytes(host, &vec![0; size.get() as usize]);
        own.copy(*device, host, memory, size, stream)?;
        own.driver().stream_synchronize(*device, stream)?;
        all("copied back by it", &harness.host_bytes(host, size), byte)?;
    }
    Ok(Verdict::Passed)
}

fn primary(harness: &Harness) -> Outcome {
    let own = harness.own()?;
    for device in harness.driver().devices()? {
        let (theirs, ours) = (harness.stream(device.id)?, own.stream(device.id)?);
        same("a stream of the program", harness.driver().primary_of(theirs)?, Some(device.id))?;
        same("a stream of ours", harness.driver().primary_of(ours)?, None)?;
        same("the device of a stream of ours", harness.driver().stream_device(ours)?, device.id)?;
    }
    Ok(Verdict::Passed)
}
