//! Requests of clients (`glake ps`, `shrink`, ...) over the same socket, and the agent's answers: one `ask`, then `row` and
//! `decision` frames, then `end` or `error`. These frames are not numbered.
//!
//! Invariant: no answer is too long for its frames, whatever the number of workers and the length of their texts: [`Answer::parts`].

use std::time::Duration;

use glake_units::Bytes;
use serde::{Deserialize, Serialize};

use crate::frame::MOST_BYTES;
use crate::snapshot::Snapshot;

/// First and only frame of a client's connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Question or command.
    #[serde(flatten)]
    pub ask: Ask,
    /// Milliseconds that a command may take. None: the agent's default, [`Ask::TIMEOUT`], or [`Ask::START_TIMEOUT`] if it starts a worker.
    #[serde(default)]
    pub timeout_ms: Option<u64>,
    /// Whether the client knows [`Answer::Waits`]; a client of an earlier release does not.
    #[serde(default)]
    pub waits: bool,
}

impl From<Ask> for Request {
    fn from(ask: Ask) -> Self {
        Request { ask, timeout_ms: None, waits: true }
    }
}

impl Request {
    /// Sets the time that a command may take.
    #[must_use]
    pub fn within(self, timeout: Duration) -> Self {
        Request { timeout_ms: u64::try_from(timeout.as_millis()).ok(), ..self }
    }

    /// Returns the longest time until the agent's last frame.
    pub fn longest(&self) -> Duration {
        let default = match self.ask {
            Ask::Start { .. } | Ask::Refill { .. } => Ask::START_TIMEOUT,
            _ => Ask::TIMEOUT,
        };
        self.timeout_ms.map_or(default, Duration::from_millis)
    }
}

impl Ask {
    /// Default time of a command.
    pub const TIMEOUT: Duration = Duration::from_secs(30);
    /// Default time of a command that starts a worker.
    pub const START_TIMEOUT: Duration = Duration::from_secs(600);
}

/// Question or command of a client.
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
    /// Sends snapshots of the agent's state until the client closes the connection. A client that reads slowly gets the newest one, and the
    /// number of those that it missed.
    Watch {
        /// Interval of snapshots in milliseconds, at least [`LEAST_INTERVAL_MS`](crate::LEAST_INTERVAL_MS).
        every_ms: u64,
    },
}

/// One frame of the answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Answer {
    /// State of one worker.
    Row(WorkerRow),
    /// Record of one decision.
    Decision(DecisionRow),
    /// Part of a snapshot.
    Snapshot(Snapshot),
    /// Part of a text.
    Text {
        /// Content of the part.
        text: String,
    },
    /// The command is under way; sent twice a second to clients that know it.
    Waits {
        /// Reason why the command is not done yet.
        why: String,
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
    /// Whether `taken` continues that of the row before, which is the same decision. Rows that a client prints have all of it.
    #[serde(skip_serializing_if = "is_false")]
    pub continues: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde calls")]
pub(crate) fn is_false(value: &bool) -> bool {
    !value
}

/// Size of the JSON of the lists and texts of one frame, at most; the rest is small.
pub(crate) const PART: usize = MOST_BYTES / 2;
/// Longest text of an error or a row, in characters, each of which takes up to six bytes of JSON.
const LONGEST: usize = 4000;

impl Answer {
    /// Splits the answer so that each part fits into a frame: lists are continued, and texts for people are cut.
    pub fn parts(self) -> Vec<Answer> {
        match self {
            Answer::Text { text } => {
                split(text.chars(), |letter| if letter.is_ascii_graphic() { 2 } else { 6 })
                    .map(|part: String| Answer::Text { text: part })
                    .collect()
            }
            Answer::Decision(row) => row.parts().into_iter().map(Answer::Decision).collect(),
            Answer::Snapshot(snapshot) => snapshot.parts().into_iter().map(Answer::Snapshot).collect(),
            mut answer => {
                match &mut answer {
                    Answer::Row(row) => row.cut(),
                    Answer::Waits { why } | Answer::Refused { why } | Answer::Error { why } => cut(why),
                    _ => {}
                }
                vec![answer]
            }
        }
    }
}

impl WorkerRow {
    /// Cuts the texts for people.
    pub(crate) fn cut(&mut self) {
        cut(&mut self.tenant);
        self.note.iter_mut().for_each(cut);
    }
}

impl DecisionRow {
    /// Splits the victims so that each part fits into a frame.
    pub(crate) fn parts(self) -> Vec<DecisionRow> {
        let size = |of: &VictimRow| serde_json::to_string(of).map_or(PART, |json| json.len() + 1);
        let parts = split(self.taken.iter().cloned(), size);
        let part = |(at, taken)| DecisionRow { taken, continues: at > 0, ..self.clone() };
        parts.enumerate().map(part).collect()
    }
}

/// Splits items into parts of at most [`PART`] bytes of JSON, of which there is at least one.
pub(crate) fn split<T, C: FromIterator<T>>(
    items: impl Iterator<Item = T>,
    size: impl Fn(&T) -> usize,
) -> impl Iterator<Item = C> {
    let mut items = items.peekable();
    let mut is_first = true;
    std::iter::from_fn(move || {
        if !std::mem::take(&mut is_first) {
            items.peek()?;
        }
        let mut left = PART;
        let mut fits = |item: &T| {
            let size = size(item).min(PART);
            let fits = size <= left;
            left = left.saturating_sub(size);
            fits
        };
        Some(std::iter::from_fn(|| items.next_if(&mut fits)).collect())
    })
}

/// Cuts a text for people.
pub(crate) fn cut(text: &mut String) {
    // No character is shorter than a byte.
    let end = if text.len() <= LONGEST { None } else { text.char_indices().nth(LONGEST) };
    if let Some((at, _)) = end {
        text.truncate(at);
        text.push('…');
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{Envelope, FrameError, frame};

    #[test]
    fn no_answer_is_too_long_for_its_frames() {
        let victim = |number| VictimRow {
            worker: format!("{:0>64}/{number}", "w"),
            gpu: "0000:3b:00.0".to_owned(),
            bytes: Bytes::gib(40),
            why: "busy for its quantum, and parked".to_owned(),
        };
        let decision = DecisionRow { taken: (0..3000).map(victim).collect(), ..DecisionRow::default() };
        let whole = frame(&Envelope::unnumbered(Answer::Decision(decision.clone())));
        assert!(matches!(whole, Err(FrameError::TooLong { .. })));
        let long = || "\u{1}".repeat(200_000);
        let row = WorkerRow { tenant: long(), note: Some(long()), ..WorkerRow::default() };
        let answers = [
            Answer::Decision(decision.clone()),
            Answer::Decision(DecisionRow::default()),
            Answer::Row(row),
            Answer::Text { text: long() },
            Answer::Text { text: "\u{10ffff}\"\\".repeat(50_000) },
            Answer::Waits { why: long() },
            Answer::Refused { why: long() },
            Answer::Error { why: long() },
            Answer::End,
        ];
        for answer in &answers {
            let parts = answer.clone().parts();
            assert!(!parts.is_empty());
            for part in parts {
                frame(&Envelope::unnumbered(part)).unwrap();
            }
        }
        let parts = answers[0].clone().parts().into_iter();
        let rows: Vec<DecisionRow> = parts
            .filter_map(|part| if let Answer::Decision(row) = part { Some(row) } else { None })
            .collect();
        assert!(rows.iter().enumerate().all(|(at, row)| row.continues == (at > 0)));
        assert_eq!(rows.into_iter().flat_map(|row| row.taken).collect::<Vec<_>>(), decision.taken);
        let texts = answers[4].clone().parts().into_iter();
        let text: String = texts
            .filter_map(|part| if let Answer::Text { text } = part { Some(text) } else { None })
            .collect();
        assert_eq!(Answer::Text { text }, answers[4]);
        assert_eq!(answers[1].clone().parts(), [answers[1].clone()]);
    }
}
