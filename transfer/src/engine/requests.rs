//! What the engine's thread is asked for: contexts, lanes, events, slots, and to give them up again.
//!
//! Invariant: asking never waits for the thread. What is asked for several times before the thread looks is done once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use glake_device::DeviceId;
use glake_device::owned::DeviceSet;
use parking_lot::{Condvar, Mutex};

use super::Engine;

/// What is called on the thread with the engine.
pub(crate) type After = Box<dyn FnOnce(&Engine) + Send>;

/// Asked by copies, served by the thread.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    orders: Mutex<Orders>,
    woken: Condvar,
    served: AtomicBool,
}

/// All that was asked for since the thread last looked.
#[derive(Default)]
pub(crate) struct Orders {
    /// The relays that are wanted are to be made ready.
    pub(crate) prepare: bool,
    /// What is called when all of this is done.
    pub(crate) after: Vec<After>,
    /// A calibrated graph was seen not to hold.
    stale: bool,
    /// What is called then.
    when_stale: Vec<After>,
    /// Devices whose streams copies fork from.
    pub(crate) forks: DeviceSet,
    /// A stream found no lane set.
    pub(crate) more_lane_sets: bool,
    /// GPUs whose memory is copied.
    pub(crate) resources: DeviceSet,
    /// How many suspensions were asked for, if one was since.
    pub(crate) suspend: Option<u64>,
    /// The thread is to end.
    pub(crate) stop: bool,
}

impl Requests {
    /// Whether there is a thread.
    pub(crate) fn is_served(&self) -> bool {
        self.served.load(Ordering::Acquire)
    }

    /// There is one now, or no more.
    pub(crate) fn set_served(&self, served: bool) {
        self.served.store(served, Ordering::Release);
    }

    /// Makes the wanted relays ready, then calls `after`.
    pub(crate) fn prepare(&self, after: After) {
        self.order(|orders| {
            orders.prepare = true;
            orders.after.push(after);
        });
    }

    /// Calls it on the thread, where there is one.
    pub(crate) fn call(&self, call: After) {
        self.order(|orders| orders.after.push(call));
    }

    /// The relays that are wanted have changed.
    pub(crate) fn prepare_again(&self) {
        self.order(|orders| orders.prepare = true);
    }

    /// So many suspensions were asked for by now.
    pub(crate) fn suspend(&self, asked: u64) {
        self.order(|orders| orders.suspend = orders.suspend.max(Some(asked)));
    }

    /// A stream found no lane set.
    pub(crate) fn more_lane_sets(&self) {
        // Asked by every copy of such a stream.
        if !self.orders.lock().more_lane_sets {
            self.order(|orders| orders.more_lane_sets = true);
        }
    }

    /// Copies fork from a device that has no event for it.
    pub(crate) fn fork_event(&self, device: DeviceId) {
        self.order(|orders| orders.forks = orders.forks.union(DeviceSet::of(device)));
    }

    /// Copies of a GPU's memory could use what is not made yet.
    pub(crate) fn resources(&self, device: DeviceId) {
        self.order(|orders| orders.resources = orders.resources.union(DeviceSet::of(device)));
    }

    /// Has `call` called when a calibrated graph is seen not to hold.
    pub(crate) fn when_stale(&self, call: After) {
        self.order(|orders| orders.when_stale.push(call));
    }

    /// It was seen.
    pub(crate) fn stale(&self) {
        self.order(|orders| orders.stale = true);
    }

    /// Ends the thread.
    pub(crate) fn stop(&self) {
        self.order(|orders| orders.stop = true);
    }

    fn order(&self, change: impl FnOnce(&mut Orders)) {
        change(&mut self.orders.lock());
        self.woken.notify_all();
    }

    /// Sleeps until something is asked, or for so long.
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
        requests.when_stale(Box::new(|_| {}));
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
