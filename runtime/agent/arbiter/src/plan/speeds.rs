//! How fast memory moves, and a calibration's file.

use std::collections::BTreeMap;
use std::time::Duration;

use glake_units::Bytes;
use serde::Deserialize;

use crate::node::{Node, Worker};

/// What was measured of a machine, alone on it. Each key has the value of one H200 where it is not given.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Calibration {
    /// Host to GPU, in GB/s.
    pub refill_gbps: f64,
    /// GPU to host, in GB/s.
    pub shrink_gbps: f64,
    /// What a clean GiB costs to leave, in milliseconds: none of it is another's before.
    pub clean_ms_per_gib: f64,
    /// What a shrink or a refill costs beside its bytes, in milliseconds.
    pub switch_ms: f64,
    /// From the end of a step until it is parked, in milliseconds.
    pub park_ms: f64,
    /// The algorithm that copies tensor by tensor: host to GPU, in GB/s.
    pub per_tensor_refill_gbps: f64,
    /// GPU to host, in GB/s.
    pub per_tensor_shrink_gbps: f64,
    /// Beside its bytes, in milliseconds.
    pub per_tensor_switch_ms: f64,
    /// A process and its libraries, until weights are read, in seconds.
    pub start_s: f64,
    /// Weights from the page cache to the GPU, in GB/s.
    pub start_gbps: f64,
    /// Until a killed process's memory is back, in seconds.
    pub stop_s: f64,
    /// What single workers do, by name.
    pub worker: BTreeMap<String, Pace>,
}

/// What a worker does alone.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pace {
    /// In place of the worker's own.
    pub prefill_tok_s: Option<f64>,
    /// In place of the worker's own.
    pub decode_ms: Option<f64>,
    /// The part of a step in which the GPU computes, where it waits for something else in the rest; else all of it.
    pub step_ms: Option<f64>,
}

impl Default for Calibration {
    fn default() -> Self {
        Calibration {
            refill_gbps: 50.0,
            shrink_gbps: 50.0,
            clean_ms_per_gib: 0.53,
            switch_ms: 4.0,
            park_ms: 30.0,
            per_tensor_refill_gbps: 50.0,
            per_tensor_shrink_gbps: 50.0,
            per_tensor_switch_ms: 20.0,
            start_s: 5.0,
            start_gbps: 5.0,
            stop_s: 0.35,
            worker: BTreeMap::new(),
        }
    }
}

/// A file that is no calibration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CalibrationError {
    /// Not this schema.
    #[error("{}", .0.to_string().trim_end())]
    Syntax(#[from] toml::de::Error),
    /// A value that cannot be.
    #[error("{key} is {found}: give a number above 0")]
    Value {
        /// Which.
        key: String,
        /// What it is.
        found: f64,
    },
    /// It names nobody.
    #[error("it has figures for a worker {name:?}, which the workers' file does not name")]
    Unknown {
        /// Who.
        name: String,
    },
}

/// How fast memory moves under a policy.
#[derive(Clone, Copy, Debug)]
pub(super) struct Speeds {
    /// Bytes a second.
    pub(super) refill: Bytes,
    pub(super) shrink: Bytes,
    pub(super) clean_gib: Duration,
    pub(super) refill_fixed: Duration,
    pub(super) shrink_fixed: Duration,
    pub(super) park: Duration,
    /// Weights are copied out each time.
    pub(super) copies_out: bool,
    /// The whole process goes, its context too, and comes back when it has all bytes.
    pub(super) restarts: bool,
}

impl Calibration {
    /// What holds where no file says more: the link as the workers' file has it.
    pub fn of(node: &Node) -> Self {
        let mut plain = Calibration::default();
        if let Some(link) = node.link_gbps {
            (plain.refill_gbps, plain.shrink_gbps) = (link, link);
            (plain.per_tensor_refill_gbps, plain.per_tensor_shrink_gbps) = (link, link);
        }
        plain
    }

    /// Reads a file's text.
    ///
    /// # Errors
    /// [`CalibrationError`].
    pub fn parse(text: &str, workers: &[Worker]) -> Result<Self, CalibrationError> {
        let read: Calibration = toml::from_str(text)?;
        let own = [
            ("refill_gbps", read.refill_gbps),
            ("shrink_gbps", read.shrink_gbps),
            ("per_tensor_refill_gbps", read.per_tensor_refill_gbps),
            ("per_tensor_shrink_gbps", read.per_tensor_shrink_gbps),
            ("start_gbps", read.start_gbps),
            ("clean_ms_per_gib", read.clean_ms_per_gib),
            ("switch_ms", read.switch_ms),
            ("park_ms", read.park_ms),
            ("per_tensor_switch_ms", read.per_tensor_switch_ms),
            ("start_s", read.start_s),
            ("stop_s", read.stop_s),
        ];
        let own = own.map(|(key, value)| (key.to_owned(), value));
        let paces = read.worker.iter().flat_map(|(name, pace)| {
            let figures = [
                ("prefill_tok_s", pace.prefill_tok_s),
                ("decode_ms", pace.decode_ms),
                ("step_ms", pace.step_ms),
            ];
            figures.into_iter().filter_map(move |(key, value)| Some((format!("worker.{name}.{key}"), value?)))
        });
        if let Some((key, found)) = own.into_iter().chain(paces).find(|(_, v)| !(v.is_finite() && *v > 0.0)) {
            return Err(CalibrationError::Value { key, found });
        }
        match read.worker.keys().find(|name| workers.iter().all(|worker| worker.name != **name)) {
            Some(name) => Err(CalibrationError::Unknown { name: name.clone() }),
            None => Ok(read),
        }
    }

    /// A worker as it was measured, and how many milliseconds of each step its GPU computes.
    pub(super) fn paced(&self, worker: &Worker) -> (Worker, f64) {
        let pace = self.worker.get(&worker.name).copied().unwrap_or_default();
        let decode_ms = pace.decode_ms.unwrap_or(worker.decode_ms);
        let prefill_tok_s = pace.prefill_tok_s.unwrap_or(worker.prefill_tok_s);
        let step_ms = pace.step_ms.unwrap_or(decode_ms).min(decode_ms);
        (Worker { prefill_tok_s, decode_ms, ..worker.clone() }, step_ms)
    }

    pub(super) fn ours(&self) -> Speeds {
        Speeds {
            refill: rate(self.refill_gbps),
            shrink: rate(self.shrink_gbps),
            clean_gib: millis(self.clean_ms_per_gib),
            refill_fixed: millis(self.switch_ms),
            shrink_fixed: millis(self.switch_ms),
            park: millis(self.park_ms),
            copies_out: false,
            restarts: false,
        }
    }

    pub(super) fn per_tensor(&self) -> Speeds {
        Speeds {
            refill: rate(self.per_tensor_refill_gbps),
            shrink: rate(self.per_tensor_shrink_gbps),
            refill_fixed: millis(self.per_tensor_switch_ms),
            shrink_fixed: millis(self.per_tensor_switch_ms),
            copies_out: true,
            ..self.ours()
        }
    }

    pub(super) fn start_stop(&self) -> Speeds {
        Speeds {
            refill: rate(self.start_gbps),
            clean_gib: Duration::ZERO,
            refill_fixed: millis(self.start_s * 1e3),
            shrink_fixed: millis(self.stop_s * 1e3),
            restarts: true,
            ..self.ours()
        }
    }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // above 0, and far below 2^64
pub(super) fn rate(gbps: f64) -> Bytes {
    Bytes::new((gbps * 1e9) as u64)
}

fn millis(millis: f64) -> Duration {
    Duration::from_secs_f64(millis / 1e3)
}
