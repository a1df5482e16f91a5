//! Stitched address ranges: extents of free pieces mapped side by side, kept mapped for the next request.
//!
//! ```text
//! home:   [ e0 |  e1  ]   [ e2 ]      [ e3 |   e4 ]
//!             ▀▀▀▀▀▀▀      ▀▀▀▀        ▀▀▀▀▀▀▀              what is free
//! alias:  [ e0 |  e1  | e2 | e3 | e4 ]                      whole extents, one address range
//!             ^block                ^end                    begins in a free suffix, ends in a free prefix
//! ```
//!
//! An alias owns no bytes: what is free is asked of home. It is idle while no block was handed out through it.

use crate::ids::{AliasId, DomainId, Epoch, ExtentId};
use crate::run::Run;
use slab::Slab;

/// Consecutive alias addresses that are consecutive at home too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// From the start of the alias.
    pub(crate) offset: u64,
    pub(crate) home: u64,
    pub(crate) size: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct Alias {
    pub(crate) start: u64,
    pub(crate) size: u64,
    pub(crate) domain: DomainId,
    pub(crate) extents: Vec<ExtentId>,
    pub(crate) spans: Vec<Span>,
    /// Blocks handed out through it.
    pub(crate) blocks: u32,
    /// Covers its last use.
    pub(crate) epoch: Epoch,
    /// Grows with every use: the order in which idle aliases are collected.
    pub(crate) used: u64,
}

/// Free bytes of an alias that are side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) offset: u64,
    pub(crate) size: u64,
}

impl Alias {
    /// The smallest window of at least `size` free bytes, where `runs` (sorted, disjoint) are what is free at home.
    pub(crate) fn best_window(&self, runs: &[Run], size: u64) -> Option<Window> {
        let mut best: Option<Window> = None;
        let mut open = Window { offset: 0, size: 0 };
        let mut close = |window: Window| {
            if window.size >= size && best.is_none_or(|best| window.size < best.size) {
                best = Some(window);
            }
        };
        for span in &self.spans {
            let (from, to) = (span.home, span.home + span.size);
            let first = runs.partition_point(|run| run.end <= from);
            for run in runs[first..].iter().take_while(|run| run.start < to) {
                let (start, end) = (run.start.max(from), run.end.min(to));
                let offset = span.offset + (start - from);
                if offset != open.offset + open.size {
                    close(open);
                    open = Window { offset, size: 0 };
                }
                open.size += end - start;
            }
        }
        close(open);
        best
    }

    /// The home ranges behind a range of the alias, in alias order.
    pub(crate) fn home_of(&self, window: Window) -> impl Iterator<Item = (u64, u64)> + '_ {
        let (from, to) = (window.offset, window.offset + window.size);
        self.spans.iter().filter_map(move |span| {
            let (start, end) = (span.offset.max(from), (span.offset + span.size).min(to));
            (start < end).then(|| (span.home + (start - span.offset), end - start))
        })
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.blocks == 0
    }
}

/// All aliases of a device.
#[derive(Debug, Default)]
pub(crate) struct Aliases {
    aliases: Slab<Alias>,
    clock: u64,
}

impl std::ops::Index<AliasId> for Aliases {
    type Output = Alias;

    fn index(&self, id: AliasId) -> &Alias {
        &self.aliases[id.index()]
    }
}

impl std::ops::IndexMut<AliasId> for Aliases {
    fn index_mut(&mut self, id: AliasId) -> &mut Alias {
        &mut self.aliases[id.index()]
    }
}

impl Aliases {
    pub(crate) fn insert(&mut self, alias: Alias) -> AliasId {
        AliasId::at(self.aliases.insert(alias))
    }

    pub(crate) fn remove(&mut self, id: AliasId) -> Alias {
        self.aliases.remove(id.index())
    }

    /// Marks an alias as used now.
    pub(crate) fn touch(&mut self, id: AliasId) {
        self.clock += 1;
        self[id].used = self.clock;
    }

    pub(crate) fn len(&self) -> usize {
        self.aliases.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (AliasId, &Alias)> {
        self.aliases.iter().map(|(index, alias)| (AliasId::at(index), alias))
    }
}
