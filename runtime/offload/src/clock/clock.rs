//! Clock: executes a plan step by step.

use std::collections::HashSet;
use std::sync::Arc;

use super::Orders;
use crate::{Follower, ItemId, Pack, Plan, Position, ScopeId, Step, TapeError, Verdict};

/// Returns, for each step of a pass, which copies begin and which must have completed.
///
/// If a pass diverges from the plan's tape, the rest of it runs on demand: packed items are offloaded, and reloaded when they are unpacked.
///
/// ```
/// use std::sync::Arc;
/// use glake_offload::{Clock, ItemId, Links, Pack, Plan, Preset, Recorder, Request, Verdict};
/// use glake_units::{Bandwidth, Bytes};
///
/// let packs = [Pack::new(Bytes::mib(8)), Pack::new(Bytes::mib(8)), Pack::new(Bytes::mib(8))];
/// let mut recorder = Recorder::new();
/// let items = packs.map(|pack| recorder.packed(pack));
/// for item in items.into_iter().rev() {
///     recorder.unpacked(item)?;
///     recorder.dropped(item)?;
/// }
/// let request = Request::new(Bytes::MAX, Links::new(Bandwidth(50.0), Bandwidth(50.0)));
/// let plan = Plan::new(&Arc::new(recorder.finish()), &request.preset(Preset::Memory))?;
///
/// let (mut clock, mut reloaded) = (Clock::new(Arc::new(plan)), Vec::new());
/// for pack in &packs {
///     reloaded.extend_from_slice(clock.packed(pack).1.reload);
/// }
/// for item in [2, 1, 0].map(ItemId::new) {
///     let orders = clock.unpacked(item)?;
///     reloaded.extend_from_slice(orders.reload);
///     assert_eq!(orders.verdict == Verdict::Keep, item == ItemId::new(2));
/// }
/// assert_eq!(reloaded, [ItemId::new(1), ItemId::new(0)]);    // the last item was never offloaded
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Clock {
    plan: Arc<Plan>,
    follower: Follower,
    items: Vec<Away>,
    settled: usize,
    issued: usize,
    replays: usize,
    /// Scopes replayed on demand, before or after the pass diverged.
    replayed: HashSet<ScopeId>,
    /// Buffer for an on-demand reload.
    demanded: [ItemId; 1],
}

/// State of an item of the pass.
#[derive(Clone, Copy, Debug)]
struct Away {
    verdict: Verdict,
    scope: Option<ScopeId>,
    /// Whether the item is offloaded and no reload has been issued since.
    away: bool,
}

impl Clock {
    /// Creates a clock at the beginning of a pass.
    pub fn new(plan: Arc<Plan>) -> Self {
        let follower = Follower::new(Arc::clone(plan.tape()));
        Clock {
            plan,
            follower,
            items: Vec::new(),
            settled: 0,
            issued: 0,
            replays: 0,
            replayed: HashSet::new(),
            demanded: [ItemId::new(0)],
        }
    }

    /// Records that the pass packs a new item. Returns its ID and the orders of the step.
    pub fn packed(&mut self, pack: &Pack) -> (ItemId, Orders<'_>) {
        let (item, position) = (ItemId::new(self.items.len()), self.follower.position());
        let planned = self.follower.packed(pack).then(|| self.plan.verdict(item)).flatten();
        let verdict = planned.unwrap_or(Verdict::unplanned(pack));
        self.items.push(Away { verdict, scope: pack.scope, away: verdict == Verdict::Offload });
        let orders = match planned {
            Some(_) => self.planned(position, verdict),
            None => Orders { position, settle: &[], reload: &[], replay: None, verdict },
        };
        (item, orders)
    }

    /// Records that the pass unpacks a handle of `item`.
    ///
    /// # Errors
    /// [`TapeError::UnknownItem`] if the pass has not packed the item.
    pub fn unpacked(&mut self, item: ItemId) -> Result<Orders<'_>, TapeError> {
        let packed = self.items.len();
        let Away { verdict, scope, away } =
            *self.items.get(item.index()).ok_or(TapeError::UnknownItem { item, packed })?;
        let position = self.follower.position();
        if self.follower.unpacked(item) {
            return Ok(self.planned(position, verdict));
        }
        self.demanded = [item];
        if away {
            self.items[item.index()].away = false;
        }
        let again = scope.filter(|_| verdict == Verdict::Recompute);
        let replay = again.filter(|scope| self.replayed.insert(*scope));
        let reload: &[ItemId] = if away { &self.demanded } else { &[] };
        Ok(Orders { position, settle: &[], reload, replay, verdict })
    }

    /// Records that a reloaded copy of `item` was freed during the pass. The next on-demand unpack reloads it again, as for a retained
    /// graph.
    pub fn freed(&mut self, item: ItemId) {
        if let Some(away) = self.items.get_mut(item.index()) {
            away.away = away.verdict == Verdict::Offload;
        }
    }

    /// Returns the position from which the pass runs on demand; `None` while it follows the plan.
    pub fn diverged(&self) -> Option<Position> {
        self.follower.diverged()
    }

    /// Returns whether the pass executed every step of the plan's tape and no other.
    pub fn is_complete(&self) -> bool {
        self.follower.is_complete()
    }

    /// Returns the plan that the clock follows.
    pub fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    /// Returns the next step of the tape, so that the caller can prepare it; `None` after divergence.
    pub fn next(&self) -> Option<Step> {
        let next = self.plan.tape().steps().get(self.follower.position().0).copied();
        next.filter(|_| self.follower.diverged().is_none())
    }

    fn planned(&mut self, position: Position, verdict: Verdict) -> Orders<'_> {
        let settled = self.plan.settled[position.0].max(self.settled);
        let issued = self.plan.issued[position.0].max(self.issued);
        let settle = std::mem::replace(&mut self.settled, settled)..settled;
        let reload = std::mem::replace(&mut self.issued, issued)..issued;
        for item in &self.plan.reloads[reload.clone()] {
            self.items[item.index()].away = false;
        }
        let replay = self.plan.replays.get(self.replays).filter(|(at, _)| *at == position).map(|(_, id)| *id);
        if let Some(scope) = replay {
            self.replays += 1;
            self.replayed.insert(scope);
        }
        Orders {
            position,
            settle: &self.plan.out[settle],
            reload: &self.plan.reloads[reload],
            replay,
            verdict,
        }
    }
}
