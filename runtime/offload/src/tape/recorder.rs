//! Recorder of a tape.

use std::collections::HashMap;
use std::time::Duration;

use glake_units::Bytes;

use super::rest::Rest;
use super::times::Times;
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
