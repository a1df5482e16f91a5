//! Answers of workers to commands, and the cleanup after a worker's death.

use glake_units::Bytes;

use crate::arbiter::Arbiter;
use crate::away::Presence;
use crate::gang::{Distrust, Share, State};
use crate::log::Outcome;
use crate::server::AGAIN;
use crate::{Denied, GangId, Holding, Task, WorkerId};

impl Arbiter {
    pub(crate) fn parked(&mut self, worker: WorkerId) {
        if let Some(&id) = self.server.gang_of.get(&worker) {
            self.stops_waiting_to_park(id, worker);
        }
    }

    /// Removes a rank that has parked or died from the ranks to wait for, and shrinks the gang after the last one.
    fn stops_waiting_to_park(&mut self, id: GangId, worker: WorkerId) {
        let (now, longest) = (self.server.now, self.server.settings.longest_park());
        let Some(gang) = self.server.gangs.get_mut(&id) else { return };
        let State::Parking { waits, since, takes, .. } = &mut gang.state else { return };
        waits.remove(&worker);
        if waits.is_empty() {
            let (since, takes) = (*since, std::mem::take(takes));
            gang.predictions.saw_park(now.saturating_sub(since), longest);
            gang.is_parked = true;
            gang.parks = gang.parks.saturating_add(1);
            self.server.shrink(id, &takes);
        }
    }

    pub(crate) fn shrunk(&mut self, worker: WorkerId) {
        let (now, link) = (self.server.now, self.server.settings.link);
        let Some((id, gang)) = self.gang_mut(worker) else { return };
        let State::Shrinking { waits, since, leaving, dirty, .. } = &mut gang.state else { return };
        waits.remove(&worker);
        if waits.is_empty() {
            let (since, leaving, dirty) = (*since, *leaving, *dirty);
            gang.predictions.saw_shrink(leaving, dirty, link, now.saturating_sub(since));
            gang.distrust = Distrust::default();
            self.server.set_state(id, State::Resting);
        }
    }

    /// Clears the needs of a worker on GPUs missing from `named`, once it is resident and has given their leases back: its start reserved
    /// them but never used them.
    pub(crate) fn wants_nothing_elsewhere(&mut self, worker: WorkerId, named: &[Holding]) {
        let Some((_, gang)) = self.gang_mut(worker) else { return };
        let is_named = |share: &Share| named.iter().any(|held| held.gpu == share.holding.gpu);
        for share in gang.shares.iter_mut().filter(|share| share.worker == worker && !is_named(share)) {
            if share.holding.lease.is_zero() {
                (share.holding.evicted, share.holding.room) = (Bytes::ZERO, Bytes::ZERO);
            }
        }
    }

    pub(crate) fn refilled(&mut self, worker: WorkerId) {
        let Some((id, gang)) = self.gang_mut(worker) else { return };
        gang.end_start(worker);
        // Nobody waits for more.
        for share in gang.shares.iter_mut().filter(|share| share.worker == worker) {
            share.owed = Bytes::ZERO;
        }
        match &mut gang.state {
            State::Refilling(refill) => {
                refill.waits.remove(&worker);
                self.server.finish_refill(id);
            }
            // Late, and here now.
            State::Resting => (gang.distrust, gang.is_parked) = (Distrust::default(), false),
            _ => {}
        }
    }

    /// Records that a worker could not carry out a command. Does nothing if the arbiter no longer waits for that command.
    pub(crate) fn failed(&mut self, worker: WorkerId, what: Task) {
        let short = self.server.settings.least_quantum;
        let Some((id, gang)) = self.gang_mut(worker) else { return };
        match (&gang.state, what) {
            (State::Parking { .. }, Task::Park) => self.server.unpark(id),
            (State::Shrinking { .. }, Task::Shrink) => self.shrunk(worker),
            (State::Refilling(refill), Task::Refill) if refill.waits.contains(&worker) => {
                match refill.admitted {
                    // Which distrusts it for longer.
                    Some(_) => return self.server.give_up_on(id),
                    None => self.server.give_back(id, Outcome::Returned),
                }
            }
            _ => return,
        }
        self.server.distrust(id, short);
    }

    pub(crate) fn died(&mut self, worker: WorkerId) {
        let Some(&id) = self.server.gang_of.get(&worker) else { return };
        let now = self.server.now;
        for (gpu, footprint) in self.server.remove_shares(worker) {
            self.server.gpus.entry(gpu).or_default().died(now, footprint);
        }
        self.forget(worker, id);
    }

    /// Removes a rank from a gang, after its shares.
    pub(crate) fn forget(&mut self, worker: WorkerId, id: GangId) {
        self.server.gang_of.remove(&worker);
        self.server.growths.retain(|growth| growth.worker != worker);
        let growing = self.server.growths.iter().filter(|growth| growth.gang == id).count();
        let Some(gang) = self.server.gangs.get_mut(&id) else { return };
        gang.growing = u32::try_from(growing).unwrap_or(u32::MAX);
        gang.members.remove(&worker);
        gang.sum_up();
        if gang.members.is_empty() {
            self.server.gangs.remove(&id);
            self.server.call_off(id);
            self.server.absent.remove(&id);
            self.server.log.ended(id, Outcome::Died);
            return self.server.note(id);
        }
        if gang.away.worker == Some(worker) {
            self.server.set_presence(id, None, Presence::Present);
        }
        if self.server.gangs.get(&id).is_some_and(|gang| gang.want.is_some()) {
            self.server.deny(id, Denied::Incomplete, Some(AGAIN));
        }
        let Some(gang) = self.server.gangs.get_mut(&id) else { return };
        match &mut gang.state {
            State::Resting => {}
            State::Parking { .. } => self.stops_waiting_to_park(id, worker),
            State::Shrinking { waits, .. } => {
                waits.remove(&worker);
                if waits.is_empty() {
                    self.server.set_state(id, State::Resting);
                }
            }
            State::Refilling(refill) if refill.admitted.is_none() => {
                self.server.give_back(id, Outcome::Returned);
            }
            State::Refilling(refill) => {
                refill.waits.remove(&worker);
                self.server.finish_refill(id);
            }
        }
    }
}
