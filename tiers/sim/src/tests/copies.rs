//! Which links copies go over, and when their calls return.

use super::*;

const SIZE: Bytes = Bytes::mib(8);
const FOUR: Bytes = Bytes::mib(32);

fn model(name: &str) -> Simulator {
    let topology = crate::load(name).unwrap();
    Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap()
}

fn gpus(count: u32) -> Vec<DeviceId> {
    (0..count).map(DeviceId).collect()
}

/// GB/s of copies of `SIZE`, each on a stream of its own, begun at once.
fn speed(sim: &Simulator, copies: &[(DeviceId, Address, Address)]) -> f64 {
    let before = sim.now();
    for (gpu, to, from) in copies {
        let stream = sim.stream_create(*gpu, Priority::Normal).unwrap();
        // SAFETY: the simulator refuses undefined operations.
        unsafe { sim.copy(*gpu, CopyRequest { to: *to, from: *from, size: SIZE }, stream) }.unwrap();
    }
    for (gpu, ..) in copies {
        sim.context_synchronize(*gpu).unwrap();
    }
    let time = sim.now() - before - US(7);
    copies.len() as f64 * SIZE.get() as f64 / time.as_secs_f64() / 1e9
}

fn close(found: f64, expected: f64) {
    assert!((found / expected - 1.0).abs() < 0.01, "{found} instead of {expected}");
}

/// Host memory for so many copies, and where each of them has its part.
fn pinned(sim: &Simulator, count: u64) -> Vec<Address> {
    let mib = SIZE.get() / MIB;
    let host = mapped_at(sim, Place::HostNuma(0), mib * count, &gpus(4));
    (0..count).map(|index| Address(host.0 + index * SIZE.get())).collect()
}

#[test]
fn a_staged_relay_takes_the_link_of_the_relay_and_then_nvlink() {
    let sim = model("h200x4");
    let host = pinned(&sim, 4);
    let target = sim.plain_alloc(GPU, FOUR).unwrap();
    let target = |index: usize| Address(target.0 + index as u64 * SIZE.get());
    let slots: Vec<Address> = gpus(4).iter().map(|gpu| sim.plain_alloc(*gpu, SIZE).unwrap()).collect();
    let fill: Vec<_> =
        gpus(4).iter().map(|gpu| (*gpu, slots[gpu.0 as usize], host[gpu.0 as usize])).collect();
    close(speed(&sim, &fill[1..2]), 55.5);
    close(speed(&sim, &fill), 213.0);
    let drain: Vec<_> =
        gpus(4).iter().map(|gpu| (*gpu, target(gpu.0 as usize), slots[gpu.0 as usize])).collect();
    // Without access the driver goes through host memory.
    close(speed(&sim, &drain[1..2]), 55.4);
    close(speed(&sim, &drain[1..]), 55.5);
    for peer in &gpus(4)[1..] {
        sim.enable_peer_access(*peer, GPU).unwrap();
    }
    close(speed(&sim, &drain[1..2]), 396.0);
    close(speed(&sim, &drain[1..]), 396.0);
    // The other way, on a stream of the relay too.
    let back = (PEER, slots[1], target(1));
    close(speed(&sim, &[back]), 396.0);
}

#[test]
fn plain_memory_is_copied_over_its_owners_link_on_any_stream() {
    let sim = model("h200x4");
    let host = pinned(&sim, 4);
    let plain = sim.plain_alloc(GPU, FOUR).unwrap();
    let pair =
        |gpu: &DeviceId| (*gpu, Address(plain.0 + u64::from(gpu.0) * SIZE.get()), host[gpu.0 as usize]);
    let to_gpu: Vec<_> = gpus(4).iter().map(pair).collect();
    let from_gpu: Vec<_> = to_gpu.iter().map(|(gpu, device, host)| (*gpu, *host, *device)).collect();
    for enabled in [false, true] {
        close(speed(&sim, &to_gpu[1..2]), 55.5);
        close(speed(&sim, &to_gpu), 55.5);
        close(speed(&sim, &from_gpu), 55.4);
        if !enabled {
            gpus(4)[1..].iter().for_each(|peer| sim.enable_peer_access(*peer, GPU).unwrap());
        }
    }
}

#[test]
fn a_user_stream_of_another_gpu_takes_that_gpus_link_to_mapped_memory() {
    let sim = model("h200x4");
    let host = pinned(&sim, 4);
    let target = mapped(&sim, 32, &gpus(4));
    let pair =
        |index: u64, gpu| (DeviceId(gpu), Address(target.0 + index * SIZE.get()), host[index as usize]);
    close(speed(&sim, &[pair(0, 2), pair(1, 0)]), 111.0);
    close(speed(&sim, &[pair(0, 2), pair(1, 2)]), 55.5);
}

#[test]
fn relays_gain_nothing_on_servers_without_them() {
    for (name, link) in [("h200x4-direct", 55.5), ("pcie4x4", 24.3)] {
        let sim = model(name);
        let host = pinned(&sim, 4);
        let target = mapped(&sim, 32, &gpus(4));
        let pair =
            |gpu: &DeviceId| (*gpu, Address(target.0 + u64::from(gpu.0) * SIZE.get()), host[gpu.0 as usize]);
        close(speed(&sim, &gpus(4).iter().map(pair).collect::<Vec<_>>()), link);
        // A copy over a peer's memory: NVLink there, both links here.
        let slot = mapped_at(&sim, Place::Gpu(PEER), 8, &gpus(4));
        close(speed(&sim, &[(PEER, target, slot)]), if name == "pcie4x4" { 24.3 } else { 396.0 });
    }
}

#[test]
fn kernels_and_fills_need_access_to_plain_memory() {
    let sim = model("h200x4");
    let plain = sim.plain_alloc(GPU, SIZE).unwrap();
    let stream = sim.stream_create(PEER, Priority::Normal).unwrap();
    // SAFETY: the simulator refuses undefined operations.
    let fill = || unsafe { sim.fill(PEER, plain, SIZE, 1, stream) };
    assert_eq!(rule(fill()), Refusal::NoPeerAccess);
    assert_eq!(
        rule(sim.enqueue_kernel(PEER, stream, &[], &touch(plain, 8), US(1), |_| {})),
        Refusal::NoPeerAccess
    );
    sim.enable_peer_access(PEER, GPU).unwrap();
    fill().unwrap();
}

/// Host memory that the driver does not know of.
fn pageable(bytes: &mut [u8]) -> Address {
    Address(bytes.as_mut_ptr().expose_provenance() as u64)
}

#[test]
fn a_copy_from_pageable_memory_returns_when_its_source_was_read() {
    let sim = model("h200x4");
    let stream = sim.stream_create(GPU, Priority::Normal).unwrap();
    let event = sim.event_create(GPU, EventKind::Plain).unwrap();
    let device = mapped(&sim, 64, &[GPU]);
    for size in [100, 3 * MIB] {
        let mut source = vec![7; size as usize];
        let request = CopyRequest { to: device, from: pageable(&mut source), size: Bytes::new(size) };
        sim.enqueue_kernel(GPU, stream, &[], &[], Duration::from_millis(1), |_| {}).unwrap();
        let before = sim.now();
        // SAFETY: the source lives until the call returns, which is when it has been read.
        unsafe { sim.copy(GPU, request, stream) }.unwrap();
        let took = sim.now() - before;
        assert!(
            took >= Duration::from_millis(1),
            "the source was read before the stream came to it: {took:?}"
        );
        source.fill(9);
        sim.event_record(GPU, event, stream).unwrap();
        assert!(!sim.event_query(GPU, event).unwrap(), "the last bytes are on their way");
        assert_eq!(rule(sim.read_now(GPU, device, &mut [0])), Refusal::Unordered);
        sim.event_synchronize(GPU, event).unwrap();
        let mut found = vec![0; size as usize];
        sim.read_now(GPU, device, &mut found).unwrap();
        assert!(found.iter().all(|byte| *byte == 7));
        let rate = size as f64 / (sim.now() - before - Duration::from_millis(1)).as_secs_f64() / 1e9;
        assert!(rate < 9.5, "{rate}");
    }
}

#[test]
fn a_copy_to_pageable_memory_and_one_between_host_memories_return_when_done() {
    let sim = model("h200x4");
    let stream = sim.stream_create(GPU, Priority::Normal).unwrap();
    let device = mapped(&sim, 2, &[GPU]);
    let size = Bytes::kib(300);
    // SAFETY: the target lives until the calls return.
    unsafe {
        sim.fill(GPU, device, size, 5, stream).unwrap();
        let mut target = vec![0; size.get() as usize];
        sim.copy(GPU, CopyRequest { to: pageable(&mut target), from: device, size }, stream).unwrap();
        assert!(target.iter().all(|byte| *byte == 5));
        let node = mapped_at(&sim, Place::HostNuma(0), 2, &[GPU]);
        let request = CopyRequest { to: node, from: pageable(&mut target), size };
        sim.copy(GPU, request, stream).unwrap();
        assert_eq!(first(&sim, node), 5);
    }
}

#[test]
fn times_alone_are_those_of_copies_that_move_bytes() {
    let took = |times_only| {
        let topology = crate::load("h200x4").unwrap();
        let sim = Simulator::new(SimOptions { topology, times_only, ..SimOptions::default() }).unwrap();
        let target = sim.plain_alloc(GPU, SIZE).unwrap();
        let host = pinned(&sim, 1)[0];
        // SAFETY: the simulator refuses undefined operations.
        unsafe { sim.write_now(GPU, target, &[1; 64]) }.unwrap();
        let speed = speed(&sim, &[(GPU, target, host)]);
        let mut found = [0; 64];
        sim.read_now(GPU, target, &mut found).unwrap();
        (speed, found[0])
    };
    let (moved, alone) = (took(false), took(true));
    assert_eq!((moved.0, moved.1, alone.1), (alone.0, 0, 1));
}

#[test]
fn setting_access_waits_for_copies_leaving_over_the_link() {
    let sim = model("h200x4");
    let host = pinned(&sim, 8);
    let own = mapped(&sim, 64, &gpus(2));
    let extents = [(); 3].map(|()| sim.create(Bytes::mib(2), properties()).unwrap());
    let start = sim.reserve(Bytes::mib(6)).unwrap();
    let opens = |gpu: DeviceId| {
        let before = sim.now();
        // SAFETY: the simulator refuses undefined operations.
        unsafe {
            for (at, extent) in (0..).zip(extents) {
                sim.map(Address(start.0 + at * 2 * MIB), Bytes::mib(2), extent).unwrap();
            }
            sim.set_access(start, Bytes::mib(6), &[access(gpu)]).unwrap();
            let time = sim.now() - before;
            sim.context_synchronize(GPU).unwrap();
            sim.unmap(start, Bytes::mib(6)).unwrap();
            time
        }
    };
    let copy = |to: Address, from: Address| {
        let stream = sim.stream_create(GPU, Priority::Normal).unwrap();
        // SAFETY: as above.
        unsafe { sim.copy(GPU, CopyRequest { to, from, size: FOUR }, stream) }.unwrap();
    };
    assert_eq!(opens(GPU), Duration::ZERO);
    copy(own, host[0]);
    assert_eq!(opens(GPU), Duration::ZERO, "what comes in holds nothing up");
    copy(host[0], own);
    assert_eq!(opens(PEER), Duration::ZERO, "it leaves another GPU");
    copy(host[0], own);
    // It takes .6 ms: of three mappings the first waits for it.
    assert_eq!(opens(GPU), US(1060));
}
