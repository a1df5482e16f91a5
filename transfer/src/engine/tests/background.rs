//! Background copies: their bytes and their order, how they give way, what becomes of them when calls fail or the engine stops.

use std::time::Duration;

use glake_device::owned::{OwnedStream, Span};
use glake_device::{Fault, Injected, Touch, Verb, When};
use glake_units::Bytes;

use super::fixture::{Fixture, GPU, ends};
use crate::paths::{Direction, Way};
use crate::{CopyOptions, Priority, UserStream};

const BACKGROUND: CopyOptions =
    CopyOptions { priority: Priority::Background, verify: false, waited: true, unordered: false };
const CRITICAL: CopyOptions = CopyOptions { priority: Priority::Critical, ..BACKGROUND };
const UNWAITED: CopyOptions = CopyOptions { waited: false, ..BACKGROUND };

/// A user's stream with pool memory and pinned memory for copies in a direction.
struct User {
    on: UserStream,
    host: Span,
    gpu: Span,
    direction: Direction,
    stream: OwnedStream,
}

impl User {
    fn new(fixture: &Fixture, direction: Direction, size: Bytes) -> User {
        let stream = fixture.stream(GPU);
        User {
            on: fixture.user(GPU, stream.id()),
            host: Span::pinned(&fixture.pinned(size, 3), Bytes::ZERO, size).unwrap(),
            gpu: fixture.mapped(GPU, size).span(Bytes::ZERO, size).unwrap(),
            direction,
            stream,
        }
    }

    fn copy(&self, fixture: &Fixture, options: CopyOptions) {
        let (to, from) = ends(self.direction, &self.host, &self.gpu);
        fixture.engine().copy(to, from, self.on, options).unwrap();
    }

    fn copy_blocking(&self, fixture: &Fixture, options: CopyOptions) -> Duration {
        let start = fixture.sim.now();
        self.copy(fixture, options);
        fixture.wait(self.on);
        fixture.sim.now() - start
    }
}

fn slices(fixture: &Fixture) -> u64 {
    fixture.engine().statistics().paths.iter().map(|path| path.slices).sum()
}

#[test]
fn a_critical_copy_beside_background_copies_takes_half_as_long_again_at_most() {
    for direction in Direction::BOTH {
        let fixture = Fixture::of_times("h200x4");
        let critical = User::new(&fixture, direction, Bytes::mib(16));
        let alone = critical.copy_blocking(&fixture, CRITICAL);
        let background = [(); 2].map(|()| User::new(&fixture, direction, Bytes::mib(192)));
        // Until there is a lane set for every stream.
        loop {
            let before = fixture.engine().statistics().native_copies;
            background.iter().for_each(|user| user.copy(&fixture, UNWAITED));
            critical.copy_blocking(&fixture, CRITICAL);
            background.iter().for_each(|user| fixture.wait(user.on));
            if fixture.engine().statistics().native_copies == before {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut took = Vec::new();
        for round in 0..40_u64 {
            let user = &background[usize::try_from(round % 2).unwrap()];
            user.copy(&fixture, UNWAITED);
            for pause in [7, 61, 23] {
                fixture.sim.advance(Duration::from_micros(pause * (round % 5 + 1)));
                took.push(critical.copy_blocking(&fixture, CRITICAL));
            }
        }
        took.sort();
        let (half, most) = (took[took.len() / 2], took[took.len() * 99 / 100]);
        println!("{direction:?}: alone {alone:?}, beside: median {half:?}, p99 {most:?}");
        assert!(most <= alone * 3 / 2, "{direction:?}: {most:?} instead of {alone:?}");
        drop((critical, background));
        fixture.end();
    }
}

#[test]
fn slices_are_smaller_while_other_copies_come() {
    let fixture = Fixture::of_times("h200x4");
    let critical = User::new(&fixture, Direction::ToGpu, Bytes::mib(16));
    let background = User::new(&fixture, Direction::ToGpu, Bytes::mib(192));
    let sliced = || {
        let before = slices(&fixture);
        background.copy_blocking(&fixture, UNWAITED);
        slices(&fixture) - before
    };
    let whole = background.host.size().get();
    // The last slice of a link is what is left.
    let of = |slice: Bytes| whole / slice.get()..=whole / slice.get() + 4;
    assert!(of(Bytes::mib(1)).contains(&sliced()));
    // A test that is kept from running may be too late for it.
    let smaller = |_| {
        critical.copy_blocking(&fixture, CRITICAL);
        of(Bytes::kib(256)).contains(&sliced())
    };
    assert!((0..20).any(smaller), "on each of four links a fourth of 1 MiB");
    std::thread::sleep(Duration::from_millis(150));
    assert!(of(Bytes::mib(1)).contains(&sliced()));
    drop((critical, background));
    fixture.end();
}

#[test]
fn a_normal_copy_does_not_wait_for_a_background_copy() {
    let size = Bytes::mib(512);
    for memory in [Way::ZeroStaging, Way::Staged] {
        let fixture = Fixture::of_times("h200x4");
        let normal = User::new(&fixture, Direction::ToGpu, Bytes::mib(64));
        let alone = normal.copy_blocking(&fixture, CopyOptions::default());
        let plain = fixture.plain(GPU, size);
        let mut background = User::new(&fixture, Direction::ToGpu, size);
        if memory == Way::Staged {
            background.gpu = plain.span.clone();
        }
        let whole = background.copy_blocking(&fixture, UNWAITED);
        background.copy(&fixture, UNWAITED);
        fixture.sim.advance(Duration::from_micros(100));
        let beside = normal.copy_blocking(&fixture, CopyOptions::default());
        assert_eq!(fixture.carried(Way::Staged).is_zero(), memory != Way::Staged);
        assert!(
            beside < alone + whole / 4,
            "{memory:?}: {beside:?} instead of {alone:?}, beside a copy of {whole:?}"
        );
        drop((normal, background, plain));
        fixture.end();
    }
}

#[test]
fn lists_and_broadcasts_do_not_wait_for_a_background_copy() {
    let fixture = Fixture::new("h200x4");
    let normal = User::new(&fixture, Direction::ToGpu, Bytes::mib(64));
    let buffers: Vec<_> = fixture.gpus.iter().map(|gpu| fixture.mapped(gpu, normal.host.size())).collect();
    let all: Vec<Span> =
        buffers.iter().map(|buffer| buffer.span(Bytes::ZERO, normal.host.size()).unwrap()).collect();
    let block = |span: &Span, at: u64| span.part(Bytes::kib(16 * at), Bytes::kib(16)).unwrap();
    let list: Vec<_> = (0..4096).map(|at| (block(&normal.gpu, at), block(&normal.host, 4095 - at))).collect();
    let copies: [&dyn Fn(); 2] =
        [&|| drop(fixture.engine().copy_list(&list, normal.on, CopyOptions::default()).unwrap()), &|| {
            drop(fixture.engine().copy_to_all(&all, &normal.host, normal.on, CopyOptions::default()).unwrap())
        }];
    for copy in copies {
        let time = || {
            let start = fixture.sim.now();
            copy();
            fixture.wait(normal.on);
            fixture.sim.now() - start
        };
        let alone = time();
        let background = User::new(&fixture, Direction::ToGpu, Bytes::mib(512));
        let whole = background.copy_blocking(&fixture, UNWAITED);
        background.copy(&fixture, UNWAITED);
        fixture.sim.advance(Duration::from_micros(100));
        let beside = time();
        println!("{beside:?} instead of {alone:?}, beside a copy of {whole:?}");
        // Some slices of the background copy are under way in any case, more of them where the host is loaded.
        assert!(beside < alone + whole / 4, "{beside:?} instead of {alone:?}, beside a copy of {whole:?}");
        fixture.wait(background.on);
        assert!(fixture.holds(&background.gpu, fixture.pinned(Bytes::mib(512), 3).as_slice()));
    }
    assert!(all.iter().all(|span| fixture.read(span) == fixture.read(&all[0])));
    drop((list, all, buffers, normal));
    fixture.end();
}

#[test]
fn alone_a_background_copy_is_nearly_as_fast_as_any() {
    let fixture = Fixture::of_times("h200x4");
    for direction in Direction::BOTH {
        let user = User::new(&fixture, direction, Bytes::mib(256));
        let normal = user.copy_blocking(&fixture, CopyOptions::default());
        // For a while after another copy slices are smaller.
        std::thread::sleep(Duration::from_millis(150));
        let before = slices(&fixture);
        let background = user.copy_blocking(&fixture, BACKGROUND);
        assert!(slices(&fixture) - before >= 256);
        println!("{direction:?}: {background:?}, as a normal one {normal:?}");
        // Each slice costs the model what a copy costs besides its bytes.
        assert!(background <= normal * 7 / 4, "{background:?} instead of {normal:?}");
        drop(user);
    }
    fixture.end();
}

#[test]
fn bytes_are_right_in_the_order_of_the_stream() {
    let size = Bytes::mib(13);
    for memory in [Way::ZeroStaging, Way::Staged] {
        let fixture = Fixture::new("h200x4");
        let stream = fixture.stream(GPU);
        let other = fixture.stream(fixture.gpus.iter().nth(2).unwrap());
        let (mapped, plain) = (fixture.mapped(GPU, size), fixture.plain(GPU, size));
        let span = match memory {
            Way::ZeroStaging => mapped.span(Bytes::ZERO, size).unwrap(),
            _ => plain.span.clone(),
        };
        let users = [
            fixture.user(GPU, stream.id()),
            fixture.user(GPU, glake_device::Stream::LEGACY),
            fixture.user(other.device(), other.id()),
        ];
        for (seed, on) in (1..).zip(users) {
            let (source, sink) = (fixture.pinned(size, seed), fixture.pinned(size, 99));
            let from = Span::pinned(&source, Bytes::ZERO, size).unwrap();
            let to = Span::pinned(&sink, Bytes::ZERO, size).unwrap();
            fixture.engine().copy(&span, &from, on, BACKGROUND).unwrap();
            if on.device == GPU {
                // Adds one to every byte, between the two copies.
                let touch = Touch { address: span.start(), size };
                let length = usize::try_from(size.get()).unwrap();
                let add = move |memory: &mut dyn glake_device::KernelMemory| {
                    let mut bytes = vec![0; length];
                    memory.read(touch.address, &mut bytes).unwrap();
                    bytes.iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
                    memory.write(touch.address, &bytes).unwrap();
                };
                let time = Duration::from_micros(100);
                fixture.sim.enqueue_kernel(GPU, on.raw, &[touch], &[touch], time, add).unwrap();
            }
            fixture.engine().copy(&to, &span, on, BACKGROUND).unwrap();
            fixture.wait(on);
            let add = u8::from(on.device == GPU);
            let same = |(from, to): (&u8, &u8)| from.wrapping_add(add) == *to;
            let length = usize::try_from(size.get()).unwrap();
            assert!(
                source.as_slice().iter().zip(sink.as_slice()).take(length).all(same),
                "{memory:?} {on:?}"
            );
        }
        assert!(fixture.carried(memory) > Bytes::ZERO);
        drop((stream, other, mapped, plain, span));
        fixture.end();
    }
}

#[test]
fn two_at_once_and_a_critical_one_all_arrive() {
    let fixture = Fixture::new("h200x4");
    let size = Bytes::mib(48);
    let streams = [(); 3].map(|()| fixture.stream(GPU));
    let mapped = [(); 3].map(|()| fixture.mapped(GPU, size));
    let hosts = [1, 2, 3].map(|seed| fixture.pinned(size, seed));
    let handles: Vec<_> = [BACKGROUND, BACKGROUND, CRITICAL]
        .into_iter()
        .enumerate()
        .map(|(index, options)| {
            let to = mapped[index].span(Bytes::ZERO, size).unwrap();
            let from = Span::pinned(&hosts[index], Bytes::ZERO, size).unwrap();
            fixture.engine().copy(&to, &from, fixture.user(GPU, streams[index].id()), options).unwrap()
        })
        .collect();
    for handle in handles.into_iter().rev() {
        handle.wait().unwrap();
    }
    for (mapped, host) in mapped.iter().zip(&hosts) {
        assert!(fixture.holds(&mapped.span(Bytes::ZERO, size).unwrap(), host.as_slice()));
    }
    drop((streams, mapped));
    fixture.end();
}

#[test]
fn stopping_in_the_middle_lets_them_arrive() {
    let fixture = Fixture::new("h200x4");
    let size = Bytes::mib(64);
    let stream = fixture.stream(GPU);
    let on = fixture.user(GPU, stream.id());
    let (mapped, host) = (fixture.mapped(GPU, size), fixture.pinned(size, 5));
    let to = mapped.span(Bytes::ZERO, size).unwrap();
    let from = Span::pinned(&host, Bytes::ZERO, size).unwrap();
    let critical = User::new(&fixture, Direction::ToGpu, Bytes::mib(16));
    let handle = fixture.engine().copy(&to, &from, on, BACKGROUND).unwrap();
    fixture.sim.advance(Duration::from_micros(50));
    critical.copy(&fixture, CRITICAL);
    fixture.engine().stop();
    critical.copy(&fixture, CRITICAL);
    handle.wait().unwrap();
    assert!(fixture.holds(&to, host.as_slice()));
    fixture.engine().copy(&to, &from, on, BACKGROUND).unwrap().wait().unwrap();
    fixture.wait(critical.on);
    drop((stream, mapped, to, from, host, critical));
    fixture.end();
}

#[test]
fn every_call_may_fail_once() {
    let size = Bytes::mib(9);
    let length = usize::try_from(size.get()).unwrap();
    let verbs = [
        Verb::Copy,
        Verb::EventRecord,
        Verb::EventQuery,
        Verb::StreamWaitEvent,
        Verb::StreamWaitValue,
        Verb::StreamWriteValue,
        Verb::StreamSynchronize,
        Verb::CaptureState,
    ];
    for memory in [Way::ZeroStaging, Way::Staged] {
        for verb in verbs {
            for n in 1.. {
                let fixture = Fixture::new("h200x4");
                let streams = [(); 2].map(|()| fixture.stream(GPU));
                let (mapped, plain) = (fixture.mapped(GPU, size), fixture.plain(GPU, size));
                let span = match memory {
                    Way::ZeroStaging => mapped.span(Bytes::ZERO, size).unwrap(),
                    _ => plain.span.clone(),
                };
                let critical = User::new(&fixture, Direction::ToGpu, Bytes::mib(4));
                let host = fixture.pinned(size, n);
                let from = Span::pinned(&host, Bytes::ZERO, size).unwrap();
                let on = fixture.user(GPU, streams[0].id());
                fixture.faults.set(&[Fault {
                    verb: Some(verb),
                    when: When::Nth(n),
                    error: Injected::Failed(1),
                }]);
                let background = fixture.engine().copy(&span, &from, on, UNWAITED);
                let (to, source) = ends(Direction::ToGpu, &critical.host, &critical.gpu);
                let beside =
                    fixture.engine().copy(to, source, critical.on, CopyOptions { waited: false, ..CRITICAL });
                let injected = fixture.faults.injected();
                fixture.faults.set(&[]);
                fixture.wait(on);
                fixture.wait(critical.on);
                assert!(background.is_ok() && beside.is_ok(), "{verb} {n}: {background:?} {beside:?}");
                assert!(fixture.holds(&span, &host.as_slice()[..length]), "{verb} {n}");
                drop((background, beside, critical, streams, mapped, plain, span, from, host));
                fixture.end();
                if injected == 0 {
                    break;
                }
            }
        }
    }
}

/// What shuts a barrier stands on a stream that has not come there: to open it at once would be too early.
#[test]
fn a_barrier_that_a_stream_shuts_is_opened_though_a_call_fails() {
    let (size, length) = (Bytes::mib(9), usize::try_from(Bytes::mib(9).get()).unwrap());
    for unordered in [false, true] {
        for n in 1.. {
            let fixture = Fixture::new("h200x4");
            let stream = fixture.stream(GPU);
            let (on, mapped) = (fixture.user(GPU, stream.id()), fixture.mapped(GPU, size));
            let host = fixture.pinned(size, n);
            let (to, from) =
                (mapped.span(Bytes::ZERO, size).unwrap(), Span::pinned(&host, Bytes::ZERO, size).unwrap());
            let critical = User::new(&fixture, Direction::ToGpu, Bytes::mib(4));
            // Neither has come to its copy when the calls are made.
            [&stream, &critical.stream].into_iter().for_each(|stream| fixture.keep_busy(stream));
            let write =
                Fault { verb: Some(Verb::StreamWriteValue), when: When::Nth(n), error: Injected::Failed(1) };
            fixture.faults.set(&[write]);
            drop(fixture.engine().copy(&to, &from, on, UNWAITED).unwrap());
            let options = CopyOptions { waited: false, unordered, ..CRITICAL };
            let pair = (critical.gpu.clone(), critical.host.clone());
            drop(fixture.engine().copy_list(&[pair], critical.on, options).unwrap());
            let injected = fixture.faults.injected();
            fixture.faults.set(&[]);
            // In virtual time nobody waits for the watch.
            fixture.wait(on);
            fixture.wait(critical.on);
            assert!(fixture.holds(&to, &host.as_slice()[..length]), "{unordered} {n}");
            drop((critical, stream, mapped, to, from, host));
            fixture.end();
            if injected == 0 {
                break;
            }
        }
    }
}

#[test]
fn a_lost_relay_is_told_of_or_made_good() {
    let size = Bytes::mib(16);
    for n in [1, 3, 5, 6, 8] {
        let fixture = Fixture::new("h200x4");
        let stream = fixture.stream(GPU);
        let on = fixture.user(GPU, stream.id());
        let (mapped, host) = (fixture.mapped(GPU, size), fixture.pinned(size, n));
        let to = mapped.span(Bytes::ZERO, size).unwrap();
        let from = Span::pinned(&host, Bytes::ZERO, size).unwrap();
        let lose = Fault { verb: Some(Verb::Copy), when: When::Nth(n), error: Injected::Damaged(700) };
        fixture.faults.set(&[lose]);
        let answer = fixture.engine().copy(&to, &from, on, BACKGROUND).and_then(crate::CopyHandle::wait);
        let arrived = answer.is_ok() && fixture.holds(&to, host.as_slice());
        assert!(answer.is_err() || arrived, "{n}");
        fixture.faults.set(&[]);
        drop((stream, mapped, to, from, host));
        fixture.end();
    }
}
