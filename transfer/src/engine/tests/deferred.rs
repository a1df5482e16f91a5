//! Background copies that are waited for: bytes, order, who gets how much, failures.

use std::sync::atomic::Ordering;
use std::time::Duration;

use glake_device::owned::{self, OwnedStream, Span};
use glake_device::{DeviceId, Fault, Injected, Touch, Verb, When};
use glake_sim::SimOptions;
use glake_units::Bytes;

use super::fixture::{Fixture, GPU, ends};
use crate::paths::Direction;
use crate::{CopyOptions, EngineOptions, Priority, UserStream};

const BACKGROUND: CopyOptions =
    CopyOptions { priority: Priority::Background, verify: false, waited: true, unordered: false };

/// A stream with pool memory and pinned memory.
struct User {
    on: UserStream,
    host: Span,
    gpu: Span,
    stream: OwnedStream,
}

impl User {
    fn new(fixture: &Fixture, size: Bytes, seeds: [u64; 2]) -> User {
        let stream = fixture.stream(GPU);
        let user = User {
            on: fixture.user(GPU, stream.id()),
            host: Span::pinned(&fixture.pinned(size, seeds[0]), Bytes::ZERO, size).unwrap(),
            gpu: fixture.mapped(GPU, size).span(Bytes::ZERO, size).unwrap(),
            stream,
        };
        let first = Span::pinned(&fixture.pinned(size, seeds[1]), Bytes::ZERO, size).unwrap();
        owned::copy(&*fixture.driver, GPU, user.stream.id(), &user.gpu, &first).unwrap();
        user.stream.synchronize().unwrap();
        user
    }

    /// How long it took.
    fn late(&self, fixture: &Fixture, direction: Direction) -> Duration {
        let (to, from) = ends(direction, &self.host, &self.gpu);
        let start = fixture.sim.now();
        fixture.engine().copy_blocking(to, from, self.on, BACKGROUND).unwrap();
        fixture.sim.now() - start
    }

    fn split_at_once(&self, fixture: &Fixture, direction: Direction) -> Duration {
        let (to, from) = ends(direction, &self.host, &self.gpu);
        let start = fixture.sim.now();
        fixture.engine().copy(to, from, self.on, BACKGROUND).unwrap();
        fixture.wait(self.on);
        fixture.sim.now() - start
    }
}

fn bound_late(fixture: &Fixture) -> u64 {
    fixture.engine().waited.deferred.count.load(Ordering::Relaxed)
}

/// What each link carried, in the order of the GPUs.
fn carried(fixture: &Fixture) -> Vec<u64> {
    let paths = fixture.engine().statistics().paths;
    let of = |relay| paths.iter().filter(|path| path.relay == relay).map(|path| path.bytes.get()).sum();
    fixture.gpus.iter().map(of).collect()
}

#[test]
fn bytes_are_right_in_the_order_of_the_stream() {
    let fixture = Fixture::new("h200x4");
    for size in [Bytes::mib(64), Bytes::new((150 << 20) + 4097)] {
        let user = User::new(&fixture, size, [1, 2]);
        let before = bound_late(&fixture);
        // Takes longer than the call would without it.
        let touch = Touch { address: user.gpu.start(), size: Bytes::kib(4) };
        let paint = move |memory: &mut dyn glake_device::KernelMemory| {
            memory.write(touch.address, &[7; 4096]).unwrap();
        };
        let time = Duration::from_millis(30);
        fixture.sim.enqueue_kernel(GPU, user.on.raw, &[], &[touch], time, paint).unwrap();
        user.late(&fixture, Direction::FromGpu);
        assert_eq!(bound_late(&fixture) - before, 1);
        let mut expected = fixture.pinned(size, 2).as_slice().to_vec();
        expected[..4096].fill(7);
        let back = User::new(&fixture, size, [3, 3]);
        // What came to the host goes to other memory.
        fixture.engine().copy_blocking(&back.gpu, &user.host, user.on, BACKGROUND).unwrap();
        assert_eq!(bound_late(&fixture) - before, 2);
        assert!(fixture.read(&back.gpu)[..] == expected[..super::fixture::length(size.get())]);
    }
    assert_eq!(fixture.engine().statistics().native_copies, 0);
    fixture.end();
}

#[test]
fn where_the_program_has_its_gpu_to_itself_its_link_is_a_path_and_nothing_of_ours_is_there() {
    let size = Bytes::mib(128);
    let fixture = Fixture::made("h200x4", EngineOptions::default(), SimOptions::default());
    let user = User::new(&fixture, size, [1, 2]);
    for direction in Direction::BOTH {
        let before = carried(&fixture);
        // The target's lane is made by another thread once it is asked for.
        for _ in 0..200 {
            let (to, from) = ends(direction, &user.host, &user.gpu);
            fixture.engine().copy_blocking(to, from, user.on, BACKGROUND).unwrap();
            if carried(&fixture)[0] > before[0] {
                break;
            }
        }
        assert!(carried(&fixture).iter().zip(&before).all(|(after, before)| after > before), "{direction:?}");
    }
    assert!(fixture.holds(&user.gpu, fixture.pinned(size, 1).as_slice()));
    assert_eq!(fixture.engine().contexts.own_driver().has_context(GPU).ok(), Some(false));
    assert!(fixture.engine().statistics().paths.iter().all(|path| path.retries == 0));
    drop(user);
    fixture.end();
}

#[test]
fn small_copies_and_those_of_other_priorities_are_split_at_once() {
    let fixture = Fixture::new("h200x4");
    let user = User::new(&fixture, Bytes::mib(65), [1, 2]);
    let part = |span: &Span| span.part(Bytes::ZERO, Bytes::mib(63)).unwrap();
    fixture.engine().copy_blocking(&part(&user.gpu), &part(&user.host), user.on, BACKGROUND).unwrap();
    fixture.engine().copy_blocking(&user.gpu, &user.host, user.on, CopyOptions::default()).unwrap();
    assert_eq!(bound_late(&fixture), 0);
    drop(user);
    fixture.end();
}

#[test]
fn a_busy_link_gets_less_and_none_is_slower_than_at_once() {
    const BUSY: DeviceId = DeviceId(2);
    let size = Bytes::mib(384);
    for direction in Direction::BOTH {
        let fixture = Fixture::of_times("h200x4");
        let user = User::new(&fixture, size, [1, 2]);
        let (at_once, late) = (user.split_at_once(&fixture, direction), user.late(&fixture, direction));
        println!("{direction:?}: at once {at_once:?}, late {late:?}");
        assert!(late <= at_once * 100 / 95, "{late:?}, at once {at_once:?}");
        // The program's own copies, of which the engine knows nothing.
        let (stream, large) = (fixture.stream(BUSY), Bytes::mib(128));
        let own = fixture.mapped(BUSY, large).span(Bytes::ZERO, large).unwrap();
        let host = Span::pinned(&fixture.pinned(large, 3), Bytes::ZERO, large).unwrap();
        let keep_busy = || {
            for _ in 0..3 {
                let (to, from) = ends(direction, &host, &own);
                owned::copy(&*fixture.driver, BUSY, stream.id(), to, from).unwrap();
            }
        };
        keep_busy();
        let at_once = user.split_at_once(&fixture, direction);
        stream.synchronize().unwrap();
        let before = carried(&fixture);
        keep_busy();
        let late = user.late(&fixture, direction);
        let got: Vec<u64> =
            carried(&fixture).iter().zip(&before).map(|(after, before)| after - before).collect();
        println!(
            "{direction:?}, one link busy: at once {at_once:?}, late {late:?}, MiB {:?}",
            got.iter().map(|b| b >> 20).collect::<Vec<_>>()
        );
        assert_eq!(got.iter().sum::<u64>(), size.get());
        assert!(got[2] * 10 < (size.get() - got[2]) * 3, "{got:?}");
        assert!(late <= at_once * 100 / 95, "{late:?}, at once {at_once:?}");
        stream.synchronize().unwrap();
        drop((user, stream, own, host));
        fixture.end();
    }
}

#[test]
fn every_call_may_fail_once() {
    let size = Bytes::mib(64);
    let verbs = [
        Verb::Copy,
        Verb::EventCreate,
        Verb::EventRecord,
        Verb::EventQuery,
        Verb::EventSynchronize,
        Verb::StreamWaitEvent,
        Verb::StreamWaitValue,
        Verb::StreamWriteValue,
        Verb::CaptureState,
    ];
    for verb in verbs {
        for n in (1..5).chain((7..).step_by(37)) {
            let fixture = Fixture::new("h200x4");
            let user = User::new(&fixture, size, [n, 1000]);
            fixture.faults.set(&[Fault { verb: Some(verb), when: When::Nth(n), error: Injected::Failed(1) }]);
            let answer = fixture.engine().copy_blocking(&user.gpu, &user.host, user.on, BACKGROUND);
            let injected = fixture.faults.injected();
            fixture.faults.set(&[]);
            assert!(answer.is_ok(), "{verb} {n}: {answer:?}");
            assert!(fixture.holds(&user.gpu, fixture.pinned(size, n).as_slice()), "{verb} {n}");
            drop(user);
            fixture.end();
            if injected == 0 {
                break;
            }
        }
    }
}

#[test]
fn what_a_lost_relay_did_not_bring_is_copied_again() {
    let size = Bytes::mib(80);
    let mut made_good = 0;
    for verb in [Verb::Copy, Verb::EventSynchronize, Verb::EventQuery, Verb::EventRecord] {
        for n in [1, 2, 3, 4, 7, 11, 20, 33, 50] {
            let fixture = Fixture::new("h200x4");
            let user = User::new(&fixture, size, [n, 1000]);
            fixture.faults.set(&[Fault {
                verb: Some(verb),
                when: When::Nth(n),
                error: Injected::Damaged(700),
            }]);
            let answer = fixture.engine().copy_blocking(&user.gpu, &user.host, user.on, BACKGROUND);
            fixture.faults.set(&[]);
            let own = fixture.engine().links.relays().is_fenced(GPU);
            assert!(answer.is_ok() || own || n == 1 && verb == Verb::EventRecord, "{verb} {n}: {answer:?}");
            if answer.is_ok() {
                assert!(fixture.holds(&user.gpu, fixture.pinned(size, n).as_slice()), "{verb} {n}");
                made_good += u64::from(!fixture.engine().links.relays().fenced().is_empty());
                // Nothing more is told of it.
                fixture.engine().copy(&user.gpu, &user.host, user.on, BACKGROUND).unwrap().wait().unwrap();
            }
            drop(user);
            fixture.end();
        }
    }
    assert!(made_good > 4, "{made_good}");
}
