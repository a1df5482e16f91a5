//! Invariants of the arbiter between two steps.

use std::time::Duration;

use glake_units::Bytes;

use crate::Arbiter;
use crate::gang::State;

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
}
