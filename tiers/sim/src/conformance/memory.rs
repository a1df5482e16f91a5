//! Checks of virtual memory: reserve, create, map, access, unmap, release.

use glake_units::Bytes;

use super::ground::{Ground, after};
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

fn granularity(ground: &Ground) -> Outcome {
    let unit = ground.unit()?;
    same("the granularity is a power of two", unit.get().count_ones(), 1)?;
    let odd = Bytes::new(unit.get() / 2);
    refused("half a unit was created", ground.create(odd, Ground::properties(GPU)))?;
    refused("nothing was created", ground.create(Bytes::ZERO, Ground::properties(GPU)))?;
    refused("nothing was reserved", ground.reserve(Bytes::ZERO))?;
    let start = ground.reserve(unit)?;
    same("a reservation is aligned", start.0 % unit.get(), 0)?;
    let handle = ground.create(unit, Ground::properties(GPU))?;
    refused("half a unit was mapped", ground.map(start, odd, handle))?;
    Ok(Verdict::Passed)
}

fn fresh(ground: &Ground) -> Outcome {
    let unit = ground.unit()?;
    for round in 0..4 {
        let handle = ground.create(unit, Ground::properties(GPU))?;
        let start = ground.reserve(unit)?;
        ground.map(start, unit, handle)?;
        ground.set_access(start, unit, &[GPU])?;
        all("fresh memory", &ground.read(start, unit)?, 0)?;
        ground.write(start, &vec![0x40 + round; unit.get() as usize])?;
        ground.unmap(start, unit)?;
        ground.unreserve(start, unit)?;
        ground.release(handle)?;
    }
    Ok(Verdict::Passed)
}

fn stitched(ground: &Ground) -> Outcome {
    let unit = ground.unit()?;
    let whole = Bytes::new(unit.get() * 3);
    let start = ground.reserve(whole)?;
    let handles = [(); 3].map(|()| ground.create(unit, Ground::properties(GPU)));
    for (place, handle) in [2, 0, 1].into_iter().zip(handles) {
        ground.map(after(start, Bytes::new(place * unit.get()))?, unit, handle?)?;
    }
    ground.set_access(start, whole, &[GPU])?;
    let pattern: Vec<u8> = (0..whole.get()).map(|at| (at % 251) as u8).collect();
    ground.write(start, &pattern)?;
    let across = after(start, Bytes::new(unit.get() - 100))?;
    let skip = unit.get() as usize - 100;
    let found = ground.read(across, Bytes::new(unit.get() + 200))?;
    same("bytes across seams", found == pattern[skip..skip + found.len()], true)?;
    ground.unmap(start, whole)?;
    Ok(Verdict::Passed)
}

fn aliased(ground: &Ground) -> Outcome {
    let unit = ground.unit()?;
    let handle = ground.create(unit, Ground::properties(GPU))?;
    let starts = [ground.reserve(unit)?, ground.reserve(unit)?];
    for start in starts {
        ground.map(start, unit, handle)?;
        ground.set_access(start, unit, &[GPU])?;
    }
    ground.write(starts[0], &[7; 64])?;
    all("written at one address", &ground.read(starts[1], Bytes::new(64))?, 7)?;
    ground.unmap(starts[0], unit)?;
    ground.write(starts[1], &[9; 64])?;
    all("written after the other was unmapped", &ground.read(starts[1], Bytes::new(64))?, 9)?;
    Ok(Verdict::Passed)
}

fn mapped_twice(ground: &Ground) -> Outcome {
    let unit = ground.unit()?;
    let start = ground.memory(unit)?;
    let handle = ground.create(unit, Ground::properties(GPU))?;
    ground.write(start, &[3; 8])?;
    refused("mapped over a mapping", ground.map(start, unit, handle))?;
    all("the first mapping", &ground.read(start, Bytes::new(8))?, 3)?;
    Ok(Verdict::Passed)
}

fn unmapped_whole(ground: &Ground) -> Outcome {
    let unit = ground.unit()?;
    let size = Bytes::new(unit.get() * 2);
    let start = ground.memory(size)?;
    ground.write(start, &[5; 8])?;
    refused("half a mapping was unmapped", ground.unmap(start, unit))?;
    all("what was there", &ground.read(start, Bytes::new(8))?, 5)?;
    ground.unmap(start, size)?;
    // Unmapping once more is no error on CUDA (driver 580), and one on the simulated device: no promise.
    Ok(Verdict::Passed)
}

fn unreadable(ground: &Ground) -> Outcome {
    let unit = ground.unit()?;
    let start = ground.reserve(unit)?;
    refused("reserved memory was read", ground.read(start, Bytes::new(8)))?;
    let handle = ground.create(unit, Ground::properties(GPU))?;
    ground.map(start, unit, handle)?;
    refused("memory without access was read", ground.read(start, Bytes::new(8)))?;
    ground.set_access(start, unit, &[GPU])?;
    all("with access", &ground.read(start, Bytes::new(8))?, 0)?;
    ground.unmap(start, unit)?;
    refused("unmapped memory was read", ground.read(start, Bytes::new(8)))?;
    Ok(Verdict::Passed)
}

fn released_mapped(ground: &Ground) -> Outcome {
    let unit = ground.unit()?;
    // `memory` has released the handle already.
    let start = ground.memory(unit)?;
    ground.write(start, &[1; 8])?;
    all("after the release", &ground.read(start, Bytes::new(8))?, 1)?;
    Ok(Verdict::Passed)
}

fn counted(ground: &Ground) -> Outcome {
    let size = Bytes::mib(256);
    let before = ground.driver().memory_info(GPU)?;
    let start = ground.memory(size)?;
    let during = ground.driver().memory_info(GPU)?;
    same("the total", during.total, before.total)?;
    // Other programs may use the device too, so this is a bound.
    same("free memory fell", during.free.saturating_add(size) <= before.free, true)?;
    ground.unmap(start, size)?;
    let after = ground.driver().memory_info(GPU)?;
    same("free memory rose", after.free > during.free, true)?;
    Ok(Verdict::Passed)
}

fn too_much(ground: &Ground) -> Outcome {
    let unit = ground.unit()?;
    let total = ground.driver().memory_info(GPU)?.total;
    let more = total.align_up(unit).unwrap_or(total).saturating_add(unit);
    refused("more than all memory was created", ground.create(more, Ground::properties(GPU)))?;
    Ok(Verdict::Passed)
}

fn no_such_device(ground: &Ground) -> Outcome {
    let count = ground.driver().devices()?.len();
    let none = DeviceId(u32::try_from(count).unwrap_or(u32::MAX));
    refused("its memory", ground.driver().memory_info(none))?;
    refused("memory on it", ground.create(Bytes::mib(2), Ground::properties(none)))?;
    refused("a stream on it", ground.stream(none))?;
    refused("an event on it", ground.event(none, EventKind::Plain))?;
    Ok(Verdict::Passed)
}
