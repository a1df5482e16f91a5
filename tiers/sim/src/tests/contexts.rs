//! Contexts of our own beside the program's.

use super::*;

/// A stream of each of two drivers' contexts of the first GPU.
fn streams(sim: &Simulator, own: &Simulator) -> [Stream; 2] {
    [sim, own].map(|driver| driver.stream_create(GPU, Priority::Normal).unwrap())
}

/// Work that takes 100 us and touches nothing.
fn busy(sim: &Simulator, device: DeviceId, stream: Stream) {
    sim.enqueue_kernel(device, stream, &[], &[], US(100), |_| {}).unwrap();
}

#[test]
fn contexts_have_separate_work() {
    let sim = server(1);
    let own = sim.own();
    let [theirs, ours] = streams(&sim, &own);
    let event = sim.event_create(GPU, EventKind::Plain).unwrap();
    busy(&own, GPU, ours);
    sim.event_record_context(GPU, event).unwrap();
    assert!(sim.event_query(GPU, event).unwrap());
    sim.context_synchronize(GPU).unwrap();
    busy(&sim, GPU, Stream::LEGACY);
    sim.stream_synchronize(GPU, Stream::LEGACY).unwrap();
    assert_eq!(sim.now(), US(100));
    // Nor is the program's work ours.
    busy(&sim, GPU, theirs);
    own.context_synchronize(GPU).unwrap();
    assert_eq!(own.now(), US(100));
    sim.context_synchronize(GPU).unwrap();
    assert_eq!(own.now(), US(200));
}

#[test]
fn each_context_has_default_streams_of_its_own() {
    let sim = server(1);
    let own = sim.own();
    let id = |driver: &Simulator, stream| driver.stream_id(GPU, stream).unwrap();
    for stream in [Stream::LEGACY, Stream::PER_THREAD] {
        assert_ne!(id(&sim, stream), id(&own, stream));
    }
    let blocking = sim.stream_create_blocking(GPU).unwrap();
    busy(&sim, GPU, blocking);
    busy(&own, GPU, Stream::LEGACY);
    own.stream_synchronize(GPU, Stream::LEGACY).unwrap();
    assert_eq!(sim.now(), US(100), "both ran at once");
    assert_eq!(sim.census().streams, 1);
}

#[test]
fn only_waits_cross_contexts() {
    let sim = server(2);
    let own = sim.own();
    let [theirs, ours] = streams(&sim, &own);
    let at = mapped(&sim, 2, &[GPU]);
    let event = own.event_create(GPU, EventKind::Plain).unwrap();
    assert_eq!(rule(own.event_record(GPU, event, theirs)), Refusal::UnknownHandle);
    assert_eq!(rule(sim.event_record(GPU, event, theirs)), Refusal::UnknownHandle);
    assert_eq!(rule(sim.event_query(GPU, event)), Refusal::UnknownHandle);
    assert_eq!(rule(sim.event_synchronize(GPU, event)), Refusal::UnknownHandle);
    assert_eq!(rule(writes(&sim, ours, at, 1)), Refusal::UnknownHandle);
    assert_eq!(rule(sim.stream_synchronize(GPU, ours)), Refusal::UnknownHandle);
    // SAFETY: the simulator refuses undefined operations.
    unsafe {
        assert_eq!(rule(sim.event_destroy(GPU, event)), Refusal::UnknownHandle);
        assert_eq!(rule(sim.stream_destroy(GPU, ours)), Refusal::UnknownHandle);
        let request = CopyRequest { to: at, from: Address(at.0 + MIB), size: Bytes::kib(4) };
        assert_eq!(rule(sim.copy_on(request, ours)), Refusal::UnknownHandle);
        assert_eq!(rule(own.copy_on(request, theirs)), Refusal::UnknownHandle);
        own.copy_on(request, ours).unwrap();
    }
    let source = ModuleSource { ptx: "", host: &[HostKernel { name: "nothing", body: |_, _| {} }] };
    let module = own.module_load(GPU, &source).unwrap();
    assert_eq!(rule(sim.kernel_find(GPU, module, "nothing")), Refusal::UnknownHandle);
    let kernel = own.kernel_find(GPU, module, "nothing").unwrap();
    let touches = Touched { reads: &[], writes: &[] };
    let request = LaunchRequest { kernel, grid: [1; 3], block: [1; 3], arguments: &[], touches: &touches };
    // SAFETY: the kernel does nothing.
    unsafe {
        assert_eq!(rule(sim.launch(GPU, &request, theirs)), Refusal::UnknownHandle);
        own.launch(GPU, &request, ours).unwrap();
    }
    own.stream_synchronize(GPU, ours).unwrap();
    // A wait orders the memory of both.
    writes(&own, ours, at, 3).unwrap();
    assert_eq!(rule(writes(&sim, theirs, at, 4)), Refusal::Unordered);
    own.event_record(GPU, event, ours).unwrap();
    sim.stream_wait_event(GPU, theirs, event).unwrap();
    writes(&sim, theirs, at, 4).unwrap();
    sim.stream_synchronize(GPU, theirs).unwrap();
    assert_eq!(first(&sim, at), 4);
    // SAFETY: all work is done.
    unsafe {
        own.module_unload(GPU, module).unwrap();
        own.event_destroy(GPU, event).unwrap();
    }
    assert_eq!((own.census().streams, own.census().events, own.census().modules), (2, 0, 0));
}

#[test]
fn streams_know_their_context() {
    let sim = server(2);
    let own = sim.own();
    let theirs = sim.stream_create(PEER, Priority::Normal).unwrap();
    let ours = own.stream_create(PEER, Priority::Normal).unwrap();
    assert_eq!(sim.stream_device(ours).unwrap(), PEER);
    assert_eq!(sim.primary_of(theirs).unwrap(), Some(PEER));
    assert_eq!(sim.primary_of(Stream::LEGACY).unwrap(), Some(GPU));
    assert_eq!(sim.primary_of(ours).unwrap(), None);
}

#[test]
fn plain_memory_of_peers_is_opened_to_primary_contexts_only() {
    let sim = server(2);
    let own = sim.own();
    let stream = own.stream_create(PEER, Priority::Normal).unwrap();
    let read = |at| own.enqueue_kernel(PEER, stream, &touch(at, 4), &[], US(1), |_| {});
    let plain = sim.plain_alloc(GPU, Bytes::mib(1)).unwrap();
    own.enable_peer_access(PEER, GPU).unwrap();
    sim.enable_peer_access(PEER, GPU).unwrap();
    assert_eq!(rule(read(plain)), Refusal::NoPeerAccess);
    read(sim.plain_alloc(PEER, Bytes::mib(1)).unwrap()).unwrap();
    // Mapped memory is opened to a device, in all of its contexts.
    let at = mapped(&sim, 2, &[GPU, PEER]);
    read(at).unwrap();
    let theirs = sim.stream_create(PEER, Priority::Normal).unwrap();
    sim.enqueue_kernel(PEER, theirs, &touch(at, 4), &[], US(1), |_| {}).unwrap();
    own.context_synchronize(PEER).unwrap();
    // A copy goes over the owner's link.
    let host = mapped_at(&sim, Place::HostNuma(0), 2, &[GPU, PEER]);
    let request = CopyRequest { to: plain, from: host, size: Bytes::mib(1) };
    // SAFETY: the simulator refuses undefined operations.
    unsafe { own.copy(PEER, request, stream) }.unwrap();
    own.context_synchronize(PEER).unwrap();
}

#[test]
fn private_contexts_are_released_separately() {
    let sim = server(2);
    let (own, further) = (sim.own(), sim.own());
    assert!(!own.has_context(GPU).unwrap());
    sim.stream_create(GPU, Priority::Normal).unwrap();
    assert!(sim.has_context(GPU).unwrap() && !own.has_context(GPU).unwrap());
    let stream = own.stream_create(GPU, Priority::Normal).unwrap();
    assert!(own.has_context(GPU).unwrap() && !further.has_context(GPU).unwrap());
    let event = own.event_create(GPU, EventKind::Plain).unwrap();
    let handle = own.create(Bytes::mib(2), properties()).unwrap();
    let living = |result: Result<()>| match result {
        Err(DriverError::ContextInUse { living, .. }) => living,
        other => panic!("{other:?}"),
    };
    let all = Living { streams: 1, events: 1, extents: 1, ..Living::default() };
    assert_eq!(living(own.release_context(GPU)), all);
    assert_eq!(living(sim.release_context(GPU)), Living { streams: 1, ..Living::default() });
    busy(&own, GPU, Stream::LEGACY);
    let legacy = own.stream_id(GPU, Stream::LEGACY).unwrap();
    // SAFETY: nothing uses them.
    unsafe {
        own.stream_destroy(GPU, stream).unwrap();
        own.event_destroy(GPU, event).unwrap();
        sim.release(handle).unwrap();
    }
    own.release_context(GPU).unwrap();
    assert_eq!(own.now(), US(100), "it waited for its work");
    assert!(!own.has_context(GPU).unwrap() && sim.has_context(GPU).unwrap());
    assert_ne!(own.stream_id(GPU, Stream::LEGACY).unwrap(), legacy, "it was made again");
}

#[test]
fn captures_are_broken_by_calls_of_their_own_context() {
    let sim = server(1);
    let own = sim.own();
    let [theirs, ours] = streams(&sim, &own);
    let event = own.event_create(GPU, EventKind::Plain).unwrap();
    sim.begin_capture(GPU, theirs).unwrap();
    own.event_record_context(GPU, event).unwrap();
    own.context_synchronize(GPU).unwrap();
    assert!(matches!(sim.capture_state(GPU, theirs).unwrap(), CaptureState::Active(_)));
    // A stream of ours joins, and its work is launched in its own context.
    let fork = sim.event_create(GPU, EventKind::Plain).unwrap();
    sim.event_record(GPU, fork, theirs).unwrap();
    own.stream_wait_event(GPU, ours, fork).unwrap();
    busy(&own, GPU, ours);
    own.event_record(GPU, event, ours).unwrap();
    sim.stream_wait_event(GPU, theirs, event).unwrap();
    let graph = sim.end_capture(GPU, theirs).unwrap();
    sim.launch_graph(&graph, GPU, theirs).unwrap();
    sim.stream_synchronize(GPU, theirs).unwrap();
    assert_eq!((graph.operations(), sim.now()), (1, US(100)));
}

#[test]
fn a_program_may_be_in_a_context_that_it_made() {
    let sim = server(2);
    let made = sim.make_context(PEER).unwrap();
    let program = sim.within(made);
    let stream = sim.stream_create_in(made).unwrap();
    let theirs = sim.stream_create(PEER, Priority::Normal).unwrap();
    let at = mapped(&sim, 2, &[GPU, PEER]);
    let copy = |stream| {
        let request = CopyRequest { to: at, from: Address(at.0 + MIB), size: Bytes::kib(4) };
        // SAFETY: the simulator refuses undefined operations.
        unsafe { sim.copy_on(request, stream) }
    };
    assert_eq!(sim.primary_of(stream).unwrap(), None);
    assert_eq!(sim.primary_of(theirs).unwrap(), Some(PEER));
    assert_eq!(sim.stream_device(stream).unwrap(), PEER);
    sim.set_current(Some(Current::Primary(PEER))).unwrap();
    assert_eq!(sim.stream_device(Stream::LEGACY).unwrap(), PEER);
    assert_eq!(sim.primary_of(Stream(0)).unwrap(), Some(PEER));
    copy(Stream::LEGACY).unwrap();
    sim.stream_synchronize(PEER, Stream::LEGACY).unwrap();
    sim.set_current(Some(Current::Made(made))).unwrap();
    assert_eq!(sim.stream_device(Stream::LEGACY).unwrap(), PEER);
    for stream in [Stream::LEGACY, Stream::PER_THREAD, stream, theirs] {
        assert_eq!(sim.primary_of(stream).unwrap(), None);
    }
    // It has default streams of its own, which a copy takes that names no device.
    assert_ne!(
        program.stream_id(PEER, Stream::LEGACY).unwrap(),
        sim.stream_id(PEER, Stream::LEGACY).unwrap()
    );
    copy(Stream::LEGACY).unwrap();
    let before = sim.now();
    sim.context_synchronize(PEER).unwrap();
    assert_eq!(sim.now(), before, "it is no work of the primary context");
    program.stream_synchronize(PEER, Stream::LEGACY).unwrap();
    assert!(sim.now() > before);
    // Each thread is in a context of its own.
    let elsewhere =
        std::thread::scope(|scope| scope.spawn(|| sim.primary_of(Stream(0)).unwrap()).join().unwrap());
    assert_eq!(elsewhere, Some(GPU));
    sim.set_current(None).unwrap();
    assert_eq!(sim.primary_of(Stream::LEGACY).unwrap(), Some(GPU));
    assert_eq!(rule(sim.stream_synchronize(PEER, stream)), Refusal::UnknownHandle);
    assert_eq!(rule(program.stream_create(GPU, Priority::Normal)), Refusal::UnknownHandle);
    // Peers are enabled for the primary contexts.
    let plain = sim.plain_alloc(GPU, Bytes::mib(1)).unwrap();
    sim.program_enable_peer(PEER, GPU);
    assert_eq!(
        rule(program.enqueue_kernel(PEER, stream, &touch(plain, 4), &[], US(1), |_| {})),
        Refusal::NoPeerAccess
    );
    program.stream_synchronize(PEER, stream).unwrap();
}
