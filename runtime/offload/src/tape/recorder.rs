//! Recorder of a tape.
//!
//! Begin of each step of a pass, interpolated from marks.
//!
//! GPU memory of a process in addition to the items of its pass.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use glake_units::Bytes;

use super::{Item, Recompute, Step, Tape, TapeError};
use crate::{ItemId, Pack, Position, ScopeId};

/// Records one pass: from its first pack until no handle lives.
///
/// Every reference to the same bytes is a handle of one item. The order of events is all that counts; times and samples
/// may be told later, for a position that has passed.
///
/// ```
/// use std::time::Duration;
/// use glake_offload::{Pack, Position, Recorder};
/// use glake_units::Bytes;
///
/// let mut recorder = Recorder::new();
/// let item = recorder.packed(Pack::new(Bytes::mib(4)));
/// recorder.released(item)?;                       // nothing of the forward holds the storage
/// recorder.sampled(Bytes::gib(16));               // parameters, optimizer, workspaces, contexts
/// recorder.mark(Duration::from_millis(3));        // as an event of the compute stream says
/// recorder.unpacked(item)?;
/// recorder.dropped(item)?;
/// assert!(recorder.is_over());
/// let tape = recorder.finish();
/// assert_eq!(tape.items()[0].unpacks(), [Position(1)]);
/// # Ok::<(), glake_offload::TapeError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Recorder {
    steps: Vec<Step>,
    items: Vec<Open>,
    live: usize,
    times: Times,
    rest: Rest,
}

/// Item of a pass in progress.
#[derive(Clone, Debug)]
struct Open {
    pack: Pack,
    recompute: Option<Recompute>,
    packed: Position,
    released: Option<Position>,
    unpacks: Vec<Position>,
    dropped: Option<Position>,
    handles: usize,
}

impl Recorder {
    /// Creates a recorder before the first pack.
    pub fn new() -> Self {
        Self::default()
    }

    /// Records the pack of a new item, with one handle.
    pub fn packed(&mut self, pack: Pack) -> ItemId {
        let (item, packed) = (ItemId::new(self.items.len()), self.position());
        let open = Open {
            pack,
            recompute: None,
            packed,
            released: None,
            unpacks: Vec::new(),
            dropped: None,
            handles: 1,
        };
        self.items.push(open);
        self.steps.push(Step::Pack(item));
        self.live += 1;
        item
    }

    /// Records another pack of the bytes of `item`: another handle.
    pub fn shared(&mut self, item: ItemId) -> Result<(), TapeError> {
        self.handled(item)?.handles += 1;
        self.live += 1;
        Ok(())
    }

    /// Records that the checkpoint around `item` can recompute it. May be called at any time.
    pub fn recomputable(&mut self, item: ItemId, recompute: Recompute) -> Result<(), TapeError> {
        self.item(item)?.recompute = Some(recompute);
        Ok(())
    }

    /// Records that the program no longer holds the storage of `item`. Without this call, the storage counts as held until its scope has
    /// packed its last item before `item` is unpacked; in no scope, until the next step.
    pub fn released(&mut self, item: ItemId) -> Result<(), TapeError> {
        let now = self.position();
        self.item(item)?.released = Some(now);
        Ok(())
    }

    /// Records an unpack of a handle, which stays alive: a retained graph unpacks it again.
    pub fn unpacked(&mut self, item: ItemId) -> Result<(), TapeError> {
        let now = self.position();
        self.handled(item)?.unpacks.push(now);
        self.steps.push(Step::Unpack(item));
        Ok(())
    }

    /// Records the end of a handle of `item`, unpacked or not.
    pub fn dropped(&mut self, item: ItemId) -> Result<(), TapeError> {
        let now = self.position();
        let open = self.handled(item)?;
        open.handles -= 1;
        if open.handles == 0 {
            open.dropped = Some(now);
        }
        self.live -= 1;
        Ok(())
    }

    /// Returns an error unless a handle of `item` is alive.
    pub(crate) fn holds(&mut self, item: ItemId) -> Result<(), TapeError> {
        self.handled(item).map(drop)
    }

    /// Records the time since the first pack at the current position.
    pub fn mark(&mut self, since_begin: Duration) {
        self.mark_at(self.position(), since_begin);
    }

    /// Records the time since the first pack at the begin of the step at `position`.
    pub fn mark_at(&mut self, position: Position, since_begin: Duration) {
        self.times.mark(position, since_begin);
    }

    /// Records that the work waited before the step at `position`, for a copy or for recomputing an item that the tape has as stored. This
    /// time does not count as the pass's own.
    pub fn waited_at(&mut self, position: Position, wait: Duration) {
        self.times.wait(position, wait);
    }

    /// Records the GPU memory of the process in addition to items, contexts included, or its maximum since the last sample.
    pub fn sampled(&mut self, rest: Bytes) {
        self.rest.sample(self.position(), rest);
    }

    /// Returns the size of an item; 0 if there is none.
    pub(crate) fn size(&self, item: ItemId) -> Bytes {
        self.items.get(item.index()).map(|open| open.pack.bytes).unwrap_or_default()
    }

    /// Returns the number of packs and unpacks so far.
    pub fn position(&self) -> Position {
        Position(self.steps.len())
    }

    /// Returns the number of live handles.
    pub fn live(&self) -> usize {
        self.live
    }

    /// Returns whether the pass has begun and no handle is alive.
    pub fn is_over(&self) -> bool {
        !self.items.is_empty() && self.live == 0
    }

    /// Returns the completed tape. Items with live handles count as held until the end.
    pub fn finish(self) -> Tape {
        let (end, last_packs) = (self.position(), self.last_packs());
        let items = self.items.into_iter().enumerate().map(|(index, open)| {
            // What the program holds without a handle is of the rest.
            let dropped = open.dropped.unwrap_or(end);
            let released = open.released.unwrap_or(last_packs[index]).min(dropped);
            Item {
                pack: open.pack,
                recompute: open.recompute.or(open.pack.is_output().then(|| untimed(open.pack))),
                packed: open.packed,
                released: released.max(Position(open.packed.0 + 1)),
                unpacks: open.unpacks,
                dropped: dropped.max(Position(open.packed.0 + 1)),
            }
        });
        Tape {
            items: items.collect(),
            times: self.times.resolve(end.0),
            timed: self.times.is_timed(),
            rest: self.rest.resolve(end.0),
            steps: self.steps,
        }
    }

    /// Returns for each item the step after the last pack of its scope before its own first unpack.
    fn last_packs(&self) -> Vec<Position> {
        let mut packs: HashMap<ScopeId, Vec<Position>> = HashMap::new();
        for open in &self.items {
            if let Some(scope) = open.pack.scope {
                packs.entry(scope).or_default().push(open.packed);
            }
        }
        let until = |open: &Open| {
            let first = open.unpacks.first().copied().unwrap_or(self.position());
            let before = |packs: &Vec<Position>| {
                packs.partition_point(|at| *at < first).checked_sub(1).map(|last| packs[last])
            };
            let last = open.pack.scope.and_then(|scope| packs.get(&scope)).and_then(before);
            Position(last.unwrap_or(open.packed).0 + 1)
        };
        self.items.iter().map(until).collect()
    }

    fn item(&mut self, item: ItemId) -> Result<&mut Open, TapeError> {
        let packed = self.items.len();
        self.items.get_mut(item.index()).ok_or(TapeError::UnknownItem { item, packed })
    }

    /// Returns the item if a handle of it is alive.
    fn handled(&mut self, item: ItemId) -> Result<&mut Open, TapeError> {
        let open = self.item(item)?;
        if open.handles == 0 { Err(TapeError::NoHandle { item }) } else { Ok(open) }
    }
}

/// Returns the assumed time of a leaf without measurements: that of a matmul with 4,096 columns, 9 ps a byte.
#[allow(clippy::cast_precision_loss)] // a number of bytes
fn untimed(pack: Pack) -> Recompute {
    Recompute::Leaf(Duration::from_secs_f64(pack.bytes.get() as f64 * 9e-12))
}

/// Time marks and waits, in any order of positions.
#[derive(Clone, Debug, Default)]
pub(super) struct Times {
    marks: Vec<(Position, Duration)>,
    waits: Vec<(Position, Duration)>,
}

impl Times {
    /// Records that `at` steps were complete after `since_begin`.
    pub(super) fn mark(&mut self, at: Position, since_begin: Duration) {
        self.marks.push((at, since_begin));
    }

    /// Records that the work waited before the step at `at`.
    pub(super) fn wait(&mut self, at: Position, wait: Duration) {
        self.waits.push((at, wait));
    }

    /// Returns whether any mark has a positive time.
    pub(super) fn is_timed(&self) -> bool {
        self.marks.iter().any(|(at, time)| at.0 > 0 && !time.is_zero())
    }

    /// Returns the begin of each of `steps` steps and the end of the last one, without waits. Steps between two marks take equally long;
    /// steps after the last mark take no time.
    pub(super) fn resolve(&self, steps: usize) -> Vec<Duration> {
        let mut marks: Vec<(usize, Duration)> = vec![(0, Duration::ZERO)];
        marks.extend(self.marks.iter().map(|(at, time)| (at.0.min(steps), *time)));
        // A pass begins with its first pack: a mark there sets nothing.
        marks.retain(|(at, time)| *at > 0 || time.is_zero());
        marks.sort();
        let mut waits = self.waits.clone();
        waits.sort();
        let (mut waits, mut waited) = (waits.into_iter().peekable(), Duration::ZERO);
        let mut times = Vec::with_capacity(steps + 1);
        let (mut from, mut since) = (0, Duration::ZERO);
        times.push(since);
        for (at, time) in marks {
            while let Some((_, wait)) = waits.next_if(|(before, _)| before.0 < at) {
                waited = waited.saturating_add(wait);
            }
            let until = time.saturating_sub(waited).max(since);
            if at > from {
                let (span, parts) = (until - since, at - from);
                times.extend((1..=parts).map(|part| since + span.mul_f64(part_of(part, parts))));
            }
            (from, since) = (at, until);
            if let Some(last) = times.last_mut() {
                *last = until;
            }
        }
        times.resize(steps + 1, since);
        times
    }
}

#[allow(clippy::cast_precision_loss)] // counts of steps
fn part_of(part: usize, parts: usize) -> f64 {
    part as f64 / parts as f64
}

/// Samples of this memory, by position.
#[derive(Clone, Debug, Default)]
pub(super) struct Rest {
    samples: Vec<(Position, Bytes)>,
}

impl Rest {
    /// Records a sample after `at` steps, or the maximum since the previous one.
    pub(super) fn sample(&mut self, at: Position, rest: Bytes) {
        self.samples.push((at, rest));
    }

    /// Returns the memory in each of `cells` cells, where a cell follows its step: at least the samples on both sides.
    pub(super) fn resolve(&self, cells: usize) -> Vec<Bytes> {
        let mut curve = vec![Bytes::ZERO; cells];
        if cells == 0 {
            return curve;
        }
        // A sample after so many steps is of the cell behind the last of them.
        let cell = |at: Position| at.0.saturating_sub(1).min(cells - 1);
        let mut samples: BTreeMap<usize, Bytes> = BTreeMap::new();
        for (at, rest) in &self.samples {
            let largest = samples.entry(cell(*at)).or_default();
            *largest = (*largest).max(*rest);
        }
        let Some((&first, &rest)) = samples.first_key_value() else { return curve };
        curve[..first].fill(rest);
        let (mut from, mut before) = (first, rest);
        for (at, rest) in samples {
            if at > from {
                curve[from + 1..at].fill(before.max(rest));
            }
            curve[at] = rest;
            (from, before) = (at, rest);
        }
        curve[from + 1..].fill(before);
        curve
    }
}

#[cfg(test)]
mod times_tests {
    use super::*;

    fn millis(times: &[Duration]) -> Vec<u128> {
        times.iter().map(Duration::as_millis).collect()
    }

    #[test]
    fn steps_between_two_marks_are_equally_long() {
        let mut times = Times::default();
        times.mark(Position(4), Duration::from_millis(100));
        times.mark(Position(2), Duration::from_millis(20));
        assert_eq!(millis(&times.resolve(6)), [0, 10, 20, 60, 100, 100, 100]);
        assert!(times.is_timed());
    }

    #[test]
    fn what_was_waited_for_is_no_time_of_the_pass() {
        let mut times = Times::default();
        times.mark(Position(2), Duration::from_millis(20));
        times.mark(Position(4), Duration::from_millis(100));
        times.wait(Position(3), Duration::from_millis(60));
        assert_eq!(millis(&times.resolve(4)), [0, 10, 20, 30, 40]);
    }

    #[test]
    fn without_marks_nothing_takes_time_and_times_never_go_back() {
        assert_eq!(millis(&Times::default().resolve(2)), [0, 0, 0]);
        assert!(!Times::default().is_timed());
        let mut times = Times::default();
        times.mark(Position(1), Duration::from_millis(50));
        times.mark(Position(2), Duration::from_millis(40));
        assert_eq!(millis(&times.resolve(2)), [0, 50, 50]);
    }
}

#[cfg(test)]
mod rest_tests {
    use super::*;

    #[test]
    fn between_two_samples_it_is_the_larger() {
        let mut rest = Rest::default();
        rest.sample(Position(2), Bytes::new(10));
        rest.sample(Position(5), Bytes::new(30));
        rest.sample(Position(5), Bytes::new(20));
        rest.sample(Position(7), Bytes::new(5));
        let curve: Vec<u64> = rest.resolve(9).iter().map(|bytes| bytes.get()).collect();
        assert_eq!(curve, [10, 10, 30, 30, 30, 30, 5, 5, 5]);
    }

    #[test]
    fn without_samples_it_is_nothing() {
        assert_eq!(Rest::default().resolve(2), [Bytes::ZERO; 2]);
        let mut early = Rest::default();
        early.sample(Position(0), Bytes::new(7));
        assert_eq!(early.resolve(0), []);
        assert_eq!(early.resolve(2), [Bytes::new(7); 2]);
    }
}
