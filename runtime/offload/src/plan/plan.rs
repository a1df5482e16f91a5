//! Plan: verdicts, and their consequences for every position.

use std::sync::Arc;
use std::time::Duration;

use glake_units::Bytes;

use super::course::{Course, NONE, signed};
use super::order::Arms;
use super::search::Search;
use super::trial::{Outcome, Trial};
use super::{PlanError, Preset, Request, Verdict};
use crate::{ItemId, Position, ScopeId, Tape};

/// Verdict and times of each item of a tape. [`Clock`](crate::Clock) carries the plan out.
///
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
/// use glake_offload::{Links, Pack, Plan, Preset, Recorder, Request, Verdict};
/// use glake_units::{Bandwidth, Bytes};
///
/// // Four layers that save 1 GiB each; 100 ms a layer forward, 200 ms backward; 20 GiB beside.
/// let mut recorder = Recorder::new();
/// recorder.sampled(Bytes::gib(20));
/// let mut time = Duration::ZERO;
/// let items: Vec<_> = (0..4).map(|_| {
///     let item = recorder.packed(Pack::new(Bytes::gib(1)));
///     time += Duration::from_millis(100);
///     recorder.mark(time);
///     item
/// }).collect();
/// for item in items.into_iter().rev() {
///     recorder.unpacked(item)?;
///     recorder.dropped(item)?;
///     time += Duration::from_millis(200);
///     recorder.mark(time);
/// }
/// let tape = Arc::new(recorder.finish());
///
/// let links = Links::new(Bandwidth(50.0), Bandwidth(50.0));
/// let plan = Plan::new(&tape, &Request::new(Bytes::gib(23), links))?;
/// assert!(plan.peak() <= Bytes::gib(23));
/// assert_eq!(plan.exposed(), Duration::ZERO);
/// assert_eq!(plan.verdicts().iter().filter(|verdict| **verdict == Verdict::Keep).count(), 3);
///
/// let less = Plan::new(&tape, &Request::new(Bytes::gib(20), links)).unwrap_err();
/// assert!(less.to_string().contains("the pass needs 21.00 GiB"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    tape: Arc<Tape>,
    verdicts: Vec<Verdict>,
    pub(crate) out: Vec<ItemId>,
    pub(crate) reloads: Vec<ItemId>,
    pub(crate) settled: Vec<usize>,
    pub(crate) issued: Vec<usize>,
    pub(crate) replays: Vec<(Position, ScopeId)>,
    reload_at: Vec<usize>,
    held: Vec<Bytes>,
    window: Bytes,
    time: Duration,
    recompute: Duration,
    exposed: Duration,
}

impl Plan {
    /// Creates a plan for passes like `tape` under `request`.
    ///
    /// # Errors
    /// [`PlanError::BelowFloor`] with the minimum budget; [`PlanError::Rate`] for an invalid link rate.
    pub fn new(tape: &Arc<Tape>, request: &Request) -> Result<Plan, PlanError> {
        request.links.check()?;
        let course = Course::new(tape, &request.links);
        let (verdicts, budget) = match request.preset {
            Preset::Fit => fit(&course, request, Arms::Scopes)?,
            Preset::Hybrid => fit(&course, request, Arms::Leaves)?,
            Preset::Memory => memory(&course, request)?,
        };
        Plan::of(tape, &course, verdicts, budget, request)
    }

    /// Creates a plan with given verdicts, one per item, within the request's budget. Ignores the preset.
    ///
    /// # Errors
    /// [`PlanError::BelowFloor`] if the verdicts need more than the budget; [`PlanError::Verdicts`]; [`PlanError::Rate`].
    pub fn with_verdicts(
        tape: &Arc<Tape>,
        request: &Request,
        verdicts: &[Verdict],
    ) -> Result<Plan, PlanError> {
        request.links.check()?;
        if verdicts.len() != tape.items().len() {
            return Err(PlanError::Verdicts { verdicts: verdicts.len(), items: tape.items().len() });
        }
        let course = Course::new(tape, &request.links);
        Plan::of(tape, &course, verdicts.to_vec(), signed(request.budget.get()), request)
    }

    /// Returns the smallest budget with a plan for `request`, whatever its own budget is.
    ///
    /// # Errors
    /// [`PlanError::Rate`].
    pub fn floor(tape: &Arc<Tape>, request: &Request) -> Result<Bytes, PlanError> {
        match Plan::new(tape, &Request { budget: Bytes::ZERO, ..*request }) {
            Ok(_) => Ok(Bytes::ZERO),
            Err(PlanError::BelowFloor { minimum, .. }) => Ok(minimum),
            Err(error) => Err(error),
        }
    }

    fn of(
        tape: &Arc<Tape>,
        course: &Course,
        verdicts: Vec<Verdict>,
        budget: i64,
        request: &Request,
    ) -> Result<Plan, PlanError> {
        let mut trial = Trial::default();
        let Some(Outcome { timing, .. }) = trial.run(course, &verdicts, budget) else {
            return Err(below(trial.peak(course, &verdicts), request));
        };
        let (schedule, ids) =
            (&trial.schedule, |of: &[usize]| of.iter().map(|index| ItemId::new(*index)).collect());
        let scopes = course.scopes.iter().zip(&trial.replayed);
        let mut replays: Vec<_> = scopes
            .filter(|(scope, replayed)| **replayed && scope.start != NONE)
            .map(|(scope, _)| (Position(scope.start), scope.id))
            .collect();
        replays.sort();
        Ok(Plan {
            tape: Arc::clone(tape),
            out: ids(&schedule.out),
            reloads: ids(&schedule.into),
            settled: schedule.settled.clone(),
            issued: schedule.issued.clone(),
            replays,
            reload_at: schedule.reload_at.clone(),
            held: schedule.held.iter().map(|held| unsigned(*held)).collect(),
            window: unsigned(schedule.ahead.iter().copied().max().unwrap_or(0)),
            time: duration(timing.total),
            recompute: duration(timing.recompute),
            exposed: duration(timing.exposed),
            verdicts,
        })
    }

    /// Returns the tape of the plan.
    pub fn tape(&self) -> &Arc<Tape> {
        &self.tape
    }

    /// Returns the verdict of `item`; `None` if the tape has no such item.
    pub fn verdict(&self, item: ItemId) -> Option<Verdict> {
        self.verdicts.get(item.index()).copied()
    }

    /// Returns the verdict of each item.
    pub fn verdicts(&self) -> &[Verdict] {
        &self.verdicts
    }

    /// Returns whether every item is kept.
    pub fn keeps_all(&self) -> bool {
        self.verdicts.iter().all(|verdict| *verdict == Verdict::Keep)
    }

    /// Returns the step at which the reload of `item` begins; `None` if it is never reloaded.
    pub fn reload_at(&self, item: ItemId) -> Option<Position> {
        self.reload_at.get(item.index()).copied().filter(|at| *at != NONE).map(Position)
    }

    /// Returns the maximum memory of the process under the plan, whatever copies take.
    pub fn peak(&self) -> Bytes {
        self.held.iter().copied().max().unwrap_or_default()
    }

    /// Returns that maximum with the other memory of another tape of the same steps, if that is larger.
    pub(crate) fn peak_with(&self, other: &Tape) -> Bytes {
        let more = |at: usize| {
            let at = Position(at);
            other.rest_at(at).saturating_sub(self.tape.rest_at(at))
        };
        self.held.iter().enumerate().map(|(at, held)| held.saturating_add(more(at))).max().unwrap_or_default()
    }

    /// Returns the maximum memory between each step and the next one.
    pub fn held(&self) -> &[Bytes] {
        &self.held
    }

    /// Returns the maximum memory of items reloaded ahead of their use.
    pub fn window(&self) -> Bytes {
        self.window
    }

    /// Returns the host memory of the offloaded items.
    pub fn host(&self) -> Bytes {
        self.out.iter().map(|item| self.tape.items()[item.index()].pack().link_bytes).sum()
    }

    /// Returns the estimated time of a pass.
    pub fn time(&self) -> Duration {
        self.time
    }

    /// Returns the part of it spent on recomputing.
    pub fn recompute(&self) -> Duration {
        self.recompute
    }

    /// Returns the part of it spent waiting for copies.
    pub fn exposed(&self) -> Duration {
        self.exposed
    }
}

/// Returns the verdicts with the least time.
fn fit(course: &Course, request: &Request, arms: Arms) -> Result<(Vec<Verdict>, i64), PlanError> {
    let budget = signed(request.budget.get());
    let mut search = Search::new(course, budget, request.host_room.get(), arms);
    if let Some(best) = search.run() {
        return Ok((best.verdicts, budget));
    }
    let tightest = search.tightest();
    Err(below(search.trial.peak(course, &tightest), request))
}

/// Returns verdicts that offload everything, with room for overlapping copies.
fn memory(course: &Course, request: &Request) -> Result<(Vec<Verdict>, i64), PlanError> {
    let budget = signed(request.budget.get());
    let mut search = Search::new(course, budget, request.host_room.get(), Arms::Stored);
    let verdicts = search.tightest();
    let floor = search.trial.peak(course, &verdicts);
    if floor > budget {
        return Err(below(floor, request));
    }
    let mut sizes: Vec<i64> = course.items.iter().map(|item| item.bytes).collect();
    sizes.sort_unstable_by(|left, right| right.cmp(left));
    let two: i64 = sizes.iter().take(2).sum();
    Ok((verdicts, budget.min(floor + two.max(floor / 30))))
}

fn below(minimum: i64, request: &Request) -> PlanError {
    PlanError::BelowFloor { budget: request.budget, minimum: unsigned(minimum), host_room: request.host_room }
}

fn unsigned(bytes: i64) -> Bytes {
    Bytes::new(u64::try_from(bytes).unwrap_or(0))
}

fn duration(micros: f64) -> Duration {
    Duration::try_from_secs_f64(micros * 1e-6).unwrap_or_default()
}
