//! The allocator of one device: a few pure methods over its parts.
//!
//! ```text
//! take ──hit──► Grant                                   no driver, no heap
//!   └─miss─► plan ─► Ready | Work(plan) | Wait ─► commit or abort
//!
//! Heap        bytes at home, free and handed out: Home (pieces, free lists, domains, extents), completion points, counts
//! Aliases     the second mappings, and the blocks that lie in them
//! Plans       what waits for the driver
//! ```
//!
//! A miss ([`Miss`]), a release ([`Trim`]), a claim ([`Placement`]) and an eviction ([`Evictions`]) borrow the parts that they change;
//! [`Report`], [`Blocks`] and [`ExtentViews`] read them.
//!
//! Invariants (checked whole by [`Allocator::check`] in tests): those of the parts, and reserved memory, plans included, is at most the
//! limit.

use glake_units::Bytes;

use crate::aliases::Aliases;
use crate::claim::{Claim, Restored};
use crate::domain::DomainOptions;
use crate::error::StitchError;
use crate::evictions::Evictions;
use crate::heap::{Heap, Pending, Placement};
use crate::holds::StreamUse;
use crate::ids::{DomainId, ExtentId, HoldId, PlanId, PointNumber, StreamKey};
use crate::live::Live;
use crate::plan::{Grant, Outcome, Plan, Request};
use crate::plans::{Answer, Draft, Miss, Plans, Trim};
use crate::settings::Settings;
use crate::stats::Counters;
use crate::view::{Audit, Blocks, Broken, ExtentViews, Largest, Report};
use crate::zone::Zone;

/// Where the addresses of aliases begin, and how long they are, in times the device's memory: home comes before, and the slabs.
const ALIAS_START: u64 = 3;
const ALIAS_SPACE: u64 = 8;

/// The allocator of one device.
#[derive(Debug)]
pub struct Allocator {
    settings: Settings,
    heap: Heap,
    aliases: Aliases,
    plans: Plans,
}

impl Allocator {
    /// An allocator with nothing reserved.
    ///
    /// # Errors
    /// [`StitchError::BadSetting`] for the first knob that makes no sense.
    pub fn new(settings: Settings) -> Result<Self, StitchError> {
        settings.check()?;
        let memory = settings.whole_memory();
        let mut allocator = Allocator {
            heap: Heap::new(&settings),
            aliases: Aliases::new(Zone::new(ALIAS_START * memory, ALIAS_SPACE * memory)),
            plans: Plans::default(),
            settings,
        };
        allocator.add_domain(DomainOptions::default());
        Ok(allocator)
    }

    /// How long the device's reservation must be: every offset is below.
    pub fn address_space(&self) -> Bytes {
        Bytes::new((ALIAS_START + ALIAS_SPACE) * self.settings.whole_memory())
    }

    /// The knobs.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The domain of requests that name no other.
    pub const fn default_domain() -> DomainId {
        DomainId::DEFAULT
    }

    /// A new owner of extents.
    pub fn add_domain(&mut self, options: DomainOptions) -> DomainId {
        self.heap.home.domains.add(options, &mut self.heap.home.lists)
    }

    /// A CUDA graph is captured in a domain: from now on it is a [`DomainOptions::private_pool`], so that the addresses in
    /// the graph stay. What is stitched or lent already stays so until it is freed.
    pub fn keep_addresses(&mut self, id: DomainId) {
        if let Some(domain) = self.heap.home.domains.get_mut(id) {
            domain.options = DomainOptions { extent: domain.options.extent, ..DomainOptions::private_pool() };
        }
    }

    /// Gives a domain up: its blocks live on until they are freed, its free extents go back to the driver once all
    /// work enqueued before this call has completed, and nothing new is taken from it.
    ///
    /// # Errors
    /// [`StitchError::UnknownDomain`]; the default domain cannot be released.
    pub fn release_domain(&mut self, id: DomainId) -> Result<(), StitchError> {
        if id == Self::default_domain() {
            return Err(StitchError::UnknownDomain { domain: id });
        }
        self.heap.release_domain(id)?;
        self.aliases.renew(id, self.heap.points.open());
        self.heap.home.drop_if_done(id);
        Ok(())
    }

    /// Whether there is anything of a domain: a released one goes with its last extent.
    pub fn has_domain(&self, id: DomainId) -> bool {
        self.heap.home.domains.get(id).is_some()
    }

    /// Says whether the bytes of a domain stay as they are: while it is sealed nothing new is handed out of it, so that no copy
    /// of them becomes old.
    pub fn seal_domain(&mut self, id: DomainId, sealed: bool) {
        if let Some(domain) = self.heap.home.domains.get_mut(id) {
            domain.sealed = sealed;
        }
    }

    /// Changes the most that may be reserved; what is reserved above stays until it is trimmed.
    pub fn set_limit(&mut self, limit: Bytes) {
        self.settings.limit = limit.min(self.settings.memory);
    }

    /// Changes the most that may be reserved for requests, below the limit: what was evicted may come back up to that.
    pub fn set_budget(&mut self, most: Bytes) {
        self.settings.budget = most;
    }

    /// The completion point that frees belong to now, where there are frees that no recorded event covers.
    pub fn uncovered(&self) -> Option<PointNumber> {
        self.heap.points.uncovered()
    }

    /// Closes the open completion point: the caller has just recorded its event. Later frees belong to the next one.
    pub fn close_point(&mut self) -> PointNumber {
        self.heap.points.close()
    }

    /// The event of the last closed completion point could not be recorded: the next one has to cover its frees too.
    pub fn uncover(&mut self) {
        self.heap.points.uncover();
    }

    /// All work enqueued before this completion point was closed has completed.
    pub fn pass_point(&mut self, point: PointNumber) {
        self.heap.pass(point);
    }

    /// The last completion point that has passed.
    pub fn passed(&self) -> PointNumber {
        self.heap.points.passed()
    }

    /// Hands out a free piece that fits, or nothing: then [`Allocator::plan`] says what it takes.
    #[inline]
    pub fn take(&mut self, request: &Request) -> Option<Grant> {
        self.heap.take(request)
    }

    /// Takes a block back. Its own stream may have its bytes at once, or after its holds have passed, others after the open completion point
    /// has.
    ///
    /// Returns the block's size.
    ///
    /// # Errors
    /// [`StitchError::UnknownBlock`] where no live block begins; nothing changes then.
    pub fn free(&mut self, offset: Bytes) -> Result<Bytes, StitchError> {
        let home = &mut self.heap.home;
        let live =
            home.live.remove(offset.get(), &home.pieces).ok_or(StitchError::UnknownBlock { offset })?;
        self.heap.points.uncover();
        let recorded = match live {
            Live::Piece(id) => home.pieces[id].recorded,
            Live::Stitched(index) => self.aliases.blocks[index as usize].recorded,
        };
        if recorded || !self.heap.holds.knows_none() {
            return Ok(self.free_known(offset, live, recorded));
        }
        match live {
            Live::Piece(id) => Ok(self.heap.free_piece(id, &[])),
            Live::Stitched(index) => Ok(self.aliases.free(index, &[], &mut self.heap)),
        }
    }

    /// As [`Allocator::free`], of a block that something may hold.
    #[cold]
    fn free_known(&mut self, offset: Bytes, live: Live, recorded: bool) -> Bytes {
        let mut holds = self.heap.holds.end_block(offset.get());
        if recorded {
            self.heap.holds.end_recorded(offset.get(), &mut holds);
        }
        let size = match live {
            Live::Piece(id) => self.heap.free_piece(id, &holds),
            Live::Stitched(index) => self.aliases.free(index, &holds, &mut self.heap),
        };
        self.heap.holds.forget_idle(&holds);
        size
    }

    /// A number for the life of the block that begins there: the same until it is freed, and no other block's ever. `None`: no live
    /// block begins there.
    pub fn generation(&mut self, offset: Bytes) -> Option<u64> {
        let home = &self.heap.home;
        home.live.get(offset.get(), &home.pieces)?;
        Some(self.heap.holds.generation(offset.get()))
    }

    /// Something that was enqueued before uses a block beside its stream, until [`Allocator::pass_hold`]. While the block lives that
    /// changes nothing. Once it is freed, its stream has its bytes only behind a wait for the hold, and nobody else before the
    /// completion point. `None`: the block of that generation lives no more.
    pub fn hold(&mut self, offset: Bytes, generation: u64) -> Option<HoldId> {
        self.heap.holds.add(offset.get(), generation)
    }

    /// What a hold names has completed.
    pub fn pass_hold(&mut self, hold: HoldId) {
        self.heap.pass_hold(hold);
    }

    /// Free bytes that holds keep from their stream.
    pub fn held_bytes(&self) -> Bytes {
        Bytes::new(self.heap.held_bytes())
    }

    /// Another stream uses a block, until the event that is recorded on it after the free ([`Allocator::take_uses`]), or until the
    /// completion point: then the block's own stream may have its bytes again. A block that begins nowhere is ignored, as torch does with
    /// foreign pointers.
    ///
    /// Returns whether there was such a block.
    pub fn record_stream(&mut self, offset: Bytes, stream: StreamKey) -> bool {
        let home = &mut self.heap.home;
        let Some(live) = home.live.get(offset.get(), &home.pieces) else { return false };
        let (list, recorded) = match live {
            Live::Piece(id) => (home.pieces[id].list, &mut home.pieces[id].recorded),
            Live::Stitched(index) => {
                let block = &mut self.aliases.blocks[index as usize];
                (block.list, &mut block.recorded)
            }
        };
        if home.lists[list].stream() != Some(stream) {
            *recorded = true;
            self.heap.holds.record(offset.get(), stream);
        }
        true
    }

    /// The uses of blocks by other streams that frees have left behind since the last call. A use whose event the caller cannot record
    /// ends with the completion point.
    #[inline]
    pub fn take_uses(&mut self) -> Vec<StreamUse> {
        self.heap.holds.take_uses()
    }

    /// The holds that keep bytes from everybody which the request's stream would have again without them, where these were freed up to a
    /// completion point.
    pub fn withheld_by(&self, request: &Request, upto: PointNumber) -> Vec<HoldId> {
        let lists =
            self.heap.home.domains.get(request.domain).and_then(|domain| domain.lists_of(request.stream));
        lists.map_or_else(Vec::new, |lists| self.heap.withheld_by(&lists, request.domain, upto).into_vec())
    }

    /// Says how a request that is no hit can be served: at once after all, with driver work, after a wait, or not.
    ///
    /// With `grow` false nothing new is asked of the driver (it has just said that it has no more).
    ///
    /// # Errors
    /// [`StitchError::OutOfMemory`] after everything else, [`StitchError::LargerThanDevice`],
    /// [`StitchError::UnknownDomain`].
    pub fn plan(&mut self, request: &Request, grow: bool) -> Result<Outcome, StitchError> {
        self.plan_with(request, grow, true)
    }

    /// As [`Allocator::plan`], for a stream that can wait for nothing: it gets nothing that holds keep from it.
    ///
    /// # Errors
    /// As [`Allocator::plan`].
    pub fn plan_in_capture(&mut self, request: &Request, grow: bool) -> Result<Outcome, StitchError> {
        self.plan_with(request, grow, false)
    }

    fn plan_with(&mut self, request: &Request, grow: bool, waits: bool) -> Result<Outcome, StitchError> {
        let memory = self.settings.memory;
        if request.size > memory {
            self.heap.tallies.counters.ooms += 1;
            return Err(StitchError::LargerThanDevice { wanted: request.size, memory });
        }
        if self.heap.home.domains.active(request.domain)?.sealed {
            return Err(StitchError::Sealed { domain: request.domain });
        }
        self.make_room_for(request.domain, request.stream);
        let lists = self.heap.home.lists_for(request.domain, request.stream);
        if let Some(grant) = self.take(request) {
            return Ok(Outcome::Ready(grant));
        }
        let mut miss = Miss::new(request, lists, grow, &mut self.heap, &mut self.aliases, &self.settings);
        miss.waits = waits;
        Ok(match miss.answer()? {
            Answer::Ready(grant) => Outcome::Ready(grant),
            Answer::Work(draft) => Outcome::Work(self.plans.add(draft, &mut self.heap)),
            Answer::Wait(point) => Outcome::Wait(point),
        })
    }

    /// The driver has done a plan's steps: makes it true. A plan for a block returns it.
    pub fn commit(&mut self, plan: PlanId) -> Option<Grant> {
        self.plans.commit(plan, &mut self.heap, &mut self.aliases)
    }

    /// The driver could not do a plan's steps and has undone those that it did: everything is as before.
    pub fn abort(&mut self, plan: PlanId) {
        self.plans.abort(plan, &mut self.heap, &mut self.aliases);
    }

    /// Counts a request that is refused, and says how memory stands: also where what [`Outcome::Wait`] asks for cannot be waited for.
    pub fn refuse(&mut self, wanted: Bytes) -> StitchError {
        self.heap.tallies.counters.ooms += 1;
        self.heap.out_of_memory(wanted, self.settings.most())
    }

    /// Driver work that releases free memory until at most `keep` is reserved, or nothing is left to release. Idle
    /// aliases of what goes are unmapped first; what is in use, or still pending, stays.
    pub fn plan_trim(&mut self, keep: Bytes) -> Option<Plan> {
        let target = Bytes::new(self.heap.tallies.committed().saturating_sub(keep.get()));
        let draft = self.trim().of_all(target);
        self.named(draft)
    }

    /// Driver work that releases all free memory of one domain, also where it keeps its own from [`Allocator::plan_trim`]; of a
    /// released one, what is left of it.
    pub fn plan_trim_domain(&mut self, domain: DomainId) -> Option<Plan> {
        self.heap.home.domains.get(domain)?;
        let draft = self.trim().of_domain(domain);
        self.named(draft)
    }

    /// Driver work that forgets the extents of a domain that are evicted and hold nothing live; none where a captured graph knows
    /// their addresses.
    pub fn plan_forget(&mut self, domain: DomainId) -> Option<Plan> {
        self.heap.home.domains.get(domain).filter(|domain| !domain.is_held())?;
        let draft = self.trim().of_evicted(domain);
        self.named(draft)
    }

    /// Driver work that unmaps idle aliases, the least recently used first, until at most `keep` of them is mapped.
    pub fn plan_collection(&mut self, keep: Bytes) -> Option<Plan> {
        let draft = self.trim().of_aliases(keep);
        self.named(draft)
    }

    /// Driver work that is due: idle aliases above their limit go, and the older half of them where mappings near their
    /// cap, or where there are so many that looking through them costs more than making one. Nothing else is due.
    pub fn plan_due_collection(&mut self) -> Option<Plan> {
        let draft = Trim::new(&mut self.heap, &mut self.aliases).of_due(&self.settings);
        self.named(draft)
    }

    /// The live blocks of a domain, as [`Allocator::restore`] takes them.
    ///
    /// # Errors
    /// [`StitchError::NotClaimable`] where one is stitched: such an address cannot be had back.
    pub fn checkpoint(&self, domain: DomainId) -> Result<Vec<Claim>, StitchError> {
        let blocks = self.blocks();
        blocks.of(domain).iter().map(|block| blocks.claim_of(block)).collect()
    }

    /// Makes exactly the blocks of a checkpoint live in a domain: frees what is live now, claims what was live then.
    ///
    /// # Errors
    /// [`StitchError::UnknownDomain`] where a block would be new in a released domain, [`StitchError::Evicted`], or
    /// [`StitchError::NotClaimable`] for a block whose memory is not the domain's any more; the same blocks as before are live then.
    pub fn restore(&mut self, domain: DomainId, checkpoint: &[Claim]) -> Result<Restored, StitchError> {
        self.heap.home.extents.all_resident(domain)?;
        let now = self.checkpoint(domain)?;
        let freed = self.blocks().of(domain);
        let (goes, comes) = Claim::differences(&now, checkpoint);
        if !comes.is_empty() {
            self.heap.home.domains.active(domain)?;
        }
        self.free_all(domain, &goes);
        for (done, claim) in comes.iter().enumerate() {
            if let Err(error) = self.claim(domain, claim) {
                self.free_all(domain, &comes[..done]);
                for claim in &goes {
                    let again = self.claim_at(domain, claim, Pending::Fine);
                    debug_assert!(again.is_ok(), "it was live a moment ago: {again:?}");
                }
                return Err(error);
            }
        }
        Ok(Restored { freed, claimed: self.blocks().of(domain) })
    }

    /// Makes a block live at one place of a domain, where all of its bytes are free, whoever could take them. No stream is
    /// made to wait.
    ///
    /// # Errors
    /// [`StitchError::UnknownDomain`], [`StitchError::Evicted`], or [`StitchError::NotClaimable`], which says why; nothing has changed.
    pub fn claim(&mut self, domain: DomainId, claim: &Claim) -> Result<(), StitchError> {
        self.heap.home.domains.active(domain)?;
        self.heap.home.extents.all_resident(domain)?;
        self.claim_at(domain, claim, Pending::Refused)
    }

    /// Extents that leave and come back.
    pub fn evictions(&mut self) -> Evictions<'_> {
        Evictions { heap: &mut self.heap, limit: self.settings.limit }
    }

    /// The extents that are not resident and lost the last of what was kept in them, since the last call: a live block was freed, or
    /// their domain released. What was kept of them is worth nothing.
    #[inline]
    pub fn take_emptied(&mut self) -> Vec<ExtentId> {
        self.heap.home.extents.take_emptied()
    }

    /// The whole of it: statistics and segments.
    pub fn report(&self) -> Report<'_> {
        Report { heap: &self.heap, aliases: &self.aliases }
    }

    /// What is handed out.
    pub fn blocks(&self) -> Blocks<'_> {
        Blocks { heap: &self.heap, aliases: &self.aliases }
    }

    /// Single extents.
    pub fn extents(&self) -> ExtentViews<'_> {
        ExtentViews { heap: &self.heap, aliases: &self.aliases }
    }

    /// The largest request of a domain that can be served now, where the driver has `device_free` left: a free run, or
    /// what stitching and growing make, with pending memory waited for and other owners' free extents given back, on
    /// the stream for which that is most. Walks the free pieces, changes nothing.
    ///
    /// No larger request is served. One of this size is, but where the last extents are in use in part, where the number
    /// of mappings is at its limit, or where the driver takes memory for itself.
    ///
    /// # Errors
    /// [`StitchError::UnknownDomain`].
    pub fn largest(&self, domain: DomainId, device_free: Bytes) -> Result<Bytes, StitchError> {
        Largest { heap: &self.heap, settings: &self.settings, device_free }.of(domain)
    }

    /// Physical memory held: cheaper than [`Report::stats`], which walks the free pieces.
    pub fn reserved_bytes(&self) -> Bytes {
        Bytes::new(self.heap.tallies.reserved())
    }

    /// The counters alone: cheaper than [`Report::stats`].
    pub fn counters(&self) -> Counters {
        self.heap.tallies.counters
    }

    /// Bytes of live blocks and of those that other streams still use.
    pub fn active_bytes(&self) -> Bytes {
        Bytes::new(self.heap.tallies.active())
    }

    /// Bytes of live blocks and of those that other streams still use, and the most that they were since this was asked last.
    pub fn take_most(&mut self) -> (Bytes, Bytes) {
        let (now, most) = self.heap.tallies.take_most();
        (Bytes::new(now), Bytes::new(most))
    }

    /// Starts the peaks from what is now.
    pub fn reset_peaks(&mut self) {
        self.heap.tallies.reset_peaks();
    }

    /// Starts the totals from zero.
    pub fn reset_totals(&mut self) {
        self.heap.tallies.reset_totals();
    }

    /// Walks everything and checks the invariants, of the parts and between them.
    ///
    /// # Errors
    /// The first one that is broken.
    pub fn check(&self) -> Result<(), Broken> {
        let limit = self.settings.limit.get();
        Audit { heap: &self.heap, aliases: &self.aliases, plans: &self.plans, limit }.check()
    }

    fn trim(&mut self) -> Trim<'_> {
        Trim::new(&mut self.heap, &mut self.aliases)
    }

    fn named(&mut self, draft: Option<Draft>) -> Option<Plan> {
        draft.map(|draft| self.plans.add(draft, &mut self.heap))
    }

    /// Forgets streams that have nothing any more, where a new one comes and there are many.
    fn make_room_for(&mut self, domain: DomainId, stream: StreamKey) {
        if self.heap.home.domains[domain].is_crowded(stream) {
            self.heap.home.forget_streams(domain, self.aliases.lists().chain(self.plans.lists()));
        }
    }

    fn claim_at(&mut self, domain: DomainId, claim: &Claim, pending: Pending) -> Result<(), StitchError> {
        self.make_room_for(domain, claim.stream);
        Placement::new(&mut self.heap, domain, claim).fill(pending)
    }

    fn free_all(&mut self, domain: DomainId, claims: &[Claim]) {
        for claim in claims {
            let freed = self.free(claim.offset);
            debug_assert!(freed.is_ok(), "it is live");
        }
        self.heap.home.dissolve_idle_slabs(Some(domain));
    }
}
