//! The node agent's clients: `glake ps`, `shrink`, `refill`, `start`, `stop`, `explain`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use glake_agent::{ClientError, ask, stop_started};
use glake_runtime::config::{Config, Environment, Sources};
use glake_wire::{Answer, Ask, DecisionRow, Request, WorkerRow, find_socket};

use super::Failure;
use super::output::{Output, Waiting, table};

/// Address of the agent.
#[derive(Debug, Args)]
pub(super) struct Agent {
    /// The agent's socket [default: GLAKE_AGENT, else as for glake serve]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Seconds to wait for the agent, and for what it is told to do [default: 30; 600 if a worker is started]
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: Option<u64>,
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

/// Arguments of `glake stop`.
#[derive(Debug, Args)]
pub struct StopArguments {
    /// Name of the worker, as glake ps shows it
    #[arg(value_name = "W", required_unless_present = "all")]
    worker: Option<String>,
    /// End the agent and all workers that it has started
    #[arg(long, conflicts_with = "worker")]
    all: bool,
    #[command(flatten)]
    agent: Agent,
}

/// Arguments of `glake shrink`, `refill` and `start`.
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
  idle                how long no use has run; -: one runs, none has begun
                      yet, or nothing is known
  wake                how long its memory would take to come back, as predicted
  note                of a worker that has not joined: how it ended, and what is
                      waited for

State:
  idle, busy          its memory is there, and whether a use runs (or a capture)
  loaded              its memory is there and counts as in use, so that nothing
                      is taken of it: no use has begun yet, and its program has
                      not called glake.join() since it loaded
  joined              it has no memory yet
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
evicted (bytes), idle_s (null: a use runs, none has begun, or nothing is known),
predicted_wake_s, note (null: none)";

const EXPLAIN: &str = "\
Columns:
  worker     worker that waited for memory, or grew beyond its lease
  outcome    what came of it; requests to grow are here if they were denied
  taken      holders of the memory that it received, and why they gave it
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
    let request = Request::from(question);
    let request = agent.timeout.iter().fold(request, |of, seconds| of.within(Duration::from_secs(*seconds)));
    let mut waiting = Waiting::default();
    ask(&socket, request, |why| waiting.say(why)).map_err(Failure::failed)
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
        return output.exact(text.trim_end());
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
    done(&arguments.worker, "shrunk", output)
}

pub(super) fn refill(
    arguments: &WorkerArguments,
    sources: &Sources,
    config: &Config,
    output: &mut Output,
) -> Result<(), Failure> {
    let worker = arguments.worker.clone();
    answer(&arguments.agent, sources, config, Ask::Refill { worker })?;
    done(&arguments.worker, "refilled", output)
}

pub(super) fn start(
    arguments: &WorkerArguments,
    sources: &Sources,
    config: &Config,
    output: &mut Output,
) -> Result<(), Failure> {
    let worker = arguments.worker.clone();
    answer(&arguments.agent, sources, config, Ask::Start { worker })?;
    done(&arguments.worker, "started", output)
}

pub(super) fn stop(
    arguments: &StopArguments,
    sources: &Sources,
    config: &Config,
    output: &mut Output,
) -> Result<(), Failure> {
    let Some(worker) = arguments.worker.clone() else {
        return stop_all(arguments, sources, config, output);
    };
    answer(&arguments.agent, sources, config, Ask::Stop { worker: worker.clone() })?;
    done(&worker, "stopped", output)
}

/// Stops the agent and its workers; if the agent has ended, the workers that it left behind.
fn stop_all(
    arguments: &StopArguments,
    sources: &Sources,
    config: &Config,
    output: &mut Output,
) -> Result<(), Failure> {
    let socket = socket(arguments.agent.socket.as_deref(), config, &sources.environment)?;
    let (stopped, left) = match ask(&socket, Ask::StopAll, |_| ()) {
        Ok(rows) => {
            let left =
                rows.into_iter().filter_map(|row| if let Answer::Row(row) = row { Some(row) } else { None });
            ("the agent and its workers".to_owned(), left.collect::<Vec<_>>())
        }
        Err(ClientError::Nobody(_)) => match stop_started(&socket).map_err(Failure::failed)? {
            names if names.is_empty() => {
                return Err(Failure::failed(format_args!(
                    "no agent serves {}, and none has left workers behind there",
                    socket.display()
                )));
            }
            names => (names.join(", "), Vec::new()),
        },
        Err(error) => return Err(Failure::failed(error)),
    };
    if output.is_json() {
        let left: Vec<&str> = left.iter().map(|row| row.worker.as_str()).collect();
        return output.object(&serde_json::json!({ "worker": null, "done": "stopped", "left": left }));
    }
    output.text(&format!("{stopped}: stopped"))?;
    left.iter().try_for_each(|row| {
        output.text(&format!("{} goes on: the agent did not start process {}", row.worker, row.pid))
    })
}

fn done(worker: &str, what: &str, output: &mut Output) -> Result<(), Failure> {
    if output.is_json() {
        return output.object(&serde_json::json!({ "worker": worker, "done": what }));
    }
    output.text(&format!("{worker}: {what}"))
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
                true if row.needed.is_zero() || row.outcome.contains("denied") => "-".to_owned(),
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
