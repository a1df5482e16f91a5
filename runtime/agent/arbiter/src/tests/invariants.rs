//! What holds between two steps.

use std::time::Duration;

use glake_units::Bytes;

use crate::Arbiter;
use crate::gang::State;

/// Nothing is waited for longer: a start may take ten minutes.
const LONGEST: Duration = Duration::from_secs(20 * 60);

impl Arbiter {
    /// What is broken, if anything is: whatever else holds between two steps.
    pub(crate) fn check(&self) {
        let server = &self.server;
        for (gpu, held) in &server.gpus {
            let sum: Bytes =
                server.gangs.values().flat_map(|gang| gang.on(*gpu)).map(|share| share.footprint()).sum();
            assert_eq!(held.counted, sum, "the sum of GPU {gpu}");
            let refills = server.gangs.values().filter(|gang| {
                matches!(gang.state, State::Refilling(_))
                    && gang.shares.iter().any(|share| {
                        share.holding.gpu == *gpu && !share.owed.saturating_add(share.granted).is_zero()
                    })
            });
            assert!(refills.count() <= 1, "two refills on GPU {gpu}");
        }
        for (id, gang) in &server.gangs {
            assert_eq!(gang.is_under_way(), server.under_way.contains(id), "gang {id} under way");
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
            assert!(late_at <= server.now + LONGEST, "gang {id} is waited for until {late_at:?}");
            assert_eq!(gang.away.is_present(), !server.absent.contains(id), "gang {id} is away");
            let out = |worker| gang.away.is_checkpointed() && gang.away.worker == Some(worker);
            let agree = gang.shares.iter().all(|share| share.is_checkpointed == out(share.worker));
            assert!(agree, "floors of gang {id}");
            let is_member = gang.away.worker.is_none_or(|worker| gang.members.contains_key(&worker));
            assert!(is_member && gang.away.is_present() == gang.away.worker.is_none(), "who of gang {id}");
            let growing = server.growths.iter().filter(|growth| growth.gang == *id).count();
            assert_eq!(growing, gang.growing as usize, "growths of gang {id}");
        }
    }
}
