//! A driver call that fails, each in turn, in every kind of plan.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use glake_device::{DeviceId, DriverError, Fault, Injected, Verb, When};
use glake_stitch::DomainOptions;
use glake_tests::pool::{Fixture, Lane, Picture, Shape, Stamp, Verdicts};
use glake_tiers::{Block, PoolError};
use glake_units::Bytes;

/// A pool made ready for a plan, with live blocks that the plan must not disturb.
struct Scene {
    fixture: Fixture,
    one: Lane,
    two: Lane,
    live: Vec<Stamp>,
    verdicts: Verdicts,
}

type Answer = Result<Option<Block>, PoolError>;

/// What is asked of a scene.
struct Case {
    name: &'static str,
    ready: fn(&mut Scene),
    ask: fn(&Scene) -> Answer,
    /// Verbs that it must need, so that a case stays what it is called.
    needs: &'static [Verb],
    /// Whether a failure may come after the plan was carried out: then its memory stays, free.
    late: bool,
}

impl Scene {
    fn of(case: &Case) -> Self {
        let fixture = Fixture::new(Shape::default());
        let (one, two) = (fixture.lane(), fixture.lane());
        let mut scene = Scene { fixture, one, two, live: Vec::new(), verdicts: Verdicts::default() };
        (case.ready)(&mut scene);
        scene.fixture.recorder.take_log();
        scene
    }

    fn add(&mut self, mib: u64) -> Block {
        let block = self.fixture.pool.malloc(Bytes::mib(mib), self.one.pool).unwrap();
        self.stamp(block);
        block
    }

    fn stamp(&mut self, block: Block) {
        let stamp = Stamp { block, seed: block.address.0 };
        stamp.write_now(&self.fixture.pool).unwrap();
        self.live.push(stamp);
    }

    fn free(&mut self, index: usize) {
        let stamp = self.live.remove(index);
        stamp.assert_on(&self.fixture.pool);
        self.fixture.pool.free(stamp.block.address).unwrap();
    }

    /// Frees a block that another stream still reads.
    fn free_held(&mut self, index: usize) {
        let stamp = self.live.remove(index);
        self.two.follows(&self.one);
        stamp.verify(&self.two, Duration::from_millis(1), &self.verdicts).unwrap();
        self.two.holds(&self.fixture.pool, stamp.block);
        self.fixture.pool.free(stamp.block.address).unwrap();
    }

    /// Frees a block that another stream still reads and that was recorded on it.
    fn free_recorded(&mut self, index: usize) {
        let stamp = self.live.remove(index);
        self.two.follows(&self.one);
        stamp.verify(&self.two, Duration::from_millis(1), &self.verdicts).unwrap();
        assert!(self.fixture.pool.record_stream(stamp.block.address, self.two.pool));
        self.fixture.pool.free(stamp.block.address).unwrap();
    }

    /// A kernel is under way that keeps completion points from passing.
    fn busy(&self) {
        self.two.busy(Duration::from_millis(1));
    }

    /// Fills the GPU with blocks of 8 MiB and frees every second one.
    fn holes(&mut self, blocks: usize, holes: usize) {
        for _ in 0..blocks {
            self.add(8);
        }
        (0..holes).for_each(|index| self.free(index));
    }

    /// A stitched block over three holes.
    fn stitched(&mut self) -> Block {
        self.holes(8, 3);
        self.fixture.pool.settle().unwrap();
        let block = self.add(20);
        assert_eq!(self.fixture.pool.counters().stitches, 1);
        block
    }

    fn malloc(&self, size: Bytes, lane: &Lane) -> Answer {
        self.fixture.pool.malloc(size, lane.pool).map(Some)
    }

    fn fail(&self, when: When, error: Injected) {
        self.fixture.faults.set(&[Fault { verb: None, when, error }]);
    }

    /// The pool is whole and every live block holds its bytes.
    fn check(&self, what: &str) {
        self.fixture.pool.check().unwrap_or_else(|broken| panic!("{what}: {broken}"));
        self.live.iter().for_each(|stamp| stamp.assert_on(&self.fixture.pool));
    }
}

const CASES: &[Case] = &[
    Case {
        name: "first growth",
        ready: |_| (),
        ask: |scene| scene.malloc(Bytes::mib(20), &scene.one),
        needs: &[Verb::Create, Verb::Map, Verb::SetAccess],
        late: false,
    },
    Case {
        name: "extension",
        ready: |scene| _ = scene.add(6),
        ask: |scene| scene.malloc(Bytes::mib(10), &scene.one),
        needs: &[Verb::Create, Verb::Map, Verb::SetAccess],
        late: false,
    },
    Case {
        name: "stitch without growth",
        ready: |scene| {
            scene.holes(8, 3);
            scene.fixture.pool.settle().unwrap();
        },
        ask: |scene| scene.malloc(Bytes::mib(20), &scene.one),
        needs: &[Verb::Map, Verb::SetAccess],
        late: false,
    },
    Case {
        name: "stitch with growth",
        ready: |scene| {
            scene.holes(6, 2);
            scene.fixture.pool.settle().unwrap();
        },
        ask: |scene| scene.malloc(Bytes::mib(28), &scene.one),
        needs: &[Verb::Create, Verb::Map, Verb::SetAccess],
        late: false,
    },
    Case {
        name: "stitch of pending bytes",
        ready: |scene| {
            scene.holes(8, 3);
            scene.busy();
        },
        ask: |scene| scene.malloc(Bytes::mib(20), &scene.one),
        needs: &[
            Verb::Map,
            Verb::SetAccess,
            Verb::EventRecordContext,
            Verb::EventRecord,
            Verb::StreamWaitEvent,
        ],
        late: true,
    },
    Case {
        name: "home of bytes last used in an alias",
        ready: |scene| {
            scene.stitched();
            scene.free(scene.live.len() - 1);
            scene.busy();
        },
        ask: |scene| scene.malloc(Bytes::mib(8), &scene.one),
        needs: &[Verb::EventRecord, Verb::StreamWaitEvent],
        late: true,
    },
    Case {
        name: "slabs",
        ready: |scene| _ = scene.add(8),
        ask: |scene| scene.malloc(Bytes::kib(700), &scene.one),
        needs: &[Verb::Create, Verb::Map, Verb::SetAccess],
        late: false,
    },
    Case {
        name: "trim",
        ready: |scene| {
            scene.stitched();
            scene.free(scene.live.len() - 1);
            scene.fixture.pool.settle().unwrap();
        },
        ask: |scene| scene.fixture.pool.trim(Bytes::ZERO).map(|_| None),
        needs: &[Verb::Unmap, Verb::Release],
        late: false,
    },
    Case {
        name: "memory of another domain",
        ready: |scene| {
            scene.add(8);
            let options = DomainOptions { keep: false, ..DomainOptions::private_pool() };
            let domain = scene.fixture.pool.add_domain(options, None);
            let block = scene.fixture.pool.malloc_in(domain, Bytes::mib(40), scene.one.pool).unwrap();
            scene.fixture.pool.free(block.address).unwrap();
            scene.fixture.pool.settle().unwrap();
        },
        ask: |scene| scene.malloc(Bytes::mib(40), &scene.one),
        needs: &[Verb::Unmap, Verb::Release, Verb::Create, Verb::Map, Verb::SetAccess],
        late: true,
    },
    Case {
        name: "plain memory",
        ready: |_| (),
        ask: |scene| {
            let domain = glake_stitch::Allocator::default_domain();
            scene.fixture.pool.malloc_plain(domain, Bytes::mib(20), scene.one.pool).map(Some)
        },
        needs: &[Verb::AllocPlain],
        late: false,
    },
    Case {
        name: "a wait for another stream",
        ready: |scene| {
            scene.holes(8, 4);
            scene.busy();
        },
        ask: |scene| scene.malloc(Bytes::mib(8), &scene.two),
        needs: &[Verb::EventRecordContext, Verb::EventQuery, Verb::EventSynchronize],
        late: false,
    },
    Case {
        name: "a held block",
        ready: |scene| {
            scene.holes(8, 0);
            scene.free_held(3);
        },
        ask: |scene| scene.malloc(Bytes::mib(8), &scene.one),
        needs: &[Verb::EventRecordContext, Verb::EventQuery, Verb::StreamWaitEvent],
        late: true,
    },
    Case {
        name: "a recorded block",
        ready: |scene| {
            scene.holes(8, 0);
            scene.free_recorded(3);
        },
        ask: |scene| scene.malloc(Bytes::mib(8), &scene.one),
        needs: &[Verb::EventRecordContext, Verb::EventQuery, Verb::EventSynchronize],
        late: true,
    },
    Case {
        name: "stitch of held blocks",
        ready: |scene| {
            scene.holes(8, 0);
            (0..3).for_each(|index| scene.free_held(index));
        },
        ask: |scene| scene.malloc(Bytes::mib(20), &scene.one),
        needs: &[Verb::Map, Verb::SetAccess, Verb::EventRecord, Verb::StreamWaitEvent],
        late: true,
    },
];

/// The verbs that a case needs, in order.
fn verbs(case: &Case) -> Vec<Verb> {
    let scene = Scene::of(case);
    (case.ask)(&scene).unwrap_or_else(|error| panic!("{}: {error}", case.name));
    let verbs: Vec<Verb> = scene.fixture.recorder.take_log().iter().map(|logged| logged.call.verb).collect();
    assert!(case.needs.iter().all(|verb| verbs.contains(verb)), "{}: {verbs:?}", case.name);
    verbs
}

/// Runs a case for each of its calls, with that call named.
fn each_call(mut run: impl FnMut(&Case, u64, Verb, &str)) {
    for case in CASES {
        for (n, verb) in (1..).zip(verbs(case)) {
            run(case, n, verb, &format!("{}, call {n} ({verb:?})", case.name));
        }
    }
}

/// The answer is a block that can be used, which leaves the others alone; then the same can be asked again.
fn used(scene: &mut Scene, answer: Option<Block>, what: &str) {
    if let Some(block) = answer {
        // It may wait for what holds its bytes.
        scene.one.synchronize();
        scene.stamp(block);
    }
    scene.check(what);
}

fn fails(error: Injected) {
    each_call(|case, n, verb, what| {
        let mut scene = Scene::of(case);
        let before = Picture::of(&scene.fixture);
        scene.fail(When::Nth(n), error);
        let answer = (case.ask)(&scene);
        scene.fixture.faults.set(&[]);
        match answer {
            // Another way was found, or nothing depended on it.
            Ok(block) => used(&mut scene, block, what),
            Err(error) => {
                assert!(!matches!(error, PoolError::Poisoned { .. }), "{what}: {error}");
                assert_eq!(error.is_out_of_memory(), error.to_string().contains("memory"), "{what}: {error}");
                scene.check(what);
                if !case.late {
                    assert_eq!(Picture::of(&scene.fixture), before, "{what}: the pool is not as it was");
                }
                let again = (case.ask)(&scene).unwrap_or_else(|error| panic!("{what}, again: {error}"));
                used(&mut scene, again, what);
            }
        }
        // A release that fails leaks: nobody can say whether the memory is there.
        if verb != Verb::Release {
            empties(scene, what);
        }
    });
}

/// Everything can be freed and given back.
fn empties(mut scene: Scene, what: &str) {
    while !scene.live.is_empty() {
        scene.free(0);
    }
    scene.fixture.pool.settle().unwrap();
    scene.fixture.pool.trim(Bytes::ZERO).unwrap();
    glake_tests::pool::assert_empty(&scene.fixture.pool);
    scene.verdicts.assert_clean();
    let census = scene.fixture.sim.census();
    assert_eq!((census.mappings, census.extents), (0, 0), "{what}");
}

#[test]
fn a_failure_leaves_the_pool_as_it_was() {
    fails(Injected::Failed(999));
}

#[test]
fn no_memory_leaves_the_pool_as_it_was_or_finds_another_way() {
    fails(Injected::OutOfMemory);
}

#[test]
fn a_busy_device_is_asked_again() {
    each_call(|case, n, _, what| {
        let mut scene = Scene::of(case);
        scene.fail(When::Nth(n), Injected::NotReady);
        let answer = (case.ask)(&scene).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(scene.fixture.faults.injected(), 1, "{what}");
        used(&mut scene, answer, what);
        empties(scene, what);
    });
}

/// Once every call fails for good the pool says so, with the cause, and asks the driver nothing more.
#[test]
fn a_lost_context_is_reported_as_itself() {
    each_call(|case, n, verb, what| {
        let scene = Scene::of(case);
        scene.fail(When::From(n), Injected::Sticky(700));
        let answer = (case.ask)(&scene);
        // A release says nothing, nor does what measures a wait: the next call is told.
        let is_measured = verb == Verb::EventRecord && case.needs.contains(&Verb::StreamWaitEvent);
        assert!(verb == Verb::Release || is_measured || answer.is_err(), "{what}");
        let poisoned = |answer: Result<(), PoolError>| {
            let Err(error @ PoolError::Poisoned { .. }) = answer else { panic!("{what}: {answer:?}") };
            assert!(error.to_string().contains("700"), "{error}");
            assert!(!error.is_out_of_memory());
        };
        if answer.is_err() {
            poisoned(answer.map(drop));
        }
        let pool = &scene.fixture.pool;
        poisoned(pool.malloc(Bytes::mib(16), scene.one.pool).map(drop));
        let calls = scene.fixture.calls();
        poisoned(pool.malloc(Bytes::new(1), scene.two.pool).map(drop));
        poisoned(pool.malloc(Bytes::mib(8), scene.one.pool).map(drop));
        poisoned(pool.trim(Bytes::ZERO).map(drop));
        poisoned(pool.settle());
        poisoned(pool.tick());
        poisoned(pool.read(pool.base(), &mut [0]));
        assert!(!pool.clock().is_ticking(), "{what}");
        // Frees are bookkeeping: a program that unwinds is not hindered.
        scene.live.iter().for_each(|stamp| assert!(pool.free(stamp.block.address).is_ok()));
        assert_eq!(scene.fixture.calls(), calls, "{what}: the driver was asked");
    });
}

/// A plan that can be neither done nor undone leaves nothing to rely on.
#[test]
fn what_cannot_be_undone_ends_the_pool_with_both_causes() {
    let scene = Scene::of(&CASES[0]);
    let fault = |verb, when| Fault { verb: Some(verb), when, error: Injected::Failed(999) };
    scene.fixture.faults.set(&[fault(Verb::SetAccess, When::Nth(1)), fault(Verb::Unmap, When::From(1))]);
    let error = (CASES[0].ask)(&scene).unwrap_err();
    assert!(matches!(error, PoolError::Poisoned { .. }));
    let told = error.to_string();
    assert!(told.contains("set_access: CUDA error 999") && told.contains("unmap: CUDA error 999"), "{told}");
    assert_eq!(scene.fixture.pool.trim(Bytes::ZERO).unwrap_err().to_string(), told);
}

/// What a trim had unmapped before it failed is mapped again, with access, at home and in aliases.
#[test]
fn a_trim_that_fails_half_way_leaves_everything_usable() {
    let unmaps = verbs(&CASES[7]).into_iter().filter(|verb| *verb == Verb::Unmap).count();
    assert!(unmaps > 2, "an alias and several holes");
    for n in 1..=unmaps as u64 {
        for size in [Bytes::mib(20), Bytes::mib(8)] {
            let mut scene = Scene::of(&CASES[7]);
            let fault = Fault { verb: Some(Verb::Unmap), when: When::Nth(n), error: Injected::Failed(999) };
            scene.fixture.faults.set(&[fault]);
            scene.fixture.pool.trim(Bytes::ZERO).unwrap_err();
            let creates = |fixture: &Fixture| fixture.recorder.counters().of(Verb::Create).calls;
            let before = creates(&scene.fixture);
            for _ in 0..20 / size.get().div_ceil(1 << 20) {
                let block = scene.fixture.pool.malloc(size, scene.one.pool).unwrap();
                scene.stamp(block);
            }
            assert_eq!(creates(&scene.fixture), before, "what was there serves");
            scene.check("after a trim that failed");
            empties(scene, "after a trim that failed");
        }
    }
}

/// Memory that is there is handed out, though idle aliases could not be unmapped.
#[test]
fn a_collection_that_fails_takes_no_block_with_it() {
    let fixture = Fixture::tuned(Shape::default(), |settings| settings.idle_aliases = Bytes::ZERO);
    let (one, two) = (fixture.lane(), fixture.lane());
    let mut scene = Scene { fixture, one, two, live: Vec::new(), verdicts: Verdicts::default() };
    scene.stitched();
    scene.free(scene.live.len() - 1);
    scene.fixture.pool.settle().unwrap();
    scene.free(0);
    scene.fixture.pool.settle().unwrap();
    let fault = Fault { verb: Some(Verb::Unmap), when: When::Nth(1), error: Injected::Failed(999) };
    scene.fixture.faults.set(&[fault]);
    let block = scene.fixture.pool.malloc(Bytes::mib(28), scene.one.pool).unwrap();
    assert_eq!((scene.fixture.faults.injected(), scene.fixture.pool.counters().aliases_collected), (1, 0));
    scene.stamp(block);
    scene.check("after a collection that failed");
    empties(scene, "after a collection that failed");
}

/// An edge that could not be made is made for the next block of the stream, and the block that lacks it waits for its
/// completion point.
#[test]
fn an_edge_that_fails_is_owed() {
    for verb in [Verb::EventRecord, Verb::StreamWaitEvent] {
        let mut scene = Scene::of(&CASES[0]);
        let stitched = scene.stitched();
        scene.live.pop();
        scene.busy();
        Stamp { block: stitched, seed: 1 }.write(&scene.one, Duration::from_millis(1)).unwrap();
        scene.fixture.pool.free(stitched.address).unwrap();
        scene.fixture.faults.set(&[Fault {
            verb: Some(verb),
            when: When::Nth(1),
            error: Injected::Failed(999),
        }]);
        let refused = scene.fixture.pool.malloc(Bytes::mib(8), scene.one.pool).unwrap_err();
        assert!(matches!(refused, PoolError::Driver(DriverError::Failed { code: 999, .. })), "{refused}");
        assert_eq!(scene.fixture.pool.stats().all.active_bytes.current, 48 << 20, "withheld, not free");
        let waits = |fixture: &Fixture| fixture.recorder.counters().of(Verb::StreamWaitEvent).calls;
        let before = waits(&scene.fixture);
        // The device refuses a write through an address that the bytes were not last used at, without an edge.
        let block = scene.fixture.pool.malloc(Bytes::mib(8), scene.one.pool).unwrap();
        assert_eq!(waits(&scene.fixture), before + 1);
        Stamp { block, seed: 2 }.write(&scene.one, Duration::ZERO).unwrap();
        scene.one.synchronize();
        scene.live.push(Stamp { block, seed: 2 });
        scene.check("after an edge that failed");
        empties(scene, "after an edge that failed");
    }
}

/// The rest of a device that others hold is not an error of the pool's own account.
#[test]
fn a_device_that_others_fill_is_reported_as_that() {
    let fixture = Fixture::new(Shape::default());
    let lane = fixture.lane();
    let held = fixture.sim.plain_alloc(DeviceId(0), Bytes::mib(40)).unwrap();
    let error = fixture.pool.malloc(Bytes::mib(30), lane.pool).unwrap_err();
    assert!(matches!(error, PoolError::DeviceFull { .. }) && error.is_out_of_memory(), "{error}");
    assert_eq!(fixture.sim.census().extents, 1);
    fixture.sim.plain_free(held).unwrap();
    fixture.pool.malloc(Bytes::mib(30), lane.pool).unwrap();
}
