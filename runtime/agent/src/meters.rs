//! Reading of meters in the background, because a driver may be slow or hang.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use glake_arbiter::{GpuId, WorkerId};
use glake_meter::{GpuMemory, Meter, MeterError};
use glake_units::Bytes;
use tokio::task::spawn_local;
use tokio::time::{Instant, timeout};

use crate::Agent;
use crate::daemon::{Daemon, METER_INTERVAL};

/// Readings of the meters, finished and under way.
pub(crate) struct Meters {
    meter: Arc<dyn Meter>,
    /// GPUs whose meter is being read.
    reading: RefCell<HashMap<GpuId, Reading>>,
    /// Begin of the last reading of each GPU's meter.
    read_at: RefCell<HashMap<GpuId, Duration>>,
    /// GPUs whose meter did not answer when it was read last.
    unanswered: RefCell<BTreeSet<GpuId>>,
    /// Whether the meters are being read for snapshots.
    is_glancing: Cell<bool>,
}

/// Reading under way.
struct Reading {
    since: Instant,
    /// Whether another reading was requested meanwhile.
    again: bool,
}

impl Meters {
    pub(crate) fn new(meter: Arc<dyn Meter>) -> Self {
        Meters {
            meter,
            reading: RefCell::default(),
            read_at: RefCell::default(),
            unanswered: RefCell::default(),
            is_glancing: Cell::new(false),
        }
    }

    /// Reads a meter synchronously, before the agent serves.
    pub(crate) fn read_now(&self, gpu: &str) -> Result<GpuMemory, MeterError> {
        self.meter.read(gpu)
    }

    fn is_old(&self, gpu: GpuId, at: Duration) -> bool {
        self.read_at.borrow().get(&gpu).is_none_or(|read| *read + METER_INTERVAL < at)
    }

    /// Returns whether an earlier reading hangs in the driver.
    fn hangs(&self, gpu: GpuId) -> bool {
        self.reading.borrow().get(&gpu).is_some_and(|reading| reading.since.elapsed() > METER_INTERVAL)
    }
}

impl Daemon {
    /// Reads meters with old readings and waits for the results, with a timeout for a driver that hangs. Other connections are served
    /// meanwhile.
    pub(crate) async fn measure_old(self: &Rc<Self>, gpus: Vec<(GpuId, String)>) {
        let asked = self.now();
        let old =
            gpus.into_iter().filter(|(gpu, _)| self.meters.is_old(*gpu, asked) && !self.meters.hangs(*gpu));
        let old: Vec<_> = old.collect();
        for (gpu, name) in &old {
            self.measure(*gpu, name.clone());
        }
        let all = async {
            for (gpu, _) in old {
                let mut change = self.change();
                while self.meters.is_old(gpu, asked) {
                    change.await;
                    change = self.change();
                }
            }
        };
        let _ = timeout(METER_INTERVAL, all).await;
    }

    /// Starts a reading in the background. If one is under way, the meter is read once more afterwards.
    pub(crate) fn measure(self: &Rc<Self>, gpu: GpuId, name: String) {
        if let Some(reading) = self.meters.reading.borrow_mut().get_mut(&gpu) {
            reading.again = true;
            return;
        }
        self.meters.reading.borrow_mut().insert(gpu, Reading { since: Instant::now(), again: false });
        let daemon = self.clone();
        spawn_local(async move {
            loop {
                let (meter, asked, begun) = (daemon.meters.meter.clone(), name.clone(), daemon.now());
                daemon.look();
                daemon.wake();
                let before = daemon.ask(|agent| agent.made(gpu));
                let read = tokio::task::spawn_blocking(move || meter.read(&asked)).await;
                daemon.look();
                let read = read.map_err(|error| error.to_string());
                daemon.measured(
                    gpu,
                    begun,
                    read.and_then(|read| read.map_err(|error| error.to_string())),
                    &before,
                );
                daemon.wake();
                let mut reading = daemon.meters.reading.borrow_mut();
                match reading.get_mut(&gpu) {
                    Some(under_way) if under_way.again => {
                        *under_way = Reading { since: Instant::now(), again: false };
                    }
                    _ => {
                        reading.remove(&gpu);
                        return;
                    }
                }
            }
        });
    }

    /// Reads all meters for snapshots, for as long as `longest`. Decisions do not depend on these readings, so that nothing changes because
    /// somebody watches. A driver that hangs is asked once.
    pub(crate) async fn glance(self: &Rc<Self>, longest: Duration) {
        if self.meters.is_glancing.replace(true) {
            return;
        }
        let (meter, gpus, daemon) = (self.meters.meter.clone(), self.ask(Agent::gpus), self.clone());
        let reading = spawn_local(async move {
            let read = move || {
                gpus.into_iter().filter_map(|(gpu, name)| Some((gpu, meter.read(&name).ok()?))).collect()
            };
            let read: Vec<(GpuId, GpuMemory)> = tokio::task::spawn_blocking(read).await.unwrap_or_default();
            daemon.meters.is_glancing.set(false);
            let read: Vec<(GpuId, &GpuMemory)> = read.iter().map(|(gpu, memory)| (*gpu, memory)).collect();
            daemon.tell_quietly(|agent, now| agent.metered(&read, now));
        });
        let _ = timeout(longest, reading).await;
    }

    /// Passes a reading that began at `begun` to the agent, or records that the meter did not answer.
    pub(crate) fn measured(
        &self,
        gpu: GpuId,
        begun: Duration,
        read: Result<GpuMemory, String>,
        before: &BTreeMap<WorkerId, Bytes>,
    ) {
        self.meters.read_at.borrow_mut().insert(gpu, begun);
        let is_answer = read.is_ok();
        match read {
            Ok(memory) => self.tell_quietly(|agent, now| agent.measured(gpu, begun, &memory, before, now)),
            Err(error) if self.meters.unanswered.borrow_mut().insert(gpu) => {
                tracing::warn!(target: "glake::agent", %error, "the meter does not respond: its last reading stays in use");
            }
            Err(_) => {}
        }
        if is_answer && self.meters.unanswered.borrow_mut().remove(&gpu) {
            tracing::info!(target: "glake::agent", %gpu, "the meter answers again");
        }
        self.announce();
    }
}
