//! The product as the subject of a replay.
//!
//! ```text
//! Machine ─► Recorder (calls, what they cost) ─► Lag (the GPU is behind) ─► GpuPool ◄─ Run (events)
//!                                                  ▲ trace time                ▲ ticks     └► Stamps (--verify)
//!                                                  └────────── Pace ───────────┘
//! ```
//!
//! The pool is the one that programs get; only its clock is the trace's. A subject leaves nothing on the device.

mod pace;
mod run;

use std::time::Duration;

use glake_device::DriverError;
use glake_units::Bytes;

use super::{Refusal, Subject};
use crate::machine::Machine;
use crate::trace::Trace;
use glake_runtime::backend::Backend;
use glake_runtime::config::{self, Config};
use run::Run;

/// The product on an open device, ready for replays.
#[derive(Debug)]
pub struct Glake {
    machine: Machine,
    pool: config::Pool,
}

/// How one replay is made.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// How far the GPU is behind the host: a free's completion point passes this long after it.
    pub gpu_lag_ms: u64,
    /// The most to reserve; `None`: what the configuration and the device allow.
    pub limit: Option<Bytes>,
    /// Whether every block is stamped and its bytes compared when it is freed.
    pub verify: bool,
}

impl Glake {
    /// Gets the device ready.
    ///
    /// # Errors
    /// [`Refusal::Failed`]: the device refused.
    pub fn open(backend: Backend, config: &Config) -> Result<Glake, Refusal> {
        Ok(Glake::on(Machine::open(&backend).map_err(failed)?, config.pool.clone()))
    }

    /// On a device that is open.
    pub fn on(machine: Machine, pool: config::Pool) -> Glake {
        Glake { machine, pool }
    }

    /// What it runs on, for reports.
    pub fn device(&self) -> &str {
        self.machine.name()
    }

    /// The device.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// A fresh pool.
    ///
    /// # Errors
    /// [`Refusal::Failed`]: the device refused.
    pub fn subject<'a>(
        &'a self,
        trace: &'a Trace,
        options: Options,
    ) -> Result<Box<dyn Subject + 'a>, Refusal> {
        let lag = Duration::from_millis(options.gpu_lag_ms);
        let interval = Duration::from_micros(self.pool.completion_interval_us);
        let mut settings = self.machine.settings(&self.pool);
        settings.limit = settings.limit.min(options.limit.unwrap_or(Bytes::MAX));
        let run = Run::new(&self.machine, trace, settings, lag, interval, options.verify);
        Ok(Box::new(run.map_err(failed)?))
    }
}

fn failed(error: impl std::error::Error + Send + Sync + 'static) -> Refusal {
    Refusal::Failed(Box::new(error))
}

/// For the driver's own errors, where no pool is between.
impl From<DriverError> for Refusal {
    fn from(error: DriverError) -> Self {
        failed(error)
    }
}
