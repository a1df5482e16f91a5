//! A list of blocks gathered and spread by a kernel, on the simulated device.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::Arc;

use glake_device::owned::*;
use glake_device::*;
use glake_sim::{Census, SimOptions, SimTopology, Simulator};
use glake_units::{Bandwidth, Bytes};

const OWNER: DeviceId = DeviceId(0);
const RELAY: DeviceId = DeviceId(1);
const STRANGER: DeviceId = DeviceId(2);

struct Harness {
    sim: Arc<Simulator>,
    driver: Arc<dyn Driver>,
    completion_events: Arc<CompletionEvents>,
}

fn harness() -> Harness {
    let topology = SimTopology::uniform(3, Bytes::mib(256));
    let sim = Arc::new(Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap());
    let driver: Arc<dyn Driver> = sim.clone();
    Harness { sim, completion_events: CompletionEvents::new(driver.clone()), driver }
}

impl Harness {
    /// Pinned memory whose bytes differ from their neighbours, and a buffer of `OWNER` that `RELAY` may touch.
    fn memory(&self, size: Bytes) -> (Arc<Registration>, Arc<Buffer>) {
        let mut pinned = Registration::new(&self.completion_events, Pages::new(size, 1).unwrap()).unwrap();
        for (at, byte) in pinned.as_mut_slice().iter_mut().enumerate() {
            *byte = at.wrapping_mul(167).wrapping_add(at >> 8) as u8;
        }
        (
            Arc::new(pinned),
            Arc::new(Buffer::new(&self.completion_events, OWNER, size, DeviceSet::of(RELAY)).unwrap()),
        )
    }
}

fn whole(pinned: &Arc<Registration>, buffer: &Arc<Buffer>) -> (Span, Span) {
    let size = pinned.size();
    (Span::pinned(pinned, Bytes::ZERO, size).unwrap(), buffer.span(Bytes::ZERO, size).unwrap())
}

/// Adds a block of two spans.
fn push(list: &mut BlockList, block: CopyRequest, to: &Span, from: &Span) -> Result<()> {
    let part = |span: &Span, at: Address| span.part(Bytes::new(at.0 - span.start().0), block.size).unwrap();
    let (to, from) = (part(to, block.to), part(from, block.from));
    list.push(&Blocks::pair(&to, &from).unwrap().piece(0, Bytes::ZERO, Bytes::MAX).unwrap())
}

#[test]
fn blocks_arrive_where_the_list_says() {
    let harness = harness();
    let (pinned, buffer) = harness.memory(Bytes::mib(4));
    let (host, gpu) = whole(&pinned, &buffer);
    let gather = Gather::new(&harness.completion_events, RELAY, Bytes::mib(2)).unwrap();
    let stream = OwnedStream::new(&harness.driver, RELAY).unwrap();
    let mut list = gather.list().unwrap().unwrap();
    let mut expected = vec![0_u8; 4 << 20];
    for block in 0..200_u64 {
        // Of odd sizes, at odd places, in the reverse order.
        let (to, from, size) = (block * 20_011, (199 - block) * 20_483, 1 + (block * 977) % 20_000);
        let request = CopyRequest {
            to: Address(gpu.start().0 + to),
            from: Address(host.start().0 + from),
            size: Bytes::new(size),
        };
        push(&mut list, request, &gpu, &host).unwrap();
        let bytes = &pinned.as_slice()[from as usize..][..size as usize];
        expected[to as usize..][..size as usize].copy_from_slice(bytes);
    }
    assert_eq!(list.count(), 200);
    gather.gather(stream.id(), list).unwrap();
    stream.synchronize().unwrap();
    let mut bytes = vec![0; 4 << 20];
    buffer.read(Bytes::ZERO, &mut bytes).unwrap();
    assert!(bytes == expected);
    drop((host, gpu, pinned, buffer, stream, gather));
    assert_eq!(harness.sim.census(), Census::default());
}

#[test]
fn a_list_comes_back_when_its_launch_has_run() {
    let harness = harness();
    let (pinned, buffer) = harness.memory(Bytes::mib(2));
    let (host, gpu) = whole(&pinned, &buffer);
    let gather = Gather::new(&harness.completion_events, OWNER, Bytes::ZERO).unwrap();
    let stream = OwnedStream::new(&harness.driver, OWNER).unwrap();
    let block = CopyRequest { to: gpu.start(), from: host.start(), size: Bytes::kib(16) };
    let mut lists = 0;
    while let Some(mut list) = gather.list().unwrap() {
        push(&mut list, block, &gpu, &host).unwrap();
        gather.gather(stream.id(), list).unwrap();
        lists += 1;
    }
    assert_eq!(lists, (2 << 20) / (64 << 10));
    stream.synchronize().unwrap();
    let mut list = gather.list().unwrap().unwrap();
    assert_eq!(list.count(), 0, "it is empty again");
    while !list.is_full() {
        push(&mut list, block, &gpu, &host).unwrap();
    }
    assert_eq!(list.count(), 2730);
    assert!(push(&mut list, block, &gpu, &host).is_err());
    drop(list);
    // Given back unused.
    let list = gather.list().unwrap().unwrap();
    gather.gather(stream.id(), list).unwrap();
}

#[test]
fn unreachable_memory_is_refused() {
    let harness = harness();
    let (pinned, buffer) = harness.memory(Bytes::mib(2));
    let (host, gpu) = whole(&pinned, &buffer);
    let gather = Gather::new(&harness.completion_events, STRANGER, Bytes::ZERO).unwrap();
    let stream = OwnedStream::new(&harness.driver, STRANGER).unwrap();
    let mut list = gather.list().unwrap().unwrap();
    let refusal = |result: Result<()>| match result {
        Err(DriverError::Refused { verb: Verb::Launch, reason, .. }) => reason,
        other => panic!("{other:?}"),
    };
    let block = |size| CopyRequest { to: gpu.start(), from: host.start(), size };
    assert_eq!(refusal(push(&mut list, block(Bytes::kib(4)), &gpu, &host)), Refusal::NoPeerAccess);
    assert_eq!(refusal(gather.copy(stream.id(), &gpu, &host)), Refusal::NoPeerAccess);
    // Plain memory of another GPU is not reached, whatever the program has opened; a GPU's own is.
    let plain = harness.sim.plain_alloc(OWNER, Bytes::mib(2)).unwrap();
    let plain = harness.sim.span(plain, Bytes::mib(2), DeviceSet::of(OWNER)).unwrap();
    harness.driver.enable_peer_access(STRANGER, OWNER).unwrap();
    assert_eq!(refusal(gather.copy(stream.id(), &plain, &host)), Refusal::NoPeerAccess);
    assert!(gather.reaches(host.side()) && !gather.reaches(plain.side()) && !gather.reaches(gpu.side()));
    let own = Gather::new(&harness.completion_events, OWNER, Bytes::ZERO).unwrap();
    assert!(own.reaches(host.side()) && own.reaches(plain.side()) && own.reaches(gpu.side()));
    // Mapped memory is reached where it was opened.
    let relay = Gather::new(&harness.completion_events, RELAY, Bytes::ZERO).unwrap();
    assert!(relay.reaches(host.side()) && relay.reaches(gpu.side()) && !relay.reaches(plain.side()));
    let stream = OwnedStream::new(&harness.driver, OWNER).unwrap();
    own.copy(stream.id(), &plain, &host).unwrap();
    stream.synchronize().unwrap();
    let mut bytes = vec![0; 2 << 20];
    harness.driver.read_now(OWNER, plain.start(), &mut bytes).unwrap();
    assert!(bytes == pinned.as_slice());
    // The driver copies pageable memory, kernels cannot.
    let kind = PointerKind::Pageable;
    // SAFETY: no work accesses the memory.
    let pageable = unsafe { Span::lent(host.start(), Bytes::kib(4), kind, DeviceSet::ALL) };
    assert!(!gather.reaches(pageable.side()));
}

#[test]
fn lists_cannot_be_captured_but_copies_can() {
    let harness = harness();
    let (pinned, buffer) = harness.memory(Bytes::mib(2));
    let (host, gpu) = whole(&pinned, &buffer);
    let gather = Gather::new(&harness.completion_events, OWNER, Bytes::ZERO).unwrap();
    let stream = OwnedStream::new(&harness.driver, OWNER).unwrap();
    harness.sim.begin_capture(OWNER, stream.id()).unwrap();
    let mut list = gather.list().unwrap().unwrap();
    let byte = CopyRequest { to: gpu.start(), from: host.start(), size: Bytes::new(1) };
    push(&mut list, byte, &gpu, &host).unwrap();
    assert!(matches!(gather.gather(stream.id(), list), Err(DriverError::Capturing { .. })));
    gather.copy(stream.id(), &gpu, &host).unwrap();
    let graph = harness.sim.end_capture(OWNER, stream.id()).unwrap();
    assert_eq!(graph.operations(), 1);
    harness.sim.launch_graph(&graph, OWNER, stream.id()).unwrap();
    stream.synchronize().unwrap();
    let mut bytes = vec![0; 2 << 20];
    buffer.read(Bytes::ZERO, &mut bytes).unwrap();
    assert!(bytes == pinned.as_slice());
    drop(gather);
    assert_eq!(harness.sim.census().modules, 1, "a graph's code stays");
}

#[test]
fn bytes_go_over_the_link_of_the_gpu_that_runs_the_kernel() {
    let mut topology = SimTopology::uniform(2, Bytes::mib(256));
    for gpu in &mut topology.gpus {
        gpu.link.to_gpu = Bandwidth(50.0);
        gpu.link.from_gpu = Bandwidth(50.0);
        gpu.nvlink = Some(Bandwidth(400.0));
    }
    (topology.host.read, topology.host.both) = (Bandwidth(1000.0), None);
    let sim = Arc::new(Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap());
    let driver: Arc<dyn Driver> = sim.clone();
    let completion_events = CompletionEvents::new(driver.clone());
    let pinned =
        Arc::new(Registration::new(&completion_events, Pages::new(Bytes::mib(64), 0).unwrap()).unwrap());
    let target =
        Arc::new(Buffer::new(&completion_events, OWNER, Bytes::mib(64), DeviceSet::of(RELAY)).unwrap());
    let half = Bytes::mib(32);
    let ends = [OWNER, RELAY].map(|gpu| {
        let gather = Gather::new(&completion_events, gpu, Bytes::ZERO).unwrap();
        let stream = OwnedStream::new(&driver, gpu).unwrap();
        let clock = [EventKind::Timed; 2].map(|kind| OwnedEvent::new(&driver, gpu, kind).unwrap());
        (gather, stream, clock)
    });
    for ((gather, stream, clock), offset) in ends.iter().zip([Bytes::ZERO, half]) {
        let from = Span::pinned(&pinned, offset, half).unwrap();
        clock[0].record(stream.id()).unwrap();
        gather.copy(stream.id(), &target.span(offset, half).unwrap(), &from).unwrap();
        clock[1].record(stream.id()).unwrap();
    }
    for (_, stream, clock) in &ends {
        stream.synchronize().unwrap();
        let rate = half.get() as f64 / (clock[1].since(&clock[0]).unwrap() * 1e3);
        assert!((45.0..50.0).contains(&rate), "{rate} GB/s: each has a link of its own");
    }
}

#[test]
fn a_list_that_is_not_launched_is_idle_again() {
    let harness = harness();
    let (pinned, buffer) = harness.memory(Bytes::mib(2));
    let (host, gpu) = whole(&pinned, &buffer);
    let gather = Gather::new(&harness.completion_events, RELAY, Bytes::ZERO).unwrap();
    let block = CopyRequest { to: gpu.start(), from: host.start(), size: Bytes::kib(16) };
    let count = || {
        let lists: Vec<BlockList> = std::iter::from_fn(|| gather.list().unwrap()).collect();
        lists.len()
    };
    let all = count();
    assert!(all > 0);
    for _ in 0..3 * all {
        let mut list = gather.list().unwrap().unwrap();
        push(&mut list, block, &gpu, &host).unwrap();
        // What its GPU does not reach is refused, and who meets that lets go of the list.
        let plain = harness.sim.plain_alloc(OWNER, Bytes::mib(2)).unwrap();
        let own = harness.sim.span(plain, Bytes::mib(2), DeviceSet::of(OWNER)).unwrap();
        let refused = CopyRequest { to: own.start(), ..block };
        assert!(push(&mut list, refused, &own, &host).is_err());
        drop(list);
        harness.sim.plain_free(plain).unwrap();
    }
    assert_eq!(count(), all);
    // One that outlives its kernels goes nowhere.
    let list = gather.list().unwrap().unwrap();
    drop(gather);
    drop((list, host, gpu, pinned, buffer));
    assert_eq!(harness.sim.census(), Census::default());
}
