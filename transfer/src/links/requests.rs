//! Requests to the engine's thread to create or release contexts, lanes, events and slots.
//!
//! Invariant: a request never waits for the thread. Repeated requests are served once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use glake_device::DeviceId;
use glake_device::owned::DeviceSet;
use parking_lot::{Condvar, Mutex};

/// Function that runs on the engine's thread.
pub(crate) type Call = Box<dyn FnOnce() + Send>;

/// Request queue, filled by copies and served by the engine's thread.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    orders: Mutex<Orders>,
    woken: Condvar,
    served: AtomicBool,
}

/// Requests since the thread last checked.
#[derive(Default)]
pub(crate) struct Orders {
    /// Whether to set up the wanted relays.
    pub(crate) prepare: bool,
    /// Callbacks to run when the other requests are served.
    pub(crate) after: Vec<Call>,
    /// Whether a calibrated graph was found to be stale.
    stale: bool,
    /// Callbacks to run when a graph becomes stale.
    when_stale: Vec<Call>,
    /// Devices whose streams need fork events.
    pub(crate) forks: DeviceSet,
    /// Whether a stream found no free lane set.
    pub(crate) more_lane_sets: bool,
    /// GPUs whose copies need resources.
    pub(crate) resources: DeviceSet,
    /// Number of the most recent suspension request; `None` if there was none.
    pub(crate) suspend: Option<u64>,
    /// Whether the thread must stop.
    pub(crate) stop: bool,
}

impl Requests {
    /// Returns whether a thread serves the requests.
    pub(crate) fn is_served(&self) -> bool {
        self.served.load(Ordering::Acquire)
    }

    /// Sets whether a thread serves the requests.
    pub(crate) fn set_served(&self, served: bool) {
        self.served.store(served, Ordering::Release);
    }

    /// Requests the setup of the wanted relays, then a call of `after`.
    pub(crate) fn prepare(&self, after: Call) {
        self.order(|orders| {
            orders.prepare = true;
            orders.after.push(after);
        });
    }

    /// Requests a call on the thread, if there is one.
    pub(crate) fn call(&self, call: Call) {
        self.order(|orders| orders.after.push(call));
    }

    /// Requests another setup after the set of wanted relays changed.
    pub(crate) fn prepare_again(&self) {
        self.order(|orders| orders.prepare = true);
    }

    /// Requests the suspension with number `asked`.
    pub(crate) fn suspend(&self, asked: u64) {
        self.order(|orders| orders.suspend = orders.suspend.max(Some(asked)));
    }

    /// Requests another lane set for a stream that found none.
    pub(crate) fn more_lane_sets(&self) {
        // Asked by every copy of such a stream.
        if !self.orders.lock().more_lane_sets {
            self.order(|orders| orders.more_lane_sets = true);
        }
    }

    /// Requests a fork event for a device.
    pub(crate) fn fork_event(&self, device: DeviceId) {
        self.order(|orders| orders.forks = orders.forks.union(DeviceSet::of(device)));
    }

    /// Requests the resources for copies of a GPU's memory.
    pub(crate) fn resources(&self, device: DeviceId) {
        self.order(|orders| orders.resources = orders.resources.union(DeviceSet::of(device)));
    }

    /// Registers a callback for a stale graph.
    pub(crate) fn when_stale(&self, call: Call) {
        self.order(|orders| orders.when_stale.push(call));
    }

    /// Reports that a calibrated graph is stale.
    pub(crate) fn stale(&self) {
        self.order(|orders| orders.stale = true);
    }

    /// Asks the thread to stop.
    pub(crate) fn stop(&self) {
        self.order(|orders| orders.stop = true);
    }

    fn order(&self, change: impl FnOnce(&mut Orders)) {
        change(&mut self.orders.lock());
        self.woken.notify_all();
    }

    /// Blocks until there is a request, at most for `most`, and takes all requests.
    pub(crate) fn next(&self, most: Option<Duration>) -> Orders {
        let mut orders = self.orders.lock();
        while !orders.is_some() {
            match most {
                None => self.woken.wait(&mut orders),
                Some(most) => {
                    self.woken.wait_for(&mut orders, most);
                    break;
                }
            }
        }
        let (stop, mut when_stale) = (orders.stop, std::mem::take(&mut orders.when_stale));
        let mut next = std::mem::take(&mut *orders);
        // Kept: an ended thread does not come back.
        orders.stop = stop;
        match next.stale {
            true => next.after.append(&mut when_stale),
            false => orders.when_stale = when_stale,
        }
        next
    }
}

impl Orders {
    fn is_some(&self) -> bool {
        let asked = self.prepare || self.stop || self.stale || self.more_lane_sets || self.suspend.is_some();
        asked || !self.after.is_empty() || !self.forks.is_empty() || !self.resources.is_empty()
    }
}

impl std::fmt::Debug for Orders {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Orders").field("stop", &self.stop).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_for_twice_is_given_out_once() {
        let requests = Requests::default();
        let [a, b] = [0, 1].map(DeviceId);
        [a, b, a].into_iter().for_each(|device| requests.fork_event(device));
        requests.more_lane_sets();
        requests.more_lane_sets();
        requests.suspend(2);
        requests.suspend(1);
        let orders = requests.next(None);
        assert_eq!(orders.forks, DeviceSet::of(a).union(DeviceSet::of(b)));
        assert!(orders.more_lane_sets && !orders.prepare && !orders.stop);
        assert_eq!(orders.suspend, Some(2));
        let none = requests.next(Some(Duration::from_millis(1)));
        assert!(!none.is_some(), "nothing is asked any more");
    }

    #[test]
    fn what_waits_for_a_stale_graph_is_called_once_and_a_stop_stays() {
        let requests = Requests::default();
        requests.when_stale(Box::new(|| {}));
        requests.prepare_again();
        assert!(requests.next(None).after.is_empty());
        requests.stale();
        assert_eq!(requests.next(None).after.len(), 1);
        requests.stale();
        assert!(requests.next(None).after.is_empty());
        requests.stop();
        assert!(requests.next(None).stop && requests.next(None).stop);
    }
}
