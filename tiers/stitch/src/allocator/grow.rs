//! New memory: where it goes, how much of it, and which free pieces it completes.
//!
//! Two ways to a large block are compared, and the one that reserves less is taken (at home where they are equal):
//!
//! ```text
//! extend:   … free ][ new ]            the free run before a hole, or before the end, is made longer
//! stitch:   [..free][free][new][free..]   everything free goes into an alias, the rest is new
//! ```

use glake_units::Bytes;

use super::Allocator;
use super::miss::{Runs, Want};
use super::outcome::{Carved, Grown, Pending};
use crate::StitchError;
use crate::alias::{Alias, Span};
use crate::free_list::Class;
use crate::ids::{DomainId, Epoch, ExtentId};
use crate::plan::{Outcome, Plan, Step, Stitch};
use crate::run::Run;

/// Home ranges in alias order, and what has to be grown among them.
#[derive(Debug)]
struct Selection {
    /// The first begins anywhere in its first extent, the last ends anywhere in its last; the others are whole extents.
    ranges: Vec<(u64, u64)>,
    /// How much of the last range lies in an extent that is not free as a whole.
    tail: u64,
    /// What has to be grown, in front of the tail.
    missing: u64,
}

impl Selection {
    /// Makes the new range `total` long instead of `missing`: less of the tail is needed, or none of it. Returns how much
    /// of the new range is used, and its place among the ranges.
    fn grow_to(&mut self, total: u64) -> (u64, usize) {
        let spared = (total - self.missing).min(self.tail);
        if let Some((start, end)) = self.ranges.pop()
            && start < end - spared
        {
            self.ranges.push((start, end - spared));
        }
        let behind = self.tail > spared;
        (self.missing + spared, self.ranges.len() - usize::from(behind))
    }
}

/// Extents of a growth are so many times larger, where it holds so many of them.
const LARGER: [(u64, u64); 2] = [(4, 2), (2, 1)];

/// An alias completed by growth is worth its mappings if for each of them it saves so much of an extent: making one
/// costs about as much as mapping one more time.
const WORTH: (u64, u64) = (3, 4);

/// So many extents of one size as hold `bytes`.
fn side_by_side(bytes: u64, size: u64) -> Vec<u64> {
    #[allow(clippy::cast_possible_truncation)]
    let count = bytes.div_ceil(size) as usize;
    vec![size; count]
}

impl Allocator {
    pub(super) fn extent_size(&self, domain: DomainId) -> Bytes {
        self.domains[domain].options.extent.unwrap_or(self.settings.extent)
    }

    pub(super) fn reserved(&self) -> u64 {
        self.stats.reserved() + self.planned
    }

    /// The sizes of new extents for so many bytes. Setting access costs the same for any extent, so a large growth takes
    /// few large ones; near the limit they are small, so that little of them stays unused. A domain that has a size of its own has a
    /// reason for it: there they are small only where others do not fit.
    fn extent_sizes(&self, missing: u64, domain: DomainId) -> Vec<u64> {
        let (full, small) = (self.extent_size(domain).get(), self.settings.extent_near_limit.get());
        let own = self.domains[domain].options.extent.is_some();
        let near = if own { self.settings.limit.get() } else { self.near_limit() };
        if self.reserved() + missing.next_multiple_of(full) > near {
            return side_by_side(missing, small.min(full));
        }
        let large =
            LARGER.iter().find(|(times, few)| missing >= few * times * full).map(|(times, _)| times * full);
        let Some(large) = large else { return side_by_side(missing, full) };
        let mut sizes = side_by_side(missing - missing % large, large);
        sizes.extend(side_by_side(missing % large, full));
        sizes
    }

    /// Where extents become small: a limit that was set asks for tight packing long before the device itself does.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
    fn near_limit(&self) -> u64 {
        let settings = &self.settings;
        let part = if settings.limit < settings.memory { settings.near_limit } else { settings.near_full };
        (settings.limit.get() as f64 * part) as u64
    }

    fn fits_limit(&self, sizes: &[u64]) -> bool {
        let growth: u64 = sizes.iter().sum();
        self.reserved() + growth <= self.settings.limit.get()
    }

    /// Names new extents in a range that its zone has set aside, and the steps that make them.
    fn grow(
        &mut self,
        start: u64,
        sizes: &[u64],
        used: u64,
        domain: DomainId,
        class: Class,
        steps: &mut Vec<Step>,
    ) -> Grown {
        let size: u64 = sizes.iter().sum();
        let extents = self.add_extents(start, sizes, domain, class);
        for &extent in &extents {
            let Bounds { offset, size } = self.bounds(extent);
            steps.push(Step::Create { extent, size, domain });
            steps.push(Step::Map { extent, offset, size });
        }
        steps.push(Step::Access { offset: Bytes::new(start), size: Bytes::new(size), domain });
        self.planned += size;
        Grown { start, size, extents, domain, class, used }
    }

    fn bounds(&self, extent: ExtentId) -> Bounds {
        let extent = &self.extents[extent];
        Bounds { offset: Bytes::new(extent.start), size: Bytes::new(extent.size) }
    }

    /// One more extent of slabs.
    pub(super) fn plan_slab(&mut self, want: Want, grow: bool) -> Result<Outcome, StitchError> {
        if self.take_idle_slabs(want.domain)
            && let Some(grant) =
                self.take_small(want.lists, self.domains[want.domain].passed_slabs, want.size, want.requested)
        {
            return Ok(Outcome::Ready(grant));
        }
        let sizes = self.extent_sizes(self.settings.slab.get(), want.domain);
        let total: u64 = sizes.iter().sum();
        if grow
            && self.fits_limit(&sizes)
            && let Some(start) = self.slabs.take(total)
        {
            let mut steps = Vec::new();
            let grown = self.grow(start, &sizes, 0, want.domain, Class::Slabs, &mut steps);
            let id = self.pend(Pending::Slabs { list: want.lists.slabs, grown });
            return Ok(Outcome::Work(Plan { id, steps, stitch: None }));
        }
        self.shortage(&want, &Runs::default(), grow)
    }

    /// The least growth that serves a large request.
    pub(super) fn plan_growth(&mut self, want: &Want, runs: &Runs) -> Option<Plan> {
        let extended = runs
            .home()
            .iter()
            .filter_map(|run| {
                let sizes = self.extent_sizes(want.size - run.size(), want.domain);
                let total: u64 = sizes.iter().sum();
                (self.home.room_at(run.end) >= total).then_some((total, Some(*run), sizes))
            })
            .min_by_key(|(total, ..)| *total);
        let (total, run, sizes) = extended.unwrap_or_else(|| {
            let sizes = self.extent_sizes(want.size, want.domain);
            (sizes.iter().sum(), None, sizes)
        });
        if self.may_stitch(want) && !self.settings.stitch_only_when_full {
            let selection = self.select(want.size, &runs.all);
            let stitched: u64 = self.extent_sizes(selection.missing, want.domain).iter().sum();
            let saved = total.saturating_sub(stitched);
            let mapped = self.touched(&selection.ranges) as u64 * self.extent_size(want.domain).get();
            let worth = saved > 0 && saved * WORTH.1 >= mapped * WORTH.0;
            if !selection.ranges.is_empty() && (worth || !self.fits_limit(&sizes)) {
                return self.plan_selection(want, &runs.all, selection);
            }
        }
        if !self.fits_limit(&sizes) {
            return None;
        }
        let start = match run {
            Some(run) => self.home.take_at(run.end, total).then_some(run.end),
            None => self.home.take(total),
        }?;
        let carved = run.map(|run| self.carve(&run, run.start, run.end));
        let used = want.size - run.map_or(0, |run| run.size());
        let mut steps = Vec::new();
        let grown = self.grow(start, &sizes, used, want.domain, Class::Large, &mut steps);
        let id = self.pend(Pending::Extended { want: *want, carved, grown });
        Some(Plan { id, steps, stitch: None })
    }

    /// An alias over free pieces that are enough without growing.
    pub(super) fn plan_stitch(&mut self, want: &Want, runs: &Runs) -> Option<Plan> {
        let selection = self.select(want.size, &runs.all);
        if selection.missing > 0 {
            return None;
        }
        self.plan_selection(want, &runs.all, selection)
    }

    /// Chooses free ranges for an alias: the longest first, so that few are broken, and for the end the shortest that
    /// is enough. A free suffix of an extent can only come first, a free prefix only last.
    fn select(&self, size: u64, runs: &[Run]) -> Selection {
        let mut candidates: Vec<Candidate> = runs
            .iter()
            .map(|run| self.candidate(run))
            .filter(|candidate| candidate.first <= candidate.last)
            .collect();
        candidates.sort_unstable_by_key(|candidate| std::cmp::Reverse((candidate.whole(), candidate.start)));
        let mut ranges = Vec::new();
        let mut missing = size;
        let mut rest = candidates.as_slice();
        while missing > 0
            && let Some((longest, shorter)) = rest.split_first()
        {
            if longest.whole() == 0 {
                break;
            }
            if longest.whole() >= missing {
                let shortest =
                    rest.iter().rev().find(|candidate| candidate.whole() >= missing).unwrap_or(longest);
                ranges.push((shortest.first, shortest.first + missing));
                return Selection { ranges, tail: 0, missing: 0 };
            }
            missing -= longest.whole();
            ranges.push((longest.first, longest.last));
            rest = shorter;
        }
        self.add_ends(&candidates, ranges, missing)
    }

    /// Completes whole extents by a suffix in front and a prefix behind.
    fn add_ends(&self, candidates: &[Candidate], mut ranges: Vec<(u64, u64)>, mut missing: u64) -> Selection {
        let head = candidates.iter().max_by_key(|candidate| candidate.head()).filter(|head| head.head() > 0);
        // An alias maps an extent once: the suffix and the prefix are of two.
        let apart = |tail: &&Candidate| {
            head.is_none_or(|head| {
                head.start != tail.start && self.extents.at(head.start) != self.extents.at(tail.end - 1)
            })
        };
        let tail = candidates
            .iter()
            .filter(apart)
            .max_by_key(|candidate| candidate.tail())
            .filter(|tail| tail.tail() > 0);
        if missing > 0
            && let Some(head) = head
        {
            let take = head.head().min(missing);
            missing -= take;
            match ranges.iter().position(|range| range.0 == head.first && head.whole() > 0) {
                Some(at) => {
                    let (_, end) = ranges.remove(at);
                    ranges.insert(0, (head.first - take, end));
                }
                None => ranges.insert(0, (head.first - take, head.first)),
            }
        }
        let mut used_tail = 0;
        if missing > 0
            && let Some(tail) = tail
        {
            let take = tail.tail().min(missing);
            missing -= take;
            match ranges.iter().skip(1).position(|range| range.0 == tail.first && tail.whole() > 0) {
                Some(at) => {
                    let (start, _) = ranges.remove(at + 1);
                    ranges.push((start, tail.last + take));
                }
                None => ranges.push((tail.last, tail.last + take)),
            }
            used_tail = take;
        }
        Selection { ranges, tail: used_tail, missing }
    }

    /// How many extents an alias over home ranges maps.
    fn touched(&self, ranges: &[(u64, u64)]) -> usize {
        ranges.iter().map(|&(start, end)| self.extents.touching(start, end).count()).sum()
    }

    fn candidate(&self, run: &Run) -> Candidate {
        let (first, last) = self.extents.boundaries(run.start, run.end);
        Candidate { start: run.start, first, last, end: run.end }
    }

    /// Sets a selection aside, grows what it misses, and says how its alias is made.
    fn plan_selection(&mut self, want: &Want, runs: &[Run], selection: Selection) -> Option<Plan> {
        let mut selection = selection;
        let sizes = self.extent_sizes(selection.missing, want.domain);
        let growth: u64 = sizes.iter().sum();
        let (used, grow_at) = if growth > 0 { selection.grow_to(growth) } else { (0, 0) };
        let ranges = selection.ranges;
        let touched = self.touched(&ranges);
        let mappings = self.stats.mappings + (touched + 2 * sizes.len()) as u64;
        if !self.fits_limit(&sizes) || mappings > self.settings.max_mappings {
            return None;
        }
        let start = if growth > 0 { Some(self.home.take(growth)?) } else { None };
        let mut steps = Vec::new();
        let grown = start.map(|start| self.grow(start, &sizes, used, want.domain, Class::Large, &mut steps));
        let mut parts = ranges.clone();
        if let Some(grown) = &grown {
            parts.insert(grow_at, (grown.start, grown.start + used));
        }
        let extents: Vec<ExtentId> =
            parts.iter().flat_map(|&(start, end)| self.extents.touching(start, end)).collect();
        let length = extents.iter().map(|&extent| self.extents[extent].size).sum();
        let Some(address) = self.elsewhere.take(length) else {
            if let Some(grown) = grown {
                self.undo_growth(&grown);
            }
            return None;
        };
        let offset =
            parts.first().map_or(0, |&(start, _)| start - self.extents[self.extents.at(start)].start);
        let spans = self.map_alias(address, &extents, want.domain, &mut steps);
        let alias = Alias {
            start: address,
            size: length,
            domain: want.domain,
            extents,
            spans,
            blocks: 0,
            epoch: Epoch(0),
            used: 0,
        };
        let home: Vec<_> = ranges.iter().map(|&(start, end)| (start, end - start)).collect();
        let carved: Vec<Carved> = self.carve_all(runs, &home);
        let stitch = Stitch {
            alias: crate::ids::AliasId(0),
            wanted: Bytes::new(want.requested),
            ranges: parts.len(),
            extents: alias.extents.len(),
            grown: Bytes::new(growth),
        };
        let grown = grown.map(|grown| (grow_at, grown));
        let id = self.pend(Pending::Stitched { want: *want, alias, offset, carved, grown });
        Some(Plan { id, steps, stitch: Some(stitch) })
    }

    fn undo_growth(&mut self, grown: &Grown) {
        for extent in &grown.extents {
            self.extents.remove(*extent);
        }
        self.home.give_back(grown.start, grown.size);
        self.planned -= grown.size;
    }

    fn map_alias(
        &self,
        address: u64,
        extents: &[ExtentId],
        domain: DomainId,
        steps: &mut Vec<Step>,
    ) -> Vec<Span> {
        let mut spans: Vec<Span> = Vec::new();
        let mut offset = 0;
        for &extent in extents {
            let Bounds { offset: home, size } = self.bounds(extent);
            let (home, size) = (home.get(), size.get());
            steps.push(Step::Map { extent, offset: Bytes::new(address + offset), size: Bytes::new(size) });
            match spans.last_mut().filter(|span| span.home + span.size == home) {
                Some(span) => span.size += size,
                None => spans.push(Span { offset, home, size }),
            }
            offset += size;
        }
        steps.push(Step::Access { offset: Bytes::new(address), size: Bytes::new(offset), domain });
        spans
    }
}

struct Bounds {
    offset: Bytes,
    size: Bytes,
}

/// A free run with its outermost boundaries between extents.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    start: u64,
    first: u64,
    last: u64,
    end: u64,
}

impl Candidate {
    fn whole(&self) -> u64 {
        self.last - self.first
    }

    fn head(&self) -> u64 {
        self.first - self.start
    }

    fn tail(&self) -> u64 {
        self.end - self.last
    }
}
