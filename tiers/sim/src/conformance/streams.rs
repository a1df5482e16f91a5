//! Checks of streams and events: what runs after what, and who can tell.

use std::time::Duration;

use glake_units::Bytes;

use super::ground::{Ground, after, processor_time};
use super::outcome::{Failure, Outcome, Verdict, all, refused, same};
use super::{Check, GPU};
use glake_device::{CaptureState, Compare, DriverError, Event, EventKind, Priority, Stream};

pub(super) const CHECKS: &[Check] = &[
    Check { name: "a stream keeps its order", run: in_order },
    Check { name: "an event orders two streams", run: events_order },
    Check { name: "an event passes with its stream, not with others", run: event_of_a_stream },
    Check { name: "an event never recorded has passed", run: never_recorded },
    Check { name: "a context event waits for all earlier work", run: context_waits },
    Check { name: "a context event does not wait for later work", run: context_does_not_wait },
    Check { name: "values hold streams back and let them go", run: values },
    Check { name: "events of every kind order and pass", run: kinds },
    Check { name: "a wait for a sleeping event leaves the processor to others", run: sleeping },
    Check { name: "streams of every priority keep their order", run: priorities },
    Check { name: "the default streams wait for each other, and for events", run: defaults },
    Check { name: "timed events tell the time between them", run: timed },
    Check { name: "streams have ids of their own", run: ids },
    Check { name: "a stream knows its device", run: devices },
    Check { name: "no stream captures unasked", run: no_capture },
    Check { name: "a destroyed stream's work still runs", run: destroyed },
];

const SIZE: Bytes = Bytes::kib(64);

fn in_order(ground: &Ground) -> Outcome {
    let start = ground.memory(ground.unit()?)?;
    for stream in [ground.stream(GPU)?, Stream::LEGACY, Stream::PER_THREAD] {
        for byte in 1..=20 {
            ground.fill(start, SIZE, byte, stream)?;
        }
        ground.driver().stream_synchronize(GPU, stream)?;
        all("the last of many fills", &ground.read(start, SIZE)?, 20)?;
    }
    Ok(Verdict::Passed)
}

fn events_order(ground: &Ground) -> Outcome {
    let unit = ground.unit()?;
    let (from, to) = (ground.memory(unit)?, ground.memory(unit)?);
    let (one, two) = (ground.stream(GPU)?, ground.stream(GPU)?);
    let event = ground.event(GPU, EventKind::Plain)?;
    let flag = ground.flag()?;
    ground.hold(one, flag)?;
    ground.fill(from, SIZE, 0x33, one)?;
    ground.driver().event_record(GPU, event, one)?;
    ground.driver().stream_wait_event(GPU, two, event)?;
    ground.copy(GPU, to, from, SIZE, two)?;
    ground.raise(flag);
    ground.driver().stream_synchronize(GPU, two)?;
    all("what the second stream copied", &ground.read(to, SIZE)?, 0x33)?;
    Ok(Verdict::Passed)
}

fn event_of_a_stream(ground: &Ground) -> Outcome {
    let (held, free) = (ground.stream(GPU)?, ground.stream(GPU)?);
    let (behind, beside) = (ground.event(GPU, EventKind::Plain)?, ground.event(GPU, EventKind::Plain)?);
    let flag = ground.flag()?;
    ground.hold(held, flag)?;
    ground.driver().event_record(GPU, behind, held)?;
    ground.driver().event_record(GPU, beside, free)?;
    ground.driver().event_synchronize(GPU, beside)?;
    same("behind held work", ground.driver().event_query(GPU, behind)?, false)?;
    same("beside held work", ground.driver().event_query(GPU, beside)?, true)?;
    ground.raise(flag);
    ground.driver().event_synchronize(GPU, behind)?;
    same("let go", ground.driver().event_query(GPU, behind)?, true)?;
    Ok(Verdict::Passed)
}

fn never_recorded(ground: &Ground) -> Outcome {
    let event = ground.event(GPU, EventKind::Plain)?;
    same("queried", ground.driver().event_query(GPU, event)?, true)?;
    ground.driver().event_synchronize(GPU, event)?;
    ground.driver().stream_wait_event(GPU, ground.stream(GPU)?, event)?;
    Ok(Verdict::Passed)
}

/// Records an event of the whole context; false where the driver cannot.
fn record_context(ground: &Ground, event: Event) -> glake_device::Result<bool> {
    match ground.driver().event_record_context(GPU, event) {
        Ok(()) => Ok(true),
        Err(DriverError::Unsupported { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

const TOO_OLD: Verdict = Verdict::Skipped("the driver has no context events");

fn context_waits(ground: &Ground) -> Outcome {
    let start = ground.memory(ground.unit()?)?;
    let (held, free) = (ground.stream(GPU)?, ground.stream(GPU)?);
    let event = ground.event(GPU, EventKind::Plain)?;
    let flag = ground.flag()?;
    ground.hold(held, flag)?;
    ground.fill(start, SIZE, 1, held)?;
    ground.fill(after(start, SIZE)?, SIZE, 1, free)?;
    if !record_context(ground, event)? {
        return Ok(TOO_OLD);
    }
    ground.driver().stream_synchronize(GPU, free)?;
    same("before the held work is done", ground.driver().event_query(GPU, event)?, false)?;
    ground.raise(flag);
    ground.driver().event_synchronize(GPU, event)?;
    all("after it", &ground.read(start, Bytes::new(2 * SIZE.get()))?, 1)?;
    Ok(Verdict::Passed)
}

fn context_does_not_wait(ground: &Ground) -> Outcome {
    let start = ground.memory(ground.unit()?)?;
    let (one, two) = (ground.stream(GPU)?, ground.stream(GPU)?);
    let event = ground.event(GPU, EventKind::Plain)?;
    let flag = ground.flag()?;
    ground.fill(start, SIZE, 1, one)?;
    if !record_context(ground, event)? {
        return Ok(TOO_OLD);
    }
    ground.hold(one, flag)?;
    ground.hold(two, flag)?;
    ground.driver().event_synchronize(GPU, event)?;
    all("the earlier work", &ground.read(start, SIZE)?, 1)?;
    ground.raise(flag);
    Ok(Verdict::Passed)
}

fn values(ground: &Ground) -> Outcome {
    let unit = ground.unit()?;
    let (from, to, word) = (ground.memory(unit)?, ground.memory(unit)?, ground.memory(unit)?);
    let (one, two) = (ground.stream(GPU)?, ground.stream(GPU)?);
    ground.fill(from, SIZE, 0x44, one)?;
    ground.write_value(one, word, 8)?;
    ground.wait_value(two, word, 8, Compare::Equal)?;
    ground.wait_value(two, word, 5, Compare::AtLeast)?;
    ground.copy(GPU, to, from, SIZE, two)?;
    ground.driver().stream_synchronize(GPU, two)?;
    all("what the waiting stream copied", &ground.read(to, SIZE)?, 0x44)?;
    same("the value", ground.read(word, Bytes::new(4))?, 8_u32.to_le_bytes().to_vec())?;
    // Cyclic: 2 is at least 0xffff_fff0.
    ground.write_value(one, word, 2)?;
    ground.wait_value(one, word, 0xffff_fff0, Compare::AtLeast)?;
    ground.driver().stream_synchronize(GPU, one)?;
    Ok(Verdict::Passed)
}

fn kinds(ground: &Ground) -> Outcome {
    let unit = ground.unit()?;
    let (from, to) = (ground.memory(unit)?, ground.memory(unit)?);
    let (one, two) = (ground.stream(GPU)?, ground.stream(GPU)?);
    for (kind, byte) in [(EventKind::Plain, 1), (EventKind::Timed, 2), (EventKind::Sleeping, 3)] {
        let (before, behind) = (ground.event(GPU, kind)?, ground.event(GPU, kind)?);
        let flag = ground.flag()?;
        ground.hold(one, flag)?;
        ground.fill(from, SIZE, byte, one)?;
        ground.driver().event_record(GPU, before, one)?;
        ground.driver().stream_wait_event(GPU, two, before)?;
        ground.copy(GPU, to, from, SIZE, two)?;
        ground.driver().event_record(GPU, behind, two)?;
        same("behind held work", ground.driver().event_query(GPU, behind)?, false)?;
        ground.raise(flag);
        ground.driver().event_synchronize(GPU, behind)?;
        same("let go", ground.driver().event_query(GPU, behind)?, true)?;
        all("what the second stream copied", &ground.read(to, SIZE)?, byte)?;
    }
    Ok(Verdict::Passed)
}

fn sleeping(ground: &Ground) -> Outcome {
    const HELD: Duration = Duration::from_millis(40);
    let stream = ground.stream(GPU)?;
    let event = ground.event(GPU, EventKind::Sleeping)?;
    let flag = ground.flag()?;
    ground.hold(stream, flag)?;
    ground.driver().event_record(GPU, event, stream)?;
    let (waited, busy) = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(HELD);
            ground.raise(flag);
        });
        let before = processor_time();
        let waited = ground.driver().event_synchronize(GPU, event);
        (waited, processor_time().saturating_sub(before))
    });
    match waited {
        Err(DriverError::Deadlock { .. }) => return Ok(Verdict::Skipped("nobody waits in virtual time")),
        waited => waited?,
    }
    match busy < HELD / 4 {
        true => Ok(Verdict::Passed),
        false => Err(Failure::wrong("the wait was busy for", busy)),
    }
}

fn priorities(ground: &Ground) -> Outcome {
    let start = ground.memory(ground.unit()?)?;
    for priority in [Priority::Normal, Priority::High] {
        let stream = ground.stream_of(GPU, priority)?;
        for byte in 1..=20 {
            ground.fill(start, SIZE, byte, stream)?;
        }
        ground.driver().stream_synchronize(GPU, stream)?;
        all("the last of many fills", &ground.read(start, SIZE)?, 20)?;
    }
    Ok(Verdict::Passed)
}

fn defaults(ground: &Ground) -> Outcome {
    let unit = ground.unit()?;
    let (first, second, third) = (ground.memory(unit)?, ground.memory(unit)?, ground.memory(unit)?);
    let (legacy, own, other) = (Stream::LEGACY, Stream::PER_THREAD, ground.stream(GPU)?);
    let (there, back) = (ground.event(GPU, EventKind::Plain)?, ground.event(GPU, EventKind::Plain)?);
    let flag = ground.flag()?;
    ground.hold(legacy, flag)?;
    ground.fill(first, SIZE, 1, legacy)?;
    ground.copy(GPU, second, first, SIZE, own)?;
    ground.driver().event_record(GPU, there, own)?;
    ground.driver().stream_wait_event(GPU, other, there)?;
    ground.fill(first, SIZE, 2, legacy)?;
    ground.copy(GPU, third, second, SIZE, other)?;
    ground.fill(third, SIZE, 3, other)?;
    ground.driver().event_record(GPU, back, other)?;
    ground.driver().stream_wait_event(GPU, legacy, back)?;
    ground.copy(GPU, first, third, SIZE, own)?;
    same("behind held work", ground.driver().event_query(GPU, back)?, false)?;
    ground.raise(flag);
    ground.driver().stream_synchronize(GPU, own)?;
    all("behind the legacy stream, before its next work", &ground.read(second, SIZE)?, 1)?;
    all("behind the event that the legacy stream waits for", &ground.read(first, SIZE)?, 3)?;
    Ok(Verdict::Passed)
}

fn timed(ground: &Ground) -> Outcome {
    let start = ground.memory(Bytes::mib(16))?;
    let stream = ground.stream(GPU)?;
    let (from, to) = (ground.event(GPU, EventKind::Timed)?, ground.event(GPU, EventKind::Timed)?);
    ground.driver().event_record(GPU, from, stream)?;
    ground.fill(start, Bytes::mib(16), 1, stream)?;
    ground.driver().event_record(GPU, to, stream)?;
    ground.driver().event_synchronize(GPU, to)?;
    let time = ground.driver().event_elapsed(GPU, from, to)?;
    same("16 MiB take between 1 us and 1 s", (1.0..1e6).contains(&time), true)?;
    let untimed = ground.event(GPU, EventKind::Plain)?;
    ground.driver().event_record(GPU, untimed, stream)?;
    ground.driver().event_synchronize(GPU, untimed)?;
    refused("time since an untimed event", ground.driver().event_elapsed(GPU, untimed, to))?;
    Ok(Verdict::Passed)
}

fn ids(ground: &Ground) -> Outcome {
    let (one, two) = (ground.stream(GPU)?, ground.stream(GPU)?);
    let streams = [one, two, Stream::LEGACY, Stream::PER_THREAD];
    let mut ids = Vec::new();
    for stream in streams {
        let id = ground.driver().stream_id(GPU, stream)?;
        same("an id asked for twice", ground.driver().stream_id(GPU, stream)?, id)?;
        ids.push(id);
    }
    ids.sort_unstable();
    ids.dedup();
    same("different streams", ids.len(), streams.len())?;
    same("no handle", ground.driver().stream_id(GPU, Stream(0)).is_ok(), true)?;
    Ok(Verdict::Passed)
}

fn devices(ground: &Ground) -> Outcome {
    for device in ground.driver().devices()? {
        let stream = ground.stream(device.id)?;
        same("the device of a stream", ground.driver().stream_device(stream)?, device.id)?;
    }
    same("of the legacy one", ground.driver().stream_device(Stream::LEGACY)?, GPU)?;
    Ok(Verdict::Passed)
}

fn no_capture(ground: &Ground) -> Outcome {
    for stream in [ground.stream(GPU)?, Stream::PER_THREAD, Stream::LEGACY] {
        same("a stream", ground.driver().capture_state(GPU, stream)?, CaptureState::None)?;
    }
    Ok(Verdict::Passed)
}

fn destroyed(ground: &Ground) -> Outcome {
    let start = ground.memory(ground.unit()?)?;
    let stream = ground.stream(GPU)?;
    ground.fill(start, SIZE, 6, stream)?;
    ground.destroy_stream(GPU, stream)?;
    ground.driver().context_synchronize(GPU)?;
    all("its last work", &ground.read(start, SIZE)?, 6)?;
    Ok(Verdict::Passed)
}
