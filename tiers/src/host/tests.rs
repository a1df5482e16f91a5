//! The host pool over the simulated device: real bytes, real refusals, nothing left behind.

use std::time::Duration;

use glake_device::owned::{self, Buffer, OwnedStream};
use glake_device::{
    DeviceId, Driver, DriverError, Fault, Faults, Injected, PointerKind, Recorder, Touch, Verb, When,
};
use glake_sim::{Census, SimOptions, SimTopology, Simulator};
use proptest::prelude::*;

use super::*;

const GPU: DeviceId = DeviceId(0);
const ARENA: Bytes = Bytes::mib(4);
const ONE: Bytes = Bytes::mib(1);

struct Fixture {
    sim: Arc<Simulator>,
    faults: Arc<Faults>,
    recorder: Arc<Recorder>,
    completion_events: Arc<CompletionEvents>,
    pool: Arc<HostPool>,
}

fn fixture(budget: Bytes) -> Fixture {
    let topology = SimTopology::uniform(2, Bytes::mib(64));
    let sim = Arc::new(Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap());
    let faults = Arc::new(Faults::new(sim.clone()));
    let recorder = Arc::new(Recorder::measured(faults.clone()));
    let completion_events = CompletionEvents::new(recorder.clone());
    let options = HostOptions {
        budget: Budget::new(budget),
        arena: ARENA,
        spare: Bytes::ZERO,
        threads: 2,
        ..HostOptions::default()
    };
    let pool = HostPool::new(&completion_events, options).unwrap();
    Fixture { sim, faults, recorder, completion_events, pool }
}

impl Fixture {
    fn take(&self, size: Bytes) -> HostBlock {
        self.pool.take(size).unwrap()
    }

    fn pins(&self) -> u64 {
        self.recorder.counters().of(Verb::HostRegister).calls
    }

    /// A kernel that fills a block after a millisecond.
    fn fill_slowly(&self, stream: &OwnedStream, block: &HostBlock, byte: u8) {
        let span = block.span(Bytes::ZERO, block.size()).unwrap();
        let bytes = vec![byte; usize::try_from(span.size().get()).unwrap()];
        let writes = [Touch { address: span.start(), size: span.size() }];
        let to = span.start();
        let work = move |memory: &mut dyn glake_device::KernelMemory| memory.write(to, &bytes).unwrap();
        let time = Duration::from_millis(1);
        self.sim.enqueue_kernel(GPU, stream.id(), &[], &writes, time, work).unwrap();
    }

    /// Nothing is pinned, nothing is held.
    fn end(self) {
        let Fixture { sim, recorder, completion_events, pool, .. } = self;
        let statistics = pool.statistics();
        assert_eq!((statistics.in_use, statistics.retained), (Bytes::ZERO, Bytes::ZERO));
        drop((pool, completion_events));
        assert_eq!(sim.census(), Census::default());
        let (pinned, unpinned) = (Verb::HostRegister, Verb::HostUnregister);
        let done = |verb| recorder.counters().of(verb).calls - recorder.counters().of(verb).failures;
        assert_eq!(done(pinned), done(unpinned));
    }
}

fn all(bytes: &[u8], byte: u8) -> bool {
    bytes.iter().all(|found| *found == byte)
}

#[test]
fn bytes_go_to_a_gpu_and_back_through_blocks() {
    let fixture = fixture(Bytes::MAX);
    let driver: Arc<dyn Driver> = fixture.recorder.clone();
    let buffer =
        Arc::new(Buffer::new(&fixture.completion_events, GPU, Bytes::mib(3), DeviceSet::EMPTY).unwrap());
    let stream = OwnedStream::new(&driver, GPU).unwrap();
    let (mut from, to) = (fixture.take(Bytes::mib(3)), fixture.take(Bytes::new((3 << 20) - 1)));
    assert_eq!(driver.pointer_attributes(from.start()).unwrap().kind, PointerKind::Pinned);
    for (at, byte) in (0_u32..).zip(from.as_mut_slice().unwrap()) {
        *byte = at.wrapping_mul(2_654_435_761).to_be_bytes()[0];
    }
    let size = to.size();
    let on_gpu = buffer.span(Bytes::ZERO, size).unwrap();
    owned::copy(&*driver, GPU, stream.id(), &on_gpu, &from.span(Bytes::ZERO, size).unwrap()).unwrap();
    owned::copy(&*driver, GPU, stream.id(), &to.span(Bytes::ZERO, size).unwrap(), &on_gpu).unwrap();
    stream.synchronize().unwrap();
    assert!(to.as_slice() == &from.as_slice()[..to.as_slice().len()] && !all(to.as_slice(), 0));
    assert!(to.span(Bytes::ZERO, Bytes::mib(3)).is_none(), "past its end");
    drop((from, to, on_gpu, buffer, stream));
    fixture.end();
}

#[test]
fn memory_is_pinned_once() {
    let fixture = fixture(Bytes::MAX);
    for _ in 0..3 {
        let blocks: Vec<HostBlock> = (0..8).map(|_| fixture.take(ONE)).collect();
        assert_eq!(fixture.pool.statistics().in_use, Bytes::mib(8));
        drop(blocks);
    }
    assert_eq!((fixture.pins(), fixture.pool.statistics().pins), (3, 3));
    let larger = fixture.take(Bytes::mib(6));
    assert_eq!(fixture.pool.statistics().pinned, Bytes::mib(14));
    drop(larger);
    let went = fixture.pool.trim(Bytes::mib(10));
    assert!([4, 6].map(Bytes::mib).contains(&went), "one arena is enough: {went}");
    assert_eq!(fixture.pool.trim(Bytes::ZERO), Bytes::mib(14).saturating_sub(went));
    assert_eq!(fixture.pool.statistics().pinned, Bytes::ZERO);
    assert!(fixture.pool.statistics().pinning > Duration::ZERO);
    fixture.end();
}

/// The first use pins no more than it needs, and later ones at most as much as is pinned.
#[test]
fn little_use_pins_little() {
    let fixture = fixture(Bytes::MAX);
    let pinned = || fixture.pool.statistics().pinned;
    let first = fixture.take(ONE);
    assert_eq!(pinned(), Bytes::mib(2));
    let second = fixture.take(Bytes::mib(2));
    assert_eq!(pinned(), Bytes::mib(4));
    let third = fixture.take(ONE);
    assert_eq!(pinned(), Bytes::mib(4), "the rest of the first arena");
    let fourth = fixture.take(ONE);
    assert_eq!(pinned(), Bytes::mib(8), "a whole arena");
    drop((first, second, third, fourth));
    fixture.end();
}

#[test]
fn what_was_prepared_is_not_pinned_again() {
    let fixture = fixture(Bytes::mib(32));
    fixture.pool.prepare(Bytes::mib(10)).unwrap();
    assert_eq!((fixture.pins(), fixture.pool.statistics().pinned), (3, Bytes::mib(10)));
    fixture.pool.prepare(Bytes::mib(9)).unwrap();
    let blocks = [4, 4, 2].map(|mib| fixture.take(Bytes::mib(mib)));
    assert_eq!(fixture.pins(), 3);
    let refused = fixture.pool.prepare(Bytes::mib(23)).unwrap_err();
    assert!(matches!(refused, HostError::OverBudget { .. }), "{refused}");
    fixture.pool.prepare(Bytes::mib(22)).unwrap();
    assert_eq!(fixture.pool.statistics().pinned, Bytes::mib(32));
    drop(blocks);
    fixture.end();
}

/// Threads take what another pins, and pin nothing themselves.
#[test]
fn what_is_being_prepared_is_taken_as_it_arrives() {
    let fixture = fixture(Bytes::mib(64));
    std::thread::scope(|scope| {
        scope.spawn(|| fixture.pool.prepare(Bytes::mib(64)).unwrap());
        while fixture.pool.statistics().pinned.is_zero() {
            std::thread::yield_now();
        }
        let takes: Vec<_> = (0..16).map(|_| scope.spawn(|| fixture.take(ARENA))).collect();
        let blocks: Vec<HostBlock> = takes.into_iter().map(|take| take.join().unwrap()).collect();
        assert!(fixture.pool.take(ONE).unwrap_err().is_shortage());
        drop(blocks);
    });
    assert_eq!(fixture.pins(), 16);
    fixture.end();
}

#[test]
fn what_is_expected_is_pinned_while_it_is_wanted() {
    let fixture = fixture(Bytes::mib(32));
    let expect = |mib, count| fixture.pool.expect(&vec![Bytes::mib(mib); count]);
    expect(3, 5).unwrap().pin(|| false);
    assert_eq!(fixture.pins(), 0);
    expect(3, 5).unwrap().pin(|| fixture.pins() < 2);
    assert_eq!(fixture.pins(), 3, "the third was under way");
    let expected = expect(3, 5).unwrap();
    assert!(expect(3, 5).is_none(), "one thread pins at a time");
    expected.pin(|| true);
    let blocks: Vec<HostBlock> = (0..4).map(|_| fixture.take(Bytes::mib(3))).collect();
    assert_eq!(
        fixture.pins(),
        4,
        "what is free in pieces counts as one: the rest is pinned when it is taken"
    );
    // Nobody is told here: who takes memory is.
    let fault = Fault { verb: Some(Verb::HostRegister), when: When::Nth(1), error: Injected::Failed(304) };
    fixture.faults.set(&[fault]);
    expect(8, 1).unwrap().pin(|| true);
    fixture.faults.set(&[]);
    assert!(expect(1000, 1).is_none(), "the budget does not allow it");
    drop(blocks);
    fixture.end();
}

#[test]
fn memory_that_work_still_touches_is_not_handed_out() {
    let fixture = fixture(Bytes::mib(8));
    let driver: Arc<dyn Driver> = fixture.recorder.clone();
    let stream = OwnedStream::new(&driver, GPU).unwrap();
    let block = fixture.take(ARENA);
    let (start, begin) = (block.start(), fixture.sim.now());
    fixture.fill_slowly(&stream, &block, 7);
    drop(block);
    let other = fixture.take(ARENA);
    assert!(
        other.start() != start && fixture.sim.now() == begin,
        "there is other memory: nothing is waited for"
    );
    let mut again = fixture.take(ARENA);
    assert!(again.start() == start && fixture.sim.now() >= begin + Duration::from_millis(1));
    assert!(all(again.as_slice(), 7));
    again.as_mut_slice().unwrap().fill(8);
    stream.synchronize().unwrap();
    assert!(all(again.as_slice(), 8));
    drop((other, again, stream));
    fixture.end();
}

/// Neighbours become one range, which waits for the work on either.
#[test]
fn joined_memory_waits_for_all_of_it() {
    for busy in 0..2 {
        let fixture = fixture(ARENA);
        let driver: Arc<dyn Driver> = fixture.recorder.clone();
        let stream = OwnedStream::new(&driver, GPU).unwrap();
        fixture.pool.prepare(ARENA).unwrap();
        let mut halves = vec![fixture.take(Bytes::mib(2)), fixture.take(Bytes::mib(2))];
        let begin = fixture.sim.now();
        let slow = halves.remove(busy);
        drop(halves);
        assert!(fixture.pool.take(ARENA).is_err(), "the half that is free has passed now");
        fixture.fill_slowly(&stream, &slow, 7);
        drop(slow);
        let whole = fixture.take(ARENA);
        assert!(fixture.sim.now() >= begin + Duration::from_millis(1) && fixture.pins() == 1);
        assert_eq!(whole.as_slice().iter().filter(|byte| **byte == 7).count(), 2 << 20);
        drop((whole, stream));
        fixture.end();
    }
}

#[test]
fn spans_keep_memory_from_being_handed_out() {
    let fixture = fixture(ARENA);
    let mut block = fixture.take(ARENA);
    let span = block.span(ONE, ONE).unwrap();
    assert!(block.as_mut_slice().is_none());
    drop(block);
    assert_eq!(fixture.pool.statistics().in_use, ARENA);
    assert!(fixture.pool.take(ONE).unwrap_err().is_shortage());
    drop(span);
    drop(fixture.take(ARENA));
    assert_eq!(fixture.pins(), 1);
    fixture.end();
}

#[test]
fn a_capture_is_not_broken() {
    let fixture = fixture(ARENA);
    drop(fixture.take(ARENA));
    let hold = fixture.completion_events.hold();
    assert!(matches!(fixture.pool.take(ARENA), Err(HostError::OverBudget { .. })));
    drop(hold);
    drop(fixture.take(ARENA));
    fixture.end();
}

#[test]
fn small_pieces_make_room_for_a_large_one() {
    let fixture = fixture(Bytes::mib(8));
    let blocks = [fixture.take(ARENA), fixture.take(ARENA)];
    let refused = fixture.pool.take(Bytes::mib(8)).unwrap_err();
    assert!(refused.is_shortage());
    drop(blocks);
    let large = fixture.take(Bytes::mib(8));
    assert_eq!((fixture.pins(), fixture.pool.statistics().pinned), (3, Bytes::mib(8)));
    drop(large);
    fixture.end();
}

#[test]
fn retained_copies_count_against_the_budget_and_are_told_apart() {
    let fixture = fixture(Bytes::mib(8));
    let copy = fixture.take(Bytes::mib(5));
    copy.set_retained(true);
    copy.set_retained(true);
    let block = fixture.take(ONE);
    let statistics = fixture.pool.statistics();
    assert_eq!((statistics.retained, statistics.in_use), (Bytes::mib(5), ONE));
    match fixture.pool.take(Bytes::mib(4)).unwrap_err() {
        error @ HostError::OverBudget { wanted, budget, in_use, retained, .. } => {
            assert_eq!([wanted, budget, in_use, retained], [4, 8, 1, 5].map(Bytes::mib));
            let text = error.to_string();
            assert!(text.contains("drop retained copies") && text.contains("5.00 MiB"), "{text}");
        }
        other => panic!("{other}"),
    }
    drop((copy, block));
    drop(fixture.take(Bytes::mib(8)));
    fixture.end();
}

#[test]
fn a_host_that_has_not_so_much_is_asked_for_nothing() {
    let fixture = fixture(Bytes::MAX);
    let error = fixture.pool.take(Bytes::gib(1 << 20)).unwrap_err();
    assert!(matches!(error, HostError::Exhausted { wanted, .. } if wanted == Bytes::gib(1 << 20)), "{error}");
    assert!(fixture.pool.take(Bytes::MAX).unwrap_err().is_shortage());
    assert_eq!(fixture.pool.statistics().pinned, Bytes::ZERO);
    drop(fixture.take(ONE));
    fixture.end();
}

#[test]
fn whether_there_is_room_is_said_without_pinning() {
    let fixture = fixture(ARENA);
    fixture.pool.has_room(ARENA, Bytes::ZERO).unwrap();
    assert!(matches!(fixture.pool.has_room(Bytes::mib(5), Bytes::ZERO), Err(HostError::OverBudget { .. })));
    assert_eq!(fixture.pins(), 0);
    let block = fixture.take(ONE);
    // What is free of what is pinned counts.
    fixture.pool.has_room(Bytes::mib(3), Bytes::ZERO).unwrap();
    assert!(matches!(fixture.pool.has_room(ARENA, Bytes::ZERO), Err(HostError::OverBudget { .. })));
    drop(block);
    let endless = self::fixture(Bytes::MAX);
    assert!(matches!(
        endless.pool.has_room(Bytes::new(1 << 60), Bytes::ZERO),
        Err(HostError::Exhausted { .. })
    ));
    // Of what the process itself frees meanwhile the host has enough; the budget counts all of it.
    endless.pool.has_room(Bytes::new(1 << 60), Bytes::new(1 << 60)).unwrap();
    assert!(matches!(fixture.pool.has_room(Bytes::mib(5), ARENA), Err(HostError::OverBudget { .. })));
    assert_eq!((fixture.pins(), endless.pins()), (1, 0));
    endless.end();
    fixture.end();
}

#[test]
fn a_driver_that_does_not_pin_leaves_the_pool_as_it_was() {
    let fixture = fixture(Bytes::mib(32));
    let fail = |when, error| Fault { verb: Some(Verb::HostRegister), when, error };
    fixture.faults.set(&[fail(When::Nth(2), Injected::Failed(304))]);
    let refused = fixture.pool.prepare(Bytes::mib(12)).unwrap_err();
    assert!(matches!(refused, HostError::PinRefused { .. }), "{refused}");
    assert!(refused.to_string().contains("RLIMIT_MEMLOCK"), "{refused}");
    assert_eq!(fixture.pool.statistics().pinned, ARENA, "what was pinned before stays");
    fixture.faults.set(&[fail(When::From(1), Injected::OutOfMemory)]);
    drop(fixture.take(ARENA));
    assert!(fixture.pool.take(Bytes::mib(8)).unwrap_err().is_shortage());
    fixture.faults.set(&[fail(When::Nth(1), Injected::Sticky(700))]);
    let lost = fixture.pool.take(Bytes::mib(8)).unwrap_err();
    assert!(matches!(lost, HostError::Driver(DriverError::Sticky { code: 700, .. })), "{lost}");
    fixture.faults.set(&[]);
    drop(fixture.take(Bytes::mib(8)));
    fixture.end();
}

/// GPUs that are used later have a pool of their own, under the same budget.
#[test]
fn pools_of_one_budget_pin_no_more_than_it_together() {
    let fixture = fixture(Bytes::mib(8));
    let pool_of = |budget: &Arc<Budget>| {
        let options = HostOptions {
            budget: budget.clone(),
            arena: ARENA,
            spare: Bytes::ZERO,
            threads: 1,
            ..HostOptions::default()
        };
        HostPool::new(&fixture.completion_events, options).unwrap()
    };
    let budget = Budget::new(Bytes::mib(8));
    let [one, other] = [(); 2].map(|()| pool_of(&budget));
    let pinned =
        |pools: &[&Arc<HostPool>]| -> Bytes { pools.iter().map(|pool| pool.statistics().pinned).sum() };
    let blocks = [(); 2].map(|()| one.take(Bytes::mib(4)).unwrap());
    match other.take(Bytes::mib(2)).unwrap_err() {
        HostError::OverBudget { budget, in_use, .. } => assert_eq!([budget, in_use], [Bytes::mib(8); 2]),
        error => panic!("{error}"),
    }
    assert!(other.prepare(Bytes::mib(2)).unwrap_err().is_shortage());
    assert!(other.has_room(Bytes::mib(2), Bytes::ZERO).unwrap_err().is_shortage());
    // What the one has free, the other can have.
    drop(blocks);
    other.has_room(Bytes::mib(8), Bytes::ZERO).unwrap();
    let block = other.take(Bytes::mib(2)).unwrap();
    assert!(pinned(&[&one, &other]) <= Bytes::mib(8));
    other.prepare(Bytes::mib(6)).unwrap();
    assert_eq!((pinned(&[&one, &other]), one.statistics().pinned), (Bytes::mib(8), Bytes::ZERO));
    // A pool that goes leaves its part.
    drop((block, other));
    assert_eq!(budget.room(), Bytes::mib(8));
    // Both at once.
    let other = pool_of(&budget);
    std::thread::scope(|scope| {
        for pool in [&one, &other] {
            scope.spawn(move || {
                for _ in 0..50 {
                    let blocks: Vec<_> = (0..2).map_while(|_| pool.take(Bytes::mib(3)).ok()).collect();
                    drop(blocks);
                }
            });
        }
    });
    let pinned = pinned(&[&one, &other]);
    assert_eq!(budget.room().saturating_add(pinned), Bytes::mib(8));
}

/// More bytes than the budget go from GPU memory through the slots of a ring.
#[test]
fn a_ring_streams_what_is_larger_than_the_budget() {
    let fixture = fixture(ARENA);
    let driver: Arc<dyn Driver> = fixture.recorder.clone();
    let whole = fixture.pool.stage(Bytes::mib(3), ONE, 2).unwrap();
    assert!(matches!(whole, Staging::Whole(_)));
    drop(whole);
    let Staging::Ring(ring) = fixture.pool.stage(Bytes::mib(12), ONE, 3).unwrap() else {
        panic!("it fits nowhere")
    };
    assert_eq!((ring.slots(), ring.slot()), (3, ONE));
    let buffer =
        Arc::new(Buffer::new(&fixture.completion_events, GPU, Bytes::mib(12), DeviceSet::EMPTY).unwrap());
    let ours: Vec<u8> = (0..12_usize << 20).map(|at| (at / 4099 * 31 % 251).to_le_bytes()[0]).collect();
    buffer.write(Bytes::ZERO, &ours).unwrap();
    let stream = OwnedStream::new(&driver, GPU).unwrap();
    let mut theirs = Vec::new();
    for part in 0..12 {
        let slot = ring.next().unwrap();
        let (to, from) = (slot.span(Bytes::ZERO, ONE), buffer.span(Bytes::mib(part), ONE));
        owned::copy(&*driver, GPU, stream.id(), &to.unwrap(), &from.unwrap()).unwrap();
        stream.synchronize().unwrap();
        theirs.extend_from_slice(slot.as_slice());
    }
    assert!(ours == theirs);
    let held = [(); 3].map(|()| ring.next().unwrap());
    assert!(ring.try_next().is_none());
    let waiting = std::thread::spawn({
        let ring = ring.clone();
        move || drop(ring.next())
    });
    drop(held);
    waiting.join().unwrap();
    // What is given up is nobody's next, and who waits for it is told.
    let spent = fixture.pool.ring(Bytes::kib(256), 2).unwrap();
    let held = [(); 2].map(|()| spent.next().unwrap());
    let waiting = std::thread::spawn({
        let spent = spent.clone();
        move || spent.next().is_none()
    });
    held.into_iter().for_each(RingSlot::give_up);
    assert!(waiting.join().unwrap() && spent.slots() == 0);
    let fewer = fixture.pool.ring(Bytes::kib(512), 9).unwrap();
    assert_eq!(fewer.slots(), 2, "the other ring has the rest");
    assert!(fixture.pool.ring(Bytes::kib(512), 2).unwrap_err().is_shortage(), "one slot is no ring");
    drop((ring, fewer, buffer, stream));
    fixture.end();
}

#[test]
fn threads_never_have_the_same_memory() {
    let fixture = fixture(Bytes::mib(12));
    std::thread::scope(|scope| {
        for byte in 1..=6_u8 {
            let pool = &fixture.pool;
            scope.spawn(move || {
                for turn in 0..40_u64 {
                    let size = Bytes::kib(256 * (1 + turn % 5));
                    let Ok(mut block) = pool.take(size) else { continue };
                    block.as_mut_slice().unwrap().fill(byte);
                    std::thread::yield_now();
                    assert!(all(block.as_slice(), byte));
                }
            });
        }
    });
    assert!(fixture.pool.statistics().pinned <= Bytes::mib(12));
    fixture.end();
}

#[test]
#[ignore = "a measurement"]
fn pinning_costs() {
    for threads in [1, 2, 4] {
        let fixture = fixture(ARENA);
        let options = HostOptions { threads, ..HostOptions::default() };
        let pool = HostPool::new(&fixture.completion_events, options).unwrap();
        pool.prepare(Bytes::gib(2)).unwrap();
        let HostStatistics { pinned, pinning, .. } = pool.statistics();
        println!("{threads} threads: {:.2} GB/s", pinned.get() as f64 / pinning.as_secs_f64() / 1e9);
    }
}

#[derive(Clone, Copy, Debug)]
enum Act {
    Take(u64),
    Drop(usize),
    Retain(usize, bool),
    Prepare(u64),
    Trim(u64),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        6 => (1..6000_u64).prop_map(Act::Take),
        5 => (0..16_usize).prop_map(Act::Drop),
        1 => (0..16_usize, any::<bool>()).prop_map(|(which, retained)| Act::Retain(which, retained)),
        1 => (0..9000_u64).prop_map(Act::Prepare),
        1 => (0..17_u64).prop_map(Act::Trim),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Against a model that is a list of blocks with a byte each.
    #[test]
    fn blocks_keep_their_bytes_and_the_budget_holds(acts in prop::collection::vec(act(), 1..60)) {
        let budget = Bytes::mib(16);
        let fixture = fixture(budget);
        let mut model: Vec<(HostBlock, u8)> = Vec::new();
        for (act, byte) in acts.into_iter().zip(1..) {
            let taken: u64 = model.iter().map(|(block, _)| block.size().align_up(PAGE).unwrap().get()).sum();
            match act {
                Act::Take(kib) => match fixture.pool.take(Bytes::kib(kib)) {
                    Ok(mut block) => {
                        prop_assert_eq!(block.size(), Bytes::kib(kib));
                        block.as_mut_slice().unwrap().fill(byte);
                        model.push((block, byte));
                    }
                    Err(error) => {
                        prop_assert!(matches!(error, HostError::OverBudget { .. }), "{}", error);
                        prop_assert!(!model.is_empty(), "{} of {} was refused", kib, budget);
                    }
                },
                Act::Drop(which) if which < model.len() => {
                    let (block, byte) = model.swap_remove(which);
                    prop_assert!(all(block.as_slice(), byte));
                }
                Act::Retain(which, retained) if which < model.len() => model[which].0.set_retained(retained),
                Act::Prepare(kib) => {
                    let answer = fixture.pool.prepare(Bytes::kib(kib));
                    prop_assert!(answer.is_ok() || taken > 0);
                }
                Act::Trim(mib) => {
                    fixture.pool.trim(Bytes::mib(mib));
                    let pinned = fixture.pool.statistics().pinned;
                    prop_assert!(!model.is_empty() || pinned <= Bytes::mib(mib));
                }
                _ => {}
            }
            let of = |retained| {
                let blocks = model.iter().filter(|(block, _)| block.is_retained() == retained);
                Bytes::new(blocks.map(|(block, _)| block.size().align_up(PAGE).unwrap().get()).sum())
            };
            let statistics = fixture.pool.statistics();
            prop_assert_eq!((statistics.in_use, statistics.retained), (of(false), of(true)));
            prop_assert!(statistics.pinned <= budget);
        }
        prop_assert!(model.iter().all(|(block, byte)| all(block.as_slice(), *byte)));
        drop(model);
        fixture.end();
    }
}
