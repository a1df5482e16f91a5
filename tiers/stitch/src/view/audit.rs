//! Checks of all invariants, for tests and debugging.

use std::collections::HashSet;

use crate::alias::Aliases;
use crate::extent::{Extent, ExtentState};
use crate::free_list::{FreeSums, Owner};
use crate::heap::Heap;
use crate::ids::{ExtentId, PieceId};
use crate::piece::{Live, State};
use crate::plans::Plans;

/// Invariant that does not hold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{rule} (at offset {offset:#x})")]
pub struct Broken {
    /// Text of the rule.
    pub rule: &'static str,
    /// Offset at which it is broken.
    pub offset: u64,
}

fn hold(holds: bool, rule: &'static str, offset: u64) -> Result<(), Broken> {
    if holds { Ok(()) } else { Err(Broken { rule, offset }) }
}

/// A walk over the whole state of an allocator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Audit<'a> {
    pub(crate) heap: &'a Heap,
    pub(crate) aliases: &'a Aliases,
    pub(crate) plans: &'a Plans,
    pub(crate) limit: u64,
}

impl Audit<'_> {
    /// Walks the whole state and checks the invariants.
    ///
    /// # Errors
    /// The first broken invariant.
    pub(crate) fn check(&self) -> Result<(), Broken> {
        let (mut in_lists, mut held, mut summed) = (HashSet::new(), 0, FreeSums::default());
        let (kept, is_changed) = self.heap.home.lists.kept();
        for (name, list) in self.heap.home.lists.iter() {
            let released = self.heap.home.domains.get(list.domain).is_none_or(|domain| domain.is_released());
            let mut bytes = 0;
            for id in list.bins.iter() {
                let piece = &self.heap.home.pieces[id];
                hold(piece.state == State::Free, "a piece in a list is free", piece.start)?;
                hold(piece.list == name, "a free piece names its list", piece.start)?;
                hold(
                    self.heap.home.pieces.is_in(id, piece.list),
                    "the table of lists names a free piece's list",
                    piece.start,
                )?;
                hold(in_lists.insert(id), "a free piece is in one list", piece.start)?;
                let passed =
                    list.owner != Owner::Anyone || released || !self.heap.points.is_pending(piece.point);
                hold(passed, "memory that any stream may take has passed", piece.start)?;
                let is_held = self.heap.holds.on(piece.start, piece.end()).next().is_some();
                match list.owner {
                    Owner::Held(_) => hold(is_held, "a held piece has a hold", piece.start)?,
                    Owner::Nobody => {}
                    _ => hold(!is_held, "a piece that may be taken has no hold", piece.start)?,
                }
                if is_held {
                    hold(self.heap.points.is_pending(piece.point), "a held piece is pending", piece.start)?;
                    held += piece.size;
                }
                bytes += piece.size;
            }
            hold(bytes == list.bytes, "the bytes of a list are the sum of its pieces", 0)?;
            let now = self.heap.home.sums_now(list, self.heap.points.passed());
            let kept = is_changed(name) || list.sums() == &now;
            hold(kept, "the kept figures of a list are the sums of its pieces", 0)?;
            summed.replace(&FreeSums::default(), list.sums());
        }
        hold(kept == summed, "the kept figures are the sums of the lists' figures", 0)?;
        let all_held = held == self.heap.holds.bytes();
        hold(all_held || !self.plans.is_empty(), "ranges of holds are held or withheld pieces", 0)?;
        let live = |block: &u64| self.heap.home.live.get(*block, &self.heap.home.pieces).is_some();
        hold(self.heap.holds.recorded().all(|block| live(&block)), "recorded blocks are live", 0)?;
        let mut covered = 0;
        let mut free = 0;
        for first in self.heap.home.segments.begins() {
            covered += self.check_segment(first, &mut free)?;
        }
        let reserved = self.heap.tallies.reserved();
        let evicted =
            self.heap.home.extents.iter().filter(|(_, extent)| extent.state == ExtentState::Evicted);
        let (evicted, live_evicted) =
            evicted.fold((0, 0), |(size, live), (_, extent)| (size + extent.size, live + extent.live));
        let counted = live_evicted == self.heap.home.extents.live_evicted();
        hold(counted, "the live bytes of evicted extents are counted", 0)?;
        hold(covered == reserved + evicted, "pieces cover reserved and evicted memory", 0)?;
        hold(free == in_lists.len(), "every free piece is in a list", 0)?;
        hold(self.heap.tallies.committed() <= self.limit.max(reserved), "the limit is kept", 0)?;
        self.check_blocks()?;
        self.check_extents()
    }

    /// Walks one segment. Returns its bytes and counts its free pieces, those in slabs too.
    fn check_segment(&self, first: PieceId, free: &mut usize) -> Result<u64, Broken> {
        let mut bytes = 0;
        let mut at = self.heap.home.pieces[first].start;
        let mut id = self.heap.home.pieces[first].next;
        while self.heap.home.pieces[id].state != State::Edge {
            let piece = &self.heap.home.pieces[id];
            hold(piece.start == at && piece.size > 0, "pieces lie side by side", at)?;
            hold(self.heap.home.pieces[piece.prev].next == id, "links agree", at)?;
            let next = &self.heap.home.pieces[piece.next];
            let merged = piece.state != State::Free
                || next.state != State::Free
                || piece.list != next.list
                || matches!(
                    self.heap.home.lists[piece.list].owner,
                    Owner::Nobody | Owner::Held(_) | Owner::Evicted
                );
            hold(merged, "free neighbours of one list are one piece", at)?;
            *free += usize::from(piece.state == State::Free);
            if piece.state == State::Slab {
                let inner = self.check_segment(piece.inside, free)?;
                hold(inner == piece.size, "a slab's pieces cover it", at)?;
            }
            at += piece.size;
            bytes += piece.size;
            id = piece.next;
        }
        hold(self.heap.home.pieces[id].start == at, "a segment ends at its edge", at)?;
        Ok(bytes)
    }

    fn check_blocks(&self) -> Result<(), Broken> {
        let (mut bytes, mut parts) = (0, HashSet::new());
        for (offset, live) in self.heap.home.live.iter(&self.heap.home.pieces) {
            match live {
                Live::Piece(id) => {
                    let piece = &self.heap.home.pieces[id];
                    hold(
                        piece.state == State::Live && piece.start == offset,
                        "a live block is a live piece",
                        offset,
                    )?;
                    bytes += piece.size;
                }
                Live::Stitched(index) => {
                    let block = &self.aliases.blocks[index as usize];
                    let mut size = 0;
                    for &part in &block.parts {
                        hold(
                            self.heap.home.pieces[part].state == State::Part,
                            "the parts of a stitched block are parts",
                            offset,
                        )?;
                        hold(parts.insert(part), "a part belongs to one block", offset)?;
                        size += self.heap.home.pieces[part].size;
                    }
                    hold(size == block.size, "a stitched block is as long as its parts", offset)?;
                    bytes += size;
                }
            }
        }
        hold(
            bytes == self.heap.tallies.allocated_bytes(),
            "the bytes of live blocks are counted as allocated",
            0,
        )
    }

    fn check_residency(&self, id: ExtentId, extent: &Extent) -> Result<(), Broken> {
        let here = extent.state == ExtentState::Resident;
        let mut broken = Ok(());
        self.heap.home.each_in(extent.start, extent.end(), |id| {
            let piece = &self.heap.home.pieces[id];
            if piece.state == State::Free && broken.is_ok() {
                let evicted = self.heap.home.lists[piece.list].owner == Owner::Evicted;
                let within = here || extent.start <= piece.start && piece.end() <= extent.end();
                broken = hold(
                    evicted != here && within,
                    "free pieces of an evicted extent are in a list of evicted pieces",
                    piece.start,
                );
            }
        });
        broken?;
        let live = here || extent.live == self.heap.home.live_in(id);
        hold(live, "a non-resident extent counts its live bytes", extent.start)
    }

    fn check_extents(&self) -> Result<(), Broken> {
        let mut mappings = 0;
        for (id, extent) in self.heap.home.extents.iter() {
            mappings += u64::from(extent.state != ExtentState::Evicted);
            self.check_residency(id, extent)?;
        }
        for (id, alias) in self.aliases.iter() {
            mappings += alias.mapped(&self.heap.home.extents);
            for extent in &alias.extents {
                let extent = &self.heap.home.extents[*extent];
                hold(extent.domain == alias.domain, "an alias maps its own domain", alias.start)?;
                hold(extent.aliases.contains(&id), "an extent knows its aliases", extent.start)?;
            }
        }
        let planned = self.plans.is_empty();
        hold(!planned || mappings == self.heap.tallies.mappings, "mappings are counted", 0)
    }
}
