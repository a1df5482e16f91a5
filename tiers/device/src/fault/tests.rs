//! Calls that fail, over a stub; `tiers/sim/tests/integration/faults.rs` has devices that are lost.

use super::*;
use crate::stub::Stub;

fn outcomes(when: When, calls: usize) -> Vec<bool> {
    let faults = Faults::new(Stub::new());
    faults.set(&[Fault { verb: Some(Verb::Reserve), when, error: Injected::OutOfMemory }]);
    (0..calls).map(|_| faults.reserve(Bytes::mib(2)).is_ok()).collect()
}

#[test]
fn selected_calls_fail() {
    assert_eq!(outcomes(When::Nth(2), 4), [true, false, true, true]);
    assert_eq!(outcomes(When::From(3), 4), [true, true, false, false]);
}

#[test]
fn chance_follows_its_seed() {
    let of = |probability, seed| outcomes(When::Chance { probability, seed }, 1000);
    assert_eq!(of(0.25, 7), of(0.25, 7));
    assert_ne!(of(0.25, 7), of(0.25, 8));
    let failed = of(0.25, 7).iter().filter(|ok| !**ok).count();
    assert!((200..300).contains(&failed), "{failed}");
    assert!(of(0.0, 1).iter().all(|ok| *ok) && of(1.0, 1).iter().all(|ok| !*ok));
}

#[test]
fn the_error_carries_the_call_and_hides_it_from_the_driver() {
    let stub = Stub::new();
    let faults = Faults::new(stub.clone());
    faults.set(&[Fault { verb: None, when: When::Nth(1), error: Injected::OutOfMemory }]);
    match faults.reserve(Bytes::mib(6)) {
        Err(DriverError::OutOfMemory { verb: Verb::Reserve, wanted }) => {
            assert_eq!(wanted, Bytes::mib(6));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(stub.reserved(), 0);
    assert_eq!(faults.injected(), 1);
    faults.reserve(Bytes::mib(6)).unwrap();
    assert_eq!(stub.reserved(), 1);
}
