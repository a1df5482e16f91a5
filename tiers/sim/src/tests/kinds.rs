//! Memory that the program allocates: who reaches it, and what happens to who does not.

use super::*;

fn killing(gpus: u32) -> Simulator {
    let topology = SimTopology::uniform(gpus, Bytes::gib(1));
    Simulator::new(SimOptions { topology, faults_kill: true, ..SimOptions::default() }).unwrap()
}

fn reads(sim: &Simulator, device: DeviceId, stream: Stream, at: Address) -> Result<()> {
    sim.enqueue_kernel(device, stream, &touch(at, 4), &[], US(1), |_| {})
}

fn lost<T: std::fmt::Debug>(result: Result<T>) {
    match result {
        Err(DriverError::Sticky { code: 700, .. }) => {}
        other => panic!("not lost: {other:?}"),
    }
}

#[test]
fn peer_access_does_not_open_memory_of_a_pool() {
    let sim = server(2);
    let own = sim.own();
    let [theirs, ours] = [&sim, &own].map(|driver| driver.stream_create(PEER, Priority::Normal).unwrap());
    let pool = sim.async_alloc(GPU, Bytes::mib(1)).unwrap();
    let kind = sim.pointer_attributes(pool).unwrap().kind;
    assert_eq!(kind, PointerKind::Device { device: GPU, mapped: false });
    sim.enable_peer_access(PEER, GPU).unwrap();
    assert_eq!(rule(reads(&sim, PEER, theirs, pool)), Refusal::NoPeerAccess);
    assert_eq!(rule(reads(&own, PEER, ours, pool)), Refusal::NoPeerAccess);
    for driver in [&sim, &own] {
        let here = driver.stream_create(GPU, Priority::Normal).unwrap();
        reads(driver, GPU, here, pool).unwrap();
        driver.context_synchronize(GPU).unwrap();
    }
    // The driver copies it all the same, over its owner's link.
    let host = mapped_at(&sim, Place::HostNuma(0), 2, &[GPU, PEER]);
    let request = CopyRequest { to: pool, from: host, size: Bytes::mib(1) };
    // SAFETY: the simulator refuses undefined operations.
    unsafe { own.copy(PEER, request, ours) }.unwrap();
    own.context_synchronize(PEER).unwrap();
    sim.plain_free(pool).unwrap();
}

#[test]
fn managed_memory_is_accessible_everywhere() {
    let sim = server(2);
    let own = sim.own();
    let managed = sim.managed_alloc(GPU, Bytes::mib(1)).unwrap();
    assert_eq!(sim.pointer_attributes(managed).unwrap().kind, PointerKind::Managed);
    for driver in [&sim, &own] {
        let stream = driver.stream_create(PEER, Priority::Normal).unwrap();
        reads(driver, PEER, stream, managed).unwrap();
        driver.context_synchronize(PEER).unwrap();
    }
    sim.plain_free(managed).unwrap();
    assert_eq!(sim.pointer_attributes(managed).unwrap().kind, PointerKind::Pageable);
}

#[test]
fn a_kernel_with_an_illegal_access_loses_its_context() {
    let sim = killing(2);
    let (own, further) = (sim.own(), sim.own());
    let at = mapped(&sim, 2, &[GPU, PEER]);
    let plain = sim.plain_alloc(GPU, Bytes::mib(1)).unwrap();
    let stream = own.stream_create(PEER, Priority::Normal).unwrap();
    let before = own.event_create(PEER, EventKind::Plain).unwrap();
    let behind = own.event_create(PEER, EventKind::Plain).unwrap();
    let module = own.module_load(PEER, &ModuleSource { ptx: "", host: &[] }).unwrap();
    own.event_record(PEER, before, stream).unwrap();
    reads(&own, PEER, stream, plain).unwrap();
    own.enqueue_kernel(PEER, stream, &[], &touch(at, 1), US(1), move |memory| {
        let _ = memory.write(at, &[1]);
    })
    .unwrap();
    own.event_record(PEER, behind, stream).unwrap();
    assert!(own.event_query(PEER, before).unwrap(), "its stream has not come to it");
    // Another context waits for an event behind it: a wait carries no error.
    let other = further.stream_create(PEER, Priority::Normal).unwrap();
    further.stream_wait_event(PEER, other, behind).unwrap();
    further.stream_synchronize(PEER, other).unwrap();
    assert_eq!(first(&sim, at), 0, "no work of it reaches memory any more");
    lost(own.event_query(PEER, before));
    lost(own.stream_synchronize(PEER, stream));
    lost(own.context_synchronize(PEER));
    lost(reads(&own, PEER, stream, at));
    lost(own.create(Bytes::mib(2), ExtentProperties { place: Place::Gpu(PEER), ..properties() }));
    lost(own.stream_create(PEER, Priority::Normal));
    lost(own.release_context(PEER));
    // Others of the device go on, as does the set's other context.
    for (driver, device) in [(&sim, PEER), (&further, PEER), (&own, GPU)] {
        let stream = driver.stream_create(device, Priority::Normal).unwrap();
        reads(driver, device, stream, at).unwrap();
        driver.stream_synchronize(device, stream).unwrap();
    }
    // SAFETY: nothing uses them any more.
    unsafe {
        lost(own.event_destroy(PEER, before));
        lost(own.event_destroy(PEER, behind));
        lost(own.stream_destroy(PEER, stream));
        lost(own.module_unload(PEER, module));
    }
    let census = sim.census();
    assert_eq!((census.streams, census.events, census.modules), (4, 0, 0), "it is destroyed all the same");
}

#[test]
fn waits_report_a_lost_context() {
    let sim = killing(1);
    let stream = sim.stream_create(GPU, Priority::Normal).unwrap();
    let mut page = vec![0_u8; 4096];
    let pageable = Address(page.as_mut_ptr().expose_provenance() as u64);
    let flag = mapped(&sim, 2, &[GPU]);
    reads(&sim, GPU, stream, pageable).unwrap();
    // What waits for a value waits no more.
    sim.enqueue_wait(GPU, stream, flag, 1).unwrap();
    lost(sim.stream_synchronize(GPU, stream));
}

#[test]
fn the_program_enables_and_disables_peers() {
    let sim = server(2);
    let stream = sim.stream_create(PEER, Priority::Normal).unwrap();
    let plain = sim.plain_alloc(GPU, Bytes::mib(1)).unwrap();
    assert_eq!(sim.program_disable_peer(PEER, GPU), 705);
    assert_eq!(sim.program_enable_peer(PEER, GPU), 0);
    assert_eq!(sim.program_enable_peer(PEER, GPU), 704);
    sim.enable_peer_access(PEER, GPU).unwrap();
    reads(&sim, PEER, stream, plain).unwrap();
    assert_eq!(sim.program_disable_peer(PEER, GPU), 0);
    assert_eq!(rule(reads(&sim, PEER, stream, plain)), Refusal::NoPeerAccess);
    sim.enable_peer_access(PEER, GPU).unwrap();
    assert_eq!(sim.program_enable_peer(PEER, GPU), 704, "whoever enabled it");
    assert_eq!(sim.program_enable_peer(GPU, PEER), 0, "each way by itself");
    assert_eq!(sim.program_enable_peer(GPU, GPU), 101);
    // What is enabled between contexts of our own is no access of the program's.
    sim.program_disable_peer(PEER, GPU);
    sim.own().enable_peer_access(PEER, GPU).unwrap();
    assert_eq!(sim.program_enable_peer(PEER, GPU), 0);
}

#[test]
fn a_range_of_host_memory_is_one_registration() {
    const PAGE: u64 = 4096;
    let sim = server(1);
    let stream = sim.stream_create(GPU, Priority::Normal).unwrap();
    let device = mapped(&sim, 2, &[GPU]);
    let mut block = vec![7_u8; 5 * PAGE as usize];
    let start = (block.as_mut_ptr().expose_provenance() as u64).next_multiple_of(PAGE);
    // Pinned, pinned, a gap, pinned.
    // SAFETY: whole pages of the block, which lives longer than their registrations.
    let register = |page: u64| unsafe { sim.host_register(Address(start + page * PAGE), Bytes::kib(4)) };
    [0, 1, 3].into_iter().for_each(|page| register(page).unwrap());
    let copy = |from: u64, size: u64| {
        let request = CopyRequest { to: device, from: Address(start + from), size: Bytes::new(size) };
        // SAFETY: the simulator refuses undefined operations.
        unsafe { sim.copy(GPU, request, stream) }
    };
    for (from, size) in [(0, 2 * PAGE), (PAGE, PAGE + 1), (PAGE, 3 * PAGE), (3 * PAGE, PAGE + 1)] {
        assert_eq!(rule(copy(from, size)), Refusal::InvalidValue);
    }
    assert!(!sim.step(), "nothing was enqueued");
    copy(100, PAGE - 100).unwrap();
    copy(PAGE, PAGE).unwrap();
    sim.stream_synchronize(GPU, stream).unwrap();
    assert_eq!(first(&sim, device), 7);
    let kernel = |page: u64, count: u64| {
        let reads = touch(Address(start + page * PAGE), count * PAGE);
        sim.enqueue_kernel(GPU, stream, &reads, &[], US(1), |_| {})
    };
    kernel(0, 2).unwrap();
    assert_eq!(rule(kernel(1, 3)), Refusal::NotRegistered);
    sim.stream_synchronize(GPU, stream).unwrap();
    let range = |at: u64| sim.pointer_attributes(Address(start + at)).unwrap().range;
    assert_eq!(range(PAGE - 1), Some((Address(start), Bytes::kib(4))));
    assert_eq!(range(PAGE), Some((Address(start + PAGE), Bytes::kib(4))));
    assert_eq!(range(2 * PAGE), None);
    // SAFETY: nothing uses them any more.
    [0, 1, 3]
        .into_iter()
        .for_each(|page| unsafe { sim.host_unregister(Address(start + page * PAGE)) }.unwrap());
}
