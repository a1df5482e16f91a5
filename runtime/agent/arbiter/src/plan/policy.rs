//! Policies that a plan compares: settings of the arbiter, the speed of memory moves, and the file of a calibration.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use glake_units::Bytes;
use serde::Deserialize;

use crate::node::{Node, Range, Worker};
use crate::{Preempt, Settings};

/// Policy of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Workers are started and stopped, least recently used first.
    StartStop,
    /// Whole workers leave, least recently used first, once their requests have ended, at the speed of today's engines: one copy per tensor
    /// in both directions.
    DrainPerTensor,
    /// The policy of the product.
    Glake,
    /// The product without parking.
    GlakeNoPreempt,
}

/// Error for an unknown name of a policy.
#[derive(Debug, thiserror::Error)]
#[error("there is no policy {name:?}: choose from {}", Policy::ALL.map(Policy::name).join(", "))]
pub struct UnknownPolicy {
    /// Requested name of a policy.
    pub name: String,
}

impl Policy {
    /// Every policy, in the order of the table.
    pub const ALL: [Policy; 4] =
        [Policy::StartStop, Policy::DrainPerTensor, Policy::GlakeNoPreempt, Policy::Glake];

    /// Returns the name of the policy.
    pub fn name(self) -> &'static str {
        match self {
            Policy::StartStop => "start-stop",
            Policy::DrainPerTensor => "drain-per-tensor",
            Policy::Glake => "glake",
            Policy::GlakeNoPreempt => "glake-no-preempt",
        }
    }

    pub(super) fn settings(self, speeds: &Speeds, node: &Node) -> Settings {
        let preempt = match self {
            Policy::Glake => Preempt::Step,
            _ => Preempt::Idle,
        };
        let partial = matches!(self, Policy::Glake | Policy::GlakeNoPreempt);
        // Stops have no timeout: no further victim is chosen.
        let least_late = match self {
            Policy::StartStop => Duration::from_secs(120),
            _ => Settings::default().least_late,
        };
        let link = match self {
            Policy::StartStop | Policy::DrainPerTensor => speeds.refill,
            // A real agent knows its file, but no calibration.
            _ => node.link_gbps.map_or(Settings::default().link, rate),
        };
        Settings { link, preempt, partial, least_late, ..Settings::default() }
    }

    pub(super) fn speeds(self, calibration: &Calibration) -> Speeds {
        match self {
            Policy::StartStop => calibration.start_stop(),
            Policy::DrainPerTensor => calibration.per_tensor(),
            _ => calibration.ours(),
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        let found = Policy::ALL.into_iter().find(|policy| policy.name() == name);
        found.ok_or_else(|| UnknownPolicy { name: name.to_owned() })
    }
}

/// Measured speeds of a machine without other load. Defaults are the values of one H200.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Calibration {
    /// Rate from host to GPU, in GB/s.
    pub refill_gbps: f64,
    /// Rate from GPU to host, in GB/s.
    pub shrink_gbps: f64,
    /// Milliseconds to unmap a clean GiB; another worker can get none of it earlier.
    pub clean_ms_per_gib: f64,
    /// Fixed cost of a shrink or a refill, in milliseconds.
    pub switch_ms: f64,
    /// Time from the end of a step until the worker is parked, in milliseconds.
    pub park_ms: f64,
    /// Rate from host to GPU of copies tensor by tensor, in GB/s.
    pub per_tensor_refill_gbps: f64,
    /// Rate from GPU to host of copies tensor by tensor, in GB/s.
    pub per_tensor_shrink_gbps: f64,
    /// Fixed cost of copies tensor by tensor, in milliseconds.
    pub per_tensor_switch_ms: f64,
    /// Seconds to start a process and its libraries, before it reads weights.
    pub start_s: f64,
    /// Rate of loading weights from the page cache to the GPU, in GB/s.
    pub start_gbps: f64,
    /// Seconds until the memory of a killed process is free.
    pub stop_s: f64,
    /// Speeds of single workers, by name.
    pub worker: BTreeMap<String, Pace>,
}

/// Compute speeds of a worker that runs alone.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pace {
    /// Prompt tokens per second; overrides that of the worker.
    pub prefill_tok_s: Option<f64>,
    /// Milliseconds per generated token; overrides that of the worker.
    pub decode_ms: Option<f64>,
    /// Milliseconds of a step in which the GPU computes; it waits in the rest. `None`: all of the step.
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

/// Reason why a file is no calibration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CalibrationError {
    /// The file does not follow the schema.
    #[error("{}", .0.to_string().trim_end())]
    Syntax(#[from] toml::de::Error),
    /// A value is out of range.
    #[error("{key} is {found:?}: {allowed}")]
    Value {
        /// Key of the value.
        key: String,
        /// Value in the file.
        found: f64,
        /// Description of allowed values.
        allowed: &'static str,
    },
    /// The calibration names an unknown worker.
    #[error("it has figures for a worker {name:?}, which the workers' file does not name")]
    Unknown { name: String },
}

/// Speed of memory moves under a policy.
#[derive(Clone, Copy, Debug)]
pub(super) struct Speeds {
    /// Bytes per second.
    pub(super) refill: Bytes,
    pub(super) shrink: Bytes,
    pub(super) clean_gib: Duration,
    pub(super) refill_fixed: Duration,
    pub(super) shrink_fixed: Duration,
    pub(super) park: Duration,
    /// Whether weights are copied out each time.
    pub(super) copies_out: bool,
    /// Whether the whole process leaves, including its context, and returns only with all bytes.
    pub(super) restarts: bool,
}

impl Calibration {
    /// Returns the default calibration with the link rate of the workers' file.
    pub fn of(node: &Node) -> Self {
        let mut plain = Calibration::default();
        if let Some(link) = node.link_gbps {
            (plain.refill_gbps, plain.shrink_gbps) = (link, link);
            (plain.per_tensor_refill_gbps, plain.per_tensor_shrink_gbps) = (link, link);
        }
        plain
    }

    /// Parses the text of a file.
    ///
    /// # Errors
    /// [`CalibrationError`].
    pub fn parse(text: &str, workers: &[Worker]) -> Result<Self, CalibrationError> {
        let read: Calibration = toml::from_str(text)?;
        let own = [
            ("refill_gbps", read.refill_gbps, Range::Link),
            ("shrink_gbps", read.shrink_gbps, Range::Link),
            ("per_tensor_refill_gbps", read.per_tensor_refill_gbps, Range::Link),
            ("per_tensor_shrink_gbps", read.per_tensor_shrink_gbps, Range::Link),
            ("start_gbps", read.start_gbps, Range::Link),
            ("clean_ms_per_gib", read.clean_ms_per_gib, Range::Milliseconds),
            ("switch_ms", read.switch_ms, Range::Milliseconds),
            ("park_ms", read.park_ms, Range::Milliseconds),
            ("per_tensor_switch_ms", read.per_tensor_switch_ms, Range::Milliseconds),
            ("start_s", read.start_s, Range::Seconds),
            ("stop_s", read.stop_s, Range::Seconds),
        ];
        let own = own.map(|(key, value, range)| (key.to_owned(), value, range));
        let paces = read.worker.iter().flat_map(|(name, pace)| {
            let figures = [
                ("prefill_tok_s", pace.prefill_tok_s, Range::Tokens),
                ("decode_ms", pace.decode_ms, Range::Step),
                ("step_ms", pace.step_ms, Range::Step),
            ];
            let named = move |(key, value, range)| Some((format!("worker.{name}.{key}"), value?, range));
            figures.into_iter().filter_map(named)
        });
        if let Some((key, found, range)) =
            own.into_iter().chain(paces).find(|(_, value, range)| !range.has(*value))
        {
            return Err(CalibrationError::Value { key, found, allowed: range.allowed() });
        }
        match read.worker.keys().find(|name| workers.iter().all(|worker| worker.name != **name)) {
            Some(name) => Err(CalibrationError::Unknown { name: name.clone() }),
            None => Ok(read),
        }
    }

    /// Returns a worker with its measured speeds, and the milliseconds of each step in which its GPU computes.
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
