//! Report of a site: goal, plan and passes.

use serde_json::{Value, json};

use glake_offload::{Plan, Preset, Request, Verdict};
use glake_units::Bytes;

use super::super::Result;
use super::passes::Sum;
use super::sites::Planned;
use super::{Offload, Position};
use crate::metrics::{ItemStats, PlanStats, SiteStats, micros};

impl Offload {
    /// Returns a site's goal, its last plan and its passes as JSON; with `course` also the planned pass step by step.
    ///
    /// # Errors
    /// [`super::ProcessError::UnknownSite`].
    pub fn told(&self, site: u64, course: bool) -> Result<Value> {
        let planned = self.sites.of(site)?;
        let planned = planned.lock();
        let (site, request) = (&planned.site, planned.site.request());
        let asked = planned.asked;
        let pool = asked.and_then(|asked| self.measures.pool(asked.device));
        let are_all_used = self.registry.engine.is_on();
        let told = SiteStats {
            preset: name(asked.map_or(request.preset, |asked| asked.preset)),
            budget: asked.and_then(|asked| asked.budget).map(Bytes::get),
            device: asked.map(|asked| asked.device.0),
            beside_bytes: planned.beside.get(),
            reserved_bytes: pool.map(|pool| pool.reserved().get()),
            above_budget: pool.map(|pool| pool.budget().1),
            passes: site.passes(),
            diverged: site.diverged(),
            unplanned: site.unplanned().map(|error| self.below(&planned, *error).to_string()),
            out_gb_s: request.links.out.0,
            in_gb_s: request.links.into.0,
            host_room_bytes: request.host_room.get(),
            real_us: planned.real.map(|(total, _)| micros(total)),
            real_exposed_us: planned.real.map(|(_, waited)| micros(waited)),
            plan: site.plan().map(|plan| plan_of(plan, &planned, are_all_used)),
        };
        let mut told = told.json();
        if let Some(plan) = site.plan().filter(|_| course) {
            told["plan"]["course"] = steps(plan, &planned);
        }
        Ok(told)
    }
}

fn plan_of(plan: &Plan, planned: &Planned, are_all_used: bool) -> PlanStats {
    let sum = |verdict| {
        let Sum { items, bytes } = Sum::of(plan, verdict);
        ItemStats { items, bytes }
    };
    PlanStats {
        kept: sum(Verdict::Keep),
        offloaded: sum(Verdict::Offload),
        recomputed: sum(Verdict::Recompute),
        peak_bytes: plan.peak().saturating_add(planned.beside).get(),
        host_bytes: plan.host().get(),
        is_timed: plan.tape().is_timed(),
        expected_us: micros(plan.time()),
        expected_exposed_us: micros(plan.exposed()),
        recompute_us: micros(plan.recompute()),
        all_links_us: if are_all_used { None } else { over_all(plan, planned).map(micros) },
    }
}

fn over_all(plan: &Plan, planned: &Planned) -> Option<std::time::Duration> {
    let (request, all) = (planned.site.request(), planned.all_links);
    let is_more = all.out.0 > request.links.out.0 * 1.05 || all.into.0 > request.links.into.0 * 1.05;
    let other = is_more.then(|| Plan::new(plan.tape(), &Request { links: all, ..*request }).ok())??;
    (other.time() < plan.time()).then(|| other.time())
}

/// Returns the start of each step and the memory in use until the next; and for each item its bytes, the bytes over a link, its verdict,
/// and when it is packed, reloaded and needed.
fn steps(plan: &Plan, planned: &Planned) -> Value {
    let tape = plan.tape();
    let time = |at: Position| micros(tape.time_at(at));
    let positions = || (0..=tape.steps().len()).map(Position);
    let items = tape.items().iter().enumerate().map(|(index, item)| {
        let id = glake_offload::ItemId::new(index);
        let (pack, needed) = (item.pack(), item.unpacks().first().copied());
        json!([
            pack.bytes.get(),
            pack.link_bytes.get(),
            plan.verdict(id).map_or(0, number),
            item.packed().0,
            plan.reload_at(id).map(|at| at.0),
            needed.map(|at| at.0),
            item.dropped().0,
        ])
    });
    json!({
        "us": positions().map(time).collect::<Vec<_>>(),
        "rest_bytes": positions().map(|at| tape.rest_at(at).saturating_add(planned.beside).get()).collect::<Vec<_>>(),
        "held_bytes": plan.held().iter().map(|held| held.saturating_add(planned.beside).get()).collect::<Vec<_>>(),
        "items": items.collect::<Vec<_>>(),
    })
}

fn number(verdict: Verdict) -> u32 {
    match verdict {
        Verdict::Keep => 0,
        Verdict::Offload => 1,
        Verdict::Recompute => 2,
    }
}

fn name(preset: Preset) -> &'static str {
    match preset {
        Preset::Fit => "fit",
        Preset::Memory => "memory",
        Preset::Hybrid => "hybrid",
    }
}
