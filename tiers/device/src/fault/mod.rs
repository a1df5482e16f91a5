//! A driver decorator that injects faults by rule.
//!
//! ```text
//!   call ──► rules ──► error returned                   the wrapped driver never sees it
//!                 ├──► accepted, and its device lost  ··· the stream reaches it  ···►  every call on the device
//!                 │    (bytes: none, or half)             other devices go on          returns the error
//!                 └──► accepted, and half done: silent data loss
//! ```
//!
//! Invariants: a call that returns an injected error was not made, except for destroy calls, which are made too. An accepted call that
//! fails later keeps its place in its stream, so that later events complete, and so do waits for them on other devices: a wait carries no
//! error. From then on no work of its device reaches memory. The error is reported once the host has waited or queried past the point of
//! failure. A real driver behaves alike: errors stick to a context and leave other devices' contexts alone. The event of a pending loss
//! belongs to the wrapped driver and is destroyed once it has completed or is forgotten.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use glake_units::Bytes;
use parking_lot::Mutex;

use crate::decorate::{Call, delegate};
use crate::{
    Address, CaptureState, CopyDevices, CopyRequest, DeviceId, Driver, DriverError, Event, EventKind,
    LaunchRequest, PointerKind, Refusal, Result, Stream, Verb,
};

/// Driver decorator that makes calls fail by rule; the first matching rule decides.
#[derive(Debug)]
pub struct Faults {
    inner: Arc<dyn Driver>,
    state: Arc<Mutex<State>>,
    losses: Arc<Losses>,
    /// All drivers under these rules, with the lost devices of each.
    family: Family,
}

type Family = Arc<Mutex<Vec<(Arc<dyn Driver>, Arc<Losses>)>>>;

#[derive(Debug, Default)]
struct State {
    rules: Vec<Rule>,
    injected: u64,
}

impl Faults {
    /// Wraps a driver, without any fault yet.
    pub fn new(inner: Arc<dyn Driver>) -> Self {
        Faults::of(inner, Arc::default(), Arc::default())
    }

    fn of(inner: Arc<dyn Driver>, state: Arc<Mutex<State>>, family: Family) -> Self {
        let losses = Arc::new(Losses::default());
        family.lock().push((inner.clone(), losses.clone()));
        Faults { inner, state, losses, family }
    }

    /// Replaces the rules. All counts restart, and lost devices are usable again, as for a restarted process.
    pub fn set(&self, faults: &[Fault]) {
        self.state.lock().rules = faults.iter().map(Rule::new).collect();
        self.family.lock().iter().for_each(|(inner, losses)| losses.forget(&**inner));
    }

    /// Returns the number of injected faults so far, without calls refused by a lost device.
    pub fn injected(&self) -> u64 {
        self.state.lock().injected
    }

    fn judge(&self, verb: Verb) -> Judged {
        let mut state = self.state.lock();
        let mut judged = Judged::Pass;
        for rule in &mut state.rules {
            let of_rule = rule.judge(verb);
            if judged == Judged::Pass {
                judged = of_rule;
            }
        }
        state.injected += u64::from(judged != Judged::Pass);
        judged
    }

    /// Returns an error if the device of the call is lost.
    fn alive(&self, call: &Call) -> Result<()> {
        match call.device.and_then(|device| self.losses.lost(device)) {
            Some(code) => Err(DriverError::Sticky { verb: call.verb, code }),
            None => Ok(()),
        }
    }

    /// Handles a verb that is not stream work.
    fn around<T>(&self, call: Call, verb: impl FnOnce(&dyn Driver) -> Result<T>) -> Result<T> {
        // No lock is held during the call: it may wait for another thread's call.
        if tells(call.verb) {
            self.losses.look(&*self.inner);
        }
        if let Err(lost) = self.alive(&call) {
            if destroys(call.verb) {
                verb(&*self.inner)?;
            }
            return Err(lost);
        }
        match self.judge(call.verb) {
            Judged::Answer(error) => return Err(error.of(&call)),
            Judged::Lose(_, code) => {
                if let Some(device) = call.device {
                    self.losses.lose_now(&*self.inner, device, code);
                }
                return Err(DriverError::Sticky { verb: call.verb, code });
            }
            Judged::Pass | Judged::Shorten(_) => {}
        }
        let answer = verb(&*self.inner);
        if tells(call.verb) {
            self.losses.look(&*self.inner);
            self.alive(&call)?;
        }
        answer
    }

    /// Handles stream work; `targets` are the ranges that it writes, and `make` executes a part of it.
    fn work(
        &self,
        call: Call,
        stream: Stream,
        mut targets: impl Iterator<Item = Address>,
        make: impl FnOnce(&dyn Driver, Part) -> Result<()>,
    ) -> Result<()> {
        self.alive(&call)?;
        let Some(device) = call.device else { return make(&*self.inner, Part::All) };
        match self.judge(call.verb) {
            Judged::Answer(error) => Err(error.of(&call)),
            Judged::Shorten(Part::Nothing) => Ok(()),
            Judged::Shorten(part) => make(&*self.inner, part),
            Judged::Pass if !self.losses.is_doomed(device) => make(&*self.inner, Part::All),
            judged => {
                match judged {
                    Judged::Lose(part, code) => {
                        if part != Part::Nothing {
                            make(&*self.inner, part)?;
                        }
                        self.losses.lose(&*self.inner, device, stream, code);
                    }
                    _ => self.losses.leave_out(&*self.inner, device, stream),
                }
                // A copy to pageable memory returns once its bytes have arrived.
                let pageable = |to| {
                    self.inner.pointer_attributes(to).is_ok_and(|found| found.kind == PointerKind::Pageable)
                };
                if targets.any(pageable) {
                    self.inner.stream_synchronize(device, stream)?;
                    self.losses.look(&*self.inner);
                    self.alive(&call)?;
                }
                Ok(())
            }
        }
    }
}

/// Returns whether a verb waits on the host or queries past work, and so may report a failure.
fn tells(verb: Verb) -> bool {
    use Verb::{ContextSynchronize, EventQuery, EventSynchronize, ReadNow, StreamSynchronize, WriteNow};
    matches!(
        verb,
        ContextSynchronize | EventQuery | EventSynchronize | ReadNow | StreamSynchronize | WriteNow
    )
}

fn destroys(verb: Verb) -> bool {
    matches!(verb, Verb::EventDestroy | Verb::ModuleUnload | Verb::StreamDestroy)
}

impl Part {
    fn of(self, size: Bytes) -> Bytes {
        match self {
            Part::Nothing => Bytes::ZERO,
            Part::Half => Bytes::new(size.get() / 2),
            Part::All => size,
        }
    }

    fn of_copy(self, request: &CopyRequest) -> CopyRequest {
        CopyRequest { size: self.of(request.size), ..*request }
    }
}

impl Driver for Faults {
    delegate!(devices);
    delegate!(memory);
    delegate!(bytes);
    delegate!(streams);
    delegate!(completion);
    delegate!(contexts);
    delegate!(kernels);
    delegate!(reach);

    /// Wraps private contexts under the same rules. A loss there affects only those contexts.
    fn own_contexts(&self) -> Result<Arc<dyn Driver>> {
        let inner = self.inner.own_contexts()?;
        Ok(Arc::new(Faults::of(inner, self.state.clone(), self.family.clone())))
    }

    unsafe fn copy(&self, device: DeviceId, request: CopyRequest, stream: Stream) -> Result<()> {
        let call = work(Verb::Copy, device, request.to, request.size);
        self.work(call, stream, [request.to].into_iter(), |driver, part| {
            // SAFETY: the caller's promise is passed on, for a part of the range.
            unsafe { driver.copy(device, part.of_copy(&request), stream) }
        })
    }

    unsafe fn copy_on(&self, request: CopyRequest, stream: Stream) -> Result<()> {
        let device = self.inner.stream_device(stream)?;
        // SAFETY: the caller's promise is passed on.
        unsafe { self.copy(device, request, stream) }
    }

    unsafe fn copy_between(
        &self,
        device: DeviceId,
        request: CopyRequest,
        owners: CopyDevices,
        stream: Stream,
    ) -> Result<()> {
        let call = work(Verb::CopyBetween, device, request.to, request.size);
        self.work(call, stream, [request.to].into_iter(), |driver, part| {
            // SAFETY: the caller's promise is passed on, for a part of the range.
            unsafe { driver.copy_between(device, part.of_copy(&request), owners, stream) }
        })
    }

    unsafe fn copy_batch(&self, device: DeviceId, requests: &[CopyRequest], stream: Stream) -> Result<()> {
        let size = requests.iter().map(|request| request.size).sum();
        let call = work(Verb::CopyBatch, device, Address(0), size);
        self.work(call, stream, requests.iter().map(|request| request.to), |driver, part| {
            let parts: Vec<CopyRequest> = requests.iter().map(|request| part.of_copy(request)).collect();
            // SAFETY: as above, for each.
            unsafe { driver.copy_batch(device, &parts, stream) }
        })
    }

    unsafe fn fill(
        &self,
        device: DeviceId,
        start: Address,
        size: Bytes,
        byte: u8,
        stream: Stream,
    ) -> Result<()> {
        let call = work(Verb::Fill, device, start, size);
        self.work(call, stream, std::iter::empty(), |driver, part| {
            // SAFETY: the caller's promise is passed on, for a part of the range.
            unsafe { driver.fill(device, start, part.of(size), byte, stream) }
        })
    }

    unsafe fn launch(&self, device: DeviceId, request: &LaunchRequest<'_>, stream: Stream) -> Result<()> {
        let call = work(Verb::Launch, device, Address(0), Bytes::ZERO);
        self.work(call, stream, std::iter::empty(), |driver, _| {
            // SAFETY: the caller's promise is passed on as it is.
            unsafe { driver.launch(device, request, stream) }
        })
    }

    unsafe fn stream_write_value(
        &self,
        device: DeviceId,
        stream: Stream,
        address: Address,
        value: u32,
    ) -> Result<()> {
        let call = work(Verb::StreamWriteValue, device, address, Bytes::ZERO);
        self.work(call, stream, std::iter::empty(), |driver, _| {
            // SAFETY: the caller's promise is passed on as it is.
            unsafe { driver.stream_write_value(device, stream, address, value) }
        })
    }
}

fn work(verb: Verb, device: DeviceId, start: Address, size: Bytes) -> Call {
    Call { verb, device: Some(device), start, size, gpus: 0 }
}

impl Drop for Faults {
    fn drop(&mut self) {
        self.losses.forget(&*self.inner);
    }
}

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
enum Judged {
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
enum Part {
    Nothing,
    Half,
    All,
}

#[derive(Debug)]
struct Rule {
    fault: Fault,
    seen: u64,
    random: fastrand::Rng,
}

impl Rule {
    fn new(fault: &Fault) -> Self {
        let seed = match fault.when {
            When::Chance { seed, .. } => seed,
            When::Nth(_) | When::From(_) => 0,
        };
        Rule { fault: *fault, seen: 0, random: fastrand::Rng::with_seed(seed) }
    }

    /// Returns the decision on a call of `verb`; [`Judged::Pass`] if the rule does not match.
    fn judge(&mut self, verb: Verb) -> Judged {
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
    fn of(self, call: &Call) -> DriverError {
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

#[derive(Debug, Default)]
struct Losses {
    table: Mutex<Vec<Loss>>,
}

#[derive(Clone, Copy, Debug)]
struct Loss {
    device: DeviceId,
    code: u32,
    /// Event that completes when the device is lost; `None` once it is.
    at: Option<Event>,
}

impl Losses {
    /// Schedules the loss of a device for when one of its streams reaches its current end. Of several such points the first one reached
    /// counts.
    fn lose(&self, driver: &dyn Driver, device: DeviceId, stream: Stream, code: u32) {
        self.add(Loss { device, code, at: mark(driver, device, stream) }, driver);
    }

    /// Discards work of a device that is about to be lost. Later waits report the loss, on whichever stream the failure is.
    fn leave_out(&self, driver: &dyn Driver, device: DeviceId, stream: Stream) {
        if let Some(loss) = self.find(device) {
            self.lose(driver, device, stream, loss.code);
        }
    }

    /// Marks a device as lost immediately.
    fn lose_now(&self, driver: &dyn Driver, device: DeviceId, code: u32) {
        self.add(Loss { device, code, at: None }, driver);
    }

    /// Returns the error number of a lost device.
    fn lost(&self, device: DeviceId) -> Option<u32> {
        let of = |loss: &&Loss| loss.device == device && loss.at.is_none();
        self.table.lock().iter().find(of).map(|loss| loss.code)
    }

    /// Returns whether a device no longer executes work, reported or not.
    fn is_doomed(&self, device: DeviceId) -> bool {
        self.find(device).is_some()
    }

    /// Promotes pending losses whose event has completed. Called by waits and by queries of past work, which may report them.
    fn look(&self, driver: &dyn Driver) {
        let pending: Vec<Loss> = self.table.lock().iter().filter(|loss| loss.at.is_some()).copied().collect();
        for loss in pending {
            let Some(event) = loss.at else { continue };
            if matches!(driver.event_query(loss.device, event), Ok(false)) {
                continue;
            }
            let mut table = self.table.lock();
            let found = table.iter_mut().find(|other| other.at == Some(event));
            // Another thread may have handled this loss first.
            let Some(found) = found else { continue };
            found.at = None;
            drop(table);
            destroy(driver, loss.device, event);
        }
    }

    /// Makes every device usable again.
    fn forget(&self, driver: &dyn Driver) {
        for loss in std::mem::take(&mut *self.table.lock()) {
            if let Some(event) = loss.at {
                destroy(driver, loss.device, event);
            }
        }
    }

    fn find(&self, device: DeviceId) -> Option<Loss> {
        self.table.lock().iter().find(|loss| loss.device == device).copied()
    }

    fn add(&self, loss: Loss, driver: &dyn Driver) {
        let mut table = self.table.lock();
        if !table.iter().any(|other| other.device == loss.device && other.at.is_none()) {
            table.push(loss);
            return;
        }
        drop(table);
        if let Some(event) = loss.at {
            destroy(driver, loss.device, event);
        }
    }
}

/// Returns an event that completes when a stream has done its work so far; `None` if it cannot be recorded.
fn mark(driver: &dyn Driver, device: DeviceId, stream: Stream) -> Option<Event> {
    if !matches!(driver.capture_state(device, stream), Ok(CaptureState::None)) {
        return None;
    }
    let event = driver.event_create(device, EventKind::Plain).ok()?;
    if driver.event_record(device, event, stream).is_err() {
        destroy(driver, device, event);
        return None;
    }
    Some(event)
}

fn destroy(driver: &dyn Driver, device: DeviceId, event: Event) {
    // SAFETY: created by `mark`, shared with no other code, and taken out of the table before. If this fails, the
    // driver keeps the event.
    let _ = unsafe { driver.event_destroy(device, event) };
}
