//! Meters are read beside all else: a driver may take its time, or hang.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;
use std::sync::Arc;

use glake_arbiter::{GpuId, WorkerId};
use glake_meter::{GpuMemory, Meter, MeterError};
use glake_units::Bytes;
use tokio::task::spawn_local;
use tokio::time::{Instant, timeout};

use crate::server::{MEASURE, Server};

/// What is known of the readings.
pub(crate) struct Meters {
    meter: Arc<dyn Meter>,
    /// GPUs whose meter is being read, and whether it is to be read once more.
    reading: RefCell<HashMap<GpuId, bool>>,
    /// When each meter was read last.
    read_at: RefCell<HashMap<GpuId, Instant>>,
    /// GPUs whose meter did not answer when it was read last.
    unanswered: RefCell<BTreeSet<GpuId>>,
}

impl Meters {
    pub(crate) fn new(meter: Arc<dyn Meter>) -> Self {
        Meters {
            meter,
            reading: RefCell::default(),
            read_at: RefCell::default(),
            unanswered: RefCell::default(),
        }
    }

    /// Before anybody is served.
    pub(crate) fn read_now(&self, gpu: &str) -> Result<GpuMemory, MeterError> {
        self.meter.read(gpu)
    }
}

impl Server {
    /// Reads meters that were read long ago, and waits for them: not for ever, of a driver that hangs. Others are heard
    /// meanwhile.
    pub(crate) async fn measure_old(self: &Rc<Self>, gpus: Vec<(GpuId, String)>) {
        let asked = Instant::now();
        let read_at = |gpu| self.meters.read_at.borrow().get(&gpu).copied();
        let old = gpus.into_iter().filter(|(gpu, _)| read_at(*gpu).is_none_or(|at| at + MEASURE < asked));
        let old: Vec<_> = old.collect();
        for (gpu, name) in &old {
            self.measure(*gpu, name.clone());
        }
        let all = async {
            for (gpu, _) in old {
                let mut change = self.change();
                while read_at(gpu).is_none_or(|at| at < asked) {
                    change.await;
                    change = self.change();
                }
            }
        };
        let _ = timeout(MEASURE, all).await;
    }

    /// Reads the meter, which may take a while, beside all else. Of a GPU that is being read it is read once more.
    pub(crate) fn measure(self: &Rc<Self>, gpu: GpuId, name: String) {
        if self.meters.reading.borrow_mut().insert(gpu, false).is_some() {
            self.meters.reading.borrow_mut().insert(gpu, true);
            return;
        }
        let server = self.clone();
        spawn_local(async move {
            loop {
                let (meter, asked) = (server.meters.meter.clone(), name.clone());
                server.look();
                let before = server.ask(|agent| agent.made(gpu));
                let Ok(read) = tokio::task::spawn_blocking(move || meter.read(&asked)).await else { return };
                server.look();
                server.measured(gpu, read, &before);
                server.wake();
                let mut measuring = server.meters.reading.borrow_mut();
                match measuring.insert(gpu, false) {
                    Some(true) => {}
                    _ => {
                        measuring.remove(&gpu);
                        return;
                    }
                }
            }
        });
    }

    pub(crate) fn measured(
        &self,
        gpu: GpuId,
        read: Result<GpuMemory, MeterError>,
        before: &BTreeMap<WorkerId, Bytes>,
    ) {
        self.meters.read_at.borrow_mut().insert(gpu, Instant::now());
        let is_answer = read.is_ok();
        match read {
            Ok(memory) => self.tell_quietly(|agent, now| agent.measured(gpu, &memory, before, now)),
            Err(error) if self.meters.unanswered.borrow_mut().insert(gpu) => {
                tracing::warn!(target: "glake::agent", %error, "the meter does not answer: what it said last stands");
            }
            Err(_) => {}
        }
        if is_answer && self.meters.unanswered.borrow_mut().remove(&gpu) {
            tracing::info!(target: "glake::agent", %gpu, "the meter answers again");
        }
        self.announce();
    }
}
