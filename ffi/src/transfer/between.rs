//! Copies between two GPUs without access to each other's memory.

use std::sync::Arc;
use std::time::Duration;

use glake_device::owned::Lent;
use glake_device::{
    Access, Address, CopyRequest, DeviceId, Driver, ExtentProperties, Fault, Faults, Injected, Place,
    Protection, Stream, Touch, Verb, When,
};
use glake_runtime::config::{Environment, Sources};
use glake_runtime::process::{CopyAsk, Form, Process, ProcessError};
use glake_sim::{Clock, SimOptions, SimTopology, Simulator};
use glake_transfer::Priority;
use glake_units::Bytes;

type Result<T> = std::result::Result<T, ProcessError>;

const SIZE: usize = 300_000;

struct Fixture {
    sim: Arc<Simulator>,
    faults: Arc<Faults>,
    process: Process,
}

fn fixture() -> Fixture {
    let options = SimOptions {
        topology: SimTopology::uniform(2, Bytes::gib(1)),
        clock: Clock::Wall,
        strict_ordering: false,
        ..SimOptions::default()
    };
    let sim = Arc::new(Simulator::new(options).unwrap());
    let faults = Arc::new(Faults::new(sim.clone()));
    let environment = Environment::from_iter([("GLAKE_DEVICE", "sim:h200x4")]);
    let sources = Sources { environment, ..Sources::default() };
    let process = Process::start_on(sources.load().unwrap(), |_| faults.clone()).unwrap();
    Fixture { sim, faults, process }
}

/// Kind of memory that the program itself owns.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Pool,
    Plain,
    Async,
    /// Memory mapped with access for its own GPU.
    Mapped,
}

impl Fixture {
    fn memory(&self, kind: Kind, device: u32) -> Address {
        let (sim, size) = (&self.sim, Bytes::mib(2));
        match kind {
            Kind::Pool => self.process.malloc(device.into(), Bytes::new(SIZE as u64), Stream(0)).unwrap(),
            Kind::Plain => sim.plain_alloc(DeviceId(device), size).unwrap(),
            Kind::Async => sim.async_alloc(DeviceId(device), size).unwrap(),
            Kind::Mapped => {
                let place = Place::Gpu(DeviceId(device));
                let properties = ExtentProperties { place, exportable: false, gpu_direct: false };
                let access = Access { device: DeviceId(device), protection: Protection::ReadWrite };
                let (start, handle) = (sim.reserve(size).unwrap(), sim.create(size, properties).unwrap());
                // SAFETY: memory of this test alone.
                unsafe { sim.map(start, size, handle).and_then(|()| sim.set_access(start, size, &[access])) }
                    .unwrap();
                start
            }
        }
    }

    fn write(&self, device: u32, at: Address, bytes: &[u8]) {
        // SAFETY: memory of this test alone, which no work touches.
        unsafe { self.sim.write_now(DeviceId(device), at, bytes) }.unwrap();
    }

    fn read(&self, device: u32, at: Address, size: usize) -> Vec<u8> {
        let mut bytes = vec![0; size];
        self.sim.read_now(DeviceId(device), at, &mut bytes).unwrap();
        bytes
    }

    fn copy(&self, requests: &[CopyRequest], stream: Stream, blocking: bool) -> Result<u64> {
        let form = if requests.len() == 1 { Form::One } else { Form::List };
        let (device, priority) = (None, Priority::Normal);
        let ask =
            CopyAsk { stream, device, priority, blocking, verify: false, direct: false, waited: !blocking };
        // SAFETY: the memory outlives the copies.
        self.process.copies().copy(unsafe { Lent::new(requests) }, form, &ask)
    }

    /// Checks copies from `from` of one GPU to `to` of the other, whole and scattered, on streams of both.
    fn assert_copied(&self, (to, to_gpu): (Address, u32), (from, from_gpu): (Address, u32), what: &str) {
        let pattern = |seed: usize| -> Vec<u8> {
            (0..SIZE).map(|at| ((at * 7 + at / 251 + seed) % 256).to_le_bytes()[0]).collect()
        };
        for (turn, gpu) in [(1, 0), (2, 1)] {
            let stream = self.process.streams().create(gpu).unwrap();
            let sent = pattern(turn);
            self.write(from_gpu, from, &sent);
            let whole = CopyRequest { to, from, size: Bytes::new(SIZE as u64) };
            let copied = self.copy(&[whole], stream, true);
            assert!(copied.is_ok(), "{what}, on a stream of {gpu}: {copied:?}");
            assert!(self.read(to_gpu, to, SIZE) == sent, "{what}, on a stream of {gpu}");
            // Every second block of 1,000 bytes, in reverse order.
            let sent = pattern(turn + 100);
            self.write(from_gpu, from, &sent);
            let at = |start: Address, block: usize| Address(start.0 + block as u64 * 1000);
            let block = |number: usize| CopyRequest {
                to: at(to, 2 * (149 - number)),
                from: at(from, 2 * number),
                size: Bytes::new(1000),
            };
            let blocks: Vec<CopyRequest> = (0..150).map(block).collect();
            let handle = self.copy(&blocks, stream, false).unwrap();
            self.process.copies().wait(handle).unwrap();
            let found = self.read(to_gpu, to, SIZE);
            let mut expected = pattern(turn);
            for number in 0..150 {
                let (to, from) = (2000 * (149 - number), 2000 * number);
                expected[to..to + 1000].copy_from_slice(&sent[from..from + 1000]);
            }
            assert!(found == expected, "{what}, scattered, on a stream of {gpu}");
            self.process.streams().destroy(gpu, stream).unwrap();
        }
    }
}

#[test]
fn copies_between_two_gpus_open_what_they_need_and_nobody_sees_it() {
    for (to, from) in [
        (Kind::Pool, Kind::Pool),
        (Kind::Pool, Kind::Plain),
        (Kind::Plain, Kind::Pool),
        (Kind::Pool, Kind::Async),
        (Kind::Async, Kind::Pool),
        (Kind::Pool, Kind::Mapped),
        (Kind::Mapped, Kind::Pool),
    ] {
        for (to_gpu, from_gpu) in [(0, 1), (1, 0)] {
            let fixture = fixture();
            let ends = (fixture.memory(to, to_gpu), fixture.memory(from, from_gpu));
            let what = format!("{from:?} of {from_gpu} to {to:?} of {to_gpu}");
            fixture.assert_copied((ends.0, to_gpu), (ends.1, from_gpu), &what);
            let sim = &fixture.sim;
            let enabled = [(0, 1), (1, 0)].map(|(a, b)| sim.program_enable_peer(DeviceId(a), DeviceId(b)));
            assert_eq!(enabled, [0; 2], "{what}: plain memory was opened to the peer");
        }
    }
}

#[test]
fn where_nothing_can_be_opened_copies_go_through_the_host() {
    for kind in [Kind::Pool, Kind::Mapped] {
        let fixture = fixture();
        let (to, from) = (fixture.memory(Kind::Pool, 0), fixture.memory(kind, 1));
        let refused = |verb, error| Fault { verb: Some(verb), when: When::From(1), error };
        fixture.faults.set(&[refused(Verb::SetAccess, Injected::OutOfMemory)]);
        fixture.assert_copied((to, 0), (from, 1), "without access");
        // The driver's error is reported.
        fixture.faults.set(&[
            refused(Verb::SetAccess, Injected::OutOfMemory),
            refused(Verb::CopyBetween, Injected::Failed(999)),
        ]);
        let stream = fixture.process.streams().create(0).unwrap();
        let request = CopyRequest { to, from, size: Bytes::new(5000) };
        let error = fixture.copy(&[request], stream, true).unwrap_err();
        assert!(error.to_string().contains("999"), "{error}");
    }
}

#[test]
fn a_block_that_another_gpu_reads_is_not_reused_before() {
    for opens in [true, false] {
        let fixture = fixture();
        let Fixture { sim, process, .. } = &fixture;
        let streams = process.streams();
        let (to, from) = (fixture.memory(Kind::Pool, 0), fixture.memory(Kind::Pool, 1));
        let fault = Fault { verb: Some(Verb::SetAccess), when: When::From(1), error: Injected::OutOfMemory };
        fixture.faults.set(if opens { &[] } else { std::slice::from_ref(&fault) });
        fixture.write(1, from, &[7; SIZE]);
        let stream = streams.create(0).unwrap();
        let reads = [Touch { address: to, size: Bytes::new(4) }];
        let late = Duration::from_millis(60);
        sim.enqueue_kernel(DeviceId(0), stream, &reads, &[], late, |_| {}).unwrap();
        let request = CopyRequest { to, from, size: Bytes::new(SIZE as u64) };
        fixture.copy(&[request], stream, false).unwrap();
        fixture.faults.set(&[]);
        process.free(from).unwrap();
        process.trim(None, Bytes::ZERO).unwrap();
        let other = streams.create(1).unwrap();
        let next = process.malloc(1, Bytes::new(SIZE as u64), other).unwrap();
        // SAFETY: memory of this test alone.
        unsafe { sim.fill(DeviceId(1), next, Bytes::new(SIZE as u64), 9, other) }.unwrap();
        sim.stream_synchronize(DeviceId(1), other).unwrap();
        sim.stream_synchronize(DeviceId(0), stream).unwrap();
        assert!(fixture.read(0, to, SIZE) == [7; SIZE], "opened: {opens}");
    }
}
