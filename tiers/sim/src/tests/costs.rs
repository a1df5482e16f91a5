//! How fast the simulator itself is: measurements, run by hand.

use super::*;

/// Prints what the verbs cost: `cargo test --release -p glake-device verbs_cost -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn verbs_cost() {
    let topology = crate::load("h200x4").unwrap();
    let sim = Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap();
    let (count, size) = (20_000_u64, Bytes::mib(2));
    let start = sim.reserve(Bytes::mib(2 * count)).unwrap();
    let time = |what: &str, body: &mut dyn FnMut(u64)| {
        let before = Instant::now();
        (0..count).for_each(body);
        println!("{what}: {:.2} us", before.elapsed().as_secs_f64() * 1e6 / count as f64);
    };
    let mut handles = Vec::new();
    let at = |index: u64| Address(start.0 + index * 2 * MIB);
    // Shuffled, so that neighbours in the address space are not neighbours in the file.
    let shuffled = |index: u64| (index * 7919) % count;
    time("create", &mut |_| handles.push(sim.create(size, properties()).unwrap()));
    // SAFETY: the simulator refuses undefined operations.
    unsafe {
        time("map in order", &mut |i| sim.map(at(i), size, handles[shuffled(i) as usize]).unwrap());
        time("set access in order", &mut |i| sim.set_access(at(i), size, &[access(GPU)]).unwrap());
        time("unmap in order", &mut |i| sim.unmap(at(i), size).unwrap());
        time("map", &mut |i| sim.map(at(shuffled(i)), size, handles[i as usize]).unwrap());
        time("set access", &mut |i| sim.set_access(at(i), size, &[access(GPU)]).unwrap());
        time("unmap", &mut |i| sim.unmap(at(i), size).unwrap());
        time("release", &mut |i| sim.release(handles[i as usize]).unwrap());
    }
    let stream = sim.stream_create(GPU, Priority::Normal).unwrap();
    let event = sim.event_create(GPU, EventKind::Plain).unwrap();
    time("kernel", &mut |_| sim.enqueue_kernel(GPU, stream, &[], &[], US(1), |_| {}).unwrap());
    time("context event", &mut |_| sim.event_record_context(GPU, event).unwrap());
    time("step", &mut |_| assert!(sim.step()));
}

/// Prints how fast a random program runs: `cargo test -p glake-device steps_cost -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn steps_cost() {
    for streams in [8, 64] {
        for (strict_ordering, ahead) in [(true, 10_000), (true, 100), (false, 10_000), (false, 100)] {
            let steps = 200_000;
            let before = Instant::now();
            let refused = random_program(strict_ordering, streams, ahead, steps);
            let speed = f64::from(steps) / before.elapsed().as_secs_f64();
            println!(
                "{streams} streams, strict {strict_ordering}, {ahead} steps ahead: {speed:.0} steps/s, {refused} refused"
            );
        }
    }
}

/// Kernels, copies and events over streams of 4 GPUs, which the host waits for every so many steps; says how many steps
/// were refused, being unordered.
fn random_program(strict_ordering: bool, count: u32, ahead: u32, steps: u32) -> u32 {
    let topology = crate::load("h200x4").unwrap();
    let sim = Simulator::new(SimOptions { topology, strict_ordering, ..SimOptions::default() }).unwrap();
    let gpus: Vec<DeviceId> = (0..4).map(DeviceId).collect();
    let memory: Vec<Address> = gpus.iter().map(|gpu| mapped_at(&sim, Place::Gpu(*gpu), 16, &gpus)).collect();
    let host = mapped_at(&sim, Place::HostNuma(0), 16, &gpus);
    let stream = |index: u32| {
        let gpu = DeviceId(index % 4);
        (gpu, sim.stream_create(gpu, Priority::Normal).unwrap())
    };
    let streams: Vec<(DeviceId, Stream)> = (0..count).map(stream).collect();
    let event =
        |index: u32| (DeviceId(index % 4), sim.event_create(DeviceId(index % 4), EventKind::Plain).unwrap());
    let events: Vec<(DeviceId, Event)> = (0..32).map(event).collect();
    let mut state = 1_u64;
    let mut random = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let mut refused = 0;
    for step in 0..steps {
        let (gpu, stream) = streams[random(streams.len() as u64) as usize];
        let own = Address(memory[gpu.0 as usize].0 + random(8 << 10) * 2048);
        let other = Address(memory[random(4) as usize].0 + random(8 << 10) * 2048);
        let outside = Address(host.0 + random(8 << 10) * 2048);
        let size = Bytes::new(1 + random(2048));
        let copy = |to, from| {
            // SAFETY: the simulator refuses undefined operations.
            unsafe { sim.copy(gpu, CopyRequest { to, from, size }, stream) }
        };
        let done = match random(100) {
            0..15 => copy(own, outside),
            15..30 => copy(outside, own),
            30..40 => copy(other, own),
            40..60 => {
                sim.enqueue_kernel(gpu, stream, &touch(other, 64), &touch(own, 64), US(5), move |memory| {
                    let _ = memory.write(own, &[1; 64]);
                })
            }
            60..75 => {
                let (gpu, event) = events[random(32) as usize];
                let (_, stream) =
                    *streams.iter().filter(|(of, _)| *of == gpu).nth(random(2) as usize).unwrap();
                sim.event_record(gpu, event, stream)
            }
            75..90 => sim.stream_wait_event(gpu, stream, events[random(32) as usize].1),
            90..97 => {
                let (gpu, event) = events[random(32) as usize];
                sim.event_query(gpu, event).map(drop)
            }
            _ => {
                let (gpu, event) = events[random(32) as usize];
                sim.event_record_context(gpu, event)
            }
        };
        refused += u32::from(done.is_err());
        if step % ahead == 0 {
            gpus.iter().for_each(|gpu| sim.context_synchronize(*gpu).unwrap());
        }
    }
    gpus.iter().for_each(|gpu| sim.context_synchronize(*gpu).unwrap());
    refused
}

/// Prints what much at once costs: `cargo test -p glake-device crowds_cost -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn crowds_cost() {
    let count = 100_000_u64;
    let time = |what: &str, body: &mut dyn FnMut()| {
        let before = Instant::now();
        body();
        println!("{what}: {:.2} us each", before.elapsed().as_secs_f64() * 1e6 / count as f64);
    };
    let topology = crate::load("h200x4").unwrap();
    let sim = Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap();
    let block = Bytes::kib(1);
    let mib = (count * block.get() / MIB + 2).next_multiple_of(2);
    let (device, host) = (mapped(&sim, mib, &[GPU]), mapped_at(&sim, Place::HostNuma(0), mib, &[GPU]));
    let stream = sim.stream_create(GPU, Priority::Normal).unwrap();
    // Shuffled, so that neighbours in the list are not neighbours in memory.
    let at = |start: Address, index: u64| Address(start.0 + index * 7919 % count * block.get());
    let copy = |index| CopyRequest { to: at(device, index), from: at(host, index + 1), size: block };
    let copies: Vec<CopyRequest> = (0..count).map(copy).collect();
    let touches = |of: fn(&CopyRequest) -> Address| -> Vec<Touch> {
        copies.iter().map(|copy| Touch { address: of(copy), size: block }).collect()
    };
    let (reads, writes) = (touches(|copy| copy.from), touches(|copy| copy.to));
    // SAFETY: the simulator refuses undefined operations.
    time("a batch of copies", &mut || unsafe { sim.copy_batch(GPU, &copies, stream) }.unwrap());
    time("its end", &mut || sim.stream_synchronize(GPU, stream).unwrap());
    time("touches of a kernel", &mut || {
        let copies = copies.clone();
        let body = move |memory: &mut dyn KernelMemory| {
            let mut bytes = vec![0; 16];
            for copy in &copies {
                memory.read(copy.from, &mut bytes).unwrap();
                memory.write(copy.to, &bytes).unwrap();
            }
        };
        sim.enqueue_kernel(GPU, stream, &reads, &writes, US(1), body).unwrap();
    });
    time("its end", &mut || sim.stream_synchronize(GPU, stream).unwrap());
    time("streams that come and go", &mut || {
        for _ in 0..count {
            let stream = sim.stream_create(GPU, Priority::Normal).unwrap();
            super::writes(&sim, stream, device, 1).unwrap();
            // SAFETY: the simulator refuses undefined operations.
            unsafe { sim.stream_destroy(GPU, stream) }.unwrap();
            sim.context_synchronize(GPU).unwrap();
        }
    });
}
