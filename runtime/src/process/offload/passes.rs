//! Passes of sites: verdicts for their saves and the measurements during a pass.
//!
//! A site that was only asked to offload everything causes no measurements and no driver calls.

use glake_device::Stream;
use glake_offload::{ItemId, Pack, PlanError, Preset, Request, ScopeId, UseOrders, UsePhase, Uses, Verdict};
use glake_units::Bytes;

use super::super::{ProcessError, Result};
use super::sites::{Asked, LEARNED, PackedItem, Planned, Spare, Timed};
use super::timer::Measures;
use super::{Offload, Position, StreamedPlace};

/// Relative change of a rate, or of the host's room, after which plans are made again. For a rate that fell, and in the first passes for
/// one that rose, the smaller threshold applies: a link slower than planned delays everything behind it.
const CHANGED: f64 = 0.2;
const RATE: f64 = 0.06;
/// A pass that waited for memory for more than 1/64 of its time has too little of it.
const STOOD: u32 = 64;
/// Number of passes that count as the first.
const FIRST: u64 = 8;
/// Interval, in passes, of passes timed only for the report.
const TOLD: u64 = 64;

impl Offload {
    /// Sets the goal of a site's plans, from its next pass on, in which its saves are checked again. Without a budget and with
    /// [`Preset::Memory`] nothing is measured.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the site does not exist, [`ProcessError::NoSuchDevice`].
    pub fn ask(&self, site: u64, device: i64, budget: Option<Bytes>, preset: Preset) -> Result<()> {
        let device = self.registry.device(device)?.id();
        let planned = self.sites.of(site)?;
        let mut planned = planned.lock();
        planned.asked = Some(Asked { device, budget, preset });
        (planned.due, planned.shapes, planned.spare) = Default::default();
        planned.most_spare = Spare::MOST;
        self.checks.again(site);
        if planned.is_measured().is_none() {
            self.measures.set_budget(site, None);
            let request = *planned.site.request();
            planned.site.ask(Request { budget: Bytes::MAX, preset, ..request });
        }
        Ok(())
    }

    /// Removes a site with its plans and the results of its checks.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the site does not exist.
    pub fn release_site(&self, site: u64) -> Result<()> {
        self.checks.forget_site(site);
        self.sites.release(site)?;
        self.measures.set_budget(site, None);
        Ok(())
    }

    /// Returns whether a forward pass of this shape must report its saves. It need not if the plan of an equal pass keeps everything,
    /// memory is unchanged and the budget was never exceeded since. A program that gives all forward passes one number has one shape.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the site does not exist; [`ProcessError::Budget`] if a pass with the same earlier forward passes needed
    /// more than the budget.
    pub fn needs(&self, site: u64, shape: u64) -> Result<bool> {
        let planned = self.sites.of(site)?;
        let mut planned = planned.lock();
        planned.shapes.begun = None;
        if let Some(error) = planned.shapes.failure_with(shape) {
            match self.below(&planned, error) {
                // Another site had a smaller budget and no longer has.
                ProcessError::Budget { budget, minimum, .. } if minimum <= budget => {
                    planned.shapes.forget_failure_with(shape);
                }
                error => return Err(error),
            }
        }
        let kept =
            planned.shapes.kept.get(&shape).copied().filter(|_| planned.site.position() == Position(0));
        if let (Some(asked), Some(adds)) = (planned.is_measured(), kept)
            && let Some(pool) = self.measures.pool(asked.device)
        {
            let passed = pool.budget().1;
            if passed > std::mem::replace(&mut planned.passed, passed) {
                // Caused by unreported passes: a pass may save more than earlier ones of its shape.
                planned.shapes.kept.clear();
            } else if pool.report().active().saturating_add(adds) <= planned.site.request().budget {
                return Ok(false);
            }
        }
        planned.shapes.begun = Some(shape);
        Ok(true)
    }

    /// Records bytes that this pass has not packed yet and that work on `stream` produces. Fills `begin` with items whose reloads must
    /// start first, as far as there is room, and returns their number; the rest follows with the next call.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the site does not exist.
    pub fn packed(
        &self,
        site: u64,
        pack: Pack,
        stream: Stream,
        begin: &mut [u64],
    ) -> Result<(PackedItem, usize)> {
        let known = self.sites.of(site)?;
        let mut planned = known.lock();
        let over = planned.site.passes();
        planned.site.end_if_over();
        if planned.site.passes() != over {
            self.ended(&mut planned);
        }
        let is_first = planned.site.position() == Position(0);
        if is_first {
            // Belongs to a finished pass.
            planned.reloads.clear();
            self.begins(site, &mut planned);
            (planned.packed, planned.checked) = Default::default();
        }
        planned.packed = planned.packed.saturating_add(pack.bytes);
        self.step(site, &mut planned, pack.bytes);
        let (item, verdict, reloads) = planned.site.packed(pack);
        // A forward pass that saves nothing belongs to no pass.
        let begun = planned.shapes.begun.take();
        planned.shapes.current.extend(begun);
        if is_first {
            let (passes, made) = (planned.site.passes(), planned.site.plans_made());
            if planned.looks.begins(passes, made) {
                self.checks.once_more(site);
            }
            self.time(&mut planned, stream);
        } else if pack.is_output()
            && let Some(timer) = &planned.timer
        {
            timer.lock().leaf_ends(item);
        }
        Ok((PackedItem { item, verdict }, planned.fill(reloads, begin)))
    }

    /// Marks the start of a leaf's computation, which ends when its output is packed. The time is measured on the stream on which the pass
    /// began.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the site does not exist.
    pub fn leaf_begins(&self, site: u64) -> Result<()> {
        if let Some(timer) = &self.sites.of(site)?.lock().timer {
            timer.lock().leaf_begins();
        }
        Ok(())
    }

    /// Excludes the current pass from timing, because it computes work that later passes will not. If every pass does so, the times count
    /// after all.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the site does not exist.
    pub fn untimed(&self, site: u64) -> Result<()> {
        let known = self.sites.of(site)?;
        let mut planned = known.lock();
        if planned.site.passes() < LEARNED
            && let Some(timer) = planned.timer.take()
        {
            self.timers.end(&timer);
        }
        Ok(())
    }

    /// Marks the start or the end of a scope's recomputation, timed like [`Offload::leaf_begins`]. Reloads to start come with the next
    /// call.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the site does not exist.
    pub fn replays(&self, site: u64, scope: ScopeId, begins: bool) -> Result<()> {
        let known = self.sites.of(site)?;
        let mut planned = known.lock();
        if begins {
            self.step(site, &mut planned, Bytes::ZERO);
            let reloads = planned.site.replays(scope);
            planned.reloads.extend(reloads);
        }
        if let Some(timer) = &planned.timer {
            timer.lock().replays(scope, begins, planned.site.position().0);
        }
        if !begins {
            let over = planned.site.passes();
            planned.site.replayed(scope);
            if planned.site.passes() != over {
                self.ended(&mut planned);
            }
        }
        Ok(())
    }

    /// Records that a handle of an item is unpacked. Fills `begin` as [`Offload::packed`] does.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the site does not exist; [`ProcessError::Pass`].
    pub fn unpacked(&self, site: u64, item: ItemId, begin: &mut [u64]) -> Result<usize> {
        let known = self.sites.of(site)?;
        let mut planned = known.lock();
        let (before, bytes) = (planned.site.position(), planned.site.size(item));
        self.step(site, &mut planned, bytes);
        let reloads = planned.site.unpacked(item)?;
        if planned.site.position() == before
            && let Some(timer) = &planned.timer
        {
            timer.lock().no_step(before);
        }
        Ok(planned.fill(reloads, begin))
    }

    /// Records that the GPU copy of an item is freed while a handle of it lives.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the site does not exist.
    pub fn freed(&self, site: u64, item: ItemId) -> Result<()> {
        self.sites.of(site)?.lock().site.freed(item);
        Ok(())
    }

    /// Records that the handle of an item is dropped. The last one ends the pass.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the site does not exist; [`ProcessError::Pass`].
    pub fn dropped(&self, site: u64, item: ItemId) -> Result<()> {
        let known = self.sites.of(site)?;
        let mut planned = known.lock();
        let over = planned.site.passes();
        planned.site.dropped(item)?;
        if planned.site.passes() != over {
            self.ended(&mut planned);
        }
        Ok(())
    }

    /// Sets the streamed weights of a site's program, which are all away. Earlier ones are forgotten.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the site does not exist.
    pub fn set_streamed(&self, site: u64, places: Vec<StreamedPlace>) -> Result<()> {
        self.sites.of(site)?.lock().uses = Uses::new(places);
        Ok(())
    }

    /// Records the use of a streamed weight, and returns the weights to move. `is_first`: a new forward begins with it, before which the
    /// caller has freed all copies on the GPU.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the site does not exist or has no such weight.
    pub fn used(&self, site: u64, place: usize, phase: UsePhase, is_first: bool) -> Result<UseOrders> {
        let known = self.sites.of(site)?;
        let mut planned = known.lock();
        let places = planned.uses.len();
        if place >= places {
            return Err(ProcessError::invalid(format!(
                "the weight {place} was used of a site that streams {places}: set the streamed weights first"
            )));
        }
        Ok(planned.uses.used(place, phase, is_first))
    }

    /// Begins a pass: evaluates the measurements of earlier passes and sets its limits.
    fn begins(&self, site: u64, planned: &mut Planned) {
        let Some(asked) = planned.is_measured().filter(|_| !self.registry.is_stopped()) else { return };
        while let Some(Timed { pass, timer, spare }) = planned.timed.front() {
            let Some((mut measured, total)) = timer.lock().read() else { break };
            let before = measured.waited();
            if let Some(pool) = self.measures.pool(asked.device) {
                let (timer, report) = (timer.lock(), pool.report());
                let (stream, waits) = timer.memory_waits();
                let times = waits.iter().map(|(at, numbers)| (*at, report.gpu_wait_time(stream, numbers)));
                measured.waits.extend(times);
            }
            let waited = measured.waited();
            let stood = *spare == Some(planned.spare) && waited.saturating_sub(before) > total / STOOD;
            if stood {
                planned.spare = planned.spare.for_waits().min(planned.most_spare);
            }
            planned.real = Some((total, waited));
            planned.site.measured(*pass, &measured);
            planned.timed.pop_front();
        }
        let passes = planned.site.passes();
        if passes >= planned.due {
            planned.due = if passes < FIRST { passes + 1 } else { passes + 16 };
            self.look(
                planned,
                asked,
                passes < FIRST || passes.is_power_of_two() || passes.is_multiple_of(256),
            );
        }
        let Some(pool) = self.measures.pool(asked.device) else { return };
        if let Some(budget) = asked.budget {
            self.measures.set_budget(site, Some((asked.device, budget.saturating_sub(planned.beside))));
            // Another site may have a smaller budget.
            let (budget, passed) = pool.budget();
            let budget = budget.unwrap_or(Bytes::MAX);
            planned.passed = passed;
            if budget.saturating_sub(planned.least) > Spare::default().of(budget) {
                planned.most_spare = Spare::MOST;
            }
            planned.least = budget;
            let request = *planned.site.request();
            planned.site.ask(Request { budget: planned.spare.planned_of(budget), ..request });
            if pool.reserved() > budget
                && let Err(error) = pool.trim(budget)
            {
                tracing::warn!(target: "glake::offload", %error, "free memory above the budget was not given back");
            }
        }
    }

    /// Updates the plan's request if the measurements have changed enough.
    fn look(&self, planned: &mut Planned, asked: Asked, all: bool) {
        if all {
            planned.beside = self.measures.beside(asked.device);
        }
        let (links, all_links) = self.measures.links(asked.device, &self.queues);
        planned.all_links = all_links;
        let before = *planned.site.request();
        let links = if planned.was_checked() { before.links } else { planned.beside_weights(links) };
        let host_room = self.host_room(asked).unwrap_or(before.host_room);
        let differs = |left: f64, right: f64| (left - right).abs() > CHANGED * right.abs();
        #[allow(clippy::cast_precision_loss)] // compared roughly
        let amount = |bytes: Bytes| bytes.get() as f64;
        let rises = if planned.site.passes() < FIRST { RATE } else { CHANGED };
        let is_other = |now: f64, before: f64| now < (1.0 - RATE) * before || now > (1.0 + rises) * before;
        let is_other =
            is_other(links.out.0, before.links.out.0) || is_other(links.into.0, before.links.into.0);
        let has_room = differs(amount(host_room), amount(before.host_room));
        planned.site.ask(Request {
            budget: if asked.budget.is_none() { Bytes::MAX } else { before.budget },
            links: if is_other { links } else { before.links },
            host_room: if has_room { host_room } else { before.host_room },
            preset: asked.preset,
        });
    }

    fn host_room(&self, asked: Asked) -> Option<Bytes> {
        let pool = self.regions.stores.host(asked.device).ok()?.statistics();
        let own = self.host(asked.device).ok()?.bytes().0;
        Some(Measures::host_room(pool.room, own))
    }

    /// Begins a step: samples the memory and records the time.
    fn step(&self, site: u64, planned: &mut Planned, bytes: Bytes) {
        if let Some(asked) = planned.is_measured()
            && let Some((now, most)) = self.measures.sample(asked.device, site)
        {
            planned.site.sampled(now, most);
        }
        if let Some(timer) = &planned.timer
            && let Some(asked) = planned.asked
        {
            timer.lock().step(bytes, self.measures.waits_for_memory(asked.device));
        }
    }

    /// Starts a timer for the new pass if its times are needed.
    fn time(&self, planned: &mut Planned, stream: Stream) {
        planned.timer = None;
        let passes = planned.site.passes();
        // The first pass allocates memory and loads modules.
        let is_wanted = passes > 0 && (planned.site.may_want_times() || passes % TOLD == 2);
        let Some(asked) = planned.is_measured().filter(|_| is_wanted && !self.registry.is_stopped()) else {
            return;
        };
        let on = self.streams.with_default_of(Some(asked.device), || self.stream(stream));
        if let Ok(Ok(on)) = on
            && on.device == asked.device
        {
            planned.timer = self.timers.begin(self.registry.completion_events.driver(), on);
            if let Some(timer) = &planned.timer {
                timer.lock().step(Bytes::ZERO, self.measures.waits_for_memory(asked.device));
            }
        }
    }

    /// Ends the current pass.
    fn ended(&self, planned: &mut Planned) {
        let over = planned.site.passes();
        if let Some(timer) = planned.timer.take() {
            self.timers.end(&timer);
            if !self.registry.is_stopped() && !planned.was_checked() && timer.lock().end() {
                let spare = planned.site.has_followed().then_some(planned.spare);
                planned.timed.push_back(Timed { pass: over, timer, spare });
                planned.timed.truncate(4);
            }
        }
        planned.note_streamed();
        let shapes = std::mem::take(&mut planned.shapes.current);
        let Some(asked) = planned.is_measured() else { return };
        let pool = self.measures.pool(asked.device);
        let is_above = asked.budget.is_some()
            && pool.is_some_and(|pool| {
                let (budget, passed) = pool.budget();
                passed > planned.passed || budget.is_some_and(|budget| pool.reserved() > budget)
            });
        let is_passed = asked.budget.is_some() && pool.is_some_and(|pool| pool.budget().1 > planned.passed);
        if is_passed && planned.site.has_followed() {
            planned.spare = planned.spare.grown().min(planned.most_spare);
        }
        let kept = planned.site.kept_all();
        // This pass had a plan, so a remaining error belongs to another pass.
        let mut unplanned = planned.site.unplanned().filter(|_| !planned.site.has_followed()).copied();
        if let Some(PlanError::BelowFloor { minimum, .. }) = unplanned
            && let Some(budget) = pool.and_then(|pool| pool.budget().0)
            && let Some(less) = planned.spare.less_for(minimum, budget)
        {
            // Waits, and gaps slightly above the budget, are better than no plan.
            (planned.spare, planned.most_spare) = (less, less);
            unplanned = None;
        }
        let failed = unplanned.filter(|_| is_above);
        planned.shapes.learn(shapes, kept, failed);
    }

    /// Translates a plan's error into the budget that was requested by this site, or by one with a smaller budget on the same GPU.
    pub(super) fn below(&self, planned: &Planned, error: PlanError) -> ProcessError {
        let PlanError::BelowFloor { minimum, host_room, .. } = error else { return error.into() };
        let own = planned.asked.and_then(|asked| asked.budget).unwrap_or(Bytes::MAX);
        let pool = planned.asked.and_then(|asked| self.measures.pool(asked.device));
        let least = pool.and_then(|pool| pool.budget().0);
        let budget = least.map_or(own, |least| own.min(least.saturating_add(planned.beside)));
        // Enough if later passes need slightly more than these.
        let minimum = Spare::default().grown().budget_of(minimum);
        ProcessError::Budget { budget, minimum: minimum.saturating_add(planned.beside), host_room }
    }
}

/// Number and bytes of a plan's items with one verdict.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sum {
    pub(super) items: u64,
    pub(super) bytes: u64,
}

impl Sum {
    pub(super) fn of(plan: &glake_offload::Plan, verdict: Verdict) -> Sum {
        let items = plan.tape().items().iter().zip(plan.verdicts()).filter(|(_, of)| **of == verdict);
        items.fold(Sum::default(), |sum, (item, _)| Sum {
            items: sum.items + 1,
            bytes: sum.bytes + item.pack().bytes.get(),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use glake_offload::{Links, UsePhase, Uses};
    use glake_units::{Bandwidth, Bytes};

    use super::super::StreamedPlace;
    use super::super::sites::Sites;

    #[test]
    fn streamed_weights_leave_less_of_the_link_to_reloads() {
        let sites = Sites::default();
        let known = sites.of(sites.create()).unwrap();
        let mut planned = known.lock();
        let links = Links::new(Bandwidth(50.0), Bandwidth(40.0));
        planned.uses =
            Uses::new((0..4).map(|block| StreamedPlace { bytes: Bytes::new(100_000_000), block }).collect());
        planned.real = Some((Duration::from_millis(20), Duration::ZERO));
        planned.note_streamed();
        assert_eq!(planned.beside_weights(links), links, "nothing came");
        for place in 0..4 {
            planned.uses.used(place, UsePhase::Forward, place == 0);
        }
        planned.note_streamed();
        // 400 MB take half of a pass.
        assert_eq!(planned.beside_weights(links), Links::new(Bandwidth(50.0), Bandwidth(20.0)));
        planned.note_streamed();
        assert_eq!(planned.beside_weights(links), links);
    }

    #[test]
    fn numbers_of_sites_are_given_once() {
        let sites = Sites::default();
        let site = sites.create();
        sites.release(site).unwrap();
        for error in [sites.release(site).unwrap_err(), sites.of(site).map(drop).unwrap_err()] {
            assert!(error.says("no site that offloads"), "{error}");
        }
        assert!(sites.create() > site);
    }
}
