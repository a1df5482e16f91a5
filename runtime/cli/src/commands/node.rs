//! The node agent's clients: `glake ps`, `shrink`, `refill`, `start`, `stop`, `explain`.

use std::path::{Path, PathBuf};

use clap::Args;
use glake_agent::ask;
use glake_runtime::config::{Config, Environment, Sources};
use glake_wire::{Answer, Ask, DecisionRow, WorkerRow, find_socket};

use super::Failure;
use super::output::{Output, table};

/// Address of the agent.
#[derive(Debug, Args)]
pub(super) struct Agent {
    /// The agent's socket [default: GLAKE_AGENT, else as for glake serve]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

/// Arguments of `glake ps`.
#[derive(Debug, Args)]
#[command(after_help = PS)]
pub struct PsArguments {
    #[command(flatten)]
    agent: Agent,
    /// Print the agent's metrics, as Prometheus reads them
    #[arg(long, conflicts_with = "json")]
    metrics: bool,
}

/// Arguments of `glake shrink`, `refill`, `start` and `stop`.
#[derive(Debug, Args)]
pub struct WorkerArguments {
    /// Name of the worker, as glake ps shows it
    #[arg(value_name = "W")]
    worker: String,
    #[command(flatten)]
    agent: Agent,
}

/// Arguments of `glake explain`.
#[derive(Debug, Args)]
#[command(after_help = EXPLAIN)]
pub struct ExplainArguments {
    #[command(flatten)]
    agent: Agent,
    /// Number of recent decisions to print
    #[arg(long, value_name = "N", default_value_t = 20)]
    last: usize,
}

const PS: &str = "\
Columns:
  pid                 of its process; 0: none
  leased, resident    what it may hold on its GPUs, and what it holds
  evicted             what is not there: in the host's memory or in files
  idle                how long no use has run; -: one runs, or nothing is known
  wake                how long its memory would take to come back, as predicted
  note                of a worker that has not joined: how it ended, and what is
                      waited for

State:
  idle, busy          its memory is there, and whether a use runs, or it loads
  resident            its memory is there, and whether a use runs is not known
  waiting             its uses wait for memory
  asleep              some of its memory is evicted, and nobody wants it
  parking, shrinking, refilling, starting
  checkpointed        asleep, and its context is off its GPUs too (serve:
                      checkpoint_after_s)
  checkpointing, restoring
  failed              the driver does not restore it, which is lost: end it, and
                      start it again
  silent              it has not joined since the agent was started

Of workers that the agent starts, and that have not joined:
  queued              another worker of its GPUs starts
  starting            its process runs, and loads; its log: see glake serve
  ended               the note says how, and when it is started again
  running             its process runs, and has not joined for 10 minutes, or
                      has left
  stopping, stopped   by glake stop, or not asked for yet (start = \"request\")

JSON fields: worker, pid (0: none), tenant, gpus, state, leased, resident,
evicted (bytes), idle_s (null: a use runs, or nothing is known),
predicted_wake_s, note (null: none)";

const EXPLAIN: &str = "\
Columns:
  worker     who waited for memory
  outcome    what came of it
  taken      whose memory it was given, and why theirs; -: it needed none
  ago        when that was decided
  waited     how long it waited until then
  needed     how much memory it waited for
  predicted  how long it was to take
  real       how long it took; -: it is not over, or was not granted

JSON fields: ago_s, worker, class, waited_s, needed (bytes), taken (worker, gpu,
bytes, why), predicted_s, real_s (null: not over, or not granted), outcome";

/// The socket of the agent that is there.
pub(super) fn socket(
    named: Option<&Path>,
    config: &Config,
    environment: &Environment,
) -> Result<PathBuf, Failure> {
    named_socket(named, config)
        .map_or_else(|| find_socket(runtime_dir(environment)).map_err(Failure::usage), Ok)
}

/// The socket that an option or the configuration names, as it does for workers. An option is relative to the working directory; the
/// configuration, which processes with other working directories read too, has an absolute path.
pub(super) fn named_socket(named: Option<&Path>, config: &Config) -> Option<PathBuf> {
    let configured = config.agent.socket.as_deref().filter(|path| !path.as_os_str().is_empty());
    // An empty path is refused where it is used.
    named.or(configured).map(|path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned()))
}

pub(super) fn runtime_dir(environment: &Environment) -> Option<&Path> {
    environment.get("XDG_RUNTIME_DIR").map(Path::new)
}

fn answer(agent: &Agent, sources: &Sources, config: &Config, question: Ask) -> Result<Vec<Answer>, Failure> {
    let socket = socket(agent.socket.as_deref(), config, &sources.environment)?;
    ask(&socket, question).map_err(Failure::failed)
}

pub(super) fn ps(
    arguments: &PsArguments,
    sources: &Sources,
    config: &Config,
    output: &mut Output,
) -> Result<(), Failure> {
    if arguments.metrics {
        let parts = answer(&arguments.agent, sources, config, Ask::Metrics)?.into_iter();
        let text: String = parts
            .filter_map(|part| if let Answer::Text { text } = part { Some(text) } else { None })
            .collect();
        return output.text(text.trim_end());
    }
    let answers = answer(&arguments.agent, sources, config, Ask::Ps)?;
    let rows =
        answers.into_iter().filter_map(|row| if let Answer::Row(row) = row { Some(row) } else { None });
    let rows: Vec<WorkerRow> = rows.collect();
    if output.is_json() {
        return rows.iter().try_for_each(|row| output.object(row));
    }
    if rows.is_empty() {
        return output.text("no worker has joined");
    }
    let has_notes = rows.iter().any(|row| row.note.is_some());
    let headers =
        ["worker", "pid", "tenant", "gpus", "state", "leased", "resident", "evicted", "idle", "wake", "note"];
    let headers = if has_notes { &headers[..] } else { &headers[..headers.len() - 1] };
    let shown = |row: &WorkerRow| {
        let note = has_notes.then(|| row.note.clone().unwrap_or_default());
        let mut shown = vec![
            row.worker.clone(),
            row.pid.to_string(),
            row.tenant.clone(),
            row.gpus.join(" "),
            row.state.clone(),
            row.leased.to_string(),
            row.resident.to_string(),
            row.evicted.to_string(),
            row.idle_s.map_or("-".to_owned(), |idle| format!("{idle:.1} s")),
            format!("{:.2} s", row.predicted_wake_s),
        ];
        shown.extend(note);
        shown
    };
    output.text(&table(5, headers, &rows.iter().map(shown).collect::<Vec<_>>()))
}

pub(super) fn shrink(
    arguments: &WorkerArguments,
    sources: &Sources,
    config: &Config,
    output: &mut Output,
) -> Result<(), Failure> {
    let worker = arguments.worker.clone();
    answer(&arguments.agent, sources, config, Ask::Shrink { worker })?;
    done(arguments, "shrunk", output)
}

pub(super) fn refill(
    arguments: &WorkerArguments,
    sources: &Sources,
    config: &Config,
    output: &mut Output,
) -> Result<(), Failure> {
    let worker = arguments.worker.clone();
    answer(&arguments.agent, sources, config, Ask::Refill { worker })?;
    done(arguments, "refilled", output)
}

pub(super) fn start(
    arguments: &WorkerArguments,
    sources: &Sources,
    config: &Config,
    output: &mut Output,
) -> Result<(), Failure> {
    let worker = arguments.worker.clone();
    answer(&arguments.agent, sources, config, Ask::Start { worker })?;
    done(arguments, "started", output)
}

pub(super) fn stop(
    arguments: &WorkerArguments,
    sources: &Sources,
    config: &Config,
    output: &mut Output,
) -> Result<(), Failure> {
    let worker = arguments.worker.clone();
    answer(&arguments.agent, sources, config, Ask::Stop { worker })?;
    done(arguments, "stopped", output)
}

fn done(arguments: &WorkerArguments, what: &str, output: &mut Output) -> Result<(), Failure> {
    if output.is_json() {
        return output.object(&serde_json::json!({ "worker": arguments.worker, "done": what }));
    }
    output.text(&format!("{}: {what}", arguments.worker))
}

pub(super) fn explain(
    arguments: &ExplainArguments,
    sources: &Sources,
    config: &Config,
    output: &mut Output,
) -> Result<(), Failure> {
    let answers = answer(&arguments.agent, sources, config, Ask::Explain)?.into_iter();
    let rows = answers.filter_map(|row| if let Answer::Decision(row) = row { Some(row) } else { None });
    let rows: Vec<DecisionRow> = rows.collect();
    let rows = &rows[rows.len().saturating_sub(arguments.last)..];
    if output.is_json() {
        return rows.iter().try_for_each(|row| output.object(row));
    }
    if rows.is_empty() {
        return output.text("nothing was decided yet");
    }
    let headers = ["worker", "outcome", "taken", "ago", "waited", "needed", "predicted", "real"];
    let shown = |row: &DecisionRow| {
        let taken =
            row.taken.iter().map(|taken| format!("{} of {} ({})", taken.bytes, taken.worker, taken.why));
        let taken: Vec<String> = taken.collect();
        vec![
            row.worker.clone(),
            row.outcome.clone(),
            match taken.is_empty() {
                true if row.needed.is_zero() => "-".to_owned(),
                true => "free memory".to_owned(),
                false => taken.join(", "),
            },
            format!("{:.1} s", row.ago_s),
            format!("{:.3} s", row.waited_s),
            row.needed.to_string(),
            format!("{:.3} s", row.predicted_s),
            row.real_s.map_or("-".to_owned(), |real| format!("{real:.3} s")),
        ]
    };
    output.text(&table(3, &headers, &rows.iter().map(shown).collect::<Vec<_>>()))
}
