//! Home ranges and aliases to be returned to the driver.

use crate::alias::Alias;
use crate::aliases::Aliases;
use crate::free_list::Class;
use crate::heap::Heap;
use crate::home::Carved;
use crate::ids::{ExtentId, FreeListId};

/// Memory and mappings that a plan releases.
#[derive(Debug, Default)]
pub(super) struct Release {
    pub(super) ranges: Vec<Carved>,
    pub(super) aliases: Vec<Alias>,
    /// Evicted extents without live bytes.
    pub(super) forgotten: Vec<ExtentId>,
}

impl Release {
    /// Iterates over the free lists that its ranges came from.
    pub(super) fn lists(&self) -> impl Iterator<Item = FreeListId> + '_ {
        self.ranges.iter().flat_map(|range| range.former.iter().map(|former| former.list))
    }

    /// Removes the released memory from the books.
    pub(super) fn commit(self, heap: &mut Heap, aliases: &mut Aliases) {
        for alias in self.aliases {
            aliases.zone.give_back(alias.start, alias.size);
            heap.tallies.counters.aliases_collected += 1;
        }
        self.forgotten.into_iter().for_each(|extent| heap.home.forget_extent(extent));
        let home = &mut heap.home;
        for range in self.ranges {
            let (start, end) = (home.pieces[range.piece].start, home.pieces[range.piece].end());
            home.remove_piece(range.piece);
            let extents: Vec<ExtentId> = home.extents.touching(start, end).collect();
            let Some(&first) = extents.first() else { continue };
            let (class, domain) = (home.extents[first].class, home.extents[first].domain);
            for &extent in &extents {
                home.extents.remove(extent);
            }
            home.zone(class).give_back(start, end - start);
            let count = extents.len() as u64;
            heap.tallies.mappings -= count;
            heap.tallies.remove_extents(class == Class::Slabs, count, end - start);
            home.domains[domain].held -= end - start;
            home.drop_if_done(domain);
        }
    }

    /// Puts everything back in its earlier state.
    pub(super) fn abort(self, heap: &mut Heap, aliases: &mut Aliases) {
        self.ranges.into_iter().for_each(|range| heap.home.put_back(range));
        for alias in self.aliases {
            aliases.add(alias, heap);
        }
    }
}
