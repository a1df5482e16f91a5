//! What an operator's command asks the agent over the same socket, and what it is answered: one `ask`, then `row` and
//! `decision` frames, then `end` or `error`. None of them has a number.

use glake_units::Bytes;
use serde::{Deserialize, Serialize};

/// The first and only frame of an operator's connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Ask {
    /// All workers.
    Ps,
    /// A worker's memory is to leave its GPUs; the answer comes when it has.
    Shrink {
        /// Its name.
        worker: String,
    },
    /// A worker's memory is to come back; the answer comes when it has.
    Refill {
        /// Its name.
        worker: String,
    },
    /// A worker of the file is to be started; the answer comes when it has joined.
    Start {
        /// Its name.
        worker: String,
    },
    /// A worker that the agent has started is to end, and is not started again; the answer comes when it has.
    Stop {
        /// Its name.
        worker: String,
    },
    /// The last decisions.
    Explain,
    /// The agent's metrics, as Prometheus reads them.
    Metrics,
}

/// One frame of the answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Answer {
    /// A worker.
    Row(WorkerRow),
    /// A decision.
    Decision(DecisionRow),
    /// A part of a text.
    Text {
        /// It.
        text: String,
    },
    /// That was all, and it is done.
    End,
    /// Whoever asks is not answered at all.
    Refused {
        /// Why.
        why: String,
    },
    /// It is not done.
    Error {
        /// What was asked, what was found, what to do.
        why: String,
    },
}

/// A worker, as `glake ps` shows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct WorkerRow {
    /// What it is called.
    pub worker: String,
    /// Its process.
    pub pid: u32,
    /// Whose it is.
    pub tenant: String,
    /// Which GPUs it uses.
    pub gpus: Vec<String>,
    /// What it does: idle, busy, or what is under way with it.
    pub state: String,
    /// What it may hold.
    pub leased: Bytes,
    /// What it holds.
    pub resident: Bytes,
    /// What is evicted.
    pub evicted: Bytes,
    /// How long no use has run; none: one runs.
    pub idle_s: Option<f64>,
    /// How long its memory would take to come back.
    pub predicted_wake_s: f64,
    /// Of one that the agent starts and that has not joined: how it ended, and what is waited for.
    pub note: Option<String>,
}

/// A decision, as `glake explain` shows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DecisionRow {
    /// How long ago.
    pub ago_s: f64,
    /// Who waited.
    pub worker: String,
    /// Of which class it was by then.
    pub class: i64,
    /// How long.
    pub waited_s: f64,
    /// For how much.
    pub needed: Bytes,
    /// Who was chosen.
    pub taken: Vec<TakenRow>,
    /// How long it was to take.
    pub predicted_s: f64,
    /// How long it took; none: it is not over, or was not granted.
    pub real_s: Option<f64>,
    /// What came of it.
    pub outcome: String,
}

/// What was taken of a worker.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TakenRow {
    /// Of whom.
    pub worker: String,
    /// Of which GPU.
    pub gpu: String,
    /// How much.
    pub bytes: Bytes,
    /// Why of them.
    pub why: String,
}
