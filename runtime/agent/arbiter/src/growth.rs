//! A use that runs asks for more memory.

use std::collections::BTreeSet;
use std::time::Duration;

use glake_units::Bytes;

use crate::gang::{Gang, State};
use crate::server::Server;
use crate::{Action, GangId, GpuId, WorkerId};

/// Answered from free bytes and idle victims only, so that no use that runs waits for another one; and soon.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Growth {
    pub(crate) gang: GangId,
    pub(crate) worker: WorkerId,
    pub(crate) gpu: GpuId,
    pub(crate) bytes: Bytes,
    pub(crate) by: Duration,
    /// Who gives the bytes, and when that is late; nobody, where its gang is absent.
    pub(crate) victims: BTreeSet<GangId>,
    pub(crate) late_at: Duration,
    /// How long each part of the bytes may take.
    pub(crate) patience: Duration,
}

impl Server {
    /// Somebody's use grows, for so long at most.
    pub(crate) fn grow(&mut self, worker: WorkerId, gpu: GpuId, bytes: Bytes, within: Duration) {
        let by = self.now + within;
        let Some(&gang) = self.gang_of.get(&worker) else {
            return self.actions.push(Action::DenyGrowth { worker, gpu, bytes });
        };
        self.add_share(gang, (worker, gpu));
        let (victims, patience) = (BTreeSet::new(), Duration::ZERO);
        let growth = Growth { gang, worker, gpu, bytes, by, victims, late_at: by, patience };
        if let Some(gang) = self.gangs.get_mut(&gang) {
            gang.growing += 1;
        }
        if self.gangs.get(&gang).is_some_and(|gang| gang.away.is_lost()) {
            self.deny_growth(&growth);
        } else if self.absent.contains(&gang) {
            self.growths.push(growth);
        } else if self.free_beside_restores(gpu) >= bytes {
            self.give(&growth);
        } else {
            self.take_for(growth);
        }
    }

    /// Free bytes go to those that grow; whose victims gave what they had, or are late, gets others.
    pub(crate) fn pay_growths(&mut self) {
        for growth in std::mem::take(&mut self.growths) {
            if self.absent.contains(&growth.gang) {
                self.growths.push(growth);
            } else if self.free_beside_restores(growth.gpu) >= growth.bytes {
                self.give(&growth);
            } else if self.is_to_come(&growth) {
                self.growths.push(growth);
            } else {
                self.take_for(growth);
            }
        }
    }

    /// Whether bytes that it can have are on their way: somebody's who leaves or has died, or those of a refill, which had its
    /// victims'.
    fn is_to_come(&self, growth: &Growth) -> bool {
        let gives = |gang: &Gang| {
            matches!(gang.state, State::Shrinking { by: Some(_), .. }) && gang.on(growth.gpu).next().is_some()
        };
        let died = self.gpus.get(&growth.gpu).is_some_and(|gpu| gpu.measure_at().is_some());
        let leaves = died || self.under_way.iter().filter_map(|id| self.gangs.get(id)).any(gives);
        self.now < growth.late_at && leaves || !growth.victims.is_empty() && self.is_refilling(growth.gpu)
    }

    /// Bytes came back: the next ones may take as long again.
    pub(crate) fn came(&mut self, id: GangId, gpu: GpuId) {
        let now = self.now;
        let growths = self.growths.iter_mut();
        for growth in growths.filter(|growth| growth.gpu == gpu && growth.victims.contains(&id)) {
            growth.late_at = now + growth.patience;
        }
    }

    /// Whether a refill is under way on a GPU that waits for bytes.
    fn is_refilling(&self, gpu: GpuId) -> bool {
        let refills = |gang: &Gang| {
            matches!(&gang.state, State::Refilling(refill) if refill.admitted.is_none())
                && gang.on(gpu).next().is_some()
        };
        self.under_way.iter().filter_map(|id| self.gangs.get(id)).any(refills)
    }

    /// Has idle workers give what is short, or denies it.
    fn take_for(&mut self, mut growth: Growth) {
        let Growth { gang, gpu, bytes, .. } = growth;
        let short = bytes.saturating_sub(self.free_beside_restores(gpu));
        // Nothing leaves beside the start of another.
        let starting = |gang: &Gang| {
            matches!(gang.state, State::Refilling(_)) && gang.starting && gang.on(gpu).next().is_some()
        };
        let others = self.under_way.iter().filter(|id| **id != gang);
        let starts = others.filter_map(|id| self.gangs.get(id)).any(starting);
        let found = self.choose(gpu, short, None, Some(gang));
        if starts || !found.short.is_zero() {
            return self.deny_growth(&growth);
        }
        let (victims, first) = self.take(&found.takes);
        let patience = self.late(first);
        (growth.victims, growth.late_at, growth.patience) = (victims, self.now + patience, patience);
        self.growths.push(growth);
    }

    fn give(&mut self, growth: &Growth) {
        self.grant(growth.gang, (growth.worker, growth.gpu), growth.bytes);
        self.end_growth(growth);
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
    }
}
