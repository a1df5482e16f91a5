//! Pass in numeric form, computed once and used by every trial of verdicts.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{Links, Verdict};
use crate::{Item, Position, Recompute, ScopeId, Step, Tape};

/// Marks an item that is never unpacked or belongs to no scope.
pub(crate) const NONE: usize = usize::MAX;

/// Pass in numeric form: bytes as `i64`, times in microseconds.
///
/// Cell `p` lies between step `p` and step `p + 1`. All bounds of spans are inclusive cells.
#[derive(Clone, Debug)]
pub(crate) struct Course {
    /// Number of steps, and therefore of cells.
    pub(crate) cells: usize,
    /// Begin of each step and end of the last one, without waiting or recomputing.
    pub(crate) begins: Vec<f64>,
    /// Memory in use in addition to items, per cell.
    pub(crate) rest: Vec<i64>,
    pub(crate) steps: Vec<Step>,
    pub(crate) items: Vec<Span>,
    pub(crate) scopes: Vec<Scope>,
    pub(crate) rates: Rates,
}

/// Cells in which an item is held or needed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) bytes: i64,
    /// Host memory of an offloaded item.
    pub(crate) host: u64,
    /// Duration of the copies out and in, each alone on the link.
    pub(crate) out: f64,
    pub(crate) into: f64,
    pub(crate) pack: usize,
    /// Last cell in which the forward pass holds it.
    pub(crate) release: usize,
    /// Cells of its first and last unpack.
    pub(crate) first: usize,
    pub(crate) last: usize,
    /// Last cell in which a handle is alive.
    pub(crate) end: usize,
    pub(crate) scope: usize,
    pub(crate) recompute: Option<f64>,
    pub(crate) inner: bool,
}

/// Scope that the program checkpoints.
#[derive(Clone, Debug)]
pub(crate) struct Scope {
    pub(crate) id: ScopeId,
    /// First unpack of one of its items, where it would be replayed.
    pub(crate) start: usize,
    /// Items that the scope can recompute.
    pub(crate) items: Vec<usize>,
}

/// Link rates per microsecond while both directions are busy, relative to each direction alone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rates {
    pub(crate) out_at_once: f64,
    pub(crate) into_at_once: f64,
}

impl Course {
    pub(crate) fn new(tape: &Tape, links: &Links) -> Self {
        let cells = tape.steps().len();
        let mut scopes: BTreeMap<ScopeId, Scope> = BTreeMap::new();
        for item in tape.items() {
            if let Some(id) = item.pack().scope {
                let scope = scopes.entry(id).or_insert(Scope { id, start: NONE, items: Vec::new() });
                scope.start = scope.start.min(item.unpacks().first().map_or(NONE, |at| at.0));
            }
        }
        // What is packed behind the begin of the replay is no part of it.
        let number: BTreeMap<ScopeId, usize> = scopes.keys().copied().zip(0..).collect();
        let mut scopes: Vec<Scope> = scopes.into_values().collect();
        let within = |item: &Item| {
            let scope = item.pack().scope.and_then(|scope| number.get(&scope)).copied();
            scope.filter(|scope| item.packed().0 < scopes[*scope].start).unwrap_or(NONE)
        };
        let scoped: Vec<usize> = tape.items().iter().map(within).collect();
        for (index, item) in tape.items().iter().enumerate() {
            if item.recompute().is_some() && scoped[index] != NONE {
                scopes[scoped[index]].items.push(index);
            }
        }
        let items = tape.items().iter().zip(&scoped).map(|(item, &scope)| {
            let pack = item.pack();
            let copy = |rate: f64| micros(links.copy) + amount(pack.link_bytes.get()) / (rate * 1e3);
            let last = item.unpacks().last().map_or(NONE, |at| at.0);
            let dropped = item.dropped().0.saturating_sub(1).min(cells.saturating_sub(1));
            Span {
                bytes: signed(pack.bytes.get()),
                host: pack.link_bytes.get(),
                out: copy(links.out.0),
                into: copy(links.into.0),
                pack: item.packed().0,
                release: item.released().0.saturating_sub(1).clamp(item.packed().0, cells.saturating_sub(1)),
                first: item.unpacks().first().map_or(NONE, |at| at.0),
                last,
                end: if last == NONE { dropped } else { dropped.max(last) },
                scope,
                recompute: item.recompute().filter(|_| scope != NONE).map(|how| micros(how.time())),
                inner: matches!(item.recompute(), Some(Recompute::Inner(_))),
            }
        });
        let items: Vec<Span> = items.collect();
        let begins = if tape.is_timed() {
            (0..=cells).map(|at| micros(tape.time_at(Position(at)))).collect()
        } else {
            untimed(tape.steps(), &items)
        };
        Course {
            cells,
            begins,
            rest: (0..cells).map(|at| signed(tape.rest_at(Position(at)).get())).collect(),
            steps: tape.steps().to_vec(),
            items,
            scopes,
            rates: Rates {
                out_at_once: links.out_at_once.0 / links.out.0,
                into_at_once: links.into_at_once.0 / links.into.0,
            },
        }
    }

    /// Determines which scopes the verdicts replay.
    pub(crate) fn replayed(&self, verdicts: &[Verdict], replayed: &mut Vec<bool>) {
        replayed.clear();
        let any = |scope: &Scope| scope.items.iter().any(|item| verdicts[*item] == Verdict::Recompute);
        replayed.extend(self.scopes.iter().map(any));
    }

    /// Returns the cell in which the item must be on the GPU again; earlier if its scope is replayed.
    pub(crate) fn need(&self, item: &Span, replayed: &[bool]) -> usize {
        let replay = item.scope != NONE && replayed[item.scope] && item.first != NONE;
        if replay { self.scopes[item.scope].start } else { item.first }
    }

    /// Returns whether offloading the item frees any cell.
    pub(crate) fn frees(&self, item: &Span) -> bool {
        self.freed(item).iter().any(|(from, until)| from < until)
    }

    /// Returns the half-open ranges of cells that offloading the item frees: before it is needed, and after its last use.
    pub(crate) fn freed(&self, item: &Span) -> [(usize, usize); 2] {
        let held = item.release + 1;
        match item.first {
            NONE => [(held, (item.end + 1).max(held)), (held, held)],
            first => {
                let used = held.max(item.last + 1);
                [(held, first.max(held)), (used, used.max(item.end + 1))]
            }
        }
    }
}

/// Assumes, without measured times, that each step takes as long as a copy of its item, so that links are neither idle nor late.
fn untimed(steps: &[Step], items: &[Span]) -> Vec<f64> {
    let length = |step: &Step| match *step {
        Step::Pack(item) => items[item.index()].out,
        Step::Unpack(item) => items[item.index()].into,
    };
    let add = |sum: &mut f64, step: &Step| {
        *sum += length(step);
        Some(*sum)
    };
    std::iter::once(0.0).chain(steps.iter().scan(0.0, add)).collect()
}

/// Converts a duration to microseconds.
pub(crate) fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Converts bytes to a float; exact up to 2^53.
#[allow(clippy::cast_precision_loss)]
pub(crate) fn amount(bytes: u64) -> f64 {
    bytes as f64
}

/// Converts bytes to a signed number. The clamp exceeds any GPU's memory, and sums do not overflow.
pub(crate) fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX).min(1 << 44)
}

#[cfg(test)]
pub(crate) mod tests {
    use glake_units::{Bandwidth, Bytes};

    use super::*;
    use crate::{Pack, Recorder};

    /// Items of 1, 10 and 100 bytes, unpacked in reverse order, and 100 bytes of other memory. The first two share a scope. Each step takes
    /// 100 us, as does the fixed cost of a copy.
    pub(crate) fn small() -> Course {
        let mut recorder = Recorder::new();
        recorder.sampled(Bytes::new(100));
        let items = [(1, Some(ScopeId(0))), (10, Some(ScopeId(0))), (100, None)].map(|(bytes, scope)| {
            let item = recorder.packed(Pack { scope, ..Pack::new(Bytes::new(bytes)) });
            recorder.released(item).unwrap();
            if scope.is_some() {
                recorder.recomputable(item, Recompute::Leaf(Duration::from_micros(30))).unwrap();
            }
            item
        });
        for item in items.into_iter().rev() {
            recorder.unpacked(item).unwrap();
            recorder.dropped(item).unwrap();
        }
        recorder.mark(Duration::from_micros(600));
        let links = Links::new(Bandwidth(50.0), Bandwidth(50.0));
        Course::new(&recorder.finish(), &Links { copy: Duration::from_micros(100), ..links })
    }

    #[test]
    fn cells_are_those_between_steps() {
        let course = small();
        let span = |item: usize| {
            let Span { pack, release, first, last, end, .. } = course.items[item];
            [pack, release, first, last, end]
        };
        assert_eq!([span(0), span(2)], [[0, 0, 5, 5, 5], [2, 2, 3, 3, 3]]);
        assert_eq!(course.scopes[0].start, 4);
        assert!(course.frees(&course.items[0]) && !course.frees(&course.items[2]));
        assert_eq!(course.freed(&course.items[0])[0], (1, 5));
        assert_eq!(course.begins, [0.0, 100.0, 200.0, 300.0, 400.0, 500.0, 600.0]);
    }
}
