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
use crate::gang::{Gang, Growth, Presence, Share, State};
use crate::interface::RETRY;
use crate::log::{Decision, Outcome};
use crate::{Action, Contexts, Denied, GangId, GpuId, WorkerId};

/// Time after which a restore loses its claim on the GPUs: the want waits again behind all others and may be denied.
const RESTORING: Duration = Duration::from_secs(5);

impl Arbiter {
    /// Requests a restore of a gang if its floors fit now. Returns whether the gang is present.
    pub(crate) fn restore(&mut self, id: GangId) -> bool {
        let Some(gang) = self.ledger.gangs.get(&id) else { return false };
        if gang.contexts.is_present() {
            return true;
        }
        if gang.contexts.is_moving()
            || gang.contexts.is_lost()
            || gang.contexts.restore_after > self.ledger.now
        {
            return false;
        }
        let fits = |gpu: &GpuId| {
            let room = gang.room_to_restore(*gpu);
            room.is_zero() || room <= self.ledger.free(*gpu)
        };
        if !gang.shares.iter().all(|share| fits(&share.account.gpu)) {
            return false;
        }
        let worker = gang.contexts.worker;
        self.ledger.set_presence(id, worker, Presence::Returning);
        if let Some(State::Refilling(refill)) = self.ledger.gangs.get_mut(&id).map(|gang| &mut gang.state) {
            refill.by = self.ledger.now + RESTORING;
        }
        self.actions.extend(worker.map(|worker| Action::Restore { worker }));
        false
    }

    /// Restores gangs that must return without a want, and gangs in an unknown state.
    pub(crate) fn restore_absent(&mut self) {
        let now = self.ledger.now;
        let due = |id: &GangId| {
            let Some(gang) = self.ledger.gangs.get(id) else { return false };
            gang.is_to_return()
                && gang.is_resting()
                && !gang.contexts.is_lost()
                && gang.contexts.restore_after <= now
        };
        for id in self.ledger.absent.iter().copied().filter(due).collect::<Vec<_>>() {
            let is_leaving = self.make_room(id);
            self.restore(id);
            // An unmanaged process may have returned memory.
            let waits = |gang: &&mut Gang| !gang.contexts.is_moving() && !is_leaving;
            if let Some(gang) = self.ledger.gangs.get_mut(&id).filter(waits) {
                gang.contexts.restore_after = now + RETRY;
                self.actions
                    .extend(gang.shares.iter().map(|share| Action::Measure { gpu: share.account.gpu }));
            }
        }
    }

    /// Takes memory from victims for the absent floors and growths of a gang, if the victims have enough. Returns whether a victim gives
    /// memory.
    pub(crate) fn make_room(&mut self, id: GangId) -> bool {
        let Some(gang) = self.ledger.gangs.get(&id) else { return false };
        let growths = self.ledger.growths.iter().filter(|growth| growth.gang == id).map(|growth| growth.gpu);
        let gpus: BTreeSet<GpuId> =
            gang.shares.iter().map(|share| share.account.gpu).chain(growths).collect();
        // Shrinks under way may be enough.
        let leaves = |other: &Gang| {
            let is_leaving =
                matches!(other.state, State::Parking { .. } | State::Shrinking { by: Some(_), .. });
            is_leaving && other.shares.iter().any(|share| gpus.contains(&share.account.gpu))
        };
        if self.ledger.under_way.iter().filter_map(|id| self.ledger.gangs.get(id)).any(leaves) {
            return true;
        }
        let mut takes = Vec::new();
        for &gpu in &gpus {
            let floors: Bytes = gang.on(gpu).map(Share::absent_floor).sum();
            let growths = self.ledger.growths.iter().filter(|growth| growth.gang == id && growth.gpu == gpu);
            let needed = floors.saturating_add(growths.map(|growth| growth.bytes).sum());
            let needed = needed.max(gang.room_to_restore(gpu));
            let short = needed.saturating_sub(self.ledger.free_besides_restores(gpu));
            let found = self.ledger.choose(gpu, short, Some(i64::from(gang.profile.priority)), Some(id));
            if !found.short.is_zero() {
                return false;
            }
            takes.extend(found.takes);
        }
        self.command_victims(&takes, Some(id));
        !takes.is_empty()
    }

    /// Logs the outcome of a checkpoint or restore as a decision.
    pub(crate) fn log_contexts(&mut self, id: GangId, outcome: Outcome) {
        let Some(gang) = self.ledger.gangs.get(&id) else { return };
        let needed = gang.shares.iter().map(|share| (share.account.gpu, Bytes::ZERO)).collect();
        let (at, class, waited) = (self.ledger.now, i64::from(gang.profile.priority), Duration::ZERO);
        let (taken, predicted) = (Vec::new(), Duration::ZERO);
        self.log.decided(Decision { at, gang: id, class, waited, needed, taken, predicted, outcome });
    }

    /// Records the result of a checkpoint or restore, or a state that the journal names.
    pub(crate) fn handle_contexts(&mut self, worker: WorkerId, contexts: Contexts) {
        let now = self.ledger.now;
        let Some(&id) = self.ledger.gang_of.get(&worker) else { return };
        let Some(gang) = self.ledger.gangs.get_mut(&id) else { return };
        let was = gang.contexts.presence;
        if gang.contexts.worker.is_some_and(|known| known != worker) {
            // The contexts belong to another rank, which must run in any case.
            if !matches!(contexts, Contexts::Present | Contexts::Lost) {
                self.actions.push(Action::Restore { worker });
            }
            return;
        }
        let is_refilling = matches!(gang.state, State::Refilling(_));
        match contexts {
            Contexts::Present => {
                if was == Presence::Leaving {
                    let length = self.ledger.settings.checkpoint_after.unwrap_or_default();
                    gang.contexts.refused(now, length);
                } else {
                    (gang.contexts.rests_since, gang.contexts.refusals) = (now, 0);
                }
                if let State::Refilling(refill) = &mut gang.state
                    && was != Presence::Present
                    && refill.admitted.is_none()
                {
                    refill.by = now + refill.patience.max(self.ledger.settings.least_late);
                }
                self.ledger.set_presence(id, None, Presence::Present);
                if was != Presence::Present {
                    // Pending growths are handled as if they were requested now.
                    self.make_room(id);
                }
                if was == Presence::Leaving {
                    self.log_contexts(id, Outcome::Kept);
                }
            }
            Contexts::Checkpointed | Contexts::Unknown => {
                let returns = was == Presence::Unknown || gang.contexts.returns();
                // A worker in the journal is restored without delay.
                if was == Presence::Returning {
                    gang.contexts.missed(now);
                }
                let presence = match contexts {
                    Contexts::Unknown => Presence::Unknown,
                    // A failed restore is repeated even if no want is left, because it had a reason.
                    _ => Presence::Checkpointed {
                        returns: returns || (was == Presence::Returning && !is_refilling),
                    },
                };
                self.ledger.set_presence(id, Some(worker), presence);
                if is_refilling {
                    self.return_grants(id, Outcome::NotRestored);
                }
                if was == Presence::Leaving && contexts == Contexts::Checkpointed {
                    self.log_contexts(id, Outcome::Checkpointed);
                }
            }
            Contexts::Lost => {
                self.ledger.set_presence(id, Some(worker), Presence::Lost);
                match is_refilling {
                    true => self.return_grants(id, Outcome::Lost),
                    false => self.log_contexts(id, Outcome::Lost),
                }
                self.deny(id, Denied::Lost, None);
                let growths = std::mem::take(&mut self.ledger.growths).into_iter();
                let (of_it, others) = growths.partition(|growth| growth.gang == id);
                self.ledger.growths = others;
                let of_it: Vec<Growth> = of_it;
                of_it.iter().for_each(|growth| self.deny_growth(growth, Denied::Lost));
            }
        }
    }
}
