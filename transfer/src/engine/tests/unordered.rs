//! Copies of memory that nothing before touches: their parts do not wait for the stream, so that slots of earlier copies are still in use.

use glake_device::owned::{self, Buffer, OwnedStream, Registration, Span};
use glake_device::{DeviceId, Fault, Injected, Verb, When};
use glake_units::Bytes;

use super::fixture::{Fixture, GPU, Plain};
use crate::paths::Way;
use crate::{CopyOptions, Priority, UserStream};

const UNORDERED: CopyOptions =
    CopyOptions { priority: Priority::Normal, verify: false, waited: false, unordered: true };
const ALL: Bytes = Bytes::mib(56);

/// Slots of earlier copies are still in use when the next ones begin, which lay them out otherwise, or go the other way.
#[test]
fn unordered_copies_through_slots() {
    let fixture = Fixture::new("h200x4");
    let stream = fixture.stream(GPU);
    let on = fixture.user(GPU, stream.id());
    let sizes =
        [5, 20, 20, 20, 40, 7, 16, 16, 16, 16, 48, 20].map(|mib| Bytes::new((mib << 20) + 4096 * mib));
    let all: Bytes = sizes.into_iter().sum();
    let length = usize::try_from(all.get()).unwrap();
    let (first, second, back) = (fixture.pinned(all, 1), fixture.pinned(all, 2), fixture.pinned(all, 3));
    let gpu = fixture.plain(GPU, all);
    let [one, two, three] =
        [&first, &second, &back].map(|memory| Span::pinned(memory, Bytes::ZERO, all).unwrap());
    let copy = |to: &Span, from: &Span, at: usize| {
        let offset = sizes[..at].iter().copied().sum();
        let part = |span: &Span| span.part(offset, sizes[at]).unwrap();
        let options = CopyOptions { unordered: true, ..CopyOptions::default() };
        drop(fixture.engine().copy_list(&[(part(to), part(from))], on, options).unwrap());
    };
    for round in 0..2 {
        (0..sizes.len()).for_each(|at| copy(&gpu.span, &one, at));
        fixture.wait(on);
        assert!(fixture.holds(&gpu.span, &first.as_slice()[..length]), "round {round}, to the GPU");
        // One of two comes back, of the others other bytes go there.
        for at in 0..sizes.len() {
            if at % 2 == 0 { copy(&three, &gpu.span, at) } else { copy(&gpu.span, &two, at) }
        }
        fixture.wait(on);
        let mut start = 0;
        let after = fixture.read(&gpu.span);
        for (at, size) in sizes.iter().enumerate() {
            let range = start..start + usize::try_from(size.get()).unwrap();
            start = range.end;
            let (found, expected) = match at % 2 {
                0 => (&back.as_slice()[range.clone()], &first.as_slice()[range]),
                _ => (&after[range.clone()], &second.as_slice()[range]),
            };
            assert!(found == expected, "round {round}, piece {at}");
        }
    }
    assert!(fixture.carried(Way::Staged) > all);
    // The simulator refuses what could use a slot too early.
    assert!(fixture.engine().statistics().paths.iter().all(|path| path.retries == 0));
    drop((gpu, stream));
    fixture.end();
}

/// A copy to be made: of memory that relays may touch or not, to the GPU or from it.
#[derive(Clone, Copy, Debug)]
struct Ask {
    is_open: bool,
    to_gpu: bool,
    size: Bytes,
    options: CopyOptions,
    stream: usize,
}

impl Ask {
    fn new(is_open: bool, to_gpu: bool, mib: u64) -> Ask {
        Ask { is_open, to_gpu, size: Bytes::mib(mib), options: UNORDERED, stream: 0 }
    }
}

/// Memory of both kinds, and what it is to hold.
struct Scene {
    fixture: Fixture,
    streams: [(OwnedStream, UserStream); 2],
    plain: Plain,
    open: std::sync::Arc<Buffer>,
    /// What goes to the GPU, what the GPU has, and where that comes back to.
    host: [std::sync::Arc<Registration>; 3],
    /// Where the next copy begins.
    at: Bytes,
    made: Vec<(Ask, Bytes)>,
}

impl Scene {
    fn new() -> Scene {
        let fixture = Fixture::new("h200x4");
        fixture.engine().set_relays([GPU, DeviceId(1)].into_iter().collect());
        let streams = [(); 2].map(|()| {
            let stream = fixture.stream(GPU);
            let on = fixture.user(GPU, stream.id());
            (stream, on)
        });
        let host = [1, 2, 3].map(|seed| fixture.pinned(ALL, seed));
        let (plain, open) = (fixture.plain(GPU, ALL), fixture.mapped(GPU, ALL));
        let scene = Scene { fixture, streams, plain, open, host, at: Bytes::ZERO, made: Vec::new() };
        let on = scene.streams[0].1;
        for gpu in [scene.gpu(true), scene.gpu(false)] {
            owned::copy(&*scene.fixture.driver, GPU, on.raw, &gpu, &scene.pinned(1)).unwrap();
        }
        scene.fixture.wait(on);
        scene
    }

    fn gpu(&self, is_open: bool) -> Span {
        if is_open { self.open.span(Bytes::ZERO, ALL).unwrap() } else { self.plain.span.clone() }
    }

    fn pinned(&self, index: usize) -> Span {
        Span::pinned(&self.host[index], Bytes::ZERO, ALL).unwrap()
    }

    fn has_room(&self, size: Bytes) -> bool {
        self.at.saturating_add(size) <= ALL
    }

    /// Whether it was enqueued.
    fn copy(&mut self, ask: Ask) -> bool {
        let part = |span: Span| span.part(self.at, ask.size).unwrap();
        let gpu = part(self.gpu(ask.is_open));
        let pair = if ask.to_gpu { (gpu, part(self.pinned(0))) } else { (part(self.pinned(2)), gpu) };
        let copied = self.fixture.engine().copy_list(&[pair], self.streams[ask.stream].1, ask.options);
        if copied.is_ok() {
            self.made.push((ask, self.at));
        }
        self.at = self.at.saturating_add(ask.size);
        copied.is_ok()
    }

    fn retries(&self) -> u64 {
        self.fixture.engine().statistics().paths.iter().map(|path| path.retries).sum()
    }

    /// All of it is there, and nothing is left.
    fn end(self, said: &dyn std::fmt::Debug) {
        self.streams.iter().for_each(|(_, on)| self.fixture.wait(*on));
        for (ask, at) in &self.made {
            let start = usize::try_from(at.get()).unwrap();
            let range = start..start + usize::try_from(ask.size.get()).unwrap();
            let is_there = if ask.to_gpu {
                let gpu = self.gpu(ask.is_open).part(*at, ask.size).unwrap();
                self.fixture.holds(&gpu, &self.host[0].as_slice()[range])
            } else {
                self.host[2].as_slice()[range.clone()] == self.host[1].as_slice()[range]
            };
            assert!(is_there, "{ask:?} of {said:?}");
        }
        let Scene { fixture, streams, plain, open, host, made, .. } = self;
        drop((streams, plain, open, host, made));
        // Of copies that could not be joined in the usual way, too.
        fixture.completion_events.synchronize(fixture.gpus).unwrap();
        fixture.engine().shared.contexts.own().synchronize(fixture.gpus).unwrap();
        fixture.end();
    }
}

#[test]
fn memory_that_relays_may_touch_in_between() {
    for sizes in [[20, 3, 10], [10, 3, 20], [20, 2, 6]] {
        let mut scene = Scene::new();
        for (is_open, mib) in [false, true, false].into_iter().zip(sizes) {
            assert!(scene.copy(Ask::new(is_open, true, mib)));
        }
        assert_eq!(scene.retries(), 0, "{sizes:?}");
        scene.end(&sizes);
    }
}

#[test]
fn one_call_of_the_driver_s_fails() {
    let cases = [[(true, 10), (true, 20), (true, 20)], [(false, 10), (false, 20), (false, 20)]];
    let cases = cases.into_iter().chain([[(true, 16), (true, 16), (false, 16)], [(false, 16); 3]]);
    for copies in cases {
        for verb in [Verb::StreamWaitEvent, Verb::EventRecord, Verb::Copy] {
            for nth in 1.. {
                let mut scene = Scene::new();
                let mut injected = 0;
                for (index, (to_gpu, mib)) in copies.into_iter().enumerate() {
                    let fault = Fault { verb: Some(verb), when: When::Nth(nth), error: Injected::Failed(1) };
                    scene.fixture.faults.set(if index == 1 { std::slice::from_ref(&fault) } else { &[] });
                    let before = scene.fixture.faults.injected();
                    assert!(scene.copy(Ask::new(false, to_gpu, mib)));
                    injected += scene.fixture.faults.injected() - before;
                }
                let said = (copies, verb, nth);
                assert!(scene.retries() <= injected, "{said:?}: {} retries", scene.retries());
                scene.end(&said);
                if injected == 0 {
                    break;
                }
            }
        }
    }
}

/// Copies of all kinds, on two streams, some of which wait for their stream or give way.
#[test]
fn beside_others_in_any_order() {
    let sizes = [3, 4, 5, 8, 8, 8, 10, 10, 20];
    for seed in 0..12_u64 {
        for chance in [0.0, 0.01] {
            let mut random = seed.wrapping_mul(7919).wrapping_add(13);
            let mut below = |most: u64| {
                random =
                    random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (random >> 33) % most
            };
            let mut scene = Scene::new();
            loop {
                let size = Bytes::mib(sizes[usize::try_from(below(sizes.len() as u64)).unwrap()]);
                if !scene.has_room(size) {
                    break;
                }
                let priority = if below(5) == 0 { Priority::Background } else { Priority::Normal };
                let options = CopyOptions { priority, unordered: below(5) != 0, ..UNORDERED };
                let (is_open, to_gpu, stream) = (below(4) == 0, below(2) == 0, usize::from(below(4) == 0));
                let when = When::Chance { probability: chance, seed: below(1 << 30) };
                let fault = Fault { verb: None, when, error: Injected::Failed(2) };
                scene.fixture.faults.set(if chance > 0.0 { std::slice::from_ref(&fault) } else { &[] });
                let is_enqueued = scene.copy(Ask { is_open, to_gpu, size, options, stream });
                scene.fixture.faults.set(&[]);
                assert!(is_enqueued || chance > 0.0, "{seed}");
                if below(6) == 0 {
                    scene.fixture.wait(scene.streams[stream].1);
                }
            }
            assert!(scene.retries() == 0 || chance > 0.0, "{seed}");
            scene.end(&(seed, chance));
        }
    }
}

/// A copy that waits for no fork does not know whether its streams have come to it.
#[test]
fn no_more_than_fits_stands_on_a_stream_that_is_held_up() {
    let fixture = Fixture::of_times("h200x4");
    let stream = fixture.stream(GPU);
    let (on, size) = (fixture.user(GPU, stream.id()), Bytes::gib(2));
    let (open, host) = (fixture.mapped(GPU, size), fixture.pinned(size, 1));
    let pair = (open.span(Bytes::ZERO, size).unwrap(), Span::pinned(&host, Bytes::ZERO, size).unwrap());
    let held = std::time::Duration::from_millis(500);
    fixture.sim.enqueue_kernel(GPU, stream.id(), &[], &[], held, |_| {}).unwrap();
    let options = CopyOptions { priority: Priority::Background, ..UNORDERED };
    drop(fixture.engine().copy_list(&[pair], on, options).unwrap());
    let slices: Vec<u64> = fixture.engine().statistics().paths.iter().map(|path| path.slices).collect();
    assert!(slices.iter().all(|slices| 2 * slices <= 256), "{slices:?}");
    fixture.wait(on);
    drop((open, host, stream));
    fixture.end();
}
