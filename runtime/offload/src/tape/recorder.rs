//! Builds a tape event by event.

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

/// An item of a pass that goes on.
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
    /// Before the first pack.
    pub fn new() -> Self {
        Self::default()
    }

    /// Bytes are packed that no item of this pass has: they are its next item, with one handle.
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

    /// The bytes of `item` are packed once more: it has another handle.
    pub fn shared(&mut self, item: ItemId) -> Result<(), TapeError> {
        self.handled(item)?.handles += 1;
        self.live += 1;
        Ok(())
    }

    /// The checkpoint around `item` can make it again so. May be told at any time.
    pub fn recomputable(&mut self, item: ItemId, recompute: Recompute) -> Result<(), TapeError> {
        self.item(item)?.recompute = Some(recompute);
        Ok(())
    }

    /// Nothing of the program holds the storage of `item` any more. Where nobody says so, it is taken as held until its
    /// scope has packed its last item before `item` is unpacked; in no scope, until the next step.
    pub fn released(&mut self, item: ItemId) -> Result<(), TapeError> {
        let now = self.position();
        self.item(item)?.released = Some(now);
        Ok(())
    }

    /// A handle of `item` is unpacked. It lives on: a graph that is retained unpacks it again.
    pub fn unpacked(&mut self, item: ItemId) -> Result<(), TapeError> {
        let now = self.position();
        self.handled(item)?.unpacks.push(now);
        self.steps.push(Step::Unpack(item));
        Ok(())
    }

    /// A handle of `item` is gone, unpacked or not.
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

    /// Whether a handle of `item` lives, as an error.
    pub(crate) fn holds(&mut self, item: ItemId) -> Result<(), TapeError> {
        self.handled(item).map(drop)
    }

    /// So much time has passed since the first pack.
    pub fn mark(&mut self, since_begin: Duration) {
        self.mark_at(self.position(), since_begin);
    }

    /// So much time had passed since the first pack when the step at `position` began.
    pub fn mark_at(&mut self, position: Position, since_begin: Duration) {
        self.times.mark(position, since_begin);
    }

    /// Before the step at `position` the work stood still so long, for a copy, or recomputed what the tape has as
    /// stored: this is no time of the pass itself.
    pub fn waited_at(&mut self, position: Position, wait: Duration) {
        self.times.wait(position, wait);
    }

    /// The process has so much of the GPU's memory beside items, contexts included; or had at most since the last
    /// sample.
    pub fn sampled(&mut self, rest: Bytes) {
        self.rest.sample(self.position(), rest);
    }

    /// What an item takes; nothing where there is none.
    pub(crate) fn size(&self, item: ItemId) -> Bytes {
        self.items.get(item.index()).map(|open| open.pack.bytes).unwrap_or_default()
    }

    /// How many packs and unpacks there were.
    pub fn position(&self) -> Position {
        Position(self.steps.len())
    }

    /// How many handles live.
    pub fn live(&self) -> usize {
        self.live
    }

    /// Whether the pass has begun and no handle lives.
    pub fn is_over(&self) -> bool {
        !self.items.is_empty() && self.live == 0
    }

    /// What was recorded. What still has a handle is taken as held to the end.
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

    /// For each item the step after the last pack of its scope that comes before its own first unpack.
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

    /// The item, while a handle of it lives.
    fn handled(&mut self, item: ItemId) -> Result<&mut Open, TapeError> {
        let open = self.item(item)?;
        if open.handles == 0 { Err(TapeError::NoHandle { item }) } else { Ok(open) }
    }
}

/// How long a leaf is taken to compute of which nothing was measured: as a matmul of 4,096 columns, 9 ps a byte.
#[allow(clippy::cast_precision_loss)] // a number of bytes
fn untimed(pack: Pack) -> Recompute {
    Recompute::Leaf(Duration::from_secs_f64(pack.bytes.get() as f64 * 9e-12))
}
