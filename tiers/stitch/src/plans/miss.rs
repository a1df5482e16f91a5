//! The slow path, for requests that no free piece fits: join, reuse, stitch, borrow or grow.
//!
//! ```text
//! reuse an alias ─ join ─ held memory ─ borrow ─ stitch ─ grow ─ stitch smaller pieces ─ take back ─ more held memory ─ wait ─ refuse
//! └────────────── Ready ───────────────┘   └──────────────── Work ──────────────────────┘   Ready, Work          Wait
//! ```
//!
//! Held memory comes first if there is no room to grow: a copy that leaves the GPU still reads it, and while such copies run, each mapped
//! extent costs the host about a millisecond (decision 12). A wait of the stream for one of them is shorter.
//!
//! Two ways to grow for a large block are compared, and the one that reserves less is taken (at home if they are equal):
//!
//! ```text
//! extend:   … free ][ new ]            the free run before a hole, or before the end, is made longer
//! stitch:   [..free][free][new][free..]   all free memory goes into an alias, the rest is new
//! ```

use glake_units::Bytes;

use super::selection::Selection;
use super::{Draft, Grown, NewAlias, Pending, Trim};
use crate::alias::{Alias, Aliases};
use crate::domain::StreamLists;
use crate::error::StitchError;
use crate::free_list::Class;
use crate::heap::{Heap, Runs, SMALL_LIMIT, Want, packed};
use crate::ids::{AliasId, ExtentId, PointNumber};
use crate::piece;
use crate::plan::{Grant, Request, Stitch};
use crate::settings::{Borrow, Settings};

/// Number of units of the free slabs that are not stitched into large blocks.
const KEPT_SLAB_UNITS: u64 = 2;

/// Largest ratio of a held piece's size to the request at which a wait is preferred to mapping: cut up further, the piece would serve no
/// request of its size any more.
const FITTING: u64 = 8;

/// Bytes, as a fraction of a unit, that an alias completed by growth must save for each of its mappings: making an alias costs about as
/// much as one more mapping.
const WORTH: (u64, u64) = (3, 4);

/// Answer to a miss.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // it is taken apart at once
pub(crate) enum Answer {
    /// Served at once after all.
    Ready(Grant),
    /// Served with driver work.
    Work(Draft),
    /// Served once this completion point has passed.
    Wait(PointNumber),
}

/// A request that missed.
#[derive(Debug)]
pub(crate) struct Miss<'a> {
    heap: &'a mut Heap,
    aliases: &'a mut Aliases,
    settings: &'a Settings,
    want: Want,
    /// Unit of growth of the request's domain.
    unit: u64,
    /// Whether the driver may be asked for new memory.
    grow: bool,
    /// Whether the stream can wait for the holds that keep memory from it.
    pub(crate) waits: bool,
}

impl<'a> Miss<'a> {
    /// Creates a miss of a stream whose free lists exist.
    pub(crate) fn new(
        request: &Request,
        lists: StreamLists,
        grow: bool,
        heap: &'a mut Heap,
        aliases: &'a mut Aliases,
        settings: &'a Settings,
    ) -> Self {
        let domain = &heap.home.domains[request.domain];
        let unit = settings.unit(domain.options.extent, domain.held);
        let stitched = settings.stitched_from(
            domain.options.extent,
            unit,
            domain.streams.len(),
            heap.tallies.committed(),
        );
        let want = Want {
            size: packed(request.size),
            requested: request.size.get(),
            lists,
            domain: request.domain,
            stitch_from: settings.fragment_limit.map_or(stitched, Bytes::get),
        };
        Miss { heap, aliases, settings, want, unit, grow, waits: true }
    }

    /// Tries the ways to serve the request in order.
    ///
    /// # Errors
    /// [`StitchError::OutOfMemory`] if all of them fail.
    pub(crate) fn answer(mut self) -> Result<Answer, StitchError> {
        if self.want.size <= SMALL_LIMIT.get() {
            return self.small();
        }
        if let Some(grant) = self.own_or_passed() {
            return Ok(Answer::Ready(grant));
        }
        let mine = self.runs(false);
        if let Some(grant) = self.take_from_runs(&mine) {
            return Ok(Answer::Ready(grant));
        }
        if !self.may_grow()
            && let Some(run) =
                self.held_piece().filter(|run| run.size() <= self.want.size + self.want.size / FITTING)
        {
            return Ok(Answer::Ready(self.heap.take_run(&self.want, &run)));
        }
        if self.settings.borrow == Borrow::Wait
            && let Some(answer) = self.borrowed()
        {
            return Ok(answer);
        }
        if self.stitches_early()
            && let Some(draft) = self.stitched(&mine)
        {
            return Ok(Answer::Work(draft));
        }
        if self.grow
            && let Some(draft) = self.grown(&mine)
        {
            return Ok(Answer::Work(draft));
        }
        self.shortage(&mine)
    }

    fn may_stitch(&self) -> bool {
        let want = &self.want;
        let allowed = self.settings.alias && self.heap.home.domains[want.domain].options.alias;
        allowed && want.size >= want.stitch_from
    }

    fn stitches_early(&self) -> bool {
        self.may_stitch() && !self.settings.stitch_only_when_full
    }

    fn runs(&self, borrow: bool) -> Runs {
        self.heap.runs(&self.want, borrow, KEPT_SLAB_UNITS * self.unit)
    }

    /// Serves the request from an alias over the stream's own pieces, else from a passed piece. A hit leaves this choice open.
    fn own_or_passed(&mut self) -> Option<Grant> {
        if self.may_stitch() {
            let own = self.heap.home.runs_in([self.want.lists.large].into_iter());
            let reused = self.reuse(&own);
            if reused.is_some() {
                return reused;
            }
        }
        self.heap.take_passed(&self.want)
    }

    /// Serves the request from contiguous free bytes, at home or in an alias that is already mapped.
    fn take_from_runs(&mut self, runs: &Runs) -> Option<Grant> {
        if let Some(run) = runs.shortest(self.want.size) {
            return Some(self.heap.take_run(&self.want, &run));
        }
        if self.may_stitch() { self.reuse(&runs.all) } else { None }
    }

    fn reuse(&mut self, runs: &[piece::Run]) -> Option<Grant> {
        let longest = self.settings.longest_reused(self.want.size);
        self.aliases.reuse(self.heap, &self.want, runs, longest)
    }

    /// Serves the request from memory pending on other streams: one piece, several that touch, or several stitched.
    fn borrowed(&mut self) -> Option<Answer> {
        if !self.heap.home.domains[self.want.domain].options.lend {
            return None;
        }
        if let Some(run) = self.heap.lent_piece(&self.want) {
            return Some(Answer::Ready(self.heap.take_run(&self.want, &run)));
        }
        let all = self.runs(true);
        if let Some(grant) = self.take_from_runs(&all) {
            return Some(Answer::Ready(grant));
        }
        let stitched = if self.stitches_early() { self.stitched(&all) } else { None };
        stitched.map(Answer::Work)
    }

    /// Returns whether all of the request could be new memory.
    fn may_grow(&self) -> bool {
        self.grow && self.fits(&self.extent_sizes(self.want.size))
    }

    fn is_any_held(&self) -> bool {
        let is_any = self.heap.home.lists[self.want.lists.held].bytes > 0;
        is_any && self.waits && self.want.size > SMALL_LIMIT.get()
    }

    /// Returns the best-fitting piece that the stream freed and a read hold still protects; `None` if the request may not use such pieces.
    fn held_piece(&self) -> Option<piece::Run> {
        if self.is_any_held() { self.heap.held_piece(&self.want) } else { None }
    }

    /// Serves the request from held memory of the stream: one piece, several that touch, or several stitched or extended by growth.
    fn held(&mut self) -> Option<Answer> {
        if !self.is_any_held() {
            return None;
        }
        if let Some(run) = self.held_piece() {
            return Some(Answer::Ready(self.heap.take_run(&self.want, &run)));
        }
        let all = self.heap.held_runs(&self.want, KEPT_SLAB_UNITS * self.unit);
        if let Some(grant) = self.take_from_runs(&all) {
            return Some(Answer::Ready(grant));
        }
        let stitched = if self.may_stitch() { self.stitched(&all) } else { None };
        let draft = stitched.or_else(|| if self.grow { self.grown(&all) } else { None });
        draft.map(Answer::Work)
    }

    /// Plans an alias over free pieces that suffice without growth.
    fn stitched(&mut self, runs: &Runs) -> Option<Draft> {
        let selection = Selection::of(self.want.size, &runs.all, &self.heap.home.extents);
        if selection.missing > 0 {
            return None;
        }
        self.selected(runs, selection)
    }

    /// Serves a small request from an entirely free slab of another stream, else plans one more extent of slabs.
    fn small(self) -> Result<Answer, StitchError> {
        let want = self.want;
        if self.heap.take_idle_slabs(want.domain) {
            let passed = self.heap.home.domains[want.domain].passed_slabs;
            if let Some(grant) = self.heap.take_small(want.lists, passed, want.size, want.requested) {
                return Ok(Answer::Ready(grant));
            }
        }
        let sizes = self.extent_sizes(self.settings.slab.get());
        let total: u64 = sizes.iter().sum();
        if self.grow
            && self.fits(&sizes)
            && let Some(start) = self.heap.home.reserve(want.domain, Class::Slabs, total)
        {
            let grown = Grown::new(self.heap, start, &sizes, want.domain, Class::Slabs);
            let steps = grown.steps(self.heap);
            let pending = Pending::Slabs { list: want.lists.slabs, grown };
            return Ok(Answer::Work(Draft { pending, steps, stitch: None }));
        }
        self.shortage(&Runs::default())
    }

    fn extent_sizes(&self, missing: u64) -> Vec<u64> {
        let domain = &self.heap.home.domains[self.want.domain];
        let committed = self.heap.tallies.committed();
        let sizes = self.settings.extent_sizes(missing, domain.options.extent, domain.held, committed);
        // A plain block lies in one allocation.
        if domain.options.plain { vec![sizes.iter().sum()] } else { sizes }
    }

    fn fits(&self, sizes: &[u64]) -> bool {
        self.settings.allows(sizes, self.heap.tallies.committed())
    }

    /// Plans the smallest growth that serves a large request.
    fn grown(&mut self, runs: &Runs) -> Option<Draft> {
        let want = self.want;
        let is_plain = self.heap.home.domains[want.domain].options.plain;
        let extended = if is_plain { &[] } else { runs.home() };
        let extended = extended
            .iter()
            .filter_map(|run| {
                let sizes = self.extent_sizes(want.size - run.size());
                let total: u64 = sizes.iter().sum();
                (self.heap.home.large.room_at(run.end) >= total).then_some((total, Some(*run), sizes))
            })
            .min_by_key(|(total, ..)| *total);
        let (total, run, sizes) = extended.unwrap_or_else(|| {
            let sizes = self.extent_sizes(want.size);
            (sizes.iter().sum(), None, sizes)
        });
        if self.stitches_early() {
            let home = &self.heap.home;
            let selection = Selection::of(want.size, &runs.all, &home.extents);
            let stitched: u64 = self.extent_sizes(selection.missing).iter().sum();
            let saved = total.saturating_sub(stitched);
            let mapped = selection.touched(&home.extents) as u64 * self.unit;
            let worth = saved > 0 && saved * WORTH.1 >= mapped * WORTH.0;
            if !selection.ranges.is_empty() && (worth || !self.fits(&sizes)) {
                return self.selected(runs, selection);
            }
        }
        if !self.fits(&sizes) {
            return None;
        }
        let start = match run {
            Some(run) => self.heap.home.large.take_at(run.end, total).then_some(run.end),
            None => self.heap.home.reserve(want.domain, Class::Large, total),
        }?;
        let carved = run.map(|run| self.heap.home.carve(&run, run.start, run.end));
        let mut grown = Grown::new(self.heap, start, &sizes, want.domain, Class::Large);
        grown.used = want.size - run.map_or(0, |run| run.size());
        let steps = grown.steps(self.heap);
        Some(Draft { pending: Pending::Extended { want, carved, grown }, steps, stitch: None })
    }

    /// Carves a selection, grows the missing part, and drafts the plan of its alias.
    fn selected(&mut self, runs: &Runs, mut selection: Selection) -> Option<Draft> {
        let want = self.want;
        let sizes = self.extent_sizes(selection.missing);
        let growth: u64 = sizes.iter().sum();
        let (used, grow_at) = if growth > 0 { selection.grow_to(growth) } else { (0, 0) };
        let touched = selection.touched(&self.heap.home.extents);
        let mappings = self.heap.tallies.mappings + (touched + 2 * sizes.len()) as u64;
        if !self.fits(&sizes) || mappings > self.settings.max_mappings {
            return None;
        }
        let (mut parts, mut steps, mut grown) = (selection.ranges.clone(), Vec::new(), None);
        if growth > 0 {
            let start = self.heap.home.large.take(growth)?;
            let mut new = Grown::new(self.heap, start, &sizes, want.domain, Class::Large);
            new.used = used;
            steps = new.steps(self.heap);
            parts.insert(grow_at, (new.start, new.start + used));
            grown = Some((grow_at, new));
        }
        let all = &self.heap.home.extents;
        let extents: Vec<ExtentId> =
            parts.iter().flat_map(|&(start, end)| all.touching(start, end)).collect();
        let length = extents.iter().map(|&extent| all[extent].size).sum();
        let Some(address) = self.aliases.zone.take(length) else {
            if let Some((_, grown)) = grown {
                grown.depart(self.heap);
            }
            return None;
        };
        let offset = parts.first().map_or(0, |&(start, _)| start - all[all.at(start)].start);
        let alias = Alias::new(address, want.domain, extents, all);
        alias.map(all, &mut steps);
        let stitch = Stitch {
            alias: AliasId(0),
            wanted: Bytes::new(want.requested),
            ranges: parts.len(),
            extents: alias.extents.len(),
            grown: Bytes::new(growth),
        };
        let home: Vec<_> = selection.ranges.iter().map(|&(start, end)| (start, end - start)).collect();
        let carved = self.heap.home.carve_all(&runs.all, &home);
        let pending = Pending::Stitched(NewAlias { want, alias, offset, carved, grown });
        Some(Draft { pending, steps, stitch: Some(stitch) })
    }

    /// Tries the last ways before a refusal: stitch smaller pieces, return unused memory of other owners, wait.
    fn shortage(mut self, runs: &Runs) -> Result<Answer, StitchError> {
        if self.settings.fragment_limit.is_none() {
            self.want.stitch_from = self.want.stitch_from.min(self.settings.extent_near_limit.get());
        }
        if self.may_stitch() {
            if let Some(draft) = self.stitched(runs) {
                return Ok(Answer::Work(draft));
            }
            if self.grow
                && let Some(draft) = self.grown(runs)
            {
                return Ok(Answer::Work(draft));
            }
        }
        let back = Trim::new(self.heap, self.aliases).of_all(Bytes::MAX);
        if back.is_none()
            && let Some(answer) = self.held()
        {
            return Ok(answer);
        }
        self.heap.tallies.counters.retries += 1;
        if let Some(draft) = back {
            return Ok(Answer::Work(draft));
        }
        if let Some(point) = self.heap.oldest_pending() {
            self.heap.tallies.counters.host_waits += 1;
            return Ok(Answer::Wait(point));
        }
        self.heap.tallies.counters.ooms += 1;
        Err(self.heap.out_of_memory(Bytes::new(self.want.requested), self.settings.most()))
    }
}
