//! Engine thread that creates and releases resources. It sleeps while there are no requests and holds the engine weakly.

use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use glake_device::owned::DeviceSet;
use parking_lot::Mutex;

use super::Engine;
use super::suspension::{PAUSE, Suspension};
use crate::links::requests::{Call, Requests};
use crate::{Result, TransferError};

/// Thread handle and its request queue.
#[derive(Debug)]
pub(crate) struct Worker {
    requests: Arc<Requests>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Worker {
    /// Creates a worker without a thread.
    pub(crate) fn new(requests: &Arc<Requests>) -> Worker {
        Worker { requests: requests.clone(), thread: Mutex::default() }
    }

    /// Requests the setup of the wanted relays, then a call of `after`. Starts the thread if necessary.
    ///
    /// # Errors
    /// [`TransferError::NoThread`].
    pub(crate) fn prepare(&self, engine: &Arc<Engine>, after: Call) -> Result<()> {
        let mut thread = self.thread.lock();
        if thread.is_none() {
            let (requests, engine) = (self.requests.clone(), Arc::downgrade(engine));
            let named = std::thread::Builder::new().name("glake-relays".into());
            let spawned = named.spawn(move || run(&requests, &engine));
            *thread = Some(spawned.map_err(TransferError::NoThread)?);
            self.requests.set_served(true);
        }
        self.requests.prepare(after);
        Ok(())
    }

    /// Stops the thread and waits for its end, unless called from that thread.
    pub(crate) fn stop(&self) {
        self.requests.stop();
        let thread = self.thread.lock().take();
        self.requests.set_served(false);
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != std::thread::current().id()) {
            // Its end is all that is waited for: a thread that panicked has ended too.
            let _ = thread.join();
        }
    }
}

fn run(requests: &Requests, engine: &Weak<Engine>) {
    let mut forks = DeviceSet::EMPTY;
    let (mut suspension, mut more) = (Suspension::default(), false);
    loop {
        let mut orders = requests.next(more.then_some(PAUSE));
        let Some(engine) = engine.upgrade() else { return };
        if orders.stop {
            return;
        }
        forks = forks.union(orders.forks);
        if orders.prepare {
            forks = forks.union(engine.shared.contexts.in_use());
        }
        engine.provider.provide(&orders, forks);
        for after in std::mem::take(&mut orders.after) {
            after();
        }
        if let Some(asked) = orders.suspend {
            suspension.ask(asked);
        }
        more = suspension.step(&engine.shared.links, &engine.shared.resources);
        // Those that were of suspended relays are gone.
        engine.provider.restore_lane_sets(forks);
    }
}
