//! Every call of the driver fails once, on both ways: an error, one good copy of every extent, and both directions go on.

use glake_device::{Fault, Injected, Verb, When};

use super::*;

/// What else a call may answer that is treated in a way of its own.
fn others(verb: Verb) -> Option<Injected> {
    match verb {
        Verb::Create | Verb::HostRegister => Some(Injected::OutOfMemory),
        Verb::Unmap | Verb::SetAccess | Verb::Release => Some(Injected::NotReady),
        _ => None,
    }
}

/// Runs `act` for each call of the driver that it makes, with that call failing.
fn each_call(
    needs: &[Verb],
    ready: impl Fn(&mut Bed),
    act: impl Fn(&Bed) -> Result<()>,
    after: impl Fn(&mut Bed, Verb, bool),
) {
    let calls = {
        let mut bed = bed();
        ready(&mut bed);
        bed.recorder.take_log();
        act(&bed).unwrap();
        let calls: Vec<Verb> = bed.recorder.take_log().iter().map(|logged| logged.call.verb).collect();
        bed.end();
        calls
    };
    assert!(needs.iter().all(|verb| calls.contains(verb)), "{calls:?}");
    for (nth, verb) in (1..).zip(calls) {
        for error in others(verb).into_iter().chain([Injected::Failed(1)]) {
            let mut bed = bed();
            ready(&mut bed);
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
        let needs = [Verb::Copy, Verb::EventRecordContext, Verb::Unmap, Verb::Release, Verb::HostRegister];
        each_call(
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
