//! Checks of copies and fills.

use glake_units::Bytes;

use super::harness::{Harness, after};
use super::outcome::{Outcome, Verdict, all, refused, same};
use super::{Check, GPU};
use glake_device::{Address, CopyRequest};

pub(super) const CHECKS: &[Check] = &[
    Check { name: "copies go every way through pinned memory", run: pinned },
    Check { name: "copies go every way through pageable memory", run: pageable },
    Check { name: "copies return when pageable memory was read, or its bytes are there", run: returns },
    Check { name: "a copy ends in the registration that it begins in", run: across_registrations },
    Check { name: "copies cross the seams of stitched memory", run: across_seams },
    Check { name: "a batch copies all of it", run: batch },
    Check { name: "a fill fills its range and no more", run: fill },
    Check { name: "the host reads and writes at once", run: at_once },
];

const SIZE: Bytes = Bytes::kib(300);

fn pattern(size: Bytes) -> Vec<u8> {
    (0..size.get()).map(|at| (at * 7 % 253) as u8).collect()
}

/// Copies bytes from the host to one device, to another and back, and compares them.
fn round_trip(harness: &Harness, from: Address, to: Address) -> Outcome {
    let unit = harness.unit()?;
    let (one, two) = (harness.memory(unit)?, harness.memory(unit)?);
    let stream = harness.stream(GPU)?;
    let expected = pattern(SIZE);
    harness.set_host_bytes(from, &expected);
    harness.copy(GPU, one, from, SIZE, stream)?;
    harness.copy(GPU, after(two, Bytes::new(3))?, one, SIZE, stream)?;
    harness.copy(GPU, to, after(two, Bytes::new(3))?, SIZE, stream)?;
    harness.driver().stream_synchronize(GPU, stream)?;
    same("the bytes that came back", harness.host_bytes(to, SIZE) == expected, true)?;
    Ok(Verdict::Passed)
}

fn pinned(harness: &Harness) -> Outcome {
    round_trip(harness, harness.pinned(SIZE)?, harness.pinned(SIZE)?)
}

fn pageable(harness: &Harness) -> Outcome {
    round_trip(harness, harness.pageable(SIZE)?, harness.pageable(SIZE)?)
}

fn returns(harness: &Harness) -> Outcome {
    let start = harness.memory(harness.unit()?)?;
    let host = harness.pageable(SIZE)?;
    let stream = harness.stream(GPU)?;
    for size in [Bytes::kib(4), SIZE] {
        let expected = pattern(size);
        harness.fill(start, SIZE, 0, stream)?;
        harness.set_host_bytes(host, &expected);
        harness.copy(GPU, start, host, size, stream)?;
        harness.set_host_bytes(host, &vec![0x99; size.get() as usize]);
        harness.copy(GPU, host, start, size, stream)?;
        same("what the host wrote later did not go", harness.host_bytes(host, size) == expected, true)?;
    }
    Ok(Verdict::Passed)
}

fn across_registrations(harness: &Harness) -> Outcome {
    let page = Bytes::kib(4);
    let host = harness.pageable(Bytes::kib(16))?;
    let (first, second) = (after(host, page)?, after(host, Bytes::kib(8))?);
    harness.register(first, page)?;
    harness.register(second, page)?;
    let start = harness.memory(harness.unit()?)?;
    let stream = harness.stream(GPU)?;
    let expected = pattern(page);
    harness.set_host_bytes(second, &expected);
    harness.copy(GPU, start, second, page, stream)?;
    harness.driver().stream_synchronize(GPU, stream)?;
    same("the last page of a registration", harness.read(start, page)? == expected, true)?;
    refused("two registrations side by side", harness.copy(GPU, start, first, Bytes::kib(8), stream))?;
    refused("half of the source is not registered", harness.copy(GPU, start, second, Bytes::kib(8), stream))?;
    let whole = pattern(Bytes::kib(8));
    harness.write(start, &whole)?;
    harness.copy(GPU, host, start, Bytes::kib(8), stream)?;
    harness.driver().stream_synchronize(GPU, stream)?;
    same("what begins outside of any", harness.host_bytes(host, Bytes::kib(8)) == whole, true)?;
    Ok(Verdict::Passed)
}

fn across_seams(harness: &Harness) -> Outcome {
    let unit = harness.unit()?;
    let whole = Bytes::new(unit.get() * 2);
    let start = harness.reserve(whole)?;
    let (first, second) =
        (harness.create(unit, Harness::properties(GPU))?, harness.create(unit, Harness::properties(GPU))?);
    harness.map(start, unit, second)?;
    harness.map(after(start, unit)?, unit, first)?;
    harness.set_access(start, whole, &[GPU])?;
    let host = harness.pinned(SIZE)?;
    let expected = pattern(SIZE);
    harness.set_host_bytes(host, &expected);
    let seam = after(start, Bytes::new(unit.get() - SIZE.get() / 2))?;
    let stream = harness.stream(GPU)?;
    harness.copy(GPU, seam, host, SIZE, stream)?;
    harness.driver().stream_synchronize(GPU, stream)?;
    same("the bytes at the seam", harness.read(seam, SIZE)? == expected, true)?;
    Ok(Verdict::Passed)
}

fn batch(harness: &Harness) -> Outcome {
    let unit = harness.unit()?;
    let host = harness.pinned(SIZE)?;
    let (one, two) = (harness.memory(unit)?, harness.memory(unit)?);
    harness.set_host_bytes(host, &pattern(SIZE));
    harness.write(one, &[0x11; 4096])?;
    let stream = harness.stream(GPU)?;
    let size = Bytes::kib(4);
    let requests = [
        CopyRequest { to: two, from: one, size },
        CopyRequest { to: after(two, Bytes::kib(64))?, from: host, size: Bytes::kib(64) },
        CopyRequest { to: after(host, Bytes::kib(200))?, from: one, size },
    ];
    // SAFETY: memory of this ground; nothing else uses it until the stream was waited for.
    unsafe { harness.driver().copy_batch(GPU, &requests, stream) }?;
    harness.driver().stream_synchronize(GPU, stream)?;
    all("device to device", &harness.read(two, size)?, 0x11)?;
    let found = harness.read(after(two, Bytes::kib(64))?, Bytes::kib(64))?;
    same("host to device", found == pattern(Bytes::kib(64)), true)?;
    all("device to host", &harness.host_bytes(after(host, Bytes::kib(200))?, size), 0x11)?;
    // SAFETY: it copies nothing.
    unsafe { harness.driver().copy_batch(GPU, &[], stream) }?;
    Ok(Verdict::Passed)
}

fn fill(harness: &Harness) -> Outcome {
    let start = harness.memory(harness.unit()?)?;
    let stream = harness.stream(GPU)?;
    harness.fill(after(start, Bytes::new(5))?, Bytes::new(1001), 0xee, stream)?;
    harness.driver().stream_synchronize(GPU, stream)?;
    let found = harness.read(start, Bytes::new(1011))?;
    all("before it", &found[..5], 0)?;
    all("in it", &found[5..1006], 0xee)?;
    all("after it", &found[1006..], 0)?;
    Ok(Verdict::Passed)
}

fn at_once(harness: &Harness) -> Outcome {
    let start = harness.memory(harness.unit()?)?;
    let expected = pattern(SIZE);
    harness.write(after(start, Bytes::new(1))?, &expected)?;
    same("read back", harness.read(after(start, Bytes::new(1))?, SIZE)? == expected, true)?;
    harness.write(start, &[])?;
    same("nothing read", harness.read(start, Bytes::ZERO)?.len(), 0)?;
    Ok(Verdict::Passed)
}
