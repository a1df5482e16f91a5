//! A pool under a lease: what is made never passes it, and nothing else is different.

#![allow(clippy::unwrap_used)]

use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use glake_device::{DeviceId, Fault, Injected, Verb, When};
use glake_stitch::{Borrow, DomainOptions};
use glake_tests::pool::{Fixture, Shape};
use glake_tiers::{Block, GpuPool, Lease, LeaseEvent, LeaseObserver, LeaseOptions, PoolError, PoolOptions};
use glake_units::Bytes;
use parking_lot::Mutex;

const LONG: Duration = Duration::from_secs(20);

/// What it does when a pool asks for more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Answer {
    #[default]
    Grants,
    Denies,
    Nothing,
}

/// An agent in the same process.
#[derive(Debug, Default)]
struct Agent {
    answer: Answer,
    deaf: bool,
    lease: OnceLock<Weak<Lease>>,
    told: Mutex<Vec<(LeaseEvent, Bytes)>>,
}

impl LeaseObserver for Agent {
    fn is_listening(&self) -> bool {
        !self.deaf
    }

    fn told(&self, event: LeaseEvent, _: DeviceId, bytes: Bytes) {
        if event == LeaseEvent::Waiting {
            return;
        }
        self.told.lock().push((event, bytes));
        let lease = self.lease.get().and_then(Weak::upgrade).unwrap();
        match self.answer {
            Answer::Grants => assert!(lease.grant(bytes)),
            Answer::Denies => assert!(lease.grant(Bytes::ZERO)),
            Answer::Nothing => {}
        }
    }
}

fn leased(shape: Shape, agent: Agent, timeout: Duration) -> (Fixture, Arc<Lease>, Arc<Agent>) {
    let agent = Arc::new(agent);
    let options = LeaseOptions { grow_timeout: timeout, growth: Bytes::ZERO, observer: Some(agent.clone()) };
    let lease = Lease::new(DeviceId(0), options);
    agent.lease.set(Arc::downgrade(&lease)).unwrap();
    let options = PoolOptions { lease: Some(lease.clone()), ..PoolOptions::default() };
    (Fixture::with(shape, |_| (), options), lease, agent)
}

fn answers(answer: Answer, timeout: Duration) -> (Fixture, Arc<Lease>, Arc<Agent>) {
    leased(Shape::default(), Agent { answer, ..Agent::default() }, timeout)
}

/// Mallocs and frees on two streams, some in a domain of its own; returns what is live.
fn churn(fixture: &Fixture, check: impl Fn(&GpuPool)) -> Vec<Block> {
    let (lanes, mut live, mut state) = ([fixture.lane(), fixture.lane()], Vec::<Block>::new(), 1_u64);
    let domain = fixture.pool.add_domain(DomainOptions::region(Bytes::mib(8)), None);
    for _ in 0..400 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let random = usize::try_from(state >> 33).unwrap();
        let held: Bytes = live.iter().map(|block| block.size).sum();
        if random % 5 < 3 && held < Bytes::mib(36) {
            let size = Bytes::kib(1 + (random as u64 >> 3) % [40, 900, 5000, 12_000][random % 4]);
            let stream = lanes[random % 2].pool;
            let block = match random % 7 {
                0 => fixture.pool.malloc_in(domain, size, stream),
                _ => fixture.pool.malloc(size, stream),
            };
            live.push(block.unwrap());
        } else if !live.is_empty() {
            fixture.pool.free(live.remove(random % live.len()).address).unwrap();
        }
        if random % 50 == 0 {
            fixture.pool.settle().unwrap();
        }
        check(&fixture.pool);
    }
    live
}

/// A bound changes neither sizes of extents nor what is stitched, where the limit of a pool does.
#[test]
fn extents_are_as_without_a_lease() {
    let shape = Shape { memory: Bytes::mib(256), ..Shape::default() };
    let mut seen = Vec::new();
    for lease in [None, Some(Bytes::mib(256)), Some(Bytes::ZERO), Some(Bytes::mib(21))] {
        let (fixture, bound, agent) = leased(shape, Agent::default(), LONG);
        bound.set(lease);
        let blocks = churn(&fixture, |pool| {
            let view = pool.lease().view();
            assert_eq!(view.made, pool.reserved());
            assert!(view.leased.is_none_or(|leased| view.made <= leased), "{view:?}");
        });
        let mut told = agent.told.lock();
        assert_eq!(told.is_empty(), lease.is_none_or(|lease| lease == Bytes::mib(256)));
        told.clear();
        let log = fixture.recorder.take_log();
        let creates = log.iter().filter(|logged| logged.call.verb == Verb::Create);
        let creates: Vec<Bytes> = creates.map(|logged| logged.call.size).collect();
        let segments = fixture.pool.report().segments();
        let blocks_of = segments.iter().flat_map(|segment| &segment.blocks);
        let places: Vec<_> =
            blocks_of.map(|block| (block.offset, block.size, block.live, block.lent)).collect();
        seen.push((creates, segments.len(), places, fixture.pool.counters()));
        blocks.into_iter().for_each(|block| _ = fixture.pool.free(block.address).unwrap());
        bound.set(None);
        fixture.end();
    }
    assert!(seen.iter().all(|one| *one == seen[0]), "{seen:?}");
}

#[test]
fn beyond_a_lease_is_asked_then_it_is_out_of_memory() {
    let (fixture, lease, agent) = answers(Answer::Nothing, Duration::from_millis(30));
    let lane = fixture.lane();
    lease.set(Some(Bytes::mib(8)));
    let block = fixture.pool.malloc(Bytes::mib(8), lane.pool).unwrap();
    let begin = Instant::now();
    let refused = fixture.pool.malloc(Bytes::mib(6), lane.pool).unwrap_err();
    assert!(begin.elapsed() >= Duration::from_millis(30) && refused.is_out_of_memory());
    assert_eq!(*agent.told.lock(), [(LeaseEvent::Grow, Bytes::mib(6))], "whole extents");
    let text = refused.to_string();
    for part in [
        "lease of 8.00 MiB",
        "8.00 MiB are made",
        "granted more within",
        "glake.lease.grant",
        "a larger lease",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(matches!(refused, PoolError::Leased { short, .. } if short.wanted == Bytes::mib(6)));
    let view = lease.view();
    assert!(view.waits == 1 && view.waited >= Duration::from_millis(30), "{view:?}");
    assert_eq!(fixture.pool.report().largest().unwrap(), Bytes::ZERO);
    fixture.pool.free(block.address).unwrap();
    drop(lane);
    fixture.end();
}

#[test]
fn a_grant_serves_who_waits_and_a_denial_lets_them_go() {
    let (fixture, lease, _) = answers(Answer::Nothing, LONG);
    let lane = fixture.lane();
    lease.set(Some(Bytes::ZERO));
    let block = std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..2 {
                std::thread::sleep(Duration::from_millis(5));
                assert!(lease.grant(Bytes::mib(4)));
            }
        });
        fixture.pool.malloc(Bytes::mib(8), lane.pool).unwrap()
    });
    let begin = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(5));
            assert!(lease.grant(Bytes::ZERO));
        });
        fixture.pool.malloc(Bytes::mib(8), lane.pool).unwrap_err();
    });
    // What another thread gives up is as good as a grant.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(5));
            fixture.pool.free(block.address).unwrap();
            fixture.pool.settle().unwrap();
            fixture.pool.trim(Bytes::ZERO).unwrap();
        });
        let domain = fixture.pool.add_domain(DomainOptions::region(Bytes::mib(4)), None);
        let other = fixture.pool.malloc_in(domain, Bytes::mib(8), lane.pool).unwrap();
        fixture.pool.free(other.address).unwrap();
        fixture.pool.release_domain(domain).unwrap();
    });
    // Where nobody listens nothing is waited for; at the end of a process neither.
    lease.stop();
    fixture.pool.malloc(Bytes::mib(12), lane.pool).unwrap_err();
    let (deaf, bound, _) = leased(Shape::default(), Agent { deaf: true, ..Agent::default() }, LONG);
    bound.set(Some(Bytes::ZERO));
    deaf.pool.malloc(Bytes::mib(4), deaf.lane().pool).unwrap_err();
    assert!(begin.elapsed() < LONG);
    bound.set(None);
    deaf.end();
    drop(lane);
    fixture.end();
}

/// As at any limit.
#[test]
fn what_is_free_elsewhere_goes_before_a_refusal() {
    let (fixture, lease, agent) = answers(Answer::Denies, LONG);
    let lane = fixture.lane();
    let domain = fixture.pool.add_domain(DomainOptions::region(Bytes::mib(8)), None);
    lease.set(Some(Bytes::mib(16)));
    let other = fixture.pool.malloc_in(domain, Bytes::mib(16), lane.pool).unwrap();
    fixture.pool.free(other.address).unwrap();
    let block = fixture.pool.malloc(Bytes::mib(8), lane.pool).unwrap();
    assert!(lease.view().made <= Bytes::mib(16));
    assert_eq!(agent.told.lock().len(), 1);
    fixture.pool.free(block.address).unwrap();
    fixture.pool.release_domain(domain).unwrap();
    drop(lane);
    fixture.end();
}

#[test]
fn what_is_unused_or_free_is_taken_back_and_no_more() {
    let (fixture, lease, _) = answers(Answer::Nothing, Duration::ZERO);
    let lane = fixture.lane();
    assert_eq!(fixture.pool.take_lease(Bytes::mib(4)).unwrap(), Bytes::ZERO, "there is no lease");
    assert!(!lease.grant(Bytes::mib(4)));
    lease.set(Some(Bytes::mib(40)));
    let blocks: Vec<Block> = (0..8).map(|_| fixture.pool.malloc(Bytes::mib(4), lane.pool).unwrap()).collect();
    for block in &blocks[..4] {
        fixture.pool.free(block.address).unwrap();
    }
    fixture.pool.settle().unwrap();
    let take = |mib, taken, left, made| {
        assert_eq!(fixture.pool.take_lease(Bytes::mib(mib)).unwrap(), Bytes::mib(taken));
        let view = lease.view();
        assert_eq!((view.leased, view.made), (Some(Bytes::mib(left)), Bytes::mib(made)));
    };
    take(6, 6, 34, 32);
    take(5, 5, 29, 28);
    take(100, 13, 16, 16);
    take(100, 0, 16, 16);
    // Below what is there: nothing is made, and what is freed goes.
    lease.set(Some(Bytes::mib(4)));
    fixture.pool.malloc(Bytes::mib(4), lane.pool).unwrap_err();
    for block in &blocks[4..] {
        fixture.pool.free(block.address).unwrap();
    }
    fixture.pool.settle().unwrap();
    assert_eq!(fixture.pool.take_lease(Bytes::mib(4)).unwrap(), Bytes::ZERO);
    drop(lane);
    fixture.end();
}

#[test]
fn a_capture_is_left_whole() {
    for answer in [Answer::Grants, Answer::Denies, Answer::Nothing] {
        let (fixture, lease, _) = answers(answer, Duration::from_millis(5));
        let lane = fixture.lane();
        lease.set(Some(Bytes::mib(4)));
        let freed = fixture.pool.malloc(Bytes::mib(4), lane.pool).unwrap();
        lane.busy(Duration::from_secs(1));
        lane.begin_capture();
        let hold = fixture.pool.clock().hold();
        fixture.pool.free(freed.address).unwrap();
        let asked = fixture.pool.malloc(Bytes::mib(8), fixture.lane().pool);
        if answer != Answer::Grants {
            assert!(matches!(asked, Err(PoolError::Leased { .. })), "{asked:?}");
        }
        lane.busy(Duration::from_millis(1));
        lane.end_capture();
        drop(hold);
        fixture.run_dry();
        if let Ok(block) = asked {
            fixture.pool.free(block.address).unwrap();
        }
        drop(lane);
        fixture.end();
    }
}

/// The driver keeps memory that it could not release.
#[test]
fn what_is_not_released_stays_counted() {
    let (fixture, lease, _) = answers(Answer::Nothing, Duration::ZERO);
    let lane = fixture.lane();
    lease.set(Some(Bytes::mib(16)));
    let blocks = [0, 1].map(|_| fixture.pool.malloc(Bytes::mib(4), lane.pool).unwrap());
    for block in blocks {
        fixture.pool.free(block.address).unwrap();
    }
    fixture.pool.settle().unwrap();
    fixture.faults.set(&[Fault {
        verb: Some(Verb::Release),
        when: When::Nth(1),
        error: Injected::Failed(1),
    }]);
    fixture.pool.trim(Bytes::ZERO).unwrap();
    fixture.faults.set(&[]);
    assert_eq!((lease.view().made, fixture.pool.reserved()), (Bytes::mib(4), Bytes::ZERO));
    fixture.pool.malloc(Bytes::mib(16), lane.pool).unwrap_err();
    // A failed plan counts nothing.
    for verb in [Verb::Create, Verb::Map, Verb::SetAccess] {
        fixture.faults.set(&[Fault { verb: Some(verb), when: When::Nth(2), error: Injected::Failed(1) }]);
        let asked = fixture.pool.malloc(Bytes::mib(12), lane.pool);
        fixture.faults.set(&[]);
        match asked {
            Ok(block) => _ = fixture.pool.free(block.address).unwrap(),
            Err(_) => assert_eq!(lease.view().made, Bytes::mib(4), "{verb:?}"),
        }
        fixture.pool.settle().unwrap();
        fixture.pool.trim(Bytes::ZERO).unwrap();
        assert_eq!(lease.view().made, Bytes::mib(4), "{verb:?}");
    }
}

/// Many threads at the lease at once: what is made never passes it, and who asks is served or refused.
#[test]
fn threads_at_the_lease() {
    let shape = Shape { memory: Bytes::mib(256), borrow: Borrow::Off, ..Shape::default() };
    let (fixture, lease, _) = leased(shape, Agent { answer: Answer::Nothing, ..Agent::default() }, LONG);
    lease.set(Some(Bytes::mib(8)));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let (pool, lane) = (&fixture.pool, fixture.lane());
            scope.spawn(move || {
                let blocks: Vec<Block> =
                    (0..4).map(|_| pool.malloc(Bytes::mib(4), lane.pool).unwrap()).collect();
                blocks.into_iter().for_each(|block| _ = pool.free(block.address).unwrap());
            });
        }
        let lease = &lease;
        scope.spawn(move || {
            while lease.view().leased < Some(Bytes::mib(64)) {
                std::thread::sleep(Duration::from_millis(1));
                let view = lease.view();
                assert!(Some(view.made) <= view.leased);
                assert!(lease.grant(Bytes::mib(4)));
            }
        });
    });
    lease.set(None);
    fixture.end();
}
