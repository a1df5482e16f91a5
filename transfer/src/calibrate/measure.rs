//! Measurement of one trial. Legs are forked from a stream of the first leg's target and joined to it, as in a copy. The stream is idle at
//! the fork, so that no lane waits.

use glake_device::owned::{self, Span};
use glake_device::{DeviceId, DriverError, Stream};
use glake_units::{Bytes, Micros};

use super::harness::{Harness, Lane, SLOT};
use crate::paths::trials::{Leg, Trial};
use crate::paths::{MANY_RELAYS, Way};

/// GPU that failed during a trial, with the error.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) device: DeviceId,
    pub(super) error: DriverError,
}

type Outcome<T> = std::result::Result<T, Fault>;

/// Returns the median time from fork to join of a trial, after one warm-up run. All work has completed on return, also after an error.
pub(super) fn measure(harness: &Harness, trial: &Trial, turn: u64) -> Outcome<Micros> {
    let mut times = Vec::new();
    for run in 0..=trial.repeats {
        let took = once(harness, trial, turn);
        let ended = lanes(harness, trial).map(Lane::synchronize).fold(Ok(()), Result::and);
        let took = took.and_then(|took| ended.map(|()| took))?;
        if run > 0 {
            times.push(took);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(Micros(times.get(times.len() / 2).copied().unwrap_or(f64::NAN)))
}

fn lanes<'a>(harness: &'a Harness, trial: &'a Trial) -> impl Iterator<Item = &'a Lane> {
    let targets = trial.legs.first().and_then(|leg| harness.lane(leg.target));
    let relays = trial.legs.iter().filter_map(|leg| harness.lane(leg.relay));
    targets.into_iter().chain(relays)
}

/// Returns the microseconds of one run.
fn once(harness: &Harness, trial: &Trial, turn: u64) -> Outcome<f64> {
    let Some(home) = trial.legs.first().and_then(|leg| harness.lane(leg.target)) else { return Ok(f64::NAN) };
    let at_home = |error| Fault { device: home.device, error };
    let stream = home.stream.id();
    home.begun.record(stream).map_err(at_home)?;
    let relayed = trial.legs.iter().filter(|leg| leg.relay != home.device).count();
    if relayed > 0 {
        home.fork.record(stream).map_err(at_home)?;
    }
    for (index, leg) in trial.legs.iter().enumerate() {
        let (Some(lane), Some(ends)) =
            (harness.lane(leg.relay), harness.ends(trial.direction, leg, index, turn))
        else {
            return Ok(f64::NAN);
        };
        let forked = |error| Fault { device: lane.device, error };
        if lane.device != home.device && relayed < MANY_RELAYS {
            lane.stream.wait_for(home.fork.id()).map_err(forked)?;
        }
        let last = enqueue(harness, lane, leg, &ends).map_err(forked)?;
        if lane.device != home.device {
            lane.done.record(last).map_err(forked)?;
        }
    }
    for lane in trial.legs.iter().filter_map(|leg| harness.lane(leg.relay)) {
        if lane.device != home.device {
            home.stream.wait_for(lane.done.id()).map_err(at_home)?;
        }
    }
    home.ended.record(stream).map_err(at_home)?;
    home.ended.synchronize().map_err(at_home)?;
    home.ended.since(&home.begun).map_err(at_home)
}

/// Enqueues a leg on its relay's lane. Returns the stream of its last operation.
fn enqueue(
    harness: &Harness,
    lane: &Lane,
    leg: &Leg,
    (to, from): &(Span, Span),
) -> glake_device::Result<Stream> {
    match leg.way {
        Way::Direct | Way::ZeroStaging => {
            owned::copy(&*harness.driver, lane.device, lane.stream.id(), to, from)?;
            Ok(lane.stream.id())
        }
        Way::Staged => staged(harness, lane, to, from),
    }
}

/// Enqueues a staged leg: one stream fills the relay's slots, the other one drains them.
fn staged(harness: &Harness, lane: &Lane, to: &Span, from: &Span) -> glake_device::Result<Stream> {
    let (fill, drain) = (lane.stream.id(), lane.second.id());
    let mut offset = Bytes::ZERO;
    let mut turn = 0;
    while offset < from.size() {
        let size = SLOT.min(from.size().saturating_sub(offset));
        let slot = turn % lane.slots.len().max(1);
        let (Some((filled, drained)), Some(buffer), Some(to), Some(from)) = (
            lane.slots.get(slot),
            harness.slot(lane.device, slot, size),
            to.part(offset, size),
            from.part(offset, size),
        ) else {
            break;
        };
        if turn >= lane.slots.len() {
            lane.stream.wait_for(drained.id())?;
        }
        owned::copy(&*harness.driver, lane.device, fill, &buffer, &from)?;
        filled.record(fill)?;
        lane.second.wait_for(filled.id())?;
        owned::copy(&*harness.driver, lane.device, drain, &to, &buffer)?;
        drained.record(drain)?;
        offset = offset.saturating_add(size);
        turn += 1;
    }
    Ok(drain)
}
