//! Every call of the driver fails once, on both ways: an error, one good copy of every extent, and both directions go on.

use glake_device::{Fault, Injected, Verb, When};
use glake_stitch::Allocator;

use super::*;

/// What else a call may answer that is treated in a way of its own.
fn others(verb: Verb) -> Option<Injected> {
    match verb {
        Verb::Create => Some(Injected::OutOfMemory),
        Verb::Unmap | Verb::SetAccess | Verb::Release => Some(Injected::NotReady),
        _ => None,
    }
}

/// Pins host memory: a shrink has it pinned by another thread, whose calls have no place among its own.
fn prepare(fixture: &Fixture) {
    fixture.host.prepare(Bytes::mib(24)).unwrap();
}

/// Runs `act` for each call of the driver that it makes, with that call failing.
fn each_call(
    make: impl Fn() -> Fixture,
    needs: &[Verb],
    ready: impl Fn(&mut Fixture),
    act: impl Fn(&Fixture) -> Result<()>,
    after: impl Fn(&mut Fixture, Verb, bool),
) {
    let calls = {
        let mut fixture = make();
        ready(&mut fixture);
        prepare(&fixture);
        fixture.recorder.take_log();
        act(&fixture).unwrap();
        let calls: Vec<Verb> = fixture.recorder.take_log().iter().map(|logged| logged.call.verb).collect();
        fixture.end();
        calls
    };
    assert!(needs.iter().all(|verb| calls.contains(verb)), "{calls:?}");
    // An event that cannot be destroyed is left to its context.
    for (nth, verb) in (1..).zip(calls).filter(|(_, verb)| *verb != Verb::EventDestroy) {
        for error in others(verb).into_iter().chain([Injected::Failed(1)]) {
            let mut fixture = make();
            ready(&mut fixture);
            prepare(&fixture);
            fixture.faults.set(&[Fault { verb: None, when: When::Nth(nth), error }]);
            let outcome = act(&fixture);
            fixture.faults.set(&[]);
            if let Err(error) = &outcome {
                assert!(!matches!(error, RegionError::Pool(PoolError::Poisoned { .. })), "{verb:?}: {error}");
            }
            let told = outcome.is_err() || error != Injected::Failed(1) || !needs.contains(&verb);
            assert!(told, "{verb:?} failed, and nobody was told");
            fixture.assert_sound();
            after(&mut fixture, verb, outcome.is_ok());
            fixture.end();
        }
    }
}

#[test]
fn a_failure_anywhere_on_the_way_out() {
    for back_first in [false, true] {
        let needs = [Verb::Copy, Verb::EventRecordContext, Verb::Unmap, Verb::Release];
        each_call(
            fixture,
            &needs,
            Fixture::furnish,
            |fixture| fixture.shrink().map(|_| ()),
            |fixture, verb, done| {
                if done {
                    assert_eq!(fixture.used(), Bytes::ZERO, "{verb:?}: done is done");
                }
                if !back_first {
                    let report = fixture.shrink().unwrap();
                    assert_eq!((report.resident, fixture.used()), (Bytes::ZERO, Bytes::ZERO), "{verb:?}");
                }
                assert_eq!(fixture.refill().unwrap().evicted, Bytes::ZERO);
                fixture.assert_bytes();
                fixture.assert_sound();
            },
        );
    }
}

#[test]
fn a_failure_anywhere_on_the_way_back() {
    for out_first in [false, true] {
        each_call(
            fixture,
            &[Verb::Create, Verb::Map, Verb::SetAccess, Verb::Copy, Verb::StreamSynchronize],
            |fixture| {
                fixture.furnish();
                fixture.shrink().unwrap();
            },
            |fixture| fixture.refill().map(|_| ()),
            |fixture, verb, done| {
                if done {
                    fixture.assert_bytes();
                }
                if out_first {
                    let report = fixture.shrink().unwrap();
                    assert_eq!((report.resident, fixture.used()), (Bytes::ZERO, Bytes::ZERO), "{verb:?}");
                }
                assert_eq!(fixture.refill().unwrap().evicted, Bytes::ZERO);
                fixture.assert_bytes();
                fixture.assert_sound();
            },
        );
    }
}

impl Fixture {
    /// One large block, one over two extents, a small one.
    fn furnish_little(&mut self) {
        for size in [EXTENT, Bytes::mib(3), Bytes::kib(40)] {
            self.add(size);
        }
    }
}

/// Over the default domain, with as much room as its own memory takes.
fn over() -> Fixture {
    let mut fixture = fixture();
    let options = RegionOptions { extent: EXTENT, ..RegionOptions::of("default") };
    fixture.region = Region::over(&fixture.pool, Allocator::default_domain(), options);
    fixture
}

/// Sealed strictly.
fn strict() -> Fixture {
    fixture_of(Policy::Sealed, CopyPolicy::Drop, Bytes::MAX)
}

/// What is sealed by then is as before after a shrink and a refill.
fn both_ways(fixture: &mut Fixture, verb: Verb) {
    let report = fixture.shrink().unwrap();
    assert_eq!((report.resident, fixture.used()), (Bytes::ZERO, Bytes::ZERO), "{verb:?}");
    assert_eq!(fixture.refill().unwrap().evicted, Bytes::ZERO);
    fixture.assert_bytes();
    fixture.assert_sound();
    if fixture.region.is_sealed() {
        fixture.region.seal(true).unwrap();
        fixture.assert_read_only(true);
        fixture.region.unseal().unwrap();
    }
}

#[test]
fn a_failure_over_the_default_domain() {
    let out = [Verb::Copy, Verb::EventRecordContext, Verb::Unmap, Verb::Release];
    each_call(
        over,
        &out,
        Fixture::furnish_little,
        |fixture| fixture.shrink().map(|_| ()),
        |fixture, verb, _| {
            both_ways(fixture, verb);
        },
    );
    let ready = |fixture: &mut Fixture| {
        fixture.furnish_little();
        fixture.shrink().unwrap();
    };
    let back = [Verb::Create, Verb::Map, Verb::SetAccess, Verb::Copy];
    each_call(
        over,
        &back,
        ready,
        |fixture| fixture.refill().map(|_| ()),
        |fixture, verb, _| both_ways(fixture, verb),
    );
}

#[test]
fn a_failure_with_what_is_sealed_strictly() {
    let access = [Verb::SetAccess, Verb::ContextSynchronize];
    let seal = |fixture: &Fixture| fixture.region.seal(true);
    each_call(strict, &access, Fixture::furnish_little, seal, |fixture, verb, _| both_ways(fixture, verb));
    let sealed = |fixture: &mut Fixture| {
        fixture.furnish_little();
        fixture.region.seal(true).unwrap();
    };
    let unseal = |fixture: &Fixture| fixture.region.unseal();
    each_call(strict, &access[..1], sealed, unseal, |fixture, verb, _| both_ways(fixture, verb));
    let out = [Verb::SetAccess, Verb::Copy, Verb::Unmap];
    each_call(
        strict,
        &out,
        sealed,
        |fixture| fixture.shrink().map(|_| ()),
        |fixture, verb, _| both_ways(fixture, verb),
    );
    let gone = |fixture: &mut Fixture| {
        sealed(fixture);
        fixture.shrink().unwrap();
    };
    let back = [Verb::SetAccess, Verb::Copy, Verb::ContextSynchronize];
    each_call(
        strict,
        &back,
        gone,
        |fixture| fixture.refill().map(|_| ()),
        |fixture, verb, done| {
            if done {
                fixture.assert_read_only(true);
            }
            both_ways(fixture, verb);
        },
    );
}

/// Without room, and with somebody to wait for who gives some back.
#[test]
fn a_failure_while_memory_is_waited_for() {
    #[derive(Debug)]
    struct Giving(Arc<GpuPool>);

    impl WaitPolicy for Giving {
        fn wait(&self, _: &PoolError) -> bool {
            let fraction = self.0.memory_fraction();
            self.0.set_memory_fraction(fraction + 2.0 / 64.0);
            fraction < 0.5
        }
    }

    let ready = |fixture: &mut Fixture| {
        fixture.furnish_little();
        fixture.shrink().unwrap();
        fixture.pool.set_memory_fraction(0.0);
    };
    let refill = |fixture: &Fixture| {
        let wait_policy = Giving(fixture.pool.clone());
        fixture
            .region
            .refill(
                Bytes::MAX,
                TransferContext { mover: &fixture.mover, checks: None, fill: false },
                &wait_policy,
            )
            .map(|_| ())
    };
    each_call(fixture, &[Verb::Create, Verb::Map, Verb::Copy], ready, refill, |fixture, verb, _| {
        fixture.pool.set_memory_fraction(1.0);
        both_ways(fixture, verb);
    });
}
