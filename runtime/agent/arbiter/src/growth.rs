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

use crate::arbiter::Arbiter;
use crate::gang::Growth;
use crate::{Action, GpuId, WorkerId};

impl Arbiter {
    /// Accepts the request of a use that waits for `within`.
    pub(crate) fn grow(&mut self, worker: WorkerId, gpu: GpuId, bytes: Bytes, within: Duration) {
        let (by, late_at) = (self.ledger.now + within, self.ledger.now);
        let Some(&gang) = self.ledger.gang_of.get(&worker) else {
            return self.actions.push(Action::DenyGrowth { worker, gpu, bytes });
        };
        self.ledger.add_share(gang, (worker, gpu));
        let (victims, patience) = (BTreeSet::new(), Duration::ZERO);
        let growth = Growth { gang, worker, gpu, bytes, by, victims, late_at, patience };
        if let Some(gang) = self.ledger.gangs.get_mut(&gang) {
            gang.growing += 1;
        }
        if self.ledger.gangs.get(&gang).is_some_and(|gang| gang.contexts.is_lost()) {
            self.deny_growth(&growth);
        } else {
            self.pay_growth(growth);
        }
    }

    /// Grants free bytes to growths and asks victims for the rest. Returns the time at which another victim becomes eligible.
    pub(crate) fn pay_growths(&mut self) -> Option<Duration> {
        let growths = std::mem::take(&mut self.ledger.growths).into_iter();
        growths.filter_map(|growth| self.pay_growth(growth)).min()
    }

    pub(crate) fn pay_growth(&mut self, growth: Growth) -> Option<Duration> {
        if self.ledger.absent.contains(&growth.gang) {
            self.ledger.growths.push(growth);
        } else if self.ledger.free_beside_restores(growth.gpu) >= growth.bytes {
            self.grant(growth.gang, (growth.worker, growth.gpu), growth.bytes);
            self.end_growth(&growth);
        } else if self.ledger.is_hopeless(&growth) {
            self.deny_growth(&growth);
        } else if self.ledger.is_to_come(&growth) || self.ledger.is_starting(growth.gpu, growth.gang) {
            self.ledger.growths.push(growth);
        } else {
            return self.take_for(growth);
        }
        None
    }

    /// Asks victims for the missing bytes: only idle workers while earlier victims still have time.
    pub(crate) fn take_for(&mut self, mut growth: Growth) -> Option<Duration> {
        let Growth { gang, gpu, bytes, by, .. } = growth;
        let short = bytes.saturating_sub(self.ledger.free_beside_restores(gpu));
        let in_time = self.ledger.in_time(&growth.victims);
        let class = self.ledger.gangs.get(&gang).map(|gang| i64::from(gang.profile.priority));
        let found = self.ledger.choose(gpu, short, class.filter(|_| in_time.is_none()), Some(gang));
        let mut next = found.next.into_iter().chain(in_time).min();
        if found.short.is_zero() {
            // Others give it.
            self.call_off(gang);
            let asked = self.take(&found.takes, Some(gang));
            growth.victims.extend(asked.victims);
            // Half of the request's time is left for others.
            growth.patience = asked.patience.min(by.saturating_sub(self.ledger.now) / 2);
            growth.late_at = self.ledger.now + growth.patience;
            next = None;
        }
        self.ledger.growths.push(growth);
        next
    }

    pub(crate) fn deny_growth(&mut self, growth: &Growth) {
        let Growth { worker, gpu, bytes, .. } = *growth;
        self.actions.push(Action::DenyGrowth { worker, gpu, bytes });
        self.end_growth(growth);
    }

    pub(crate) fn end_growth(&mut self, growth: &Growth) {
        if let Some(gang) = self.ledger.gangs.get_mut(&growth.gang) {
            gang.growing -= 1;
        }
        self.call_off(growth.gang);
    }
}
