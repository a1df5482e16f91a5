//! What only the simulator can be asked: time, refusals of the undefined, captures, costs.

mod checkpoint;
mod contexts;
mod copies;
mod costs;
mod graphs;
mod kinds;
mod queues;

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use glake_meter::{GpuMemory, Meter as _, MeterError, ProcessMemory};
use glake_units::Bytes;

use super::*;
use glake_device::*;

const GPU: DeviceId = DeviceId(0);
const PEER: DeviceId = DeviceId(1);
const MIB: u64 = 1 << 20;
const US: fn(u64) -> Duration = Duration::from_micros;

fn server(gpus: u32) -> Simulator {
    let topology = SimTopology::uniform(gpus, Bytes::gib(1));
    Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap()
}

fn access(device: DeviceId) -> Access {
    Access { device, protection: Protection::ReadWrite }
}

fn properties() -> ExtentProperties {
    ExtentProperties { place: Place::Gpu(GPU), exportable: false, gpu_direct: false }
}

/// Mapped memory of `GPU` that these devices may touch; its handle is released already.
fn mapped(sim: &Simulator, mib: u64, devices: &[DeviceId]) -> Address {
    mapped_at(sim, Place::Gpu(GPU), mib, devices)
}

fn mapped_at(sim: &Simulator, place: Place, mib: u64, devices: &[DeviceId]) -> Address {
    let size = Bytes::mib(mib);
    let handle = sim.create(size, ExtentProperties { place, ..properties() }).unwrap();
    let start = map(sim, handle, size, devices);
    // SAFETY: the simulator refuses undefined operations.
    unsafe { sim.release(handle) }.unwrap();
    start
}

/// Maps an extent for these devices.
fn map(sim: &Simulator, handle: Handle, size: Bytes, devices: &[DeviceId]) -> Address {
    let start = sim.reserve(size).unwrap();
    let access: Vec<Access> = devices.iter().copied().map(access).collect();
    // SAFETY: the simulator refuses undefined operations.
    unsafe {
        sim.map(start, size, handle).unwrap();
        sim.set_access(start, size, &access).unwrap();
    }
    start
}

fn touch(address: Address, bytes: u64) -> [Touch; 1] {
    [Touch { address, size: Bytes::new(bytes) }]
}

/// Enqueues a kernel that writes `value` at the start of a range.
fn writes(sim: &Simulator, stream: Stream, to: Address, value: u8) -> Result<()> {
    sim.enqueue_kernel(GPU, stream, &[], &touch(to, MIB), US(10), move |memory| {
        memory.write(to, &[value]).unwrap();
    })
}

fn rule<T: std::fmt::Debug>(result: Result<T>) -> Refusal {
    match result {
        Err(DriverError::Refused { reason, .. }) => reason,
        other => panic!("not refused: {other:?}"),
    }
}

fn first(sim: &Simulator, at: Address) -> u8 {
    let mut byte = [0];
    sim.read_now(GPU, at, &mut byte).unwrap();
    byte[0]
}

#[test]
fn time_stands_still_until_it_is_stepped() {
    let sim = server(1);
    let at = mapped(&sim, 2, &[GPU]);
    let stream = sim.stream_create(GPU, Priority::Normal).unwrap();
    let event = sim.event_create(GPU, EventKind::Timed).unwrap();
    writes(&sim, stream, at, 7).unwrap();
    sim.event_record_context(GPU, event).unwrap();
    assert!(!sim.event_query(GPU, event).unwrap());
    sim.advance(US(9));
    assert!(!sim.event_query(GPU, event).unwrap());
    assert_eq!(rule(sim.read_now(GPU, at, &mut [0])), Refusal::Unordered);
    writes(&sim, stream, at, 8).unwrap();
    assert!(sim.step());
    assert_eq!(sim.now(), US(10));
    assert!(sim.event_query(GPU, event).unwrap(), "later work does not delay it");
    assert_eq!(rule(sim.read_now(GPU, at, &mut [0])), Refusal::Unordered, "nobody waited for the second");
    sim.stream_synchronize(GPU, stream).unwrap();
    assert_eq!((sim.now(), first(&sim, at)), (US(20), 8));
    assert!(!sim.step());
}

#[test]
fn unordered_uses_are_refused() {
    let sim = server(1);
    let at = mapped(&sim, 2, &[GPU]);
    let (one, two) = (
        sim.stream_create(GPU, Priority::Normal).unwrap(),
        sim.stream_create(GPU, Priority::Normal).unwrap(),
    );
    let event = sim.event_create(GPU, EventKind::Plain).unwrap();
    writes(&sim, one, at, 1).unwrap();
    assert_eq!(rule(writes(&sim, two, at, 2)), Refusal::Unordered);
    assert!(sim.step());
    assert_eq!(rule(writes(&sim, two, at, 2)), Refusal::Unordered, "being done in time is no order");
    writes(&sim, two, Address(at.0 + MIB), 2).unwrap();
    sim.event_record(GPU, event, one).unwrap();
    sim.stream_wait_event(GPU, two, event).unwrap();
    writes(&sim, two, at, 3).unwrap();
    assert_eq!(rule(writes(&sim, one, at, 4)), Refusal::Unordered);
    sim.event_record_context(GPU, event).unwrap();
    sim.event_synchronize(GPU, event).unwrap();
    writes(&sim, one, at, 5).unwrap();
    sim.context_synchronize(GPU).unwrap();
    assert_eq!(first(&sim, at), 5);
}

#[test]
fn aliases_share_the_order_of_their_memory() {
    let sim = server(1);
    let size = Bytes::mib(2);
    let handle = sim.create(size, properties()).unwrap();
    let [one, two] = [(); 2].map(|()| map(&sim, handle, size, &[GPU]));
    let streams = [
        sim.stream_create(GPU, Priority::Normal).unwrap(),
        sim.stream_create(GPU, Priority::Normal).unwrap(),
    ];
    writes(&sim, streams[0], one, 1).unwrap();
    assert_eq!(rule(writes(&sim, streams[1], two, 2)), Refusal::Unordered);
    assert_eq!(rule(writes(&sim, streams[0], two, 2)), Refusal::Aliased);
    let event = sim.event_create(GPU, EventKind::Plain).unwrap();
    sim.event_record(GPU, event, streams[0]).unwrap();
    sim.stream_wait_event(GPU, streams[0], event).unwrap();
    writes(&sim, streams[0], two, 3).unwrap();
    sim.stream_synchronize(GPU, streams[0]).unwrap();
    assert_eq!(first(&sim, one), 3);
}

#[test]
fn memory_in_use_cannot_be_unmapped() {
    let sim = server(1);
    let at = mapped(&sim, 2, &[GPU]);
    let stream = sim.stream_create(GPU, Priority::Normal).unwrap();
    writes(&sim, stream, at, 1).unwrap();
    // SAFETY: the simulator refuses undefined operations.
    unsafe {
        let none = [Access { device: GPU, protection: Protection::None }];
        assert_eq!(rule(sim.unmap(at, Bytes::mib(2))), Refusal::InUse);
        assert_eq!(rule(sim.set_access(at, Bytes::mib(2), &none)), Refusal::InUse);
        sim.context_synchronize(GPU).unwrap();
        sim.set_access(at, Bytes::mib(2), &none).unwrap();
        assert_eq!(rule(writes(&sim, stream, at, 1)), Refusal::NoAccess);
        sim.unmap(at, Bytes::mib(2)).unwrap();
        assert_eq!(rule(writes(&sim, stream, at, 1)), Refusal::NotMapped);
        sim.unreserve(at, Bytes::mib(2)).unwrap();
        sim.stream_destroy(GPU, stream).unwrap();
    }
    assert_eq!(sim.census(), Census::default());
}

#[test]
fn peers_need_access_of_their_own() {
    let sim = server(2);
    let at = mapped(&sim, 2, &[GPU]);
    let stream = sim.stream_create(PEER, Priority::Normal).unwrap();
    let read = |at| sim.enqueue_kernel(PEER, stream, &touch(at, 4), &[], US(1), |_| {});
    assert_eq!(rule(read(at)), Refusal::NoPeerAccess);
    let plain = sim.plain_alloc(GPU, Bytes::mib(1)).unwrap();
    assert_eq!(
        sim.pointer_attributes(plain).unwrap().kind,
        PointerKind::Device { device: GPU, mapped: false }
    );
    assert_eq!(rule(read(plain)), Refusal::NoPeerAccess);
    sim.enable_peer_access(PEER, GPU).unwrap();
    read(plain).unwrap();
    assert_eq!(rule(read(at)), Refusal::NoPeerAccess, "mapped memory goes by its own access");
    assert_eq!(rule(sim.plain_free(plain)), Refusal::InUse, "it waits for its own device only");
    sim.context_synchronize(PEER).unwrap();
    sim.plain_free(plain).unwrap();
}

#[test]
fn the_legacy_stream_waits_for_blocking_streams_only() {
    let sim = server(1);
    let at = mapped(&sim, 2, &[GPU]);
    let blocking = sim.stream_create_blocking(GPU).unwrap();
    writes(&sim, blocking, at, 1).unwrap();
    writes(&sim, Stream::LEGACY, at, 2).unwrap();
    writes(&sim, Stream::PER_THREAD, at, 3).unwrap();
    sim.stream_synchronize(GPU, Stream::PER_THREAD).unwrap();
    assert_eq!((first(&sim, at), sim.now()), (3, US(30)));
    let other = sim.stream_create(GPU, Priority::Normal).unwrap();
    writes(&sim, other, at, 4).unwrap();
    assert_eq!(rule(writes(&sim, Stream::LEGACY, at, 5)), Refusal::Unordered);
    let here = sim.stream_id(GPU, Stream::PER_THREAD).unwrap();
    let there = std::thread::scope(|scope| {
        scope.spawn(|| sim.stream_id(GPU, Stream::PER_THREAD).unwrap()).join().unwrap()
    });
    assert_ne!(here, there);
    assert_eq!(sim.stream_id(GPU, Stream::LEGACY).unwrap(), sim.stream_id(GPU, Stream(0)).unwrap());
}

#[test]
fn values_order_streams() {
    let sim = server(1);
    let (at, flag) = (mapped(&sim, 2, &[GPU]), mapped(&sim, 2, &[GPU]));
    let (one, two) = (
        sim.stream_create(GPU, Priority::Normal).unwrap(),
        sim.stream_create(GPU, Priority::Normal).unwrap(),
    );
    // SAFETY: the simulator refuses undefined operations.
    unsafe {
        sim.stream_wait_value(GPU, two, flag, 3, Compare::AtLeast).unwrap();
        assert!(matches!(sim.stream_synchronize(GPU, two), Err(DriverError::Deadlock { .. })));
        writes(&sim, one, at, 1).unwrap();
        writes(&sim, two, at, 2).unwrap();
        sim.stream_write_value(GPU, one, flag, 5).unwrap();
    }
    sim.stream_synchronize(GPU, two).unwrap();
    assert_eq!((first(&sim, at), first(&sim, flag)), (2, 5));
}

#[test]
fn a_capture_records_and_is_broken_by_a_context_event() {
    let sim = server(1);
    let at = mapped(&sim, 2, &[GPU]);
    let (one, two) = (
        sim.stream_create(GPU, Priority::Normal).unwrap(),
        sim.stream_create(GPU, Priority::Normal).unwrap(),
    );
    let event = sim.event_create(GPU, EventKind::Plain).unwrap();
    sim.begin_capture(GPU, one).unwrap();
    assert!(matches!(sim.capture_state(GPU, one).unwrap(), CaptureState::Active(_)));
    writes(&sim, one, at, 9).unwrap();
    sim.event_record(GPU, event, one).unwrap();
    sim.stream_wait_event(GPU, two, event).unwrap();
    assert!(matches!(sim.capture_state(GPU, two).unwrap(), CaptureState::Active(_)));
    let graph = sim.end_capture(GPU, one).unwrap();
    assert_eq!((graph.operations(), first(&sim, at)), (1, 0));
    assert_eq!(rule(sim.event_query(GPU, event)), Refusal::CapturedEvent);
    sim.launch_graph(&graph, GPU, two).unwrap();
    sim.stream_synchronize(GPU, two).unwrap();
    assert_eq!(first(&sim, at), 9);

    sim.begin_capture(GPU, one).unwrap();
    assert!(matches!(sim.event_record_context(GPU, event), Err(DriverError::Capturing { .. })));
    assert_eq!(sim.capture_state(GPU, one).unwrap(), CaptureState::Invalidated);
    assert!(matches!(sim.end_capture(GPU, one), Err(DriverError::Failed { code: 901, .. })));
    sim.event_record_context(GPU, event).unwrap();
}

#[test]
fn a_stray_access_is_reported() {
    let sim = server(1);
    let at = mapped(&sim, 2, &[GPU]);
    let stream = sim.stream_create(GPU, Priority::Normal).unwrap();
    sim.enqueue_kernel(GPU, stream, &touch(at, 4), &[], US(1), move |memory| {
        memory.read(at, &mut [0; 4]).unwrap();
        assert!(memory.write(at, &[0]).is_err());
    })
    .unwrap();
    assert_eq!(rule(sim.stream_synchronize(GPU, stream)), Refusal::NoAccess);
    sim.stream_synchronize(GPU, stream).unwrap();
}

#[test]
fn relays_use_the_links_of_peers() {
    let sim = Arc::new(
        Simulator::new(SimOptions { topology: crate::load("h200x4").unwrap(), ..SimOptions::default() })
            .unwrap(),
    );
    let gpus: Vec<DeviceId> = (0..4).map(DeviceId).collect();
    let mib = 64;
    let at = mapped(&sim, mib, &gpus);
    let host = mapped_at(&sim, Place::HostNuma(0), mib, &gpus);
    let slice = mib * MIB / 4;
    for (index, gpu) in gpus.iter().enumerate() {
        let stream = sim.stream_create(*gpu, Priority::Normal).unwrap();
        let offset = index as u64 * slice;
        let request = CopyRequest {
            to: Address(at.0 + offset),
            from: Address(host.0 + offset),
            size: Bytes::new(slice),
        };
        // SAFETY: the simulator refuses undefined operations.
        unsafe { sim.copy(*gpu, request, stream) }.unwrap();
    }
    for gpu in gpus {
        sim.context_synchronize(gpu).unwrap();
    }
    let seconds = (sim.now() - US(7)).as_secs_f64();
    let speed = (mib * MIB) as f64 / seconds / 1e9;
    assert!((speed - 213.0).abs() < 1.0, "{speed}");
}

#[test]
fn wall_time_passes_by_itself() {
    let sim = Simulator::new(SimOptions { clock: Clock::Wall, ..SimOptions::default() }).unwrap();
    let stream = sim.stream_create(GPU, Priority::Normal).unwrap();
    let event = sim.event_create(GPU, EventKind::Timed).unwrap();
    let before = Instant::now();
    sim.enqueue_kernel(GPU, stream, &[], &[], Duration::from_millis(5), |_| {}).unwrap();
    sim.event_record(GPU, event, stream).unwrap();
    assert!(!sim.event_query(GPU, event).unwrap());
    sim.event_synchronize(GPU, event).unwrap();
    assert!(before.elapsed() >= Duration::from_millis(5));
}

/// One GPU of 1 GiB, whose contexts cost 100 MiB and whose dead give back after 5 ms.
fn small_server() -> SimTopology {
    let mut topology = SimTopology::uniform(1, Bytes::gib(1));
    topology.gpus[0].context = Bytes::mib(100);
    topology.gpus[0].reclaim = Micros(5000.0);
    topology
}

fn shared(folder: &Path) -> Simulator {
    let options =
        SimOptions { topology: small_server(), shared: Some(folder.to_owned()), ..SimOptions::default() };
    Simulator::new(options).unwrap()
}

const FOLDER: &str = "GLAKE_TEST_FOLDER";
const MEMORY: &str = "GLAKE_TEST_MEMORY";

#[test]
fn processes_share_a_folder_and_memory() {
    let folder = tempfile::tempdir().unwrap();
    let sim = shared(folder.path());
    mapped(&sim, 500, &[GPU]);
    let size = Bytes::mib(2);
    let handle = sim.create(size, ExtentProperties { exportable: true, ..properties() }).unwrap();
    let at = map(&sim, handle, size, &[GPU]);
    // SAFETY: nothing else uses the memory yet.
    unsafe { sim.write_now(GPU, at, b"from here") }.unwrap();
    let memory = sim.export(handle).unwrap();
    let path = format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd());
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "tests::the_other_process"])
        .env(FOLDER, folder.path())
        .env(MEMORY, path)
        .output()
        .unwrap();
    assert_eq!(child.status.signal(), Some(libc::SIGABRT), "{child:?}");
    let mut found = [0; 10];
    sim.read_now(GPU, at, &mut found).unwrap();
    assert_eq!(&found, b"from there");
    // It died with a context and 300 MiB, which are free again after a while.
    let meter = SimMeter::open(folder.path(), &small_server()).unwrap();
    let own = ProcessMemory { pid: std::process::id(), used: Bytes::mib(602) };
    assert_eq!(meter.read("0").unwrap().processes, [own]);
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(sim.memory_info(GPU).unwrap().free, Bytes::mib(1024 - 602));
    assert_eq!(
        meter.read("0").unwrap(),
        GpuMemory { total: Bytes::gib(1), used: own.used, reserved: Bytes::ZERO, processes: vec![own] }
    );
    assert!(matches!(meter.read("1"), Err(MeterError::Unknown { .. })));
}

#[test]
fn a_context_that_does_not_fit_is_refused_and_takes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (one, two) = (shared(folder.path()), shared(folder.path()));
    mapped(&one, 900, &[GPU]);
    assert!(two.stream_create(GPU, Priority::Normal).unwrap_err().is_out_of_memory());
    assert!(two.make_context(GPU).unwrap_err().is_out_of_memory());
    assert!(two.hold_context(GPU).unwrap_err().is_out_of_memory());
    assert!(!two.has_context(GPU).unwrap());
    assert_eq!(one.memory_info(GPU).unwrap().free, Bytes::mib(24));
    drop(one);
    two.stream_create(GPU, Priority::Normal).unwrap();
    assert_eq!(two.memory_info(GPU).unwrap().free, Bytes::mib(924));
}

/// The other side of `processes_share_a_folder_and_memory`.
#[test]
#[ignore = "run by another test"]
fn the_other_process() {
    let (Ok(folder), Ok(memory)) = (std::env::var(FOLDER), std::env::var(MEMORY)) else { return };
    let sim = shared(Path::new(&folder));
    assert_eq!(sim.memory_info(GPU).unwrap().free, Bytes::mib(1024 - 602));
    assert!(sim.create(Bytes::mib(400), properties()).unwrap_err().is_out_of_memory());
    assert_eq!(sim.memory_info(GPU).unwrap().free, Bytes::mib(1024 - 702), "its context costs memory too");
    mapped(&sim, 300, &[GPU]);
    let memory = File::options().read(true).write(true).open(memory).unwrap();
    let handle = sim.import(memory.as_fd()).unwrap();
    let at = map(&sim, handle, Bytes::mib(2), &[GPU]);
    let mut found = [0; 9];
    sim.read_now(GPU, at, &mut found).unwrap();
    assert_eq!(&found, b"from here");
    // SAFETY: the parent waits for this process.
    unsafe { sim.write_now(GPU, at, b"from there") }.unwrap();
    std::process::abort();
}
