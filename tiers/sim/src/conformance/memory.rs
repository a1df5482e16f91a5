//! Checks of memory: reserve, create, map, access, unmap, release; copies and fills.

use glake_device::{Address, CopyRequest, DeviceId, EventKind, PointerKind};
use glake_units::Bytes;

use super::harness::{Harness, after};
use super::{Check, GPU, Outcome, Verdict, all, refused, same};

pub(super) const CHECKS: &[Check] = &[
    Check { name: "sizes are multiples of the granularity", run: granularity },
    Check { name: "fresh memory reads zero", run: fresh },
    Check { name: "extents are stitched in any order", run: stitched },
    Check { name: "one extent at two addresses holds the same bytes", run: aliased },
    Check { name: "an address is mapped once at a time", run: mapped_twice },
    Check { name: "mappings come out whole", run: unmapped_whole },
    Check { name: "memory that is not mapped or not accessible is an error to read", run: unreadable },
    Check { name: "a released handle's memory stays for its mapping", run: released_mapped },
    Check { name: "memory is counted while it exists", run: counted },
    Check { name: "more than there is cannot be had", run: too_much },
    Check { name: "a device that does not exist is refused", run: no_such_device },
    Check { name: "plain memory has a range of its own", run: plain },
    Check { name: "copies go every way through pinned memory", run: pinned },
    Check { name: "copies go every way through pageable memory", run: pageable },
    Check { name: "copies return when pageable memory was read, or its bytes are there", run: returns },
    Check { name: "a copy ends in the registration that it begins in", run: across_registrations },
    Check { name: "copies cross the seams of stitched memory", run: across_seams },
    Check { name: "a batch copies all of it", run: batch },
    Check { name: "a fill fills its range and no more", run: fill },
    Check { name: "the host reads and writes at once", run: at_once },
];

fn granularity(harness: &Harness) -> Outcome {
    let unit = harness.unit()?;
    same("the granularity is a power of two", unit.get().count_ones(), 1)?;
    let odd = Bytes::new(unit.get() / 2);
    refused("half a unit was created", harness.create(odd, Harness::properties(GPU)))?;
    refused("nothing was created", harness.create(Bytes::ZERO, Harness::properties(GPU)))?;
    refused("nothing was reserved", harness.reserve(Bytes::ZERO))?;
    let start = harness.reserve(unit)?;
    same("a reservation is aligned", start.0 % unit.get(), 0)?;
    let handle = harness.create(unit, Harness::properties(GPU))?;
    refused("half a unit was mapped", harness.map(start, odd, handle))?;
    Ok(Verdict::Passed)
}

fn plain(harness: &Harness) -> Outcome {
    let size = Bytes::mib(6);
    let start = harness.alloc_plain(GPU, size)?;
    let other = harness.alloc_plain(GPU, size)?;
    let inside = Address(start.0 + size.get() - 512);
    let told = harness.driver().pointer_attributes(inside)?;
    same("the kind of plain memory", told.kind, PointerKind::Device { device: GPU, mapped: false })?;
    same("the range of plain memory", told.range, Some((start, size)))?;
    harness.write(start, &[7; 512])?;
    harness.write(inside, &[9; 512])?;
    harness.free_plain(GPU, other)?;
    all("the first bytes", &harness.read(start, Bytes::new(512))?, 7)?;
    all("the last bytes", &harness.read(inside, Bytes::new(512))?, 9)?;
    harness.free_plain(GPU, start)?;
    refused("plain memory was freed twice", harness.free_plain(GPU, start))?;
    Ok(Verdict::Passed)
}

fn fresh(harness: &Harness) -> Outcome {
    let unit = harness.unit()?;
    for round in 0..4 {
        let handle = harness.create(unit, Harness::properties(GPU))?;
        let start = harness.reserve(unit)?;
        harness.map(start, unit, handle)?;
        harness.set_access(start, unit, &[GPU])?;
        all("fresh memory", &harness.read(start, unit)?, 0)?;
        harness.write(start, &vec![0x40 + round; unit.get() as usize])?;
        harness.unmap(start, unit)?;
        harness.unreserve(start, unit)?;
        harness.release(handle)?;
    }
    Ok(Verdict::Passed)
}

fn stitched(harness: &Harness) -> Outcome {
    let unit = harness.unit()?;
    let whole = Bytes::new(unit.get() * 3);
    let start = harness.reserve(whole)?;
    let handles = [(); 3].map(|()| harness.create(unit, Harness::properties(GPU)));
    for (place, handle) in [2, 0, 1].into_iter().zip(handles) {
        harness.map(after(start, Bytes::new(place * unit.get()))?, unit, handle?)?;
    }
    harness.set_access(start, whole, &[GPU])?;
    let pattern: Vec<u8> = (0..whole.get()).map(|at| (at % 251) as u8).collect();
    harness.write(start, &pattern)?;
    let across = after(start, Bytes::new(unit.get() - 100))?;
    let skip = unit.get() as usize - 100;
    let found = harness.read(across, Bytes::new(unit.get() + 200))?;
    same("bytes across seams", found == pattern[skip..skip + found.len()], true)?;
    harness.unmap(start, whole)?;
    Ok(Verdict::Passed)
}

fn aliased(harness: &Harness) -> Outcome {
    let unit = harness.unit()?;
    let handle = harness.create(unit, Harness::properties(GPU))?;
    let starts = [harness.reserve(unit)?, harness.reserve(unit)?];
    for start in starts {
        harness.map(start, unit, handle)?;
        harness.set_access(start, unit, &[GPU])?;
    }
    harness.write(starts[0], &[7; 64])?;
    all("written at one address", &harness.read(starts[1], Bytes::new(64))?, 7)?;
    harness.unmap(starts[0], unit)?;
    harness.write(starts[1], &[9; 64])?;
    all("written after the other was unmapped", &harness.read(starts[1], Bytes::new(64))?, 9)?;
    Ok(Verdict::Passed)
}

fn mapped_twice(harness: &Harness) -> Outcome {
    let unit = harness.unit()?;
    let start = harness.memory(unit)?;
    let handle = harness.create(unit, Harness::properties(GPU))?;
    harness.write(start, &[3; 8])?;
    refused("mapped over a mapping", harness.map(start, unit, handle))?;
    all("the first mapping", &harness.read(start, Bytes::new(8))?, 3)?;
    Ok(Verdict::Passed)
}

fn unmapped_whole(harness: &Harness) -> Outcome {
    let unit = harness.unit()?;
    let size = Bytes::new(unit.get() * 2);
    let start = harness.memory(size)?;
    harness.write(start, &[5; 8])?;
    refused("half a mapping was unmapped", harness.unmap(start, unit))?;
    all("what was there", &harness.read(start, Bytes::new(8))?, 5)?;
    harness.unmap(start, size)?;
    // Unmapping once more is no error on CUDA (driver 580), and one on the simulated device: no promise.
    Ok(Verdict::Passed)
}

fn unreadable(harness: &Harness) -> Outcome {
    let unit = harness.unit()?;
    let start = harness.reserve(unit)?;
    refused("reserved memory was read", harness.read(start, Bytes::new(8)))?;
    let handle = harness.create(unit, Harness::properties(GPU))?;
    harness.map(start, unit, handle)?;
    refused("memory without access was read", harness.read(start, Bytes::new(8)))?;
    harness.set_access(start, unit, &[GPU])?;
    all("with access", &harness.read(start, Bytes::new(8))?, 0)?;
    harness.unmap(start, unit)?;
    refused("unmapped memory was read", harness.read(start, Bytes::new(8)))?;
    Ok(Verdict::Passed)
}

fn released_mapped(harness: &Harness) -> Outcome {
    let unit = harness.unit()?;
    // `memory` has released the handle already.
    let start = harness.memory(unit)?;
    harness.write(start, &[1; 8])?;
    all("after the release", &harness.read(start, Bytes::new(8))?, 1)?;
    Ok(Verdict::Passed)
}

fn counted(harness: &Harness) -> Outcome {
    let size = Bytes::mib(256);
    let before = harness.driver().memory_info(GPU)?;
    let start = harness.memory(size)?;
    let during = harness.driver().memory_info(GPU)?;
    same("the total", during.total, before.total)?;
    // Other programs may use the device too, so this is a bound.
    same("free memory fell", during.free.saturating_add(size) <= before.free, true)?;
    harness.unmap(start, size)?;
    let after = harness.driver().memory_info(GPU)?;
    same("free memory rose", after.free > during.free, true)?;
    Ok(Verdict::Passed)
}

fn too_much(harness: &Harness) -> Outcome {
    let unit = harness.unit()?;
    let total = harness.driver().memory_info(GPU)?.total;
    let more = total.align_up(unit).unwrap_or(total).saturating_add(unit);
    refused("more than all memory was created", harness.create(more, Harness::properties(GPU)))?;
    Ok(Verdict::Passed)
}

fn no_such_device(harness: &Harness) -> Outcome {
    let count = harness.driver().devices()?.len();
    let none = DeviceId(u32::try_from(count).unwrap_or(u32::MAX));
    refused("its memory", harness.driver().memory_info(none))?;
    refused("memory on it", harness.create(Bytes::mib(2), Harness::properties(none)))?;
    refused("a stream on it", harness.stream(none))?;
    refused("an event on it", harness.event(none, EventKind::Plain))?;
    Ok(Verdict::Passed)
}

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
