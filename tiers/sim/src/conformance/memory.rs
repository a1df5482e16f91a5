//! Checks of virtual memory: reserve, create, map, access, unmap, release.

use glake_units::Bytes;

use super::harness::{Harness, after};
use super::outcome::{Outcome, Verdict, all, refused, same};
use super::{Check, GPU};
use glake_device::{DeviceId, EventKind};

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
