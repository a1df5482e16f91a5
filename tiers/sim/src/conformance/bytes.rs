//! Checks of copies and fills.

use glake_units::Bytes;

use super::ground::{Ground, after};
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

/// Host to device to device to host, and compares.
fn round_trip(ground: &Ground, from: Address, to: Address) -> Outcome {
    let unit = ground.unit()?;
    let (one, two) = (ground.memory(unit)?, ground.memory(unit)?);
    let stream = ground.stream(GPU)?;
    let expected = pattern(SIZE);
    ground.set_host_bytes(from, &expected);
    ground.copy(GPU, one, from, SIZE, stream)?;
    ground.copy(GPU, after(two, Bytes::new(3))?, one, SIZE, stream)?;
    ground.copy(GPU, to, after(two, Bytes::new(3))?, SIZE, stream)?;
    ground.driver().stream_synchronize(GPU, stream)?;
    same("the bytes that came back", ground.host_bytes(to, SIZE) == expected, true)?;
    Ok(Verdict::Passed)
}

fn pinned(ground: &Ground) -> Outcome {
    round_trip(ground, ground.pinned(SIZE)?, ground.pinned(SIZE)?)
}

fn pageable(ground: &Ground) -> Outcome {
    round_trip(ground, ground.pageable(SIZE)?, ground.pageable(SIZE)?)
}

fn returns(ground: &Ground) -> Outcome {
    let start = ground.memory(ground.unit()?)?;
    let host = ground.pageable(SIZE)?;
    let stream = ground.stream(GPU)?;
    for size in [Bytes::kib(4), SIZE] {
        let expected = pattern(size);
        ground.fill(start, SIZE, 0, stream)?;
        ground.set_host_bytes(host, &expected);
        ground.copy(GPU, start, host, size, stream)?;
        ground.set_host_bytes(host, &vec![0x99; size.get() as usize]);
        ground.copy(GPU, host, start, size, stream)?;
        same("what the host wrote later did not go", ground.host_bytes(host, size) == expected, true)?;
    }
    Ok(Verdict::Passed)
}

fn across_registrations(ground: &Ground) -> Outcome {
    let page = Bytes::kib(4);
    let host = ground.pageable(Bytes::kib(16))?;
    let (first, second) = (after(host, page)?, after(host, Bytes::kib(8))?);
    ground.register(first, page)?;
    ground.register(second, page)?;
    let start = ground.memory(ground.unit()?)?;
    let stream = ground.stream(GPU)?;
    let expected = pattern(page);
    ground.set_host_bytes(second, &expected);
    ground.copy(GPU, start, second, page, stream)?;
    ground.driver().stream_synchronize(GPU, stream)?;
    same("the last page of a registration", ground.read(start, page)? == expected, true)?;
    refused("two registrations side by side", ground.copy(GPU, start, first, Bytes::kib(8), stream))?;
    refused("half of the source is not registered", ground.copy(GPU, start, second, Bytes::kib(8), stream))?;
    let whole = pattern(Bytes::kib(8));
    ground.write(start, &whole)?;
    ground.copy(GPU, host, start, Bytes::kib(8), stream)?;
    ground.driver().stream_synchronize(GPU, stream)?;
    same("what begins outside of any", ground.host_bytes(host, Bytes::kib(8)) == whole, true)?;
    Ok(Verdict::Passed)
}

fn across_seams(ground: &Ground) -> Outcome {
    let unit = ground.unit()?;
    let whole = Bytes::new(unit.get() * 2);
    let start = ground.reserve(whole)?;
    let (first, second) =
        (ground.create(unit, Ground::properties(GPU))?, ground.create(unit, Ground::properties(GPU))?);
    ground.map(start, unit, second)?;
    ground.map(after(start, unit)?, unit, first)?;
    ground.set_access(start, whole, &[GPU])?;
    let host = ground.pinned(SIZE)?;
    let expected = pattern(SIZE);
    ground.set_host_bytes(host, &expected);
    let seam = after(start, Bytes::new(unit.get() - SIZE.get() / 2))?;
    let stream = ground.stream(GPU)?;
    ground.copy(GPU, seam, host, SIZE, stream)?;
    ground.driver().stream_synchronize(GPU, stream)?;
    same("the bytes at the seam", ground.read(seam, SIZE)? == expected, true)?;
    Ok(Verdict::Passed)
}

fn batch(ground: &Ground) -> Outcome {
    let unit = ground.unit()?;
    let host = ground.pinned(SIZE)?;
    let (one, two) = (ground.memory(unit)?, ground.memory(unit)?);
    ground.set_host_bytes(host, &pattern(SIZE));
    ground.write(one, &[0x11; 4096])?;
    let stream = ground.stream(GPU)?;
    let size = Bytes::kib(4);
    let requests = [
        CopyRequest { to: two, from: one, size },
        CopyRequest { to: after(two, Bytes::kib(64))?, from: host, size: Bytes::kib(64) },
        CopyRequest { to: after(host, Bytes::kib(200))?, from: one, size },
    ];
    // SAFETY: memory of this ground; nothing else uses it until the stream was waited for.
    unsafe { ground.driver().copy_batch(GPU, &requests, stream) }?;
    ground.driver().stream_synchronize(GPU, stream)?;
    all("device to device", &ground.read(two, size)?, 0x11)?;
    let found = ground.read(after(two, Bytes::kib(64))?, Bytes::kib(64))?;
    same("host to device", found == pattern(Bytes::kib(64)), true)?;
    all("device to host", &ground.host_bytes(after(host, Bytes::kib(200))?, size), 0x11)?;
    // SAFETY: it copies nothing.
    unsafe { ground.driver().copy_batch(GPU, &[], stream) }?;
    Ok(Verdict::Passed)
}

fn fill(ground: &Ground) -> Outcome {
    let start = ground.memory(ground.unit()?)?;
    let stream = ground.stream(GPU)?;
    ground.fill(after(start, Bytes::new(5))?, Bytes::new(1001), 0xee, stream)?;
    ground.driver().stream_synchronize(GPU, stream)?;
    let found = ground.read(start, Bytes::new(1011))?;
    all("before it", &found[..5], 0)?;
    all("in it", &found[5..1006], 0xee)?;
    all("after it", &found[1006..], 0)?;
    Ok(Verdict::Passed)
}

fn at_once(ground: &Ground) -> Outcome {
    let start = ground.memory(ground.unit()?)?;
    let expected = pattern(SIZE);
    ground.write(after(start, Bytes::new(1))?, &expected)?;
    same("read back", ground.read(after(start, Bytes::new(1))?, SIZE)? == expected, true)?;
    ground.write(start, &[])?;
    same("nothing read", ground.read(start, Bytes::ZERO)?.len(), 0)?;
    Ok(Verdict::Passed)
}
