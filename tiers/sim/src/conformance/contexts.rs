//! Checks of contexts: made by the first call that runs in one, given back on request, and made again.

use glake_units::Bytes;

use super::ground::Ground;
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

/// The last device: others, and the program, are likeliest to do without it.
fn last(ground: &Ground) -> glake_device::Result<Option<DeviceId>> {
    Ok(ground.driver().devices()?.into_iter().map(|info| info.id).rfind(|id| *id != GPU))
}

const ALONE: Verdict = Verdict::Skipped("there is one device only");
const HELD: Verdict = Verdict::Skipped("the program, or what it made, holds the context");

/// Gives a context back; false where something else holds it.
fn gives_back(ground: &Ground, device: DeviceId) -> Result<bool, Failure> {
    match ground.driver().release_context(device) {
        Ok(()) => Ok(!ground.driver().has_context(device)?),
        Err(DriverError::ContextInUse { .. }) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn asked(ground: &Ground) -> Outcome {
    let Some(device) = last(ground)? else { return Ok(ALONE) };
    if !gives_back(ground, device)? {
        return Ok(HELD);
    }
    ground.driver().context_synchronize(device)?;
    same("after it was synchronized", ground.driver().has_context(device)?, false)?;
    ground.driver().release_context(device)?;
    ground.driver().memory_info(device)?;
    same("after its memory was asked for", ground.driver().has_context(device)?, false)?;
    let stream = ground.stream(device)?;
    same("after it was used", ground.driver().has_context(device)?, true)?;
    ground.destroy_stream(device, stream)?;
    Ok(Verdict::Passed)
}

fn given_back(ground: &Ground) -> Outcome {
    let Some(device) = last(ground)? else { return Ok(ALONE) };
    if !gives_back(ground, device)? {
        return Ok(HELD);
    }
    let size = Bytes::kib(256);
    let host = ground.pinned(size)?;
    let memory = ground.memory_for(ground.unit()?, &[GPU, device])?;
    for byte in 1..4 {
        ground.set_host_bytes(host, &vec![byte; size.get() as usize]);
        let stream = ground.stream(device)?;
        let event = ground.event(device, EventKind::Plain)?;
        ground.copy(device, memory, host, size, stream)?;
        ground.driver().event_record(device, event, stream)?;
        ground.driver().event_synchronize(device, event)?;
        all("copied by a context that was made again", &ground.read(memory, size)?, byte)?;
        ground.destroy_event(device, event)?;
        ground.destroy_stream(device, stream)?;
        ground.driver().release_context(device)?;
        same("after it was given back", ground.driver().has_context(device)?, false)?;
    }
    Ok(Verdict::Passed)
}

fn kept(ground: &Ground) -> Outcome {
    let Some(device) = last(ground)? else { return Ok(ALONE) };
    if !gives_back(ground, device)? {
        return Ok(HELD);
    }
    let refused = |what: &'static str, living: Living| match ground.driver().release_context(device) {
        Err(DriverError::ContextInUse { living: found, .. }) => same(what, found, living),
        Err(error) => Err(error.into()),
        Ok(()) => Err(Failure::wrong("a context was given back although something lives in it", what)),
    };
    let stream = ground.stream(device)?;
    refused("a stream", Living { streams: 1, ..Living::default() })?;
    let event = ground.event(device, EventKind::Timed)?;
    refused("and an event", Living { streams: 1, events: 1, ..Living::default() })?;
    ground.destroy_stream(device, stream)?;
    ground.destroy_event(device, event)?;
    let handle = ground.create(ground.unit()?, Ground::properties(device))?;
    refused("memory", Living { extents: 1, ..Living::default() })?;
    ground.release(handle)?;
    ground.driver().release_context(device)?;
    same("after all has gone", ground.driver().has_context(device)?, false)?;
    Ok(Verdict::Passed)
}

fn outlasted(ground: &Ground) -> Outcome {
    let Some(device) = last(ground)? else { return Ok(ALONE) };
    let (unit, size) = (ground.unit()?, Bytes::kib(256));
    let before = ground.memory_for(unit, &[GPU, device])?;
    let host = ground.pinned(size)?;
    if !gives_back(ground, device)? {
        return Ok(HELD);
    }
    // Given while the peer has no context, which it does not make.
    let during = ground.memory_for(unit, &[GPU, device])?;
    same("after it was given access", ground.driver().has_context(device)?, false)?;
    same("pinned memory", ground.driver().pointer_attributes(host)?.kind, PointerKind::Pinned)?;
    ground.set_host_bytes(host, &vec![0x3c; size.get() as usize]);
    let stream = ground.stream(device)?;
    for memory in [before, during] {
        ground.copy(device, memory, host, size, stream)?;
        ground.driver().stream_synchronize(device, stream)?;
        all("relayed by the new context", &ground.read(memory, size)?, 0x3c)?;
    }
    Ok(Verdict::Passed)
}

fn own_work(ground: &Ground) -> Outcome {
    let own = ground.own()?;
    let (theirs, ours) = (ground.stream(GPU)?, own.stream(GPU)?);
    let event = ground.event(GPU, EventKind::Plain)?;
    let flag = own.flag()?;
    own.hold(ours, flag)?;
    // Neither the synchronization of the context nor its legacy stream waits for held work.
    ground.driver().event_record(GPU, event, theirs)?;
    ground.driver().context_synchronize(GPU)?;
    same("an event of the program", ground.driver().event_query(GPU, event)?, true)?;
    for stream in [Stream::LEGACY, Stream::PER_THREAD] {
        ground.driver().stream_synchronize(GPU, stream)?;
    }
    match ground.driver().event_record_context(GPU, event) {
        Err(DriverError::Unsupported { .. }) => {}
        recorded => {
            recorded?;
            ground.driver().event_synchronize(GPU, event)?;
        }
    }
    own.raise(flag);
    // Nor do they for the program's.
    let flag = ground.flag()?;
    ground.hold(theirs, flag)?;
    own.driver().context_synchronize(GPU)?;
    ground.raise(flag);
    ground.driver().context_synchronize(GPU)?;
    Ok(Verdict::Passed)
}

fn own_events(ground: &Ground) -> Outcome {
    let own = ground.own()?;
    let (unit, size) = (ground.unit()?, Bytes::kib(256));
    let (from, to) = (ground.memory(unit)?, ground.memory(unit)?);
    let (theirs, ours) = (ground.stream(GPU)?, own.stream(GPU)?);
    let (there, back) = (ground.event(GPU, EventKind::Plain)?, own.event(GPU, EventKind::Plain)?);
    for byte in 1..4 {
        let flag = ground.flag()?;
        ground.hold(theirs, flag)?;
        ground.fill(from, size, byte, theirs)?;
        ground.driver().event_record(GPU, there, theirs)?;
        own.driver().stream_wait_event(GPU, ours, there)?;
        own.copy(GPU, to, from, size, ours)?;
        own.driver().event_record(GPU, back, ours)?;
        ground.driver().stream_wait_event(GPU, theirs, back)?;
        ground.fill(from, size, 0xee, theirs)?;
        same("behind held work", own.driver().event_query(GPU, back)?, false)?;
        ground.raise(flag);
        ground.driver().stream_synchronize(GPU, theirs)?;
        all("what our stream copied in between", &ground.read(to, size)?, byte)?;
    }
    Ok(Verdict::Passed)
}

fn own_given_back(ground: &Ground) -> Outcome {
    let (own, other) = (ground.own()?, ground.own()?);
    let driver = own.driver();
    let held = ground.driver().has_context(GPU)?;
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
        same("the program's", ground.driver().has_context(GPU)?, held)?;
    }
    Ok(Verdict::Passed)
}

fn own_reach(ground: &Ground) -> Outcome {
    let own = ground.own()?;
    let size = Bytes::kib(256);
    let devices: Vec<DeviceId> = ground.driver().devices()?.into_iter().map(|info| info.id).collect();
    let memory = ground.memory_for(ground.unit()?, &devices)?;
    let host = ground.pinned(size)?;
    for (device, byte) in devices.iter().zip(1..) {
        ground.set_host_bytes(host, &vec![byte; size.get() as usize]);
        let stream = own.stream(*device)?;
        own.copy(*device, memory, host, size, stream)?;
        own.driver().stream_synchronize(*device, stream)?;
        all("copied by a context of our own", &ground.read(memory, size)?, byte)?;
        ground.set_host_bytes(host, &vec![0; size.get() as usize]);
        own.copy(*device, host, memory, size, stream)?;
        own.driver().stream_synchronize(*device, stream)?;
        all("copied back by it", &ground.host_bytes(host, size), byte)?;
    }
    Ok(Verdict::Passed)
}

fn primary(ground: &Ground) -> Outcome {
    let own = ground.own()?;
    for device in ground.driver().devices()? {
        let (theirs, ours) = (ground.stream(device.id)?, own.stream(device.id)?);
        same("a stream of the program", ground.driver().primary_of(theirs)?, Some(device.id))?;
        same("a stream of ours", ground.driver().primary_of(ours)?, None)?;
        same("the device of a stream of ours", ground.driver().stream_device(ours)?, device.id)?;
    }
    Ok(Verdict::Passed)
}
