//! Checks of contexts: made by the first call that runs in one, given back on request, and made again.

use glake_units::Bytes;

use super::ground::Ground;
use super::outcome::{Failure, Outcome, Verdict, all, same};
use super::{Check, GPU};
use crate::{DeviceId, DriverError, EventKind, Living, PointerKind};

pub(super) const CHECKS: &[Check] = &[
    Check { name: "asking for a context or for memory makes none, synchronizing neither", run: asked },
    Check { name: "a context is given back when nothing lives in it, and made again", run: given_back },
    Check { name: "what lives in a context keeps it", run: kept },
    Check { name: "mapped and pinned memory outlast the context of a peer", run: outlasted },
];

/// The last device: others, and the program, are likeliest to do without it.
fn last(ground: &Ground) -> crate::Result<Option<DeviceId>> {
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
