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
fn prepare(bed: &Bed) {
    bed.host.prepare(Bytes::mib(24)).unwrap();
}

/// Runs `act` for each call of the driver that it makes, with that call failing.
fn each_call(
    make: impl Fn() -> Bed,
    needs: &[Verb],
    ready: impl Fn(&mut Bed),
    act: impl Fn(&Bed) -> Result<()>,
    after: impl Fn(&mut Bed, Verb, bool),
) {
    let calls = {
        let mut bed = make();
        ready(&mut bed);
        prepare(&bed);
        bed.recorder.take_log();
        act(&bed).unwrap();
        let calls: Vec<Verb> = bed.recorder.take_log().iter().map(|logged| logged.call.verb).collect();
        bed.end();
        calls
    };
    assert!(needs.iter().all(|verb| calls.contains(verb)), "{calls:?}");
    // An event that cannot be destroyed is left to its context.
    for (nth, verb) in (1..).zip(calls).filter(|(_, verb)| *verb != Verb::EventDestroy) {
        for error in others(verb).into_iter().chain([Injected::Failed(1)]) {
            let mut bed = make();
            ready(&mut bed);
            prepare(&bed);
            bed.faults.set(&[Fault { verb: None, when: When::Nth(nth), error }]);
            let outcome = act(&bed);
            bed.faults.set(&[]);
            if let Err(error) = &outcome {
                assert!(!matches!(error, RegionError::Pool(PoolError::Poisoned { .. })), "{verb:?}: {error}");
            }
            let told = outcome.is_err() || error != Injected::Failed(1) || !needs.contains(&verb);
            assert!(told, "{verb:?} failed, and nobody was told");
            bed.assert_sound();
            after(&mut bed, verb, outcome.is_ok());
            bed.end();
        }
    }
}

#[test]
fn a_failure_anywhere_on_the_way_out() {
    for back_first in [false, true] {
        let needs = [Verb::Copy, Verb::EventRecordContext, Verb::Unmap, Verb::Release];
        each_call(
            bed,
            &needs,
            Bed::furnish,
            |bed| bed.shrink().map(|_| ()),
            |bed, verb, done| {
                if done {
                    assert_eq!(bed.used(), Bytes::ZERO, "{verb:?}: done is done");
                }
                if !back_first {
                    let report = bed.shrink().unwrap();
                    assert_eq!((report.left, bed.used()), (Bytes::ZERO, Bytes::ZERO), "{verb:?}");
                }
                assert_eq!(bed.refill().unwrap().away, Bytes::ZERO);
                bed.assert_bytes();
                bed.assert_sound();
            },
        );
    }
}

#[test]
fn a_failure_anywhere_on_the_way_back() {
    for out_first in [false, true] {
        each_call(
            bed,
            &[Verb::Create, Verb::Map, Verb::SetAccess, Verb::Copy, Verb::StreamSynchronize],
            |bed| {
                bed.furnish();
                bed.shrink().unwrap();
            },
            |bed| bed.refill().map(|_| ()),
            |bed, verb, done| {
                if done {
                    bed.assert_bytes();
                }
                if out_first {
                    let report = bed.shrink().unwrap();
                    assert_eq!((report.left, bed.used()), (Bytes::ZERO, Bytes::ZERO), "{verb:?}");
                }
                assert_eq!(bed.refill().unwrap().away, Bytes::ZERO);
                bed.assert_bytes();
                bed.assert_sound();
            },
        );
    }
}

impl Bed {
    /// One large block, one over two extents, a small one.
    fn furnish_little(&mut self) {
        for size in [EXTENT, Bytes::mib(3), Bytes::kib(40)] {
            self.add(size);
        }
    }
}

/// Over the default domain, with as much room as its own memory takes.
fn over() -> Bed {
    let mut bed = bed();
    let options = RegionOptions { extent: EXTENT, ..RegionOptions::of("default") };
    bed.region = Region::over(&bed.pool, Allocator::default_domain(), options);
    bed
}

/// Sealed strictly.
fn strict() -> Bed {
    bed_of(Policy::Sealed, CopyPolicy::Drop, Bytes::MAX)
}

/// What is sealed by then is as before after a shrink and a refill.
fn both_ways(bed: &mut Bed, verb: Verb) {
    let report = bed.shrink().unwrap();
    assert_eq!((report.left, bed.used()), (Bytes::ZERO, Bytes::ZERO), "{verb:?}");
    assert_eq!(bed.refill().unwrap().away, Bytes::ZERO);
    bed.assert_bytes();
    bed.assert_sound();
    if bed.region.is_sealed() {
        bed.region.seal(true).unwrap();
        bed.assert_read_only(true);
        bed.region.unseal().unwrap();
    }
}

#[test]
fn a_failure_over_the_default_domain() {
    let out = [Verb::Copy, Verb::EventRecordContext, Verb::Unmap, Verb::Release];
    each_call(
        over,
        &out,
        Bed::furnish_little,
        |bed| bed.shrink().map(|_| ()),
        |bed, verb, _| {
            both_ways(bed, verb);
        },
    );
    let ready = |bed: &mut Bed| {
        bed.furnish_little();
        bed.shrink().unwrap();
    };
    let back = [Verb::Create, Verb::Map, Verb::SetAccess, Verb::Copy];
    each_call(over, &back, ready, |bed| bed.refill().map(|_| ()), |bed, verb, _| both_ways(bed, verb));
}

#[test]
fn a_failure_with_what_is_sealed_strictly() {
    let access = [Verb::SetAccess, Verb::ContextSynchronize];
    let seal = |bed: &Bed| bed.region.seal(true);
    each_call(strict, &access, Bed::furnish_little, seal, |bed, verb, _| both_ways(bed, verb));
    let sealed = |bed: &mut Bed| {
        bed.furnish_little();
        bed.region.seal(true).unwrap();
    };
    let unseal = |bed: &Bed| bed.region.unseal();
    each_call(strict, &access[..1], sealed, unseal, |bed, verb, _| both_ways(bed, verb));
    let out = [Verb::SetAccess, Verb::Copy, Verb::Unmap];
    each_call(strict, &out, sealed, |bed| bed.shrink().map(|_| ()), |bed, verb, _| both_ways(bed, verb));
    let gone = |bed: &mut Bed| {
        sealed(bed);
        bed.shrink().unwrap();
    };
    let back = [Verb::SetAccess, Verb::Copy, Verb::ContextSynchronize];
    each_call(
        strict,
        &back,
        gone,
        |bed| bed.refill().map(|_| ()),
        |bed, verb, done| {
            if done {
                bed.assert_read_only(true);
            }
            both_ways(bed, verb);
        },
    );
}

/// Without room, and with somebody to wait for who gives some back.
#[test]
fn a_failure_while_memory_is_waited_for() {
    #[derive(Debug)]
    struct Giving(Arc<GpuPool>);

    impl WaitPolicy for Giving {
        fn wait(&self) -> bool {
            let fraction = self.0.memory_fraction();
            self.0.set_memory_fraction(fraction + 2.0 / 64.0);
            fraction < 0.5
        }
    }

    let ready = |bed: &mut Bed| {
        bed.furnish_little();
        bed.shrink().unwrap();
        bed.pool.set_memory_fraction(0.0);
    };
    let refill = |bed: &Bed| {
        let wait_policy = Giving(bed.pool.clone());
        bed.region
            .refill(Bytes::MAX, TransferContext { mover: &bed.mover, checks: None }, &wait_policy)
            .map(|_| ())
    };
    each_call(bed, &[Verb::Create, Verb::Map, Verb::Copy], ready, refill, |bed, verb, _| {
        bed.pool.set_memory_fraction(1.0);
        both_ways(bed, verb);
    });
}
