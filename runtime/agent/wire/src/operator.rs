//! Requests of clients (`glake ps`, `shrink`, ...) over the same socket, and the agent's answers: one `ask`, then `row` and
//! `decision` frames, then `end` or `error`. These frames are not numbered.

use glake_units::Bytes;
use serde::{Deserialize, Serialize};

/// Request of a client: the first and only frame of its connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Ask {
    /// Lists all workers.
    Ps,
    /// Evicts a worker's memory from its GPUs; answered when the eviction has ended.
    Shrink {
        /// Name of the worker.
        worker: String,
    },
    /// Restores a worker's memory; answered when the refill has ended.
    Refill {
        /// Name of the worker.
        worker: String,
    },
    /// Starts a worker of the node file; answered when the worker has joined.
    Start {
        /// Name of the worker.
        worker: String,
    },
    /// Stops a worker that the agent started, and does not start it again; answered when the process has ended.
    Stop {
        /// Name of the worker.
        worker: String,
    },
    /// Stops all workers that the agent started, then the agent; answered when the processes have ended, with a row for each worker that
    /// continues because the agent did not start it.
    StopAll,
    /// Lists the last decisions.
    Explain,
    /// Returns the agent's metrics in Prometheus' text format.
    Metrics,
}

/// One frame of the answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Answer {
    /// State of one worker.
    Row(WorkerRow),
    /// Record of one decision.
    Decision(DecisionRow),
    /// Part of a text.
    Text {
        /// Content of the part.
        text: String,
    },
    /// End of a successful answer.
    End,
    /// The agent does not serve this client.
    Refused {
        /// Reason of the refusal.
        why: String,
    },
    /// The request failed.
    Error {
        /// The request, the state found, and how to fix it.
        why: String,
    },
}

/// State of a worker, as `glake ps` shows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct WorkerRow {
    /// Name of the worker.
    pub worker: String,
    /// Process id of the worker.
    pub pid: u32,
    /// Tenant that owns the worker.
    pub tenant: String,
    /// GPUs that the worker uses.
    pub gpus: Vec<String>,
    /// State: idle, busy, or the operation in progress.
    pub state: String,
    /// Sum of the worker's leases.
    pub leased: Bytes,
    /// Bytes that the worker's pools hold.
    pub resident: Bytes,
    /// Bytes that are evicted.
    pub evicted: Bytes,
    /// Seconds since the last use ended. None: a use is running.
    pub idle_s: Option<f64>,
    /// Predicted seconds to restore the worker's memory.
    pub predicted_wake_s: f64,
    /// For a worker that the agent starts and that has not joined: how its last run ended, and the awaited event.
    pub note: Option<String>,
}

/// Record of a decision, as `glake explain` shows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DecisionRow {
    /// Seconds since the decision.
    pub ago_s: f64,
    /// Name of the worker whose want was decided.
    pub worker: String,
    /// Priority class of the want at the decision.
    pub class: i64,
    /// Seconds that the want had waited.
    pub waited_s: f64,
    /// Bytes that the want needed.
    pub needed: Bytes,
    /// Victims of the decision.
    pub taken: Vec<VictimRow>,
    /// Predicted seconds until the want is granted.
    pub predicted_s: f64,
    /// Actual seconds until the grant. None: the want is pending, or was not granted.
    pub real_s: Option<f64>,
    /// Outcome of the want.
    pub outcome: String,
}

/// Memory taken from one victim.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct VictimRow {
    /// Name of the victim.
    pub worker: String,
    /// GPU of the memory.
    pub gpu: String,
    /// Bytes taken.
    pub bytes: Bytes,
    /// Reason for the choice of this victim.
    pub why: String,
}
