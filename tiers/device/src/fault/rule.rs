//! Fault rules as data: which calls fail, and in which way.

use crate::decorate::Call;
use crate::{DriverError, Refusal, Verb};

/// A fault rule: matching calls and their outcome.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fault {
    /// Verb to match; `None` matches all.
    pub verb: Option<Verb>,
    /// Selection among the matching calls.
    pub when: When,
    /// Outcome of a selected call.
    pub error: Injected,
}

/// Selection among the calls that match a [`Fault`], counted from 1 since the fault was set.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum When {
    /// Only the call with this number.
    Nth(u64),
    /// The call with this number and all after it.
    From(u64),
    /// Each call with this probability (0 never, 1 always); equal seeds select equal calls.
    Chance {
        /// Probability of a fault, from 0 to 1.
        probability: f64,
        /// Seed of the random numbers.
        seed: u64,
    },
}

/// Outcome of a faulty call. The first group is returned as a [`DriverError`] with the call's verb and size. The second group is accepted
/// and fails when its stream reaches it, with this error number of the driver; a verb that is no stream work, or that waits for its bytes,
/// returns the error at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Injected {
    /// The driver lacks the call.
    Unsupported,
    /// The device is busy.
    NotReady,
    /// The device is out of memory.
    OutOfMemory,
    /// A stream capture is open.
    Capturing,
    /// The arguments break this rule.
    Refused(Refusal),
    /// The context is lost; only this call reports it, later calls do not.
    Sticky(u32),
    /// Another error of the driver.
    Failed(u32),

    /// None of the bytes arrive, and the device is lost.
    Lost(u32),
    /// The first half of each range arrives (for a kernel, which cannot be split: all of it), and the device is lost.
    Damaged(u32),

    /// The first half of each range arrives (for a kernel, which cannot be split: nothing), without any error, like hardware that loses
    /// bytes silently. A verb that is no stream work has no effect.
    Short,
}

/// Decision on a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Judged {
    /// Execute the call unchanged.
    Pass,
    /// Return this error.
    Answer(Injected),
    /// Report success, do only this part of the work, and lose the device with this error number.
    Lose(Part, u32),
    /// Report success, but do only this part of the work.
    Shorten(Part),
}

/// Share of the work that reaches memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Nothing,
    Half,
    All,
}

#[derive(Debug)]
pub(super) struct Rule {
    fault: Fault,
    seen: u64,
    random: fastrand::Rng,
}

impl Rule {
    pub(super) fn new(fault: &Fault) -> Self {
        let seed = match fault.when {
            When::Chance { seed, .. } => seed,
            When::Nth(_) | When::From(_) => 0,
        };
        Rule { fault: *fault, seen: 0, random: fastrand::Rng::with_seed(seed) }
    }

    /// Returns the decision on a call of `verb`; [`Judged::Pass`] if the rule does not match.
    pub(super) fn judge(&mut self, verb: Verb) -> Judged {
        if self.fault.verb.is_some_and(|of| of != verb) || !self.hits() {
            return Judged::Pass;
        }
        match self.fault.error {
            Injected::Lost(code) => Judged::Lose(Part::Nothing, code),
            Injected::Damaged(code) => Judged::Lose(Part::Half, code),
            Injected::Short => {
                let part = if verb == Verb::Launch { Part::Nothing } else { Part::Half };
                Judged::Shorten(part)
            }
            error => Judged::Answer(error),
        }
    }

    fn hits(&mut self) -> bool {
        self.seen += 1;
        match self.fault.when {
            When::Nth(n) => self.seen == n,
            When::From(n) => self.seen >= n,
            When::Chance { probability, .. } => self.random.f64() < probability,
        }
    }
}

impl Injected {
    pub(super) fn of(self, call: &Call) -> DriverError {
        let verb = call.verb;
        match self {
            Injected::Unsupported => DriverError::Unsupported { verb, code: DriverError::UNSUPPORTED },
            Injected::NotReady => DriverError::NotReady { verb },
            Injected::OutOfMemory => DriverError::OutOfMemory { verb, wanted: call.size },
            Injected::Capturing => DriverError::Capturing { verb, code: DriverError::CAPTURING },
            Injected::Refused(reason) => DriverError::Refused { verb, address: call.start, reason },
            Injected::Sticky(code) | Injected::Lost(code) | Injected::Damaged(code) => {
                DriverError::Sticky { verb, code }
            }
            Injected::Failed(code) => DriverError::of_number(verb, code),
            // Handled by the caller; never returned as an error.
            Injected::Short => DriverError::Failed { verb, code: 999 },
        }
    }
}
