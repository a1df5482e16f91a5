//! Invariants of the arbiter between two steps.

use std::collections::BTreeSet;
use std::time::Duration;

use glake_units::Bytes;

use crate::gang::{Gang, State};
use crate::{Arbiter, GangId, Overview, Request, RequestKind};

/// Upper bound of all deadlines; a start may take ten minutes.
const LONGEST: Duration = Duration::from_secs(20 * 60);

impl Arbiter {
    /// Panics if an invariant is violated.
    pub(crate) fn check(&self) {
        let ledger = &self.ledger;
        for (gpu, held) in &ledger.gpus {
            let sum: Bytes =
                ledger.gangs.values().flat_map(|gang| gang.on(*gpu)).map(|share| share.footprint()).sum();
            assert_eq!(held.counted, sum, "the sum of GPU {gpu}");
            let refills = ledger.gangs.values().filter(|gang| {
                matches!(gang.state, State::Refilling(_))
                    && gang.shares.iter().any(|share| {
                        share.account.gpu == *gpu && !share.owed.saturating_add(share.granted).is_zero()
                    })
            });
            assert!(refills.count() <= 1, "two refills on GPU {gpu}");
        }
        for (id, gang) in &ledger.gangs {
            assert_eq!(gang.is_under_way(), ledger.under_way.contains(id), "gang {id} under way");
            assert!(
                gang.is_resting()
                    || gang.late_at().is_some()
                    || matches!(gang.state, State::Shrinking { by: None, .. })
            );
            assert!(
                gang.want.is_some() || gang.members.values().all(|member| !member.wants),
                "gang {id} is not answered"
            );
            let late_at = gang.late_at().unwrap_or_default();
            assert!(late_at <= ledger.now + LONGEST, "gang {id} is waited for until {late_at:?}");
            assert_eq!(gang.contexts.is_present(), !ledger.absent.contains(id), "gang {id} is away");
            let out = |worker| gang.contexts.is_checkpointed() && gang.contexts.worker == Some(worker);
            let agree = gang.shares.iter().all(|share| share.is_checkpointed == out(share.worker));
            assert!(agree, "floors of gang {id}");
            let is_member = gang.contexts.worker.is_none_or(|worker| gang.members.contains_key(&worker));
            assert!(
                is_member && gang.contexts.is_present() == gang.contexts.worker.is_none(),
                "who of gang {id}"
            );
            let growing = ledger.growths.iter().filter(|growth| growth.gang == *id).count();
            assert_eq!(growing, gang.growing as usize, "growths of gang {id}");
        }
    }

    /// Panics if an overview differs from the ledger.
    pub(crate) fn check_overview(&self) {
        let (ledger, overview) = (&self.ledger, Overview::of(self));
        for (gpu, held) in &ledger.gpus {
            let account = overview.gpus[gpu];
            let shares =
                overview.workers.values().flat_map(|of| &of.shares).filter(|share| share.gpu == *gpu);
            let sum: Bytes =
                shares.map(|of| of.floor.saturating_add(of.lease).saturating_add(of.overrun)).sum();
            assert_eq!(sum.saturating_add(account.reclaiming), account.claimed, "the sum of GPU {gpu}");
            assert_eq!((account.claimed, account.limit), (held.claimed(), held.limit()));
        }
        let is_asked = |gang: &Gang| gang.want.is_some() || matches!(gang.state, State::Refilling(_));
        let asked = ledger.gangs.iter().filter(|(_, gang)| is_asked(gang)).map(|(id, _)| *id);
        let told = overview.requests.iter().filter(|request| request.kind != RequestKind::Growth);
        let told: Vec<GangId> = told.map(|request| request.gang).collect();
        assert_eq!(told.iter().copied().collect::<BTreeSet<_>>(), asked.collect(), "wants and refills");
        assert_eq!(told.len(), told.iter().collect::<BTreeSet<_>>().len(), "one request for each");
        let growths = overview.requests.iter().filter(|request| request.kind == RequestKind::Growth);
        let growths =
            growths.map(|of| (of.gang, of.needs.iter().map(|(gpu, (all, _))| (*gpu, *all)).collect()));
        let open = ledger.growths.iter().map(|growth| (growth.gang, vec![(growth.gpu, growth.bytes)]));
        assert_eq!(growths.collect::<Vec<_>>(), open.collect::<Vec<_>>(), "growths in their order");
        // Refills under way, then growths, then wants.
        let place = |request: &Request| match request.kind {
            RequestKind::Growth => 1,
            _ if matches!(ledger.gangs[&request.gang].state, State::Refilling(_)) => 0,
            _ => 2,
        };
        assert!(overview.requests.is_sorted_by_key(place), "{:?}", overview.requests);
        for request in &overview.requests {
            let granted = |(all, granted): &(Bytes, Bytes)| granted <= all;
            assert!(request.needs.values().all(granted), "{request:?}");
            let gives = |id: &GangId| {
                matches!(ledger.gangs[id].state, State::Parking { .. } | State::Shrinking { .. })
            };
            assert!(request.givers.iter().all(gives), "{request:?}");
        }
        for (id, operation) in &overview.operations {
            assert!(
                operation.done <= operation.bytes && operation.since <= ledger.now,
                "{id}: {operation:?}"
            );
        }
    }
}
