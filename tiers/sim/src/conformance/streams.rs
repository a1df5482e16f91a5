//! Checks of streams and events: execution order and its observers.

use std::time::Duration;

use glake_units::Bytes;

use super::harness::{Harness, after, processor_time};
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

fn in_order(harness: &Harness) -> Outcome {
    let start = harness.memory(harness.unit()?)?;
    for stream in [harness.stream(GPU)?, Stream::LEGACY, Stream::PER_THREAD] {
        for byte in 1..=20 {
            harness.fill(start, SIZE, byte, stream)?;
        }
        harness.driver().stream_synchronize(GPU, stream)?;
        all("the last of many fills", &harness.read(start, SIZE)?, 20)?;
    }
    Ok(Verdict::Passed)
}

fn events_order(harness: &Harness) -> Outcome {
    let unit = harness.unit()?;
    let (from, to) = (harness.memory(unit)?, harness.memory(unit)?);
    let (one, two) = (harness.stream(GPU)?, harness.stream(GPU)?);
    let event = harness.event(GPU, EventKind::Plain)?;
    let flag = harness.flag()?;
    harness.hold(one, flag)?;
    harness.fill(from, SIZE, 0x33, one)?;
    harness.driver().event_record(GPU, event, one)?;
    harness.driver().stream_wait_event(GPU, two, event)?;
    harness.copy(GPU, to, from, SIZE, two)?;
    harness.raise(flag);
    harness.driver().stream_synchronize(GPU, two)?;
    all("what the second stream copied", &harness.read(to, SIZE)?, 0x33)?;
    Ok(Verdict::Passed)
}

fn event_of_a_stream(harness: &Harness) -> Outcome {
    let (held, free) = (harness.stream(GPU)?, harness.stream(GPU)?);
    let (behind, beside) = (harness.event(GPU, EventKind::Plain)?, harness.event(GPU, EventKind::Plain)?);
    let flag = harness.flag()?;
    harness.hold(held, flag)?;
    harness.driver().event_record(GPU, behind, held)?;
    harness.driver().event_record(GPU, beside, free)?;
    harness.driver().event_synchronize(GPU, beside)?;
    same("behind held work", harness.driver().event_query(GPU, behind)?, false)?;
    same("beside held work", harness.driver().event_query(GPU, beside)?, true)?;
    harness.raise(flag);
    harness.driver().event_synchronize(GPU, behind)?;
    same("let go", harness.driver().event_query(GPU, behind)?, true)?;
    Ok(Verdict::Passed)
}

fn never_recorded(harness: &Harness) -> Outcome {
    let event = harness.event(GPU, EventKind::Plain)?;
    same("queried", harness.driver().event_query(GPU, event)?, true)?;
    harness.driver().event_synchronize(GPU, event)?;
    harness.driver().stream_wait_event(GPU, harness.stream(GPU)?, event)?;
    Ok(Verdict::Passed)
}

/// Records an event of the whole context; returns false if the driver does not support it.
fn record_context(harness: &Harness, event: Event) -> glake_device::Result<bool> {
    match harness.driver().event_record_context(GPU, event) {
        Ok(()) => Ok(true),
        Err(DriverError::Unsupported { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

const TOO_OLD: Verdict = Verdict::Skipped("the driver has no context events");

fn context_waits(harness: &Harness) -> Outcome {
    let start = harness.memory(harness.unit()?)?;
    let (held, free) = (harness.stream(GPU)?, harness.stream(GPU)?);
    let event = harness.event(GPU, EventKind::Plain)?;
    let flag = harness.flag()?;
    harness.hold(held, flag)?;
    harness.fill(start, SIZE, 1, held)?;
    harness.fill(after(start, SIZE)?, SIZE, 1, free)?;
    if !record_context(harness, event)? {
        return Ok(TOO_OLD);
    }
    harness.driver().stream_synchronize(GPU, free)?;
    same("before the held work is done", harness.driver().event_query(GPU, event)?, false)?;
    harness.raise(flag);
    harness.driver().event_synchronize(GPU, event)?;
    all("after it", &harness.read(start, Bytes::new(2 * SIZE.get()))?, 1)?;
    Ok(Verdict::Passed)
}

fn context_does_not_wait(harness: &Harness) -> Outcome {
    let start = harness.memory(harness.unit()?)?;
    let (one, two) = (harness.stream(GPU)?, harness.stream(GPU)?);
    let event = harness.event(GPU, EventKind::Plain)?;
    let flag = harness.flag()?;
    harness.fill(start, SIZE, 1, one)?;
    if !record_context(harness, event)? {
        return Ok(TOO_OLD);
    }
    harness.hold(one, flag)?;
    harness.hold(two, flag)?;
    harness.driver().event_synchronize(GPU, event)?;
    all("the earlier work", &harness.read(start, SIZE)?, 1)?;
    harness.raise(flag);
    Ok(Verdict::Passed)
}

fn values(harness: &Harness) -> Outcome {
    let unit = harness.unit()?;
    let (from, to, word) = (harness.memory(unit)?, harness.memory(unit)?, harness.memory(unit)?);
    let (one, two) = (harness.stream(GPU)?, harness.stream(GPU)?);
    harness.fill(from, SIZE, 0x44, one)?;
    harness.write_value(one, word, 8)?;
    harness.wait_value(two, word, 8, Compare::Equal)?;
    harness.wait_value(two, word, 5, Compare::AtLeast)?;
    harness.copy(GPU, to, from, SIZE, two)?;
    harness.driver().stream_synchronize(GPU, two)?;
    all("what the waiting stream copied", &harness.read(to, SIZE)?, 0x44)?;
    same("the value", harness.read(word, Bytes::new(4))?, 8_u32.to_le_bytes().to_vec())?;
    // Cyclic: 2 is at least 0xffff_fff0.
    harness.write_value(one, word, 2)?;
    harness.wait_value(one, word, 0xffff_fff0, Compare::AtLeast)?;
    harness.driver().stream_synchronize(GPU, one)?;
    Ok(Verdict::Passed)
}

fn kinds(harness: &Harness) -> Outcome {
    let unit = harness.unit()?;
    let (from, to) = (harness.memory(unit)?, harness.memory(unit)?);
    let (one, two) = (harness.stream(GPU)?, harness.stream(GPU)?);
    for (kind, byte) in [(EventKind::Plain, 1), (EventKind::Timed, 2), (EventKind::Sleeping, 3)] {
        let (before, behind) = (harness.event(GPU, kind)?, harness.event(GPU, kind)?);
        let flag = harness.flag()?;
        harness.hold(one, flag)?;
        harness.fill(from, SIZE, byte, one)?;
        harness.driver().event_record(GPU, before, one)?;
        harness.driver().stream_wait_event(GPU, two, before)?;
        harness.copy(GPU, to, from, SIZE, two)?;
        harness.driver().event_record(GPU, behind, two)?;
        same("behind held work", harness.driver().event_query(GPU, behind)?, false)?;
        harness.raise(flag);
        harness.driver().event_synchronize(GPU, behind)?;
        same("let go", harness.driver().event_query(GPU, behind)?, true)?;
        all("what the second stream copied", &harness.read(to, SIZE)?, byte)?;
    }
    Ok(Verdict::Passed)
}

fn sleeping(harness: &Harness) -> Outcome {
    const HELD: Duration = Duration::from_millis(40);
    let stream = harness.stream(GPU)?;
    let event = harness.event(GPU, EventKind::Sleeping)?;
    let flag = harness.flag()?;
    harness.hold(stream, flag)?;
    harness.driver().event_record(GPU, event, stream)?;
    let (waited, busy) = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(HELD);
            harness.raise(flag);
        });
        let before = processor_time();
        let waited = harness.driver().event_synchronize(GPU, event);
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

fn priorities(harness: &Harness) -> Outcome {
    let start = harness.memory(harness.unit()?)?;
    for priority in [Priority::Normal, Priority::High] {
        let stream = harness.stream_of(GPU, priority)?;
        for byte in 1..=20 {
            harness.fill(start, SIZE, byte, stream)?;
        }
        harness.driver().stream_synchronize(GPU, stream)?;
        all("the last of many fills", &harness.read(start, SIZE)?, 20)?;
    }
    Ok(Verdict::Passed)
}

fn defaults(harness: &Harness) -> Outcome {
    let unit = harness.unit()?;
    let (first, second, third) = (harness.memory(unit)?, harness.memory(unit)?, harness.memory(unit)?);
    let (legacy, own, other) = (Stream::LEGACY, Stream::PER_THREAD, harness.stream(GPU)?);
    let (there, back) = (harness.event(GPU, EventKind::Plain)?, harness.event(GPU, EventKind::Plain)?);
    let flag = harness.flag()?;
    harness.hold(legacy, flag)?;
    harness.fill(first, SIZE, 1, legacy)?;
    harness.copy(GPU, second, first, SIZE, own)?;
    harness.driver().event_record(GPU, there, own)?;
    harness.driver().stream_wait_event(GPU, other, there)?;
    harness.fill(first, SIZE, 2, legacy)?;
    harness.copy(GPU, third, second, SIZE, other)?;
    harness.fill(third, SIZE, 3, other)?;
    harness.driver().event_record(GPU, back, other)?;
    harness.driver().stream_wait_event(GPU, legacy, back)?;
    harness.copy(GPU, first, third, SIZE, own)?;
    same("behind held work", harness.driver().event_query(GPU, back)?, false)?;
    harness.raise(flag);
    harness.driver().stream_synchronize(GPU, own)?;
    all("behind the legacy stream, before its next work", &harness.read(second, SIZE)?, 1)?;
    all("behind the event that the legacy stream waits for", &harness.read(first, SIZE)?, 3)?;
    Ok(Verdict::Passed)
}

fn timed(harness: &Harness) -> Outcome {
    let start = harness.memory(Bytes::mib(16))?;
    let stream = harness.stream(GPU)?;
    let (from, to) = (harness.event(GPU, EventKind::Timed)?, harness.event(GPU, EventKind::Timed)?);
    harness.driver().event_record(GPU, from, stream)?;
    harness.fill(start, Bytes::mib(16), 1, stream)?;
    harness.driver().event_record(GPU, to, stream)?;
    harness.driver().event_synchronize(GPU, to)?;
    let time = harness.driver().event_elapsed(GPU, from, to)?;
    same("16 MiB take between 1 us and 1 s", (1.0..1e6).contains(&time), true)?;
    let untimed = harness.event(GPU, EventKind::Plain)?;
    harness.driver().event_record(GPU, untimed, stream)?;
    harness.driver().event_synchronize(GPU, untimed)?;
    refused("time since an untimed event", harness.driver().event_elapsed(GPU, untimed, to))?;
    Ok(Verdict::Passed)
}

fn ids(harness: &Harness) -> Outcome {
    let (one, two) = (harness.stream(GPU)?, harness.stream(GPU)?);
    let streams = [one, two, Stream::LEGACY, Stream::PER_THREAD];
    let mut ids = Vec::new();
    for stream in streams {
        let id = harness.driver().stream_id(GPU, stream)?;
        same("an id asked for twice", harness.driver().stream_id(GPU, stream)?, id)?;
        ids.push(id);
    }
    ids.sort_unstable();
    ids.dedup();
    same("different streams", ids.len(), streams.len())?;
    same("no handle", harness.driver().stream_id(GPU, Stream(0)).is_ok(), true)?;
    Ok(Verdict::Passed)
}

fn devices(harness: &Harness) -> Outcome {
    for device in harness.driver().devices()? {
        let stream = harness.stream(device.id)?;
        same("the device of a stream", harness.driver().stream_device(stream)?, device.id)?;
    }
    same("of the legacy one", harness.driver().stream_device(Stream::LEGACY)?, GPU)?;
    Ok(Verdict::Passed)
}

fn no_capture(harness: &Harness) -> Outcome {
    for stream in [harness.stream(GPU)?, Stream::PER_THREAD, Stream::LEGACY] {
        same("a stream", harness.driver().capture_state(GPU, stream)?, CaptureState::None)?;
    }
    Ok(Verdict::Passed)
}

fn destroyed(harness: &Harness) -> Outcome {
    let start = harness.memory(harness.unit()?)?;
    let stream = harness.stream(GPU)?;
    harness.fill(start, SIZE, 6, stream)?;
    harness.destroy_stream(GPU, stream)?;
    harness.driver().context_synchronize(GPU)?;
    all("its last work", &harness.read(start, SIZE)?, 6)?;
    Ok(Verdict::Passed)
}
