//! GLake itself as the subject of a replay.
//!
//! ```text
//! Machine ─► Recorder (calls and their cost) ─► Lag (delay of the GPU) ─► GpuPool ◄─ Run (events)
//!                                                  ▲ trace time                ▲ ticks     └► Stamps (--verify)
//!                                                  └────────── Pace ───────────┘
//! ```
//!
//! The pool is the one that programs use; only its clock is the trace's. A subject leaves no memory behind on the device.

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

/// GLake on an open device, ready for replays.
#[derive(Debug)]
pub struct Glake {
    machine: Machine,
    pool: config::Pool,
}

/// Options of one replay.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Delay of the GPU behind the host: a free's completion point passes this long after the free.
    pub gpu_lag_ms: u64,
    /// Limit of reserved memory; `None`: limited by the configuration and the device only.
    pub limit: Option<Bytes>,
    /// Stamp every block, and compare its bytes when it is freed.
    pub verify: bool,
}

impl Glake {
    /// Opens the device of a backend.
    ///
    /// # Errors
    /// [`Refusal::Failed`]: the device refused.
    pub fn open(backend: Backend, config: &Config) -> Result<Glake, Refusal> {
        Ok(Glake::on(Machine::open(&backend).map_err(failed)?, config.pool.clone()))
    }

    /// Creates a subject on an open device.
    pub fn on(machine: Machine, pool: config::Pool) -> Glake {
        Glake { machine, pool }
    }

    /// Returns the device's name for reports.
    pub fn device(&self) -> &str {
        self.machine.name()
    }

    /// Returns the open device.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Creates a subject with a new pool.
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

/// Converts driver errors that do not pass through a pool.
impl From<DriverError> for Refusal {
    fn from(error: DriverError) -> Self {
        failed(error)
    }
}
