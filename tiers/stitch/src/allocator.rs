//! The allocator of one device: short pure methods over its parts.
//!
//! ```text
//! take ──hit──► Grant                                   no driver, no heap
//!   └─miss─► plan ─► Ready | Work(plan) | Wait ─► commit or abort
//!
//! Heap        bytes at home, free and handed out: Home (pieces, free lists, domains, extents), completion points, counts
//! Aliases     the second mappings, and the blocks in them
//! Plans       work that waits for the driver
//! ```
//!
//! A miss ([`Miss`]), a release ([`Trim`]), a claim ([`Placement`]) and an eviction ([`Evictions`]) borrow the parts that they change;
//! [`Report`], [`Blocks`] and [`ExtentViews`] read them.
//!
//! Invariants (checked as a whole by [`Allocator::check`] in tests): the invariants of the parts hold, and reserved memory, pending plans
//! included, never exceeds the limit.

use glake_units::Bytes;

use crate::alias::Aliases;
use crate::domain::DomainOptions;
use crate::error::StitchError;
use crate::evictions::Evictions;
use crate::extent::Zone;
use crate::heap::{Heap, Pending, Placement};
use crate::holds::StreamUse;
use crate::ids::{DomainId, ExtentId, HoldId, PlanId, PointNumber, StreamKey};
use crate::piece::Live;
use crate::plan::{Grant, Outcome, Plan, Request};
use crate::plans::{Answer, Draft, Miss, Plans, Trim};
use crate::settings::Settings;
use crate::stats::{Counters, Stats};
use crate::view::{Audit, Blocks, Broken, Claim, ExtentViews, Largest, Report, Restored};

/// Start of the alias addresses, as a multiple of the device's memory; home and the slabs lie below.
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
    /// Creates an allocator without reserved memory.
    ///
    /// # Errors
    /// [`StitchError::BadSetting`] for the first invalid setting.
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

    /// Returns the size of the device's address reservation; every offset is below it.
    pub fn address_space(&self) -> Bytes {
        Bytes::new((ALIAS_START + ALIAS_SPACE) * self.settings.whole_memory())
    }

    /// Returns the size of home and the slabs' addresses, which begin at offset 0; aliases lie above.
    pub fn home_space(&self) -> Bytes {
        Bytes::new(ALIAS_START * self.settings.whole_memory())
    }

    /// Returns the options of a domain, with later changes; `None` if there is no such domain.
    pub fn domain_options(&self, id: DomainId) -> Option<DomainOptions> {
        self.heap.home.domains.get(id).map(|domain| domain.options)
    }

    /// Returns the settings of the allocator.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Returns the default domain, for requests that name no other.
    pub const fn default_domain() -> DomainId {
        DomainId::DEFAULT
    }

    /// Adds a domain, an owner of extents.
    pub fn add_domain(&mut self, options: DomainOptions) -> DomainId {
        self.heap.home.domains.add(options, &mut self.heap.home.lists)
    }

    /// Turns a domain into a [`DomainOptions::private_pool`] because a CUDA graph is captured in it: the addresses in the graph must stay
    /// valid. Memory that is already stitched or lent stays so until it is freed.
    pub fn keep_addresses(&mut self, id: DomainId) {
        if let Some(domain) = self.heap.home.domains.get_mut(id) {
            domain.options = DomainOptions {
                extent: domain.options.extent,
                plain: domain.options.plain,
                ..DomainOptions::private_pool()
            };
        }
    }

    /// Gives a domain up. Its live blocks remain until they are freed. Its free extents return to the driver once all work enqueued before
    /// this call has completed. The domain serves no further requests.
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

    /// Returns whether a domain exists; a released domain disappears with its last extent.
    pub fn has_domain(&self, id: DomainId) -> bool {
        self.heap.home.domains.get(id).is_some()
    }

    /// Seals or unseals a domain. A sealed domain serves no requests, so that copies of its bytes stay valid.
    pub fn seal_domain(&mut self, id: DomainId, sealed: bool) {
        if let Some(domain) = self.heap.home.domains.get_mut(id) {
            domain.sealed = sealed;
        }
    }

    /// Sets the limit of reserved memory. Memory above a lowered limit stays reserved until it is trimmed.
    pub fn set_limit(&mut self, limit: Bytes) {
        self.settings.limit = limit.min(self.settings.memory);
    }

    /// Sets the budget, the most that requests may reserve below the limit. Refills of evicted memory may use the rest up to the limit.
    pub fn set_budget(&mut self, most: Bytes) {
        self.settings.budget = most;
    }

    /// Returns the completion point of the current frees if no recorded event covers them.
    pub fn uncovered(&self) -> Option<PointNumber> {
        self.heap.points.uncovered()
    }

    /// Closes the open completion point; the caller has just recorded its event. Later frees belong to the next point.
    pub fn close_point(&mut self) -> PointNumber {
        self.heap.points.close()
    }

    /// Reports that the event of the last closed completion point could not be recorded: the next point must cover its frees too.
    pub fn uncover(&mut self) {
        self.heap.points.uncover();
    }

    /// Marks a completion point as passed: all work enqueued before it was closed has completed.
    pub fn pass_point(&mut self, point: PointNumber) {
        self.heap.pass(point);
    }

    /// Returns the last completion point that has passed.
    pub fn passed(&self) -> PointNumber {
        self.heap.points.passed()
    }

    /// Serves a request from one free piece. Returns `None` on a miss; then call [`Allocator::plan`].
    #[inline]
    pub fn take(&mut self, request: &Request) -> Option<Grant> {
        self.heap.take(request)
    }

    /// Takes a block back. Its own stream may reuse the bytes at once, or after the block's holds have passed; other streams after the open
    /// completion point has passed.
    ///
    /// Returns the block's size.
    ///
    /// # Errors
    /// [`StitchError::UnknownBlock`] if no live block begins at `offset`; nothing has changed then.
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

    /// Frees a block that may be held: the general case of [`Allocator::free`].
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

    /// Returns a number for the lifetime of the block that begins at an offset. No other block ever gets the same number. `None`: no live
    /// block begins there.
    pub fn generation(&mut self, offset: Bytes) -> Option<u64> {
        let home = &self.heap.home;
        home.live.get(offset.get(), &home.pieces)?;
        Some(self.heap.holds.generation(offset.get()))
    }

    /// Puts a hold on a live block: work enqueued before on another stream still uses it, until [`Allocator::pass_hold`]. While the block
    /// lives, a hold has no effect. After the free, the block's own stream may reuse the bytes only behind a wait for the hold, other
    /// streams only after the completion point. `None`: the block of that generation is no longer live.
    pub fn hold(&mut self, offset: Bytes, generation: u64) -> Option<HoldId> {
        self.heap.holds.add(offset.get(), generation)
    }

    /// Marks a hold as passed: its event has completed.
    pub fn pass_hold(&mut self, hold: HoldId) {
        self.heap.pass_hold(hold);
    }

    /// Returns the free bytes that holds keep from their stream.
    pub fn held_bytes(&self) -> Bytes {
        Bytes::new(self.heap.held_bytes())
    }

    /// Records that another stream uses a block. After the free, the block's own stream may reuse the bytes once the event recorded on that
    /// stream ([`Allocator::take_uses`]) or the completion point has passed. Offsets at which no block begins are ignored, as torch ignores
    /// foreign pointers.
    ///
    /// Returns whether a live block begins at `offset`.
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

    /// Takes the uses by other streams of blocks freed since the last call. If the caller cannot record the event of a use, the use ends
    /// with the completion point.
    #[inline]
    pub fn take_uses(&mut self) -> Vec<StreamUse> {
        self.heap.holds.take_uses()
    }

    /// Returns the holds that withhold bytes from all streams although the request's stream could otherwise reuse them. Only bytes freed up
    /// to a completion point count.
    pub fn withheld_by(&self, request: &Request, upto: PointNumber) -> Vec<HoldId> {
        let lists =
            self.heap.home.domains.get(request.domain).and_then(|domain| domain.lists_of(request.stream));
        lists.map_or_else(Vec::new, |lists| self.heap.withheld_by(&lists, request.domain, upto).into_vec())
    }

    /// Decides how to serve a miss: at once after all, with driver work, after a wait, or not at all.
    ///
    /// With `grow` false, no new memory is requested from the driver, because it has just refused.
    ///
    /// # Errors
    /// [`StitchError::OutOfMemory`] if every other way has failed, [`StitchError::LargerThanDevice`], [`StitchError::UnknownDomain`].
    pub fn plan(&mut self, request: &Request, grow: bool) -> Result<Outcome, StitchError> {
        self.plan_with(request, grow, true)
    }

    /// Plans a request like [`Allocator::plan`] for a stream under capture, which cannot wait: held memory is not used.
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

    /// Applies a plan whose steps the driver has executed. Returns the block if the plan was for one.
    pub fn commit(&mut self, plan: PlanId) -> Option<Grant> {
        self.plans.commit(plan, &mut self.heap, &mut self.aliases)
    }

    /// Rolls a plan back after the driver failed and undid its steps: the state is as before the plan.
    pub fn abort(&mut self, plan: PlanId) {
        self.plans.abort(plan, &mut self.heap, &mut self.aliases);
    }

    /// Counts a refused request and returns the out-of-memory error. Also for an [`Outcome::Wait`] that the caller cannot wait for.
    pub fn refuse(&mut self, wanted: Bytes) -> StitchError {
        self.heap.tallies.counters.ooms += 1;
        self.heap.out_of_memory(wanted, self.settings.most())
    }

    /// Plans the release of free memory until at most `keep` is reserved or no free memory is left. Idle aliases of released extents are
    /// unmapped first; memory in use or pending stays.
    pub fn plan_trim(&mut self, keep: Bytes) -> Option<Plan> {
        let target = Bytes::new(self.heap.tallies.committed().saturating_sub(keep.get()));
        let draft = self.trim().of_all(target);
        self.named(draft)
    }

    /// Plans the release of all free memory of one domain, including memory that [`Allocator::plan_trim`] leaves to it, and of the rest of
    /// a released domain.
    pub fn plan_trim_domain(&mut self, domain: DomainId) -> Option<Plan> {
        self.heap.home.domains.get(domain)?;
        let draft = self.trim().of_domain(domain);
        self.named(draft)
    }

    /// Plans the removal of a domain's evicted extents without live bytes. Returns `None` if a captured graph knows their addresses.
    pub fn plan_forget(&mut self, domain: DomainId) -> Option<Plan> {
        self.heap.home.domains.get(domain).filter(|domain| !domain.is_held())?;
        let draft = self.trim().of_evicted(domain);
        self.named(draft)
    }

    /// Plans the unmapping of idle aliases, least recently used first, until at most `keep` bytes of them are mapped.
    pub fn plan_collection(&mut self, keep: Bytes) -> Option<Plan> {
        let draft = self.trim().of_aliases(keep);
        self.named(draft)
    }

    /// Plans the collection of aliases that is due: idle aliases above their limit. The older half of the idle aliases is also collected
    /// near the cap of mappings, or if searching them costs more than making a new one.
    pub fn plan_due_collection(&mut self) -> Option<Plan> {
        let draft = Trim::new(&mut self.heap, &mut self.aliases).of_due(&self.settings);
        self.named(draft)
    }

    /// Returns the live blocks of a domain in the form that [`Allocator::restore`] takes.
    ///
    /// # Errors
    /// [`StitchError::NotClaimable`] if a block is stitched: its address cannot be restored.
    pub fn checkpoint(&self, domain: DomainId) -> Result<Vec<Claim>, StitchError> {
        let blocks = self.blocks();
        blocks.of(domain).iter().map(|block| blocks.claim_of(block)).collect()
    }

    /// Makes exactly the blocks of checkpoints live in their domains: frees what is live now, claims what was live then. Of several domains
    /// all are restored or none.
    ///
    /// # Errors
    /// [`StitchError::UnknownDomain`] where a block would be new in a released domain, [`StitchError::Evicted`], or
    /// [`StitchError::NotClaimable`] for a block whose memory is not the domain's any more; the same blocks as before are live then.
    pub fn restore(&mut self, checkpoints: &[(DomainId, &[Claim])]) -> Result<Restored, StitchError> {
        let mut freed = Vec::new();
        let (mut goes, mut comes) = (Vec::new(), Vec::new());
        for &(domain, checkpoint) in checkpoints {
            self.heap.home.extents.all_resident(domain)?;
            let now = self.checkpoint(domain)?;
            let (gone, new) = Claim::differences(&now, checkpoint);
            if !new.is_empty() {
                self.heap.home.domains.active(domain)?;
            }
            freed.extend(self.blocks().of(domain));
            goes.push((domain, gone));
            comes.extend(new.into_iter().map(|claim| (domain, claim)));
        }
        for (domain, gone) in &goes {
            self.free_all(*domain, gone);
        }
        for (done, (domain, claim)) in comes.iter().enumerate() {
            if let Err(error) = self.claim(*domain, claim) {
                for (domain, claim) in &comes[..done] {
                    self.free_all(*domain, std::slice::from_ref(claim));
                }
                for (domain, claim) in
                    goes.iter().flat_map(|(domain, gone)| gone.iter().map(move |claim| (*domain, claim)))
                {
                    let again = self.claim_at(domain, claim, Pending::Fine);
                    debug_assert!(again.is_ok(), "the block was live before the restore: {again:?}");
                }
                return Err(error);
            }
        }
        let claimed = checkpoints.iter().flat_map(|(domain, _)| self.blocks().of(*domain)).collect();
        Ok(Restored { freed, claimed })
    }

    /// Makes a block live at one place of a domain if all of its bytes are free, whichever stream may use them. No stream waits.
    ///
    /// # Errors
    /// [`StitchError::UnknownDomain`], [`StitchError::Evicted`], or [`StitchError::NotClaimable`], which says why; nothing has changed.
    pub fn claim(&mut self, domain: DomainId, claim: &Claim) -> Result<(), StitchError> {
        self.heap.home.domains.active(domain)?;
        self.heap.home.extents.all_resident(domain)?;
        self.claim_at(domain, claim, Pending::Refused)
    }

    /// Returns the interface that evicts and refills extents.
    pub fn evictions(&mut self) -> Evictions<'_> {
        Evictions { heap: &mut self.heap, limit: self.settings.limit }
    }

    /// Takes the extents that are not resident and lost the last of their kept bytes since the last call, by a free or the release of their
    /// domain. Saved copies of their bytes can be discarded.
    #[inline]
    pub fn take_emptied(&mut self) -> Vec<ExtentId> {
        self.heap.home.extents.take_emptied()
    }

    /// Returns all statistics. They are kept as memory changes; only free pieces in lists that changed since the last call are visited.
    pub fn stats(&mut self) -> Stats {
        let passed = self.heap.points.passed();
        let free = self.heap.home.free_sums(passed);
        self.heap.tallies.stats(self.heap.free_bytes(), &free)
    }

    /// Returns a view of the whole allocator: segments and free ranges.
    pub fn report(&self) -> Report<'_> {
        Report { heap: &self.heap, aliases: &self.aliases }
    }

    /// Returns a view of the live blocks.
    pub fn blocks(&self) -> Blocks<'_> {
        Blocks { heap: &self.heap, aliases: &self.aliases }
    }

    /// Returns a view of single extents.
    pub fn extents(&self) -> ExtentViews<'_> {
        ExtentViews { heap: &self.heap, aliases: &self.aliases }
    }

    /// Returns the largest request of a domain that can be served now if the driver has `device_free` bytes left. It is a free run, or the
    /// result of stitching and growing, with waits for pending memory and release of other domains' free extents, on the stream with the
    /// best result. Walks the free pieces; changes nothing.
    ///
    /// No larger request is served. A request of this size is served unless the last extents are partly in use, the number of mappings is
    /// at its limit, or the driver takes memory for itself.
    ///
    /// # Errors
    /// [`StitchError::UnknownDomain`].
    pub fn largest(&self, domain: DomainId, device_free: Bytes) -> Result<Bytes, StitchError> {
        Largest { heap: &self.heap, settings: &self.settings, device_free }.of(domain)
    }

    /// Returns the reserved physical memory; cheaper than [`Allocator::stats`].
    pub fn reserved_bytes(&self) -> Bytes {
        Bytes::new(self.heap.tallies.reserved())
    }

    /// Returns the counters; cheaper than [`Allocator::stats`].
    pub fn counters(&self) -> Counters {
        self.heap.tallies.counters
    }

    /// Returns the bytes of live blocks and of freed blocks that other streams still use.
    pub fn active_bytes(&self) -> Bytes {
        Bytes::new(self.heap.tallies.active())
    }

    /// Returns the active bytes and their maximum since the last call. Active: live, or freed and still used by other streams.
    pub fn take_most(&mut self) -> (Bytes, Bytes) {
        let (now, most) = self.heap.tallies.take_most();
        (Bytes::new(now), Bytes::new(most))
    }

    /// Resets the peaks to the current values.
    pub fn reset_peaks(&mut self) {
        self.heap.tallies.reset_peaks();
    }

    /// Resets the totals to zero.
    pub fn reset_totals(&mut self) {
        self.heap.tallies.reset_totals();
    }

    /// Walks the whole state and checks the invariants of the parts and between them.
    ///
    /// # Errors
    /// The first broken invariant.
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

    /// Forgets streams without memory if a new stream arrives and there are many.
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
            debug_assert!(freed.is_ok(), "the block is live");
        }
        self.heap.home.dissolve_idle_slabs(Some(domain));
    }
}
