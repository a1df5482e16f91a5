//! Main loop of a replay.

use std::time::Instant;

use glake_units::Bytes;

use super::report::{Report, Setting};
use super::subject::{Counters, Refusal, Subject};
use super::timeline::Timeline;
use crate::trace::{Event, Trace};

/// Number of events between two calls of the progress callback.
const STRIDE: usize = 10_000;

/// Progress callback, called with the number of completed events.
pub type Progress<'a> = &'a mut dyn FnMut(u64);

/// Result of a replay.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Figures of the replay.
    pub report: Report,
    /// First allocation that failed, if any.
    pub first_oom: Option<FirstOom>,
}

/// First failed allocation of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FirstOom {
    /// Line of the event in the trace, or its entry in a snapshot.
    pub line: u32,
    /// Requested size of the allocation.
    pub wanted: Bytes,
    /// Memory taken from the device at that moment.
    pub reserved: Bytes,
}

/// Replays a trace on a subject. If a `timeline` is given, it receives the live and reserved memory over time.
///
/// # Errors
///
/// [`Refusal::Failed`], from the subject. Running out of memory is no error: it is counted, and the replay continues without the block.
pub fn replay(
    trace: &Trace,
    subject: &mut dyn Subject,
    setting: &Setting,
    mut timeline: Option<&mut Timeline>,
    progress: Progress<'_>,
) -> Result<Outcome, Refusal> {
    let events = trace.events();
    let late = events.len() / 5;
    let mut run = Run { refused: vec![false; trace.allocations() as usize], ..Run::default() };
    let mut early = Counters::default();
    let begin = Instant::now();
    for (place, &event) in events.iter().enumerate() {
        if place == late {
            early = subject.counters();
        }
        if place % STRIDE == 0 && place > 0 {
            progress(place as u64);
        }
        if let Some(oom) = run.step(subject, event)? {
            let line = trace.line_of(place).unwrap_or(0);
            run.first_oom.get_or_insert(FirstOom { line, ..oom });
        }
        if let Some(timeline) = timeline.as_deref_mut() {
            timeline.note(trace, event, run.reserved);
        }
    }
    let wall_ns = begin.elapsed().as_nanos();
    progress(events.len() as u64);
    let report = run.report(trace, setting, early, subject.counters(), wall_ns);
    Ok(Outcome { report, first_oom: run.first_oom })
}

/// Returns whether a trace completes on a subject without running out of memory. Stops at the first failed allocation.
pub(super) fn completes(trace: &Trace, subject: &mut dyn Subject) -> Result<bool, Refusal> {
    let mut run = Run { refused: vec![false; trace.allocations() as usize], ..Run::default() };
    for &event in trace.events() {
        if run.step(subject, event)?.is_some() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Replay in progress.
#[derive(Default)]
struct Run {
    /// Blocks whose allocation failed, indexed by block: later events of them are skipped.
    refused: Vec<bool>,
    reserved: Bytes,
    reserved_peak: Bytes,
    ooms: u64,
    ops: u64,
    first_oom: Option<FirstOom>,
}

impl Run {
    /// Performs one event. Returns the failed allocation if it ran out of memory.
    fn step(&mut self, subject: &mut dyn Subject, event: Event) -> Result<Option<FirstOom>, Refusal> {
        let refused = self.refused.get_mut(event.block().index());
        if refused.as_deref() == Some(&true) {
            return Ok(None);
        }
        match event {
            Event::Allocate { block, stream, bytes, at_us } => {
                self.ops += 1;
                let outcome = subject.allocate(block, bytes, stream, at_us);
                self.reserved = subject.reserved();
                self.reserved_peak = self.reserved_peak.max(self.reserved);
                match outcome {
                    Ok(()) => {}
                    Err(Refusal::OutOfMemory { wanted, reserved, .. }) => {
                        self.ooms += 1;
                        if let Some(refused) = refused {
                            *refused = true;
                        }
                        return Ok(Some(FirstOom { line: 0, wanted, reserved }));
                    }
                    Err(failed) => return Err(failed),
                }
            }
            Event::FreeRequested { block, at_us } => subject.free_requested(block, at_us)?,
            Event::FreeCompleted { block, at_us } => {
                self.ops += 1;
                subject.free_completed(block, at_us)?;
            }
            Event::RecordStream { block, stream, at_us } => subject.record_stream(block, stream, at_us)?,
        }
        Ok(None)
    }

    #[allow(clippy::cast_precision_loss)] // figures for people
    fn report(
        &self,
        trace: &Trace,
        setting: &Setting,
        early: Counters,
        all: Counters,
        wall_ns: u128,
    ) -> Report {
        let peaks = trace.peaks();
        Report {
            trace: trace.name().to_owned(),
            policy: setting.policy.clone(),
            device: setting.device.clone(),
            gpu_lag_ms: setting.gpu_lag_ms,
            borrow: setting.borrow.clone(),
            events: trace.events().len() as u64,
            allocations: u64::from(trace.allocations()),
            requested_peak: peaks.requested,
            active_peak: peaks.active,
            reserved_peak: self.reserved_peak,
            utilization: (self.ooms == 0).then(|| peaks.active.fraction_of(self.reserved_peak)),
            fit_limit: None,
            ooms: self.ooms,
            stitches: all.stitches,
            extent_maps: all.extent_maps,
            stream_waits: all.stream_waits,
            driver_calls: all.driver_calls,
            driver_us: all.driver_ns as f64 / 1e3,
            driver_us_late: all.driver_ns.saturating_sub(early.driver_ns) as f64 / 1e3,
            ns_per_op: wall_ns as f64 / self.ops.max(1) as f64,
        }
    }
}
