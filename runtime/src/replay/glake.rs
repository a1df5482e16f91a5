//! The product as the subject of a replay.

use glake_units::Bytes;

use super::{Refusal, Subject};
use crate::backend::Backend;
use crate::config::Config;
use crate::trace::Trace;

/// The product on an open device, ready for replays.
pub struct Glake {
    device: String,
}

/// How one replay is made.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How far the GPU is behind the host: a free's epoch passes this long after it.
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
        let _ = (backend, config);
        Err(Refusal::Failed("the policy glake is not part of this build".into()))
    }

    /// What it runs on, for reports.
    pub fn device(&self) -> &str {
        &self.device
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
        let _ = (trace, options);
        Err(Refusal::Failed("the policy glake is not part of this build".into()))
    }
}
