//! The slow path: nothing that is free fits as it lies. What can be joined, reused, stitched, borrowed or grown?

use glake_units::Bytes;
use smallvec::SmallVec;

use super::outcome::{Carved, Former};
use super::{Allocator, SMALL_LIMIT, Stitched, packed};
use crate::domain::StreamLists;
use crate::error::StitchError;
use crate::free_list::Owner;
use crate::ids::{AliasId, DomainId, FreeListId, StreamKey};
use crate::live::Live;
use crate::piece::State;
use crate::plan::{Grant, Outcome, Request};
use crate::run::{self, Run};
use crate::settings::{Borrow, WaitRules};

/// So much of the free slabs is not stitched into large blocks.
const KEPT_SLAB_EXTENTS: u64 = 2;

/// A large request on its way through the slow path.
#[derive(Clone, Copy, Debug)]
pub(super) struct Want {
    pub(super) size: u64,
    pub(super) requested: u64,
    pub(super) lists: StreamLists,
    pub(super) domain: DomainId,
    /// Requests below are not stitched.
    pub(super) stitch_from: u64,
}

/// What one stream may take, in the order of addresses: at home, then whole slabs, which only an alias can use.
#[derive(Debug, Default)]
pub(super) struct Runs {
    pub(super) all: Vec<Run>,
    home: usize,
}

impl Runs {
    pub(super) fn home(&self) -> &[Run] {
        &self.all[..self.home]
    }
}

impl Allocator {
    /// Says how a request that is no hit can be served: at once after all, with driver work, after a wait, or not.
    ///
    /// With `grow` false nothing new is asked of the driver (it has just said that it has no more).
    ///
    /// # Errors
    /// [`StitchError::OutOfMemory`] after everything else, [`StitchError::LargerThanDevice`],
    /// [`StitchError::UnknownDomain`].
    pub fn plan(&mut self, request: &Request, grow: bool) -> Result<Outcome, StitchError> {
        let memory = self.settings.memory;
        if request.size > memory {
            self.stats.counters.ooms += 1;
            return Err(StitchError::LargerThanDevice { wanted: request.size, memory });
        }
        if self.domain(request.domain)?.sealed {
            return Err(StitchError::Sealed { domain: request.domain });
        }
        let lists = self.lists_for(request.domain, request.stream);
        if let Some(grant) = self.take(request) {
            return Ok(Outcome::Ready(grant));
        }
        let size = packed(request.size);
        let want = Want {
            size,
            requested: request.size.get(),
            lists,
            domain: request.domain,
            stitch_from: self.settings.fragment_limit.unwrap_or(self.extent_size(request.domain)).get(),
        };
        if size <= SMALL_LIMIT.get() {
            return self.plan_slab(want, grow);
        }
        if let Some(grant) = self.take_own_or_passed(&want) {
            return Ok(Outcome::Ready(grant));
        }
        let mine = self.runs(&want, false);
        if let Some(grant) = self.take_from_runs(&want, &mine) {
            return Ok(Outcome::Ready(grant));
        }
        if let Borrow::Wait(rules) = self.settings.borrow
            && let Some(outcome) = self.borrow(&want, rules)
        {
            return Ok(outcome);
        }
        let stitching = self.may_stitch(&want);
        if stitching
            && !self.settings.stitch_only_when_full
            && let Some(plan) = self.plan_stitch(&want, &mine)
        {
            return Ok(Outcome::Work(plan));
        }
        if let Borrow::Wait(rules) = self.settings.borrow
            && let Some(outcome) = self.borrow(&want, rules)
        {
            return Ok(outcome);
        }
        if grow && let Some(plan) = self.plan_growth(&want, &mine) {
            return Ok(Outcome::Work(plan));
        }
        self.shortage(&want, &mine, grow)
    }

    pub(super) fn may_stitch(&self, want: &Want) -> bool {
        self.settings.alias && self.domains[want.domain].options.alias && want.size >= want.stitch_from
    }

    /// What [`Allocator::take`] left undecided: an alias over the stream's own pieces comes before passed ones.
    fn take_own_or_passed(&mut self, want: &Want) -> Option<Grant> {
        let own = run::join(self.ranges_in([want.lists.large].into_iter()));
        let reused = if self.may_stitch(want) { self.reuse_alias(want, &own) } else { None };
        if reused.is_some() {
            return reused;
        }
        let passed = self.domains[want.domain].passed_large;
        let piece = self.lists[passed.index()].take_best(&mut self.pieces, want.size)?;
        Some(self.hand_out(piece, State::Live, want.lists.large, want.requested))
    }

    /// What the stream may take, joined whichever free lists it is in; with `borrow`, also what is pending on others.
    pub(super) fn runs(&self, want: &Want, borrow: bool) -> Runs {
        let domain = &self.domains[want.domain];
        let others = domain.streams.iter().filter(|lists| borrow && lists.stream != want.lists.stream);
        let others: SmallVec<[StreamLists; 4]> = others.copied().collect();
        let large =
            [want.lists.large, domain.passed_large].into_iter().chain(others.iter().map(|lists| lists.large));
        let slabs =
            [want.lists.slabs, domain.passed_slabs].into_iter().chain(others.iter().map(|lists| lists.slabs));
        let mut all = run::join(self.ranges_in(large));
        let home = all.len();
        all.extend(self.spare(run::join(self.ranges_in(slabs))));
        Runs { all, home }
    }

    /// Free slabs but for the first few, which small requests will soon want.
    fn spare(&self, slabs: Vec<Run>) -> impl Iterator<Item = Run> {
        let mut kept = KEPT_SLAB_EXTENTS * self.settings.extent.get();
        slabs.into_iter().skip_while(move |run| {
            let keep = kept > 0;
            kept = kept.saturating_sub(run.size());
            keep
        })
    }

    fn ranges_in(&self, lists: impl Iterator<Item = FreeListId>) -> Vec<Run> {
        let pieces = lists.flat_map(|list| self.lists[list.index()].bins.iter());
        let ranges =
            pieces.map(|id| Run { start: self.pieces[id].start, end: self.pieces[id].end(), first: id });
        ranges.collect()
    }

    /// Serves a request from free bytes that lie side by side, at home or in an alias that is already mapped.
    fn take_from_runs(&mut self, want: &Want, runs: &Runs) -> Option<Grant> {
        let fitting = runs.home().iter().filter(|run| run.size() >= want.size).min_by_key(|run| run.size());
        if let Some(run) = fitting {
            let carved = self.carve(run, run.start, run.start + want.size);
            return Some(self.hand_out_carved(want, carved));
        }
        if !self.may_stitch(want) {
            return None;
        }
        self.reuse_alias(want, &runs.all)
    }

    /// Hands out a carved home range; what others freed is waited for.
    pub(super) fn hand_out_carved(&mut self, want: &Want, carved: Carved) -> Grant {
        let waits = self.lenders(want, &carved.former);
        let mut grant = self.hand_out(carved.piece, State::Live, want.lists.large, want.requested);
        grant.waits = waits;
        grant
    }

    fn reuse_alias(&mut self, want: &Want, runs: &[Run]) -> Option<Grant> {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
        let longest = (want.size as f64 * self.settings.reuse_limit) as u64;
        let aliases = &self.domains[want.domain].aliases;
        let fitting = aliases
            .iter()
            .map(|&id| (id, &self.aliases[id]))
            .filter(|(_, alias)| (want.size..=longest).contains(&alias.size))
            .filter_map(|(id, alias)| alias.best_window(runs, want.size).map(|window| (id, window)));
        let (id, mut window) = fitting.min_by_key(|(_, window)| window.size)?;
        window.size = want.size;
        let ranges: Vec<_> = self.aliases[id].home_of(window).collect();
        let carved = self.carve_all(runs, &ranges);
        self.stats.counters.alias_reuses += 1;
        Some(self.hand_out_stitched(want, id, window.offset, carved))
    }

    /// Carves several home ranges out of the runs that they lie in.
    pub(super) fn carve_all(&mut self, runs: &[Run], ranges: &[(u64, u64)]) -> Vec<Carved> {
        ranges
            .iter()
            .filter_map(|&(start, size)| {
                let run = runs.get(runs.partition_point(|run| run.end <= start))?;
                Some(self.carve(run, start, start + size))
            })
            .collect()
    }

    /// Hands out a block at `offset` of an alias, its home ranges carved.
    pub(super) fn hand_out_stitched(
        &mut self,
        want: &Want,
        id: AliasId,
        offset: u64,
        carved: Vec<Carved>,
    ) -> Grant {
        let former: Vec<Former> = carved.iter().flat_map(|range| range.former.iter().copied()).collect();
        let edge = former.iter().any(|former| former.epoch > self.passed);
        if edge {
            self.lists[want.lists.large.index()].edge = self.moves;
        }
        let waits = self.lenders(want, &former);
        let parts = carved.into_iter().map(|range| range.piece).collect();
        let start = self.aliases[id].start + offset;
        let block = Stitched {
            alias: id,
            start,
            size: want.size,
            requested: want.requested,
            list: want.lists.large,
            slabs: want.lists.slabs,
            recorded: false,
            parts,
        };
        self.aliases.touch(id);
        let alias = &mut self.aliases[id];
        if alias.is_idle() {
            let idle = &mut self.stats.idle_alias_bytes;
            *idle = idle.saturating_sub(Bytes::new(alias.size));
        }
        alias.blocks += 1;
        #[allow(clippy::cast_possible_truncation)]
        let index = self.stitched.insert(block) as u32;
        self.live.insert(start, Live::Stitched(index));
        self.stats.handed_out(false, want.size, want.requested);
        self.stats.counters.edges += u64::from(edge);
        Grant { offset: Bytes::new(start), size: Bytes::new(want.size), edge, waits }
    }

    /// The streams that the owner of these pieces has to wait for.
    pub(super) fn lenders(&mut self, want: &Want, former: &[Former]) -> SmallVec<[StreamKey; 2]> {
        let mut waits = SmallVec::new();
        for former in former.iter().filter(|former| former.epoch > self.passed) {
            if let Owner::Stream(stream) = self.lists[former.list.index()].owner
                && stream != want.lists.stream
                && !waits.contains(&stream)
            {
                waits.push(stream);
            }
        }
        self.stats.counters.stream_waits += waits.len() as u64;
        waits
    }

    /// Serves a request with what is pending on other streams, by the rules of borrowing.
    fn borrow(&mut self, want: &Want, rules: WaitRules) -> Option<Outcome> {
        if !self.domains[want.domain].options.lend {
            return None;
        }
        if let Some(grant) = self.borrow_piece(want, rules) {
            return Some(Outcome::Ready(grant));
        }
        if !rules.stitch {
            return None;
        }
        let all = self.runs(want, true);
        if let Some(grant) = self.take_from_runs(want, &all) {
            return Some(Outcome::Ready(grant));
        }
        let stitching = self.may_stitch(want) && !self.settings.stitch_only_when_full;
        stitching.then(|| self.plan_stitch(want, &all)).flatten().map(Outcome::Work)
    }

    /// Borrows one piece, whole or split.
    fn borrow_piece(&mut self, want: &Want, rules: WaitRules) -> Option<Grant> {
        let domain = &self.domains[want.domain];
        let lists: SmallVec<[FreeListId; 4]> =
            domain.streams.iter().map(|lists| lists.large).filter(|&list| list != want.lists.large).collect();
        let pieces = lists.iter().flat_map(|list| self.lists[list.index()].bins.iter());
        let fits = |size: u64| size >= want.size && size - want.size <= rules.max_excess.get();
        let fitting = pieces.filter(|&id| fits(self.pieces[id].size));
        let chosen = fitting.min_by_key(|&id| {
            let piece = &self.pieces[id];
            if rules.oldest_first { (piece.epoch.0, piece.size) } else { (piece.size, piece.epoch.0) }
        })?;
        let piece = &self.pieces[chosen];
        let run = Run { start: piece.start, end: piece.end(), first: chosen };
        let end = if rules.split { run.start + want.size } else { run.end };
        let carved = self.carve(&run, run.start, end);
        Some(self.hand_out_carved(want, carved))
    }
}
