//! Checks of reachability: peers, host memory, other processes, pointers.

use std::fs::File;
use std::os::fd::AsFd;

use glake_units::Bytes;

use super::harness::Harness;
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

fn kinds(harness: &Harness) -> Outcome {
    let unit = harness.unit()?;
    let start = harness.memory(unit)?;
    let kind = |address| Ok::<_, Failure>(harness.driver().pointer_attributes(address)?.kind);
    same("mapped memory", kind(start)?, PointerKind::Device { device: GPU, mapped: true })?;
    let last = Address(start.0 + unit.get() - 1);
    same("its last byte", kind(last)?, PointerKind::Device { device: GPU, mapped: true })?;
    let host = harness.pageable(Bytes::kib(8))?;
    same("pageable memory", kind(host)?, PointerKind::Pageable)?;
    harness.register(host, Bytes::kib(8))?;
    same("registered memory", kind(host)?, PointerKind::Pinned)?;
    // A driver may report no range; a reported range is exactly the registration.
    if let Some(range) = harness.driver().pointer_attributes(Address(host.0 + 5000))?.range {
        same("the range of registered memory", range, (host, Bytes::kib(8)))?;
    }
    harness.unregister(host)?;
    same("unregistered memory", kind(host)?, PointerKind::Pageable)?;
    Ok(Verdict::Passed)
}

fn registered(harness: &Harness) -> Outcome {
    let size = Bytes::kib(16);
    let host = harness.pageable(size)?;
    refused("what was not registered was unregistered", harness.unregister(host))?;
    harness.register(host, size)?;
    refused("registered twice", harness.register(host, size))?;
    harness.unregister(host)?;
    harness.register(host, size)?;
    Ok(Verdict::Passed)
}

fn exported(harness: &Harness) -> Outcome {
    let unit = harness.unit()?;
    let properties = ExtentProperties { exportable: true, ..Harness::properties(GPU) };
    let handle = harness.create(unit, properties)?;
    let shared = harness.driver().export(handle)?;
    let imported = harness.import(shared.as_fd())?;
    drop(shared);
    let starts = [harness.reserve(unit)?, harness.reserve(unit)?];
    for (start, handle) in starts.into_iter().zip([handle, imported]) {
        harness.map(start, unit, handle)?;
        harness.set_access(start, unit, &[GPU])?;
    }
    harness.write(starts[0], &[0x21; 100])?;
    all("read by the importer", &harness.read(starts[1], Bytes::new(100))?, 0x21)?;
    harness.unmap(starts[0], unit)?;
    harness.release(handle)?;
    harness.write(starts[1], &[0x22; 100])?;
    all("after the exporter let go", &harness.read(starts[1], Bytes::new(100))?, 0x22)?;
    Ok(Verdict::Passed)
}

fn not_exported(harness: &Harness) -> Outcome {
    let handle = harness.create(harness.unit()?, Harness::properties(GPU))?;
    refused("what is not exportable was exported", harness.driver().export(handle))?;
    let Ok(file) = File::open("/dev/null") else { return Ok(Verdict::Skipped("no /dev/null")) };
    refused("a file that is no memory was imported", harness.import(file.as_fd()))?;
    Ok(Verdict::Passed)
}

fn host_node(harness: &Harness) -> Outcome {
    let properties = ExtentProperties { place: Place::HostNuma(0), exportable: false, gpu_direct: false };
    let unit = match harness.driver().granularity(properties) {
        Ok(unit) => unit,
        Err(DriverError::Unsupported { .. }) => return Ok(Verdict::Skipped("no memory on host nodes")),
        Err(error) => return Err(Failure::Driver(error)),
    };
    let before = harness.driver().memory_info(GPU)?.free;
    let handle = harness.create(unit, properties)?;
    let start = harness.reserve(unit)?;
    harness.map(start, unit, handle)?;
    harness.set_access(start, unit, &[GPU])?;
    same("it is no device memory", harness.driver().memory_info(GPU)?.free >= before, true)?;
    let memory = harness.memory(harness.unit()?)?;
    let stream = harness.stream(GPU)?;
    harness.fill(memory, Bytes::kib(64), 0x77, stream)?;
    harness.copy(GPU, start, memory, Bytes::kib(64), stream)?;
    harness.fill(memory, Bytes::kib(64), 0, stream)?;
    harness.copy(GPU, memory, start, Bytes::kib(64), stream)?;
    harness.driver().stream_synchronize(GPU, stream)?;
    all("copied there and back", &harness.read(memory, Bytes::kib(64))?, 0x77)?;
    Ok(Verdict::Passed)
}

/// Returns another device, if there is one.
fn peer(harness: &Harness) -> glake_device::Result<Option<DeviceId>> {
    Ok(harness.driver().devices()?.into_iter().map(|info| info.id).find(|id| *id != GPU))
}

const ALONE: Verdict = Verdict::Skipped("there is one device only");

fn peers(harness: &Harness) -> Outcome {
    let Some(peer) = peer(harness)? else { return Ok(ALONE) };
    let (unit, size) = (harness.unit()?, Bytes::kib(256));
    let start = harness.memory_for(unit, &[GPU, peer])?;
    let host = harness.pinned(size)?;
    harness.set_host_bytes(host, &vec![0x5a; size.get() as usize]);
    let stream = harness.stream(peer)?;
    // The relay: pinned memory to the first device's memory, over the peer.
    harness.copy(peer, start, host, size, stream)?;
    harness.driver().stream_synchronize(peer, stream)?;
    all("relayed to the device", &harness.read(start, size)?, 0x5a)?;
    let own = harness.create(unit, Harness::properties(peer))?;
    let there = harness.reserve(unit)?;
    harness.map(there, unit, own)?;
    harness.set_access(there, unit, &[peer])?;
    harness.copy(peer, there, start, size, stream)?;
    harness.set_host_bytes(host, &vec![0; size.get() as usize]);
    harness.copy(peer, host, there, size, stream)?;
    harness.driver().stream_synchronize(peer, stream)?;
    all("copied by the peer", &harness.host_bytes(host, size), 0x5a)?;
    // An event of one device orders a stream of the other.
    let event = harness.event(GPU, EventKind::Plain)?;
    let here = harness.stream(GPU)?;
    harness.fill(start, size, 0x5b, here)?;
    harness.driver().event_record(GPU, event, here)?;
    harness.driver().stream_wait_event(peer, stream, event)?;
    harness.copy(peer, host, start, size, stream)?;
    harness.driver().stream_synchronize(peer, stream)?;
    all("after an event of the owner", &harness.host_bytes(host, size), 0x5b)?;
    Ok(Verdict::Passed)
}

fn enabled(harness: &Harness) -> Outcome {
    let Some(peer) = peer(harness)? else { return Ok(ALONE) };
    harness.driver().enable_peer_access(GPU, peer)?;
    harness.driver().enable_peer_access(GPU, peer)?;
    refused("a device as its own peer", harness.driver().enable_peer_access(GPU, GPU))?;
    Ok(Verdict::Passed)
}

fn can_be_enabled(harness: &Harness) -> Outcome {
    let Some(peer) = peer(harness)? else { return Ok(ALONE) };
    let driver = harness.driver();
    same("both ways", driver.can_access_peer(GPU, peer)?, driver.can_access_peer(peer, GPU)?)?;
    same("itself", driver.can_access_peer(GPU, GPU)?, false)?;
    Ok(Verdict::Passed)
}

fn registrations(harness: &Harness) -> Outcome {
    // Pinned, pinned, a gap, pinned.
    let page = Bytes::kib(64);
    let host = harness.pageable(Bytes::new(4 * page.get()))?;
    let at = |index: u64| Address(host.0 + index * page.get());
    for index in [0, 1, 3] {
        harness.register(at(index), page)?;
    }
    let start = harness.memory(harness.unit()?)?;
    let stream = harness.stream(GPU)?;
    let pages = |count: u64| Bytes::new(count * page.get());
    refused("a copy over two registrations", harness.copy(GPU, start, host, pages(2), stream))?;
    refused("a copy over a gap", harness.copy(GPU, start, at(1), pages(3), stream))?;
    refused("a copy to two registrations", harness.copy(GPU, host, start, pages(2), stream))?;
    harness.set_host_bytes(host, &vec![0x6d; pages(4).get() as usize]);
    for index in [0, 1, 3] {
        if let Some(range) = harness.driver().pointer_attributes(Address(at(index).0 + 100))?.range {
            same("the range of one registration", range, (at(index), page))?;
        }
        harness.copy(GPU, Address(start.0 + index * page.get()), at(index), page, stream)?;
    }
    harness.driver().stream_synchronize(GPU, stream)?;
    all("the first two", &harness.read(start, pages(2))?, 0x6d)?;
    all("the last", &harness.read(Address(start.0 + 3 * page.get()), page)?, 0x6d)?;
    Ok(Verdict::Passed)
}
