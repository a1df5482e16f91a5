//! Checkpointed workers: when a worker leaves its GPUs, when it returns, and how its memory is accounted meanwhile.
//!
//! ```text
//!            idle for long, nothing leased           a want, or an unknown state
//!  Present ──────────────► Leaving ──────► Checkpointed ──────────► Returning ──► Present
//!     ▲                      │                  ▲   Unknown ────────► │
//!     └──── checkpoint fails ┘                  └──── no room ────────┤
//!                                                          Lost ◄─────┘ the driver cannot restore it
//! ```
//!
//! Invariants: only a gang of one rank leaves, without leases and without a want. Only a present worker gets grants and commands. The floor
//! of a checkpointed worker does not count. It is counted again, within the limit and with a margin, before the driver restores the worker.
//! The agent checks the meter before a restore, because a restore without room kills the process. Wants of a lost worker are denied, and
//! the driver is not asked about it again.

use std::collections::BTreeSet;
use std::time::Duration;

use glake_units::Bytes;

use crate::arbiter::Arbiter;
use crate::gang::{Gang, Share, State};
use crate::growth::Growth;
use crate::ledger::Gpu;
use crate::log::{Decision, Outcome};
use crate::server::{AGAIN, Server};
use crate::{Action, Activity, Contexts, Denied, GangId, GpuId, WorkerId};

/// Minimum free memory beyond the floor before a restore; `MARGIN_PART` sets a larger margin for large floors.
const MARGIN: Bytes = Bytes::mib(64);
const MARGIN_PART: u64 = 20;
/// Time after which a restore loses its claim on the GPUs: the want waits again behind all others and may be denied.
const RESTORING: Duration = Duration::from_secs(5);
/// Upper bound of the interval between attempts to restore a worker, which doubles with each failure.
const SELDOM: Duration = Duration::from_secs(30);

/// Location of a gang's contexts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum Presence {
    /// The contexts are on their GPUs.
    #[default]
    Present,
    /// A checkpoint is under way.
    Leaving,
    /// In the driver's checkpoint. `returns`: restore it even without a want.
    Checkpointed { returns: bool },
    /// An earlier agent's checkpoint or restore was interrupted, so the driver must be asked.
    Unknown,
    /// A restore is under way.
    Returning,
    /// In the driver's checkpoint without a way to restore it.
    Lost,
}

/// Checkpoint state of a gang.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Away {
    pub(crate) presence: Presence,
    /// Worker whose contexts left; the gang may get another rank meanwhile.
    pub(crate) worker: Option<WorkerId>,
    /// Time since which the gang rests.
    pub(crate) rests_since: Duration,
    /// Earliest time of the next checkpoint after a failed one.
    pub(crate) stays_until: Duration,
    refusals: u32,
    /// Earliest time of the next restore after a failed one.
    pub(crate) restore_after: Duration,
    misses: u32,
}

impl Away {
    pub(crate) fn new(now: Duration) -> Self {
        Away { rests_since: now, ..Away::default() }
    }

    pub(crate) fn is_present(self) -> bool {
        self.presence == Presence::Present
    }

    /// Returns whether the driver has checkpointed the worker completely, so that its floors do not count.
    pub(crate) fn is_checkpointed(self) -> bool {
        matches!(self.presence, Presence::Checkpointed { .. } | Presence::Lost)
    }

    /// Returns whether the driver can never restore the worker.
    pub(crate) fn is_lost(self) -> bool {
        self.presence == Presence::Lost
    }

    /// Returns whether a checkpoint or a restore is under way.
    pub(crate) fn is_moving(self) -> bool {
        matches!(self.presence, Presence::Leaving | Presence::Returning)
    }

    /// Records a failed checkpoint and doubles the time until the next attempt.
    fn refused(&mut self, now: Duration, length: Duration) {
        self.stays_until = now + length * (1 << self.refusals.min(6));
        self.refusals += 1;
    }

    /// Records a failed restore and doubles the time until the next attempt.
    fn missed(&mut self, now: Duration) {
        self.restore_after = now + SELDOM.min(AGAIN * (1 << self.misses.min(6)));
        self.misses += 1;
    }

    /// Returns whether the floor of this worker does not count at the moment.
    pub(crate) fn is_out(self, worker: WorkerId) -> bool {
        self.is_checkpointed() && self.worker == Some(worker)
    }
}

impl Share {
    /// Returns the floor that must be free again before the worker is restored.
    pub(crate) fn absent_floor(&self) -> Bytes {
        if self.is_checkpointed { self.holding.floor } else { Bytes::ZERO }
    }

    /// Returns the margin beyond the absent floor that must be free until the restore ends.
    fn margin(&self) -> Bytes {
        let floor = self.absent_floor();
        if floor.is_zero() { floor } else { MARGIN.max(Bytes::new(floor.get() / MARGIN_PART)) }
    }
}

/// Returns the memory of a GPU that must be free to restore a gang; 0 if the gang is present.
fn room_to_restore(gang: &Gang, gpu: GpuId) -> Bytes {
    gang.on(gpu).map(|share| share.absent_floor().saturating_add(share.margin())).sum()
}

impl Gang {
    /// Returns whether the gang must return although none of its uses waits for evicted memory.
    fn is_to_return(&self) -> bool {
        self.away.returns() || self.growing > 0
    }

    /// Returns the time at which the gang may be checkpointed; `None` while its state rules that out.
    fn leaves_at(&self, after: Duration) -> Option<Duration> {
        let holds_nothing = |share: &Share| {
            let held = &share.holding;
            share.overrun.is_zero()
                && [held.lease, held.resident, held.fixed].iter().all(|bytes| bytes.is_zero())
        };
        let is_asleep = self.is_resting() && self.want.is_none() && !self.is_resident();
        let is_alone = self.ranks == 1 && self.members.len() == 1 && !self.silent && !self.starting;
        let is_quiet = self.activity == Activity::Idle && self.growing == 0 && self.demoting.is_none();
        let leaves = self.away.is_present()
            && is_asleep
            && is_alone
            && is_quiet
            && !self.shares.is_empty()
            && self.shares.iter().all(holds_nothing);
        let at = (self.away.rests_since + after).max(self.away.stays_until).max(self.distrust.until);
        leaves.then_some(at)
    }
}

impl Server {
    /// Returns the next gang to checkpoint and its time. Only one checkpoint runs at a time.
    pub(crate) fn next_to_leave(&self) -> Option<(Duration, GangId)> {
        let after = self.settings.checkpoint_after?;
        let is_leaving =
            |id: &GangId| self.gangs.get(id).is_some_and(|gang| gang.away.presence == Presence::Leaving);
        if self.absent.iter().any(is_leaving) {
            return None;
        }
        self.gangs.iter().filter_map(|(id, gang)| Some((gang.leaves_at(after)?, *id))).min()
    }

    /// Starts the checkpoint of a gang that has been idle long enough.
    pub(crate) fn put_away(&mut self) {
        let Some((_, id)) = self.next_to_leave().filter(|(at, _)| *at <= self.now) else { return };
        let worker = self.gangs.get(&id).and_then(|gang| gang.members.keys().next().copied());
        self.set_presence(id, worker, Presence::Leaving);
        self.actions.extend(worker.map(|worker| Action::Checkpoint { worker }));
    }

    /// Sets the location of a gang's contexts and adjusts the accounted floors.
    pub(crate) fn set_presence(&mut self, id: GangId, worker: Option<WorkerId>, presence: Presence) {
        let Some(gang) = self.gangs.get_mut(&id) else { return };
        gang.away.presence = presence;
        gang.away.worker = worker.filter(|_| presence != Presence::Present);
        if presence == Presence::Present {
            (gang.away.restore_after, gang.away.misses) = (self.now, 0);
        }
        let away = gang.away;
        let keys: Vec<_> = gang.shares.iter().map(Share::key).collect();
        for key in keys {
            self.change(id, key, |share| share.is_checkpointed = away.is_out(key.0));
        }
        if away.is_present() {
            self.absent.remove(&id)
        } else {
            self.absent.insert(id)
        };
        self.note(id);
    }

    /// Returns the free memory of a GPU beyond the needs of refills that wait for a restore.
    pub(crate) fn free_beside_restores(&self, gpu: GpuId) -> Bytes {
        let restored = self.absent.iter().filter_map(|id| self.gangs.get(id));
        let refills = restored.filter(|gang| matches!(gang.state, State::Refilling(_)));
        let owed = |share: &Share| share.owed.saturating_add(share.absent_floor());
        self.free(gpu).saturating_sub(refills.flat_map(|gang| gang.on(gpu)).map(owed).sum())
    }

    /// Requests a restore of a gang if its floors fit now. Returns whether the gang is present.
    pub(crate) fn restore(&mut self, id: GangId) -> bool {
        let Some(gang) = self.gangs.get(&id) else { return false };
        if gang.away.is_present() {
            return true;
        }
        if gang.away.is_moving() || gang.away.is_lost() || gang.away.restore_after > self.now {
            return false;
        }
        let fits = |gpu: &GpuId| {
            let room = room_to_restore(gang, *gpu);
            room.is_zero() || room <= self.free(*gpu)
        };
        if !gang.shares.iter().all(|share| fits(&share.holding.gpu)) {
            return false;
        }
        let worker = gang.away.worker;
        self.set_presence(id, worker, Presence::Returning);
        if let Some(State::Refilling(refill)) = self.gangs.get_mut(&id).map(|gang| &mut gang.state) {
            refill.by = self.now + RESTORING;
        }
        self.actions.extend(worker.map(|worker| Action::Restore { worker }));
        false
    }

    /// Restores gangs that must return without a want, and gangs in an unknown state.
    pub(crate) fn bring_back(&mut self) {
        let now = self.now;
        let due = |id: &GangId| {
            let Some(gang) = self.gangs.get(id) else { return false };
            gang.is_to_return() && gang.is_resting() && !gang.away.is_lost() && gang.away.restore_after <= now
        };
        for id in self.absent.iter().copied().filter(due).collect::<Vec<_>>() {
            let is_leaving = self.make_room(id);
            self.restore(id);
            // Somebody whom nobody manages may have given memory back.
            let waits = |gang: &&mut Gang| !gang.away.is_moving() && !is_leaving;
            if let Some(gang) = self.gangs.get_mut(&id).filter(waits) {
                gang.away.restore_after = now + AGAIN;
                self.actions
                    .extend(gang.shares.iter().map(|share| Action::Measure { gpu: share.holding.gpu }));
            }
        }
    }

    /// Takes memory from victims for the absent floors and growths of a gang, if the victims have enough. Returns whether a victim gives
    /// memory.
    fn make_room(&mut self, id: GangId) -> bool {
        let Some(gang) = self.gangs.get(&id) else { return false };
        let growths = self.growths.iter().filter(|growth| growth.gang == id).map(|growth| growth.gpu);
        let gpus: BTreeSet<GpuId> =
            gang.shares.iter().map(|share| share.holding.gpu).chain(growths).collect();
        // What leaves already may be enough.
        let leaves = |other: &Gang| {
            let is_leaving =
                matches!(other.state, State::Parking { .. } | State::Shrinking { by: Some(_), .. });
            is_leaving && other.shares.iter().any(|share| gpus.contains(&share.holding.gpu))
        };
        if self.under_way.iter().filter_map(|id| self.gangs.get(id)).any(leaves) {
            return true;
        }
        let mut takes = Vec::new();
        for &gpu in &gpus {
            let floors: Bytes = gang.on(gpu).map(Share::absent_floor).sum();
            let growths = self.growths.iter().filter(|growth| growth.gang == id && growth.gpu == gpu);
            let needed = floors.saturating_add(growths.map(|growth| growth.bytes).sum());
            let needed = needed.max(room_to_restore(gang, gpu));
            let short = needed.saturating_sub(self.free_beside_restores(gpu));
            let found = self.choose(gpu, short, Some(i64::from(gang.profile.priority)), Some(id));
            if !found.short.is_zero() {
                return false;
            }
            takes.extend(found.takes);
        }
        self.take(&takes, Some(id));
        !takes.is_empty()
    }

    /// Returns the earliest time of a restore or checkpoint without another event.
    pub(crate) fn away_at(&self) -> Option<Duration> {
        let gangs = self.absent.iter().filter_map(|id| self.gangs.get(id));
        let may_move = |gang: &&Gang| !gang.away.is_moving() && !gang.away.is_lost();
        let waits = |gang: &&Gang| may_move(gang) && (gang.is_to_return() || gang.want.is_some());
        let restores = gangs.filter(waits).map(|gang| gang.away.restore_after).filter(|at| *at > self.now);
        restores.chain(self.next_to_leave().map(|(at, _)| at)).min()
    }

    /// Logs the outcome of a checkpoint or restore as a decision.
    fn log_contexts(&mut self, id: GangId, outcome: Outcome) {
        let Some(gang) = self.gangs.get(&id) else { return };
        let needed = gang.shares.iter().map(|share| (share.holding.gpu, Bytes::ZERO)).collect();
        let (at, class, waited) = (self.now, i64::from(gang.profile.priority), Duration::ZERO);
        let (taken, predicted) = (Vec::new(), Duration::ZERO);
        self.log.decided(Decision { at, gang: id, class, waited, needed, taken, predicted, outcome });
    }
}

impl Away {
    /// Returns whether the gang must return even without a want.
    fn returns(self) -> bool {
        matches!(self.presence, Presence::Checkpointed { returns: true } | Presence::Unknown)
    }
}

impl Arbiter {
    pub(crate) fn operator_refills(&mut self, worker: WorkerId) {
        let id = self.server.gang_of.get(&worker);
        let Some(gang) = id.and_then(|id| self.server.gangs.get_mut(id)) else { return };
        if let Presence::Checkpointed { returns } = &mut gang.away.presence {
            *returns = true;
            gang.away.restore_after = gang.away.restore_after.min(self.server.now);
        }
    }

    /// Records the result of a checkpoint or restore, or a state that the journal names.
    pub(crate) fn contexts(&mut self, worker: WorkerId, contexts: Contexts) {
        let now = self.server.now;
        let server = &mut self.server;
        let Some(&id) = server.gang_of.get(&worker) else { return };
        let Some(gang) = server.gangs.get_mut(&id) else { return };
        let was = gang.away.presence;
        if gang.away.worker.is_some_and(|known| known != worker) {
            // Another rank's: it is to run, whatever it is.
            if !matches!(contexts, Contexts::Present | Contexts::Lost) {
                server.actions.push(Action::Restore { worker });
            }
            return;
        }
        let is_refilling = matches!(gang.state, State::Refilling(_));
        match contexts {
            Contexts::Present => {
                if was == Presence::Leaving {
                    let length = server.settings.checkpoint_after.unwrap_or_default();
                    gang.away.refused(now, length);
                } else {
                    (gang.away.rests_since, gang.away.refusals) = (now, 0);
                }
                if let State::Refilling(refill) = &mut gang.state
                    && was != Presence::Present
                    && refill.admitted.is_none()
                {
                    refill.by = now + refill.patience.max(server.settings.least_late);
                }
                server.set_presence(id, None, Presence::Present);
                if was != Presence::Present {
                    // What it waits for as it grows is asked for as if it was asked now.
                    server.make_room(id);
                }
                if was == Presence::Leaving {
                    server.log_contexts(id, Outcome::Kept);
                }
            }
            Contexts::Checkpointed | Contexts::Unknown => {
                let returns = was == Presence::Unknown || gang.away.returns();
                // One that a journal names is asked for at once.
                if was == Presence::Returning {
                    gang.away.missed(now);
                }
                let presence = match contexts {
                    Contexts::Unknown => Presence::Unknown,
                    // A restore that nobody wants any more is asked for again all the same: it was begun for a reason.
                    _ => Presence::Checkpointed {
                        returns: returns || (was == Presence::Returning && !is_refilling),
                    },
                };
                server.set_presence(id, Some(worker), presence);
                if is_refilling {
                    server.give_back(id, Outcome::NotRestored);
                }
                if was == Presence::Leaving && contexts == Contexts::Checkpointed {
                    server.log_contexts(id, Outcome::Checkpointed);
                }
            }
            Contexts::Lost => {
                server.set_presence(id, Some(worker), Presence::Lost);
                match is_refilling {
                    true => server.give_back(id, Outcome::Lost),
                    false => server.log_contexts(id, Outcome::Lost),
                }
                server.deny(id, Denied::Lost, None);
                let growths = std::mem::take(&mut server.growths).into_iter();
                let (of_it, others) = growths.partition(|growth| growth.gang == id);
                server.growths = others;
                let of_it: Vec<Growth> = of_it;
                of_it.iter().for_each(|growth| server.deny_growth(growth));
            }
        }
    }
}

/// Returns the memory of a GPU that a gang's want needs, including absent floors.
pub(crate) fn wanted(gang: &Gang, gpu: GpuId) -> Bytes {
    let needs: Bytes = gang.on(gpu).map(|share| share.need().saturating_add(share.absent_floor())).sum();
    needs.max(room_to_restore(gang, gpu))
}

/// Returns the missing memory of a GPU for a gang's want.
pub(crate) fn short(gang: &Gang, gpu: GpuId, held: Option<&Gpu>) -> Bytes {
    let excess = held.map_or(Bytes::ZERO, Gpu::excess);
    wanted(gang, gpu).saturating_add(excess).saturating_sub(held.map_or(Bytes::ZERO, Gpu::free))
}
