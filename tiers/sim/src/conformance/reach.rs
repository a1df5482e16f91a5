//! Checks of who reaches what: peers, host memory, other processes, pointers.

use std::fs::File;
use std::os::fd::AsFd;

use glake_units::Bytes;

use super::ground::Ground;
use super::outcome::{Failure, Outcome, Verdict, all, refused, same};
use super::{Check, GPU};
use glake_device::{Address, DeviceId, DriverError, EventKind, ExtentProperties, Place, PointerKind};

pub(super) const CHECKS: &[Check] = &[
    Check { name: "an address knows what it belongs to", run: kinds },
    Check { name: "host memory is registered once at a time", run: registered },
    Check { name: "exported memory is the same memory when imported", run: exported },
    Check { name: "only exportable memory is exported, only memory imported", run: not_exported },
    Check { name: "memory on the host's node is memory", run: host_node },
    Check { name: "a peer copies from and to memory it was given", run: peers },
    Check { name: "peers can be enabled twice", run: enabled },
    Check { name: "who can be a peer is told", run: can_be_enabled },
    Check { name: "a copy stays in the registration that it begins in", run: registrations },
];

fn kinds(ground: &Ground) -> Outcome {
    let unit = ground.unit()?;
    let start = ground.memory(unit)?;
    let kind = |address| Ok::<_, Failure>(ground.driver().pointer_attributes(address)?.kind);
    same("mapped memory", kind(start)?, PointerKind::Device { device: GPU, mapped: true })?;
    let last = Address(start.0 + unit.get() - 1);
    same("its last byte", kind(last)?, PointerKind::Device { device: GPU, mapped: true })?;
    let host = ground.pageable(Bytes::kib(8))?;
    same("pageable memory", kind(host)?, PointerKind::Pageable)?;
    ground.register(host, Bytes::kib(8))?;
    same("registered memory", kind(host)?, PointerKind::Pinned)?;
    // A driver need not tell; what it tells holds the whole registration and no more.
    if let Some(range) = ground.driver().pointer_attributes(Address(host.0 + 5000))?.range {
        same("the range of registered memory", range, (host, Bytes::kib(8)))?;
    }
    ground.unregister(host)?;
    same("unregistered memory", kind(host)?, PointerKind::Pageable)?;
    Ok(Verdict::Passed)
}

fn registered(ground: &Ground) -> Outcome {
    let size = Bytes::kib(16);
    let host = ground.pageable(size)?;
    refused("what was not registered was unregistered", ground.unregister(host))?;
    ground.register(host, size)?;
    refused("registered twice", ground.register(host, size))?;
    ground.unregister(host)?;
    ground.register(host, size)?;
    Ok(Verdict::Passed)
}

fn exported(ground: &Ground) -> Outcome {
    let unit = ground.unit()?;
    let properties = ExtentProperties { exportable: true, ..Ground::properties(GPU) };
    let handle = ground.create(unit, properties)?;
    let shared = ground.driver().export(handle)?;
    let imported = ground.import(shared.as_fd())?;
    drop(shared);
    let starts = [ground.reserve(unit)?, ground.reserve(unit)?];
    for (start, handle) in starts.into_iter().zip([handle, imported]) {
        ground.map(start, unit, handle)?;
        ground.set_access(start, unit, &[GPU])?;
    }
    ground.write(starts[0], &[0x21; 100])?;
    all("read by the importer", &ground.read(starts[1], Bytes::new(100))?, 0x21)?;
    ground.unmap(starts[0], unit)?;
    ground.release(handle)?;
    ground.write(starts[1], &[0x22; 100])?;
    all("after the exporter let go", &ground.read(starts[1], Bytes::new(100))?, 0x22)?;
    Ok(Verdict::Passed)
}

fn not_exported(ground: &Ground) -> Outcome {
    let handle = ground.create(ground.unit()?, Ground::properties(GPU))?;
    refused("what is not exportable was exported", ground.driver().export(handle))?;
    let Ok(file) = File::open("/dev/null") else { return Ok(Verdict::Skipped("no /dev/null")) };
    refused("a file that is no memory was imported", ground.import(file.as_fd()))?;
    Ok(Verdict::Passed)
}

fn host_node(ground: &Ground) -> Outcome {
    let properties = ExtentProperties { place: Place::HostNuma(0), exportable: false, gpu_direct: false };
    let unit = match ground.driver().granularity(properties) {
        Ok(unit) => unit,
        Err(DriverError::Unsupported { .. }) => return Ok(Verdict::Skipped("no memory on host nodes")),
        Err(error) => return Err(Failure::Driver(error)),
    };
    let before = ground.driver().memory_info(GPU)?.free;
    let handle = ground.create(unit, properties)?;
    let start = ground.reserve(unit)?;
    ground.map(start, unit, handle)?;
    ground.set_access(start, unit, &[GPU])?;
    same("it is no device memory", ground.driver().memory_info(GPU)?.free >= before, true)?;
    let memory = ground.memory(ground.unit()?)?;
    let stream = ground.stream(GPU)?;
    ground.fill(memory, Bytes::kib(64), 0x77, stream)?;
    ground.copy(GPU, start, memory, Bytes::kib(64), stream)?;
    ground.fill(memory, Bytes::kib(64), 0, stream)?;
    ground.copy(GPU, memory, start, Bytes::kib(64), stream)?;
    ground.driver().stream_synchronize(GPU, stream)?;
    all("copied there and back", &ground.read(memory, Bytes::kib(64))?, 0x77)?;
    Ok(Verdict::Passed)
}

/// Another device, where there is one.
fn peer(ground: &Ground) -> glake_device::Result<Option<DeviceId>> {
    Ok(ground.driver().devices()?.into_iter().map(|info| info.id).find(|id| *id != GPU))
}

const ALONE: Verdict = Verdict::Skipped("there is one device only");

fn peers(ground: &Ground) -> Outcome {
    let Some(peer) = peer(ground)? else { return Ok(ALONE) };
    let (unit, size) = (ground.unit()?, Bytes::kib(256));
    let start = ground.memory_for(unit, &[GPU, peer])?;
    let host = ground.pinned(size)?;
    ground.set_host_bytes(host, &vec![0x5a; size.get() as usize]);
    let stream = ground.stream(peer)?;
    // The relay: pinned memory to the first device's memory, over the peer.
    ground.copy(peer, start, host, size, stream)?;
    ground.driver().stream_synchronize(peer, stream)?;
    all("relayed to the device", &ground.read(start, size)?, 0x5a)?;
    let own = ground.create(unit, Ground::properties(peer))?;
    let there = ground.reserve(unit)?;
    ground.map(there, unit, own)?;
    ground.set_access(there, unit, &[peer])?;
    ground.copy(peer, there, start, size, stream)?;
    ground.set_host_bytes(host, &vec![0; size.get() as usize]);
    ground.copy(peer, host, there, size, stream)?;
    ground.driver().stream_synchronize(peer, stream)?;
    all("copied by the peer", &ground.host_bytes(host, size), 0x5a)?;
    // An event of one device orders a stream of the other.
    let event = ground.event(GPU, EventKind::Plain)?;
    let here = ground.stream(GPU)?;
    ground.fill(start, size, 0x5b, here)?;
    ground.driver().event_record(GPU, event, here)?;
    ground.driver().stream_wait_event(peer, stream, event)?;
    ground.copy(peer, host, start, size, stream)?;
    ground.driver().stream_synchronize(peer, stream)?;
    all("after an event of the owner", &ground.host_bytes(host, size), 0x5b)?;
    Ok(Verdict::Passed)
}

fn enabled(ground: &Ground) -> Outcome {
    let Some(peer) = peer(ground)? else { return Ok(ALONE) };
    ground.driver().enable_peer_access(GPU, peer)?;
    ground.driver().enable_peer_access(GPU, peer)?;
    refused("a device as its own peer", ground.driver().enable_peer_access(GPU, GPU))?;
    Ok(Verdict::Passed)
}

fn can_be_enabled(ground: &Ground) -> Outcome {
    let Some(peer) = peer(ground)? else { return Ok(ALONE) };
    let driver = ground.driver();
    same("both ways", driver.can_access_peer(GPU, peer)?, driver.can_access_peer(peer, GPU)?)?;
    same("itself", driver.can_access_peer(GPU, GPU)?, false)?;
    Ok(Verdict::Passed)
}

fn registrations(ground: &Ground) -> Outcome {
    // Pinned, pinned, a gap, pinned.
    let page = Bytes::kib(64);
    let host = ground.pageable(Bytes::new(4 * page.get()))?;
    let at = |index: u64| Address(host.0 + index * page.get());
    for index in [0, 1, 3] {
        ground.register(at(index), page)?;
    }
    let start = ground.memory(ground.unit()?)?;
    let stream = ground.stream(GPU)?;
    let pages = |count: u64| Bytes::new(count * page.get());
    refused("a copy over two registrations", ground.copy(GPU, start, host, pages(2), stream))?;
    refused("a copy over a gap", ground.copy(GPU, start, at(1), pages(3), stream))?;
    refused("a copy to two registrations", ground.copy(GPU, host, start, pages(2), stream))?;
    ground.set_host_bytes(host, &vec![0x6d; pages(4).get() as usize]);
    for index in [0, 1, 3] {
        if let Some(range) = ground.driver().pointer_attributes(Address(at(index).0 + 100))?.range {
            same("the range of one registration", range, (at(index), page))?;
        }
        ground.copy(GPU, Address(start.0 + index * page.get()), at(index), page, stream)?;
    }
    ground.driver().stream_synchronize(GPU, stream)?;
    all("the first two", &ground.read(start, pages(2))?, 0x6d)?;
    all("the last", &ground.read(Address(start.0 + 3 * page.get()), page)?, 0x6d)?;
    Ok(Verdict::Passed)
}
