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
//! failure. A real driver behaves alike: errors stick to a context and leave other devices' contexts alone.

mod loss;
mod rule;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use glake_units::Bytes;
use parking_lot::Mutex;

use crate::decorate::{Call, delegate};
use crate::{
    Address, CopyDevices, CopyRequest, DeviceId, Driver, DriverError, LaunchRequest, PointerKind, Result,
    Stream, Verb,
};
use loss::Losses;
use rule::{Judged, Part, Rule};

pub use rule::{Fault, Injected, When};

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
