//! Main loop of a replay, its report, and the search for the smallest limit under which a trace completes.
//!
//! Whether a trace completes is not monotonic in the limit: with more room, an allocator may place a block where it splits a range that a later
//! block needs. The search bisects to 2 MiB, then tries limits above the result at growing distances. If one of them fails, the search continues
//! above it. The result is a limit under which the trace completed, while it failed at 2 MiB less (or that is less than the live memory) and at
//! no tried limit above the result. A smaller limit may succeed by chance; it is not useful.

use std::time::Instant;

use glake_units::Bytes;
use serde::Serialize;

use super::subject::{Counters, Refusal, Subject};
use super::timeline::Timeline;
use crate::trace::{Event, Trace};

/// Number of events between two calls of the progress callback.
const STRIDE: usize = 1000;

/// Progress callback, called with the number of completed events; an error ends the replay.
pub type Progress<'a> = &'a mut dyn FnMut(u64) -> Result<(), Refusal>;

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
/// [`Refusal::Failed`], from the subject or the progress callback. Running out of memory is no error: it is counted, and the replay continues without the block.
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
            progress(place as u64)?;
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
    progress(events.len() as u64)?;
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

/// Names of the policy and device for the report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Setting {
    /// Name of the policy: `glake`, or that of a model.
    pub policy: String,
    /// Name of the device; `model` if there is none.
    pub device: String,
    /// Delay of the GPU behind the host; `None` for models, which use the trace's completed frees.
    pub gpu_lag_ms: Option<u64>,
    /// Rule for passing memory between streams; `None` for models, which never pass any.
    pub borrow: Option<String>,
}

/// Result of one replay. Memory in bytes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Name of the trace.
    pub trace: String,
    /// Name of the policy: `glake`, or that of a model.
    pub policy: String,
    /// Name of the device; `model` if there is none.
    pub device: String,
    /// Delay of the GPU behind the host, in milliseconds.
    pub gpu_lag_ms: Option<u64>,
    /// Rule for passing memory between streams.
    pub borrow: Option<String>,
    /// Number of events in the trace.
    pub events: u64,
    /// Number of allocations in the trace.
    pub allocations: u64,
    /// Peak of live memory, in requested bytes.
    pub requested_peak: Bytes,
    /// Peak of live memory with each block rounded up to 512 bytes: the same for every policy.
    pub active_peak: Bytes,
    /// Peak of memory taken from the device.
    pub reserved_peak: Bytes,
    /// Ratio `active_peak / reserved_peak`; `None` if allocations failed, because the live memory is then incomplete.
    pub utilization: Option<f64>,
    /// Smallest limit under which the trace completes; `None` unless requested.
    pub fit_limit: Option<Bytes>,
    /// Number of failed allocations.
    pub ooms: u64,
    /// Number of ranges made of pieces that were not neighbours.
    pub stitches: u64,
    /// Number of mappings of physical pieces; a piece mapped at two addresses counts twice.
    pub extent_maps: u64,
    /// Number of waits of one stream for another.
    pub stream_waits: u64,
    /// Number of driver calls for memory.
    pub driver_calls: u64,
    /// Cost of these calls in microseconds.
    pub driver_us: f64,
    /// Cost of the driver calls after the first fifth of the events, in microseconds.
    pub driver_us_late: f64,
    /// Wall-clock nanoseconds per allocation or completed free, averaged over the replay.
    pub ns_per_op: f64,
}

const STEP: u64 = 2 << 20;

/// Reason why no limit was found.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum FitError {
    /// Failure of the subject, or of its creation.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The trace does not complete even under the highest limit: give a higher one.
    #[error("the trace does not complete even under {ceiling}")]
    NeverFits {
        /// Highest limit that was tried.
        ceiling: Bytes,
    },
}

/// Finds the smallest limit under which the trace completes, in steps of 2 MiB, between the peak of live memory and `ceiling`, the reserved
/// peak of a replay without a limit. `make` creates a new subject under a limit. `progress` is called after every replay with the number of
/// replays so far.
///
/// # Errors
///
/// [`FitError`]: the trace does not complete under `ceiling`, or a subject failed.
pub fn find_limit<'a>(
    trace: &Trace,
    ceiling: Bytes,
    mut make: impl FnMut(Bytes) -> Result<Box<dyn Subject + 'a>, Refusal>,
    progress: &mut dyn FnMut(u64),
) -> Result<Bytes, FitError> {
    let mut replays = 0;
    let mut fits = |steps: u64| -> Result<bool, Refusal> {
        let mut subject = make(Bytes::new(steps.saturating_mul(STEP)))?;
        let fit = completes(trace, subject.as_mut())?;
        replays += 1;
        progress(replays);
        Ok(fit)
    };
    let top = ceiling.get().div_ceil(STEP);
    if !fits(top)? {
        return Err(FitError::NeverFits { ceiling });
    }
    // No limit below the peak of live memory can fit.
    let mut low = (trace.peaks().requested.get().div_ceil(STEP)).saturating_sub(1);
    loop {
        let found = bisect(low, top.max(low + 1), &mut fits)?;
        match first_failure_above(found, top, &mut fits)? {
            None => return Ok(Bytes::new(found.saturating_mul(STEP))),
            Some(failed) => low = failed,
        }
    }
}

/// Bisects between `low`, which does not fit, and `high`, which fits.
fn bisect(
    mut low: u64,
    mut high: u64,
    fits: &mut impl FnMut(u64) -> Result<bool, Refusal>,
) -> Result<u64, Refusal> {
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if fits(middle)? {
            high = middle;
        } else {
            low = middle;
        }
    }
    Ok(high)
}

/// Returns the highest limit that does not fit among those 1, 2, 4, ... steps above `found`.
fn first_failure_above(
    found: u64,
    top: u64,
    fits: &mut impl FnMut(u64) -> Result<bool, Refusal>,
) -> Result<Option<u64>, Refusal> {
    let mut failed = None;
    let mut distance = 1;
    while found + distance < top {
        if !fits(found + distance)? {
            failed = Some(found + distance);
        }
        distance *= 2;
    }
    Ok(failed)
}

#[cfg(test)]
mod limit_tests {
    use std::path::Path;

    use super::super::Counters;
    use super::*;
    use crate::trace::{BlockId, StreamIndex};

    /// Subject that fits if its field is set.
    struct Fits(bool);

    impl Subject for Fits {
        fn allocate(&mut self, _: BlockId, wanted: Bytes, _: StreamIndex, _: u64) -> Result<(), Refusal> {
            let (reserved, limit) = (Bytes::ZERO, Bytes::ZERO);
            if self.0 { Ok(()) } else { Err(Refusal::OutOfMemory { wanted, reserved, limit }) }
        }

        fn reserved(&self) -> Bytes {
            Bytes::ZERO
        }

        fn counters(&self) -> Counters {
            Counters::default()
        }
    }

    fn search(fits: impl Fn(u64) -> bool) -> Result<u64, FitError> {
        let trace = Trace::from_bytes(Path::new("t"), b"a 0 20971520 0 0\n", None).unwrap();
        let make = |limit: Bytes| Ok(Box::new(Fits(fits(limit.get() >> 20))) as Box<dyn Subject>);
        find_limit(&trace, Bytes::mib(999), make, &mut |_| ()).map(|limit| limit.get() >> 20)
    }

    #[test]
    fn finds_the_smallest() {
        for smallest in [20, 22, 500, 998, 1000] {
            assert_eq!(search(|limit| limit >= smallest).unwrap(), smallest);
        }
        assert!(matches!(search(|_| false), Err(FitError::NeverFits { .. })));
    }

    #[test]
    fn goes_on_above_a_hole() {
        // 100..=106 fits, 108..=199 does not: a reliable limit is above the hole.
        assert_eq!(search(|limit| (100..=106).contains(&limit) || limit >= 200).unwrap(), 200);
    }
}
