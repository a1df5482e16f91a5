//! Conversion between the protocol's messages and the arbiter's actions.

use std::time::Duration;

use glake_arbiter::{Action, Activity, Denied, GpuId, Holding, Tier, WorkerId};
use glake_units::Bytes;
use glake_wire as wire;

use crate::roster::{Roster, Worker};

/// Converts a worker's holdings for the arbiter: its last report, updated by its page. Unknown state counts as the costlier one. Holdings
/// on unknown GPUs are skipped.
pub(crate) fn holdings(roster: &Roster, worker: &Worker, told: &[wire::Holding]) -> Vec<Holding> {
    let unmeasured = roster.file().node.floor();
    told.iter()
        .filter_map(|told| {
            let gpu = roster.gpu(&told.gpu)?;
            // A worker with evicted memory refills: how much of it is back it says at the end.
            let is_whole = told.evicted.is_zero() && told.room.is_zero();
            let resident = if is_whole { worker.resident(told) } else { told.resident };
            let grown = resident.saturating_sub(told.resident);
            let unused = told.unused.unwrap_or(told.discardable);
            Some(Holding {
                gpu,
                floor: worker.floor(gpu, unmeasured),
                lease: told.lease,
                resident,
                fixed: told.fixed,
                evicted: told.evicted,
                room: told.room,
                growth: told.growth,
                dirty: told.dirty.saturating_add(grown),
                discardable: told.discardable,
                unknown: if worker.is_as_told(told) { Bytes::ZERO } else { unused },
                hosted: told.hosted,
            })
        })
        .collect()
}

/// Classifies a worker's activity. Without a page, or while loading, a worker may use its memory at any time; uses that never reached a
/// safe point end by themselves.
pub(crate) fn activity(page: Option<wire::Activity>) -> Activity {
    let Some(page) = page else { return Activity::Capturing };
    match page {
        _ if page.captures || page.begun == 0 => Activity::Capturing,
        _ if page.uses == 0 => Activity::Idle,
        _ if page.parks => Activity::Busy,
        _ => Activity::Running,
    }
}

/// Converts an action into a message; `None` if the worker needs none. `more`: another shrink of the same command follows.
pub(crate) fn message(roster: &Roster, action: &Action, more: bool, now: Duration) -> Option<wire::ToWorker> {
    use wire::ToWorker as Say;
    let name = |gpu: GpuId| roster.gpu_name(gpu).to_owned();
    let within_ms = |by: Duration| millis(by.saturating_sub(now));
    Some(match *action {
        Action::Grant { gpu, bytes, .. } => Say::Grant { gpu: name(gpu), bytes },
        Action::Admit { .. } => Say::Admit,
        Action::Park { by, .. } => Say::Park { within_ms: within_ms(by) },
        Action::Unpark { .. } => Say::Unpark,
        Action::Shrink { gpu, bytes, tier, by, .. } => {
            let tier = match tier {
                Tier::Peer(peer) => wire::Tier::Peer(name(peer)),
                Tier::Host => wire::Tier::Host,
                Tier::File => wire::Tier::File,
            };
            Say::Shrink { gpu: name(gpu), bytes, tier, within_ms: within_ms(by), more }
        }
        Action::Demote { bytes, .. } => Say::Demote { bytes },
        Action::Deny { why, retry_after, .. } => {
            Say::Deny { why: denied(why), retry_after_ms: retry_after.map(millis) }
        }
        Action::DenyGrowth { gpu, bytes, .. } => {
            Say::DenyGrowth { gpu: name(gpu), bytes, holders: Vec::new() }
        }
        Action::StopCountingOn { .. }
        | Action::Measure { .. }
        | Action::Checkpoint { .. }
        | Action::Restore { .. } => return None,
    })
}

/// Converts a reason into the protocol's type.
fn denied(why: Denied) -> wire::Denied {
    match why {
        Denied::TooLarge => wire::Denied::TooLarge,
        Denied::Deadline => wire::Denied::Deadline,
        Denied::Incomplete => wire::Denied::Incomplete,
        Denied::Lost => wire::Denied::Lost,
    }
}

/// Returns the display text of a reason.
pub(crate) fn why(denied: Denied) -> &'static str {
    match denied {
        Denied::TooLarge => "denied: it needs more than its GPU could ever give",
        Denied::Deadline => "denied: its deadline would have passed",
        Denied::Incomplete => "denied: not all ranks of it are there",
        Denied::Lost => "denied: the driver does not restore its process: end it, and start it again",
    }
}

pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Converts GB/s into bytes per second.
pub(crate) fn per_second(gbps: f64) -> Bytes {
    // Checked when the file was read: finite and above 0.
    Duration::try_from_secs_f64(gbps)
        .map_or(Bytes::MAX, |gigabytes| Bytes::new(u64::try_from(gigabytes.as_nanos()).unwrap_or(u64::MAX)))
}

/// Returns the worker that an action concerns.
pub(crate) fn receiver(action: &Action) -> Option<WorkerId> {
    match *action {
        Action::Grant { worker, .. }
        | Action::Admit { worker }
        | Action::Park { worker, .. }
        | Action::Unpark { worker }
        | Action::Shrink { worker, .. }
        | Action::Demote { worker, .. }
        | Action::Deny { worker, .. }
        | Action::DenyGrowth { worker, .. }
        | Action::StopCountingOn { worker, .. } => Some(worker),
        Action::Measure { .. } | Action::Checkpoint { .. } | Action::Restore { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_who_is_known_to_be_idle_is() {
        let page = wire::Activity { begun: 1, ..wire::Activity::default() };
        assert_eq!(activity(None), Activity::Capturing);
        assert_eq!(activity(Some(page)), Activity::Idle);
        assert_eq!(activity(Some(wire::Activity { begun: 0, ..page })), Activity::Capturing);
        assert_eq!(activity(Some(wire::Activity { uses: 2, ..page })), Activity::Running);
        assert_eq!(activity(Some(wire::Activity { uses: 2, parks: true, ..page })), Activity::Busy);
        assert_eq!(activity(Some(wire::Activity { captures: true, ..page })), Activity::Capturing);
    }
}
