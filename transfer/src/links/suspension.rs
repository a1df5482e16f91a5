//! Results of suspensions: relays whose contexts the engine's thread could not release (`engine::suspension`).

use std::time::{Duration, Instant};

use glake_device::owned::DeviceSet;
use glake_device::{DeviceId, Living};
use glake_units::Bytes;
use parking_lot::{Condvar, Mutex};

use super::relays::Relays;
use crate::RelayCost;

/// Relay whose context still exists after its suspension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnsuspendedRelay {
    /// Relay GPU.
    pub relay: DeviceId,
    /// Memory of its context, as in [`crate::RelayCost`].
    pub context: Bytes,
    /// Reason why the context still exists.
    pub why: WhyUnsuspended,
}

/// Reasons why a relay's context still exists.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WhyUnsuspended {
    /// Copies, or work of the program on that GPU, have not completed. The context is released afterwards.
    #[error("work on it is not done yet")]
    UnderWay,
    /// A captured graph launches GLake's kernels there.
    #[error("a captured graph has kernels on it")]
    Graph,
    /// Another object of GLake's is alive there.
    #[error("it holds {0} that are in use")]
    InUse(Living),
    /// The relay was lost and stays as it is.
    #[error("the GPU was lost")]
    Lost,
    /// The driver refused to release it.
    #[error("the driver did not give it back")]
    Refused,
}

/// Results of suspensions.
#[derive(Debug, Default)]
pub(crate) struct Suspensions {
    state: Mutex<State>,
    over: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Number of requests, and number of completed ones.
    asked: u64,
    over: u64,
    stayed: Vec<UnsuspendedRelay>,
}

impl Suspensions {
    /// Records a request and returns its number.
    pub(crate) fn ask(&self) -> u64 {
        let mut state = self.state.lock();
        state.asked += 1;
        state.asked
    }

    /// Returns the suspended relays whose contexts still exist, with the reason, after all requests have completed or `timeout` has
    /// elapsed.
    pub(crate) fn unsuspended(&self, relays: &Relays, timeout: Duration) -> Vec<UnsuspendedRelay> {
        let until = Instant::now() + timeout;
        let mut state = self.state.lock();
        let asked = state.asked;
        while state.over < asked && !self.over.wait_until(&mut state, until).timed_out() {}
        let suspended = relays.suspended();
        let mut stayed: Vec<UnsuspendedRelay> =
            state.stayed.iter().filter(|stayed| suspended.contains(stayed.relay)).copied().collect();
        if state.over < asked {
            let known: DeviceSet = stayed.iter().map(|stayed| stayed.relay).collect();
            let costs = suspended.without(known).iter().filter_map(|relay| relays.cost(relay));
            let under_way = |cost: RelayCost| UnsuspendedRelay {
                relay: cost.relay,
                context: cost.context,
                why: WhyUnsuspended::UnderWay,
            };
            stayed.extend(costs.map(under_way));
        }
        stayed.sort_by_key(|stayed| stayed.relay);
        stayed
    }

    pub(crate) fn note_unsuspended(&self, stayed: UnsuspendedRelay) {
        let mut state = self.state.lock();
        state.stayed.retain(|other| other.relay != stayed.relay);
        state.stayed.push(stayed);
    }

    pub(crate) fn forget(&self, relay: DeviceId) {
        self.state.lock().stayed.retain(|other| other.relay != relay);
    }

    pub(crate) fn end(&self, asked: u64) {
        let mut state = self.state.lock();
        state.over = state.over.max(asked);
        self.over.notify_all();
    }
}
