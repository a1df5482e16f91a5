//! Growth: a running use asks for more memory.
//!
//! ```text
//! grow ─► enough is free ─► granted
//!           └► waits: for what leaves or refills ─► for others' memory, idle workers' first ─► its time is over: denied
//!           └► no holder could ever give it: denied
//! ```

use std::collections::BTreeSet;
use std::time::Duration;

use glake_units::Bytes;

use crate::gang::{Gang, State};
use crate::ledger::Gpu;
use crate::server::Server;
use crate::{Action, GangId, GpuId, WorkerId};

/// Growth request of a use, with its own timeout.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Growth {
    pub(crate) gang: GangId,
    pub(crate) worker: WorkerId,
    pub(crate) gpu: GpuId,
    pub(crate) bytes: Bytes,
    /// End of the request's own time.
    pub(crate) by: Duration,
    /// Gangs that were asked for the bytes; none, where its gang is absent.
    pub(crate) victims: BTreeSet<GangId>,
    /// Time after which other gangs are asked too.
    pub(crate) late_at: Duration,
    /// Longest time between two parts of the bytes.
    pub(crate) patience: Duration,
}

impl Server {
    /// Accepts the request of a use that waits for `within`.
    pub(crate) fn grow(&mut self, worker: WorkerId, gpu: GpuId, bytes: Bytes, within: Duration) {
        let (by, late_at) = (self.now + within, self.now);
        let Some(&gang) = self.gang_of.get(&worker) else {
            return self.actions.push(Action::DenyGrowth { worker, gpu, bytes });
        };
        self.add_share(gang, (worker, gpu));
        let (victims, patience) = (BTreeSet::new(), Duration::ZERO);
        let growth = Growth { gang, worker, gpu, bytes, by, victims, late_at, patience };
        if let Some(gang) = self.gangs.get_mut(&gang) {
            gang.growing += 1;
        }
        if self.gangs.get(&gang).is_some_and(|gang| gang.away.is_lost()) {
            self.deny_growth(&growth);
        } else {
            self.pay_growth(growth);
        }
    }

    /// Grants free bytes to growths and asks victims for the rest. Returns the time at which another victim becomes eligible.
    pub(crate) fn pay_growths(&mut self) -> Option<Duration> {
        let growths = std::mem::take(&mut self.growths).into_iter();
        growths.filter_map(|growth| self.pay_growth(growth)).min()
    }

    fn pay_growth(&mut self, growth: Growth) -> Option<Duration> {
        if self.absent.contains(&growth.gang) {
            self.growths.push(growth);
        } else if self.free_beside_restores(growth.gpu) >= growth.bytes {
            self.grant(growth.gang, (growth.worker, growth.gpu), growth.bytes);
            self.end_growth(&growth);
        } else if self.is_hopeless(&growth) {
            self.deny_growth(&growth);
        } else if self.is_to_come(&growth) || self.is_starting(growth.gpu, growth.gang) {
            self.growths.push(growth);
        } else {
            return self.take_for(growth);
        }
        None
    }

    /// Returns whether waiting is useless: all other workers together could not give enough, and no unmanaged memory is in the way.
    fn is_hopeless(&self, growth: &Growth) -> bool {
        let is_curtailed = self.gpus.get(&growth.gpu).is_some_and(Gpu::is_curtailed);
        !is_curtailed && self.reachable(growth.gpu, growth.gang) < growth.bytes
    }

    /// Returns whether usable bytes are on their way: from a shrink, a dead worker, or a refill with victims.
    fn is_to_come(&self, growth: &Growth) -> bool {
        let gives = |gang: &Gang| {
            matches!(gang.state, State::Parking { .. } | State::Shrinking { by: Some(_), .. })
                && gang.on(growth.gpu).next().is_some()
        };
        let died = self.gpus.get(&growth.gpu).is_some_and(|gpu| gpu.measure_at().is_some());
        let leaves = died || self.under_way.iter().filter_map(|id| self.gangs.get(id)).any(gives);
        self.now < growth.late_at && leaves || !growth.victims.is_empty() && self.is_refilling(growth.gpu)
    }

    /// Extends the time of growths that wait for a gang whose bytes just came.
    pub(crate) fn came(&mut self, id: GangId, gpu: GpuId) {
        let now = self.now;
        let growths = self.growths.iter_mut();
        for growth in growths.filter(|growth| growth.gpu == gpu && growth.victims.contains(&id)) {
            growth.late_at = now + growth.patience;
        }
    }

    /// Returns whether a refill that waits for bytes is under way on a GPU.
    fn is_refilling(&self, gpu: GpuId) -> bool {
        let refills = |gang: &Gang| {
            matches!(&gang.state, State::Refilling(refill) if refill.admitted.is_none())
                && gang.on(gpu).next().is_some()
        };
        self.under_way.iter().filter_map(|id| self.gangs.get(id)).any(refills)
    }

    /// Returns whether another gang's start is under way on a GPU; no memory leaves during a start.
    fn is_starting(&self, gpu: GpuId, asker: GangId) -> bool {
        let starts = |gang: &Gang| {
            matches!(gang.state, State::Refilling(_)) && gang.starting && gang.on(gpu).next().is_some()
        };
        let others = self.under_way.iter().filter(|id| **id != asker);
        others.filter_map(|id| self.gangs.get(id)).any(starts)
    }

    /// Asks victims for the missing bytes: only idle workers while earlier victims still have time.
    fn take_for(&mut self, mut growth: Growth) -> Option<Duration> {
        let Growth { gang, gpu, bytes, by, .. } = growth;
        let short = bytes.saturating_sub(self.free_beside_restores(gpu));
        let in_time = self.in_time(&growth.victims);
        let class = self.gangs.get(&gang).map(|gang| i64::from(gang.profile.priority));
        let found = self.choose(gpu, short, class.filter(|_| in_time.is_none()), Some(gang));
        let mut next = found.next.into_iter().chain(in_time).min();
        if found.short.is_zero() {
            // Others give it.
            self.call_off(gang);
            let asked = self.take(&found.takes, Some(gang));
            growth.victims.extend(asked.victims);
            // Half of the request's time is left for others.
            growth.patience = asked.patience.min(by.saturating_sub(self.now) / 2);
            growth.late_at = self.now + growth.patience;
            next = None;
        }
        self.growths.push(growth);
        next
    }

    pub(crate) fn deny_growth(&mut self, growth: &Growth) {
        let Growth { worker, gpu, bytes, .. } = *growth;
        self.actions.push(Action::DenyGrowth { worker, gpu, bytes });
        self.end_growth(growth);
    }

    fn end_growth(&mut self, growth: &Growth) {
        if let Some(gang) = self.gangs.get_mut(&growth.gang) {
            gang.growing -= 1;
        }
        self.call_off(growth.gang);
    }
}
