//! Which calls fail, and how, as data.

use crate::decorate::Call;
use crate::{DriverError, Refusal, Verb};

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

/// What becomes of a call, as data. The first group is what it answers: [`DriverError`] with the verb and size of the call
/// filled in. The second is accepted, and fails when its stream has reached it, with this error number of the driver; a
/// verb that is no work of a stream, or that waits for its bytes, answers the error at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Injected {
    /// The driver lacks the call.
    Unsupported,
    /// The device is busy.
    NotReady,
    /// There is no memory left.
    OutOfMemory,
    /// A capture is open.
    Capturing,
    /// The arguments break a rule.
    Refused(Refusal),
    /// The context is lost; this call is told, the next ones are not.
    Sticky(u32),
    /// Another error of the driver.
    Failed(u32),

    /// None of its bytes arrive, and its device is lost.
    Lost(u32),
    /// The first half of each of its ranges arrives (of a kernel, which cannot be cut: all), and its device is lost.
    Damaged(u32),

    /// The first half of each of its ranges arrives (of a kernel, which cannot be cut: nothing), and nobody is told: what a machine
    /// does that loses bytes. Of a verb that is no work of a stream nothing is changed.
    Short,
}

/// What a call is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Judged {
    /// What it was asked.
    Pass,
    /// Answer this.
    Answer(Injected),
    /// Answer as if it was done, do so much of it, and lose its device.
    Lose(Part, u32),
    /// Answer as if it was done, and do so much of it.
    Shorten(Part),
}

/// How much of the work reaches memory.
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

    /// What becomes of a call of a verb; [`Judged::Pass`] where the rule is not about it.
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
            // Never answered.
            Injected::Short => DriverError::Failed { verb, code: 999 },
        }
    }
}
