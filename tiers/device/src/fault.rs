//! A driver that fails when told to.
//!
//! Invariant: an injected error stands for a call that was not made; the driver below never sees it.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::decorate::{Call, delegate};
use crate::{Driver, DriverError, Refusal, Result, Verb};

/// Which calls fail, and how.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fault {
    /// Calls of this verb; of any if `None`.
    pub verb: Option<Verb>,
    /// Which of them.
    pub when: When,
    /// What they answer.
    pub error: Injected,
}

/// Which of the calls that a [`Fault`] looks at fail. They are counted from 1, from when the fault was set.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum When {
    /// That one only.
    Nth(u64),
    /// That one and all after it.
    From(u64),
    /// Each with this probability (0 never, 1 always); equal seeds fail equal calls.
    Chance {
        /// How likely.
        probability: f64,
        /// Where the random numbers start.
        seed: u64,
    },
}

/// The error of an injected failure, as data: [`DriverError`] with the verb and size of the call filled in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Injected {
    Unsupported,
    NotReady,
    OutOfMemory,
    Capturing,
    Refused(Refusal),
    Sticky(u32),
    Failed(u32),
}

/// Makes calls fail by rule; the first rule that applies to a call decides.
#[derive(Debug)]
pub struct Faults {
    inner: Arc<dyn Driver>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    rules: Vec<Rule>,
    injected: u64,
}

#[derive(Debug)]
struct Rule {
    fault: Fault,
    seen: u64,
    random: u64,
}

impl Faults {
    /// Wraps a driver; nothing fails yet.
    pub fn new(inner: Arc<dyn Driver>) -> Self {
        Faults { inner, state: Mutex::default() }
    }

    /// Replaces the rules; all counts start again.
    pub fn set(&self, faults: &[Fault]) {
        let start = |&fault: &Fault| Rule {
            fault,
            seen: 0,
            random: match fault.when {
                When::Chance { seed, .. } => seed,
                When::Nth(_) | When::From(_) => 0,
            },
        };
        self.state.lock().rules = faults.iter().map(start).collect();
    }

    /// How many calls were made to fail so far.
    pub fn injected(&self) -> u64 {
        self.state.lock().injected
    }

    fn around<T>(&self, call: Call, verb: impl FnOnce(&dyn Driver) -> Result<T>) -> Result<T> {
        // The lock is let go of first: the call may wait for what another thread's call does.
        let judged = self.state.lock().judge(call.verb);
        match judged {
            Some(error) => Err(error.of(&call)),
            None => verb(&*self.inner),
        }
    }
}

impl State {
    fn judge(&mut self, verb: Verb) -> Option<Injected> {
        let mut error = None;
        for rule in self.rules.iter_mut().filter(|rule| rule.fault.verb.is_none_or(|of| of == verb)) {
            if rule.hits() && error.is_none() {
                error = Some(rule.fault.error);
            }
        }
        self.injected += u64::from(error.is_some());
        error
    }
}

impl Rule {
    fn hits(&mut self) -> bool {
        self.seen += 1;
        match self.fault.when {
            When::Nth(n) => self.seen == n,
            When::From(n) => self.seen >= n,
            When::Chance { probability, .. } => split_mix(&mut self.random) < probability,
        }
    }
}

/// The next number in [0, 1) of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators).
#[allow(clippy::cast_precision_loss)]
fn split_mix(state: &mut u64) -> f64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
}

impl Injected {
    fn of(self, call: &Call) -> DriverError {
        let verb = call.verb;
        match self {
            Injected::Unsupported => DriverError::Unsupported { verb },
            Injected::NotReady => DriverError::NotReady { verb },
            Injected::OutOfMemory => DriverError::OutOfMemory { verb, wanted: call.size },
            Injected::Capturing => DriverError::Capturing { verb },
            Injected::Refused(reason) => DriverError::Refused { verb, address: call.start, reason },
            Injected::Sticky(code) => DriverError::Sticky { verb, code },
            Injected::Failed(code) => DriverError::Failed { verb, code },
        }
    }
}

impl Driver for Faults {
    delegate!(devices);
    delegate!(memory);
    delegate!(bytes);
    delegate!(streams);
    delegate!(completion);
    delegate!(kernels);
    delegate!(reach);
}

#[cfg(test)]
mod tests {
    use glake_units::Bytes;

    use super::*;
    use crate::stub::Stub;

    fn outcomes(when: When, calls: usize) -> Vec<bool> {
        let faults = Faults::new(Stub::new());
        faults.set(&[Fault { verb: Some(Verb::Reserve), when, error: Injected::OutOfMemory }]);
        (0..calls).map(|_| faults.reserve(Bytes::mib(2)).is_ok()).collect()
    }

    #[test]
    fn fails_the_calls_it_was_told_to() {
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
}
