//! `glake serve`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, ValueEnum};
use glake_agent::{DriverCommand, Launcher, Options, ServeError, close_inherited, read_file};
use glake_arbiter::node::NodeFile;
use glake_meter::{Meter, Nvml};
use glake_runtime::config::{Config, DeviceChoice, Environment};
use glake_sim::{SimMeter, load};
use glake_wire::default_path;
use serde_json::json;

use super::Failure;
use super::checkpoint;
use super::node::{named_socket, runtime_dir};
use super::output::{Output, note, table};

/// Arguments of `glake serve`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct ServeArguments {
    /// The server and its workers, as glake plan reads it: examples/workers.toml is one [default: all memory of every
    /// GPU, and whoever joins]
    #[arg(value_name = "NODE.toml")]
    file: Option<PathBuf>,
    /// Socket for workers [default: GLAKE_AGENT, else $XDG_RUNTIME_DIR/glake/agent.sock; without that, /run/glake/agent.sock for root and
    /// /run/user/UID/glake/agent.sock for others]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Folder for the output of started workers, one NAME.log each [default: LOGS_DIRECTORY of systemd, else $XDG_STATE_HOME/glake; without
    /// that, /var/log/glake for root and ~/.local/state/glake for others. Below that, another socket than the default one has a folder of its
    /// own]
    #[arg(long, value_name = "DIR")]
    logs: Option<PathBuf>,
    /// Fate of the workers that the agent has started, once a signal ends the agent [default: keep; stop if the agent is process 1]
    #[arg(long, value_name = "WHAT", value_enum)]
    at_exit: Option<AtExit>,
    /// Say whether the file, its commands, the GPUs and the socket's folder are in order, and end
    #[arg(long)]
    check: bool,
}

/// Fate of started workers at the end of the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum AtExit {
    /// Workers go on, and join the next agent
    Keep,
    /// Workers get SIGTERM, and SIGKILL after 10 s
    Stop,
}

const EXAMPLES: &str = "\
Examples:
  glake serve
      all GPUs, all of their memory
  glake serve node.toml --check
      is the file in order?
  glake serve node.toml --socket /run/llm/a.sock
      a folder of mode 0700 that is this user's
  GLAKE_AGENT=/run/llm/a.sock python worker.py
      a worker that joins by itself

The file (sizes as 23GiB; a worker needs name and weights, all else is
optional):
  [node]      budget (what workers may use of a GPU together, contexts
              included); host_budget (host memory of all copies: from 90 % on
              they go to files, and what idle workers have above 80 % follows
              while nobody waits; workers need tiers.files) [default: no limit];
              reserve, link_gbps, floor; checkpoint_after_s (how long a worker
              that was shrunk to nothing is idle before the driver checkpoints
              it, and its context leaves too: see glake checkpoint) [default:
              never]
  [[worker]]  name, weights, kv, priority, tenant, deadline_s, preempt = never |
              idle | step, gpus, max_pause (seconds: it is not parked where that
              is predicted to take longer); command (a list, without a shell),
              env (a table), start = boot | request | never

Workers with a command are started by the agent, and run on without it:
  command = [\"python\", \"worker.py\"]
      its program calls glake.enable(), and stays in the foreground: what it
      leaves behind is ended
  env = { CUDA_VISIBLE_DEVICES = \"1\" }
      beside the agent's own environment; gpus does not set this. GLAKE_AGENT
      and GLAKE_WORKER, its name, by which it joins, are the agent's to set
  start = \"boot\" | \"request\" | \"never\"
      boot: with the agent [default]; request: at glake refill W or glake start
      W; never: by others
  One worker of a GPU starts at a time: the next one when it has joined and
  loaded, or has not within 10 minutes. If it has not joined within a minute,
  the next one starts where the free memory holds both (weights, kv). One that ends is started again after 1
  s, then after twice as long each time, 60 s at most. It has no input; its
  output is added to NAME.log, which may be cut while it runs (truncate -s 0).
  From 16 MiB on, the agent moves the text to NAME.log.1, of which 16 MiB stay.
  glake stop W ends one: SIGTERM, after 10 s SIGKILL; it stays so until
  glake start W.

Signals:      SIGHUP, also that of a closed terminal, reads NODE.toml again:
              [node], priorities and the like apply at once, new workers start,
              a changed command at its next start; missing workers run on. A
              file with a mistake changes nothing, and the log says why.
              SIGTERM and SIGINT end it; workers keep what they have, and join
              the next one, which starts none of them again; those that are
              checkpointed are restored before, as far as there is room, for 20
              s at most. To end the workers too: --at-exit stop, or glake stop
              --all, before or after
systemd:      Type=notify; with a .socket unit, connections wait while it
              restarts; KillMode=process, or the workers end with it";

/// Error text for simulated GPUs that belong to one process.
pub(super) const NOT_SHARED: &str = "--device sim: each process would simulate GPUs of its own; name the folder they \
    are shared through (--device sim:h200x4@/tmp/gpus)";

pub(super) fn run(
    arguments: &ServeArguments,
    config: &Config,
    environment: &Environment,
    output: &mut Output,
) -> Result<(), Failure> {
    let path = arguments.file.as_ref().map(std::path::absolute).transpose().map_err(Failure::usage)?;
    let file = match &path {
        Some(path) => read_file(path).map_err(Failure::usage)?,
        None => NodeFile::parse("").map_err(Failure::usage)?,
    };
    // The file may have been one of these; what asks for the GPUs' memory opens more.
    close_inherited();
    let default = || default_path(runtime_dir(environment)).map_err(Failure::usage);
    let socket = named_socket(arguments.socket.as_deref(), config).map_or_else(default, Ok)?;
    let logs = match arguments.logs.clone().or_else(|| log_folder(&socket, environment)) {
        Some(folder) => folder,
        None if file.workers.iter().all(|worker| worker.command.is_empty()) => PathBuf::new(),
        None => {
            let why = "there is no folder for logs of workers: HOME is not set; name one (--logs DIR)";
            return Err(Failure::usage(why));
        }
    };
    let launcher = Launcher { logs, environment: device(config) };
    let keeps = if std::process::id() == 1 { AtExit::Stop } else { AtExit::Keep };
    let stops_workers = arguments.at_exit.unwrap_or(keeps) == AtExit::Stop;
    let (meter, driver) = (meter(config)?, driver(config));
    let options = Options { file, path, socket, meter, driver, launcher, stops_workers };
    if arguments.check {
        if options.file.node.checkpoint_after().is_some() {
            checkpoint::driver(config).map_err(|failure| failure.about("[node] checkpoint_after_s"))?;
        }
        options.check_commands().map_err(Failure::usage)?;
        return check(&options, config, output);
    }
    let logs = match options.started() {
        (0, _) => String::new(),
        (_, folder) => format!("; logs of workers in {}", folder.display()),
    };
    let told = |path: &Path| {
        let (socket, exports) = (path.display(), exports(path, config));
        note(format_args!("serving {socket}{logs}; for its workers:\n{exports}"));
    };
    glake_agent::serve(&options, told).map_err(failure)
}

/// Returns the default folder of the logs of an agent's workers, outside the socket's folder, which is in memory. `None` if the environment
/// names no folder of this user.
fn log_folder(socket: &Path, environment: &Environment) -> Option<PathBuf> {
    let folder = |name| environment.get(name).map(PathBuf::from).filter(|folder| folder.is_absolute());
    // systemd creates this folder for the unit alone (LogsDirectory=). It may name several.
    let of_unit = environment.get("LOGS_DIRECTORY").and_then(|folders| std::env::split_paths(folders).next());
    if let Some(of_unit) = of_unit.filter(|folder| folder.is_absolute()) {
        return Some(of_unit);
    }
    let base = match folder("XDG_STATE_HOME") {
        Some(state) => state.join("glake"),
        None if rustix::process::geteuid().is_root() => PathBuf::from("/var/log/glake"),
        None => folder("HOME")?.join(".local/state/glake"),
    };
    let is_default = default_path(runtime_dir(environment)).is_ok_and(|default| default == socket);
    // The names of workers are unique only within an agent.
    Some(if is_default { base } else { base.join(socket.strip_prefix("/").unwrap_or(socket)) })
}

/// Returns shell exports for starting workers: the agent's socket, and the simulated GPUs or the worker's name.
fn exports(socket: &Path, config: &Config) -> String {
    let socket = quoted(&socket.to_string_lossy());
    let other = match device(config).get("GLAKE_DEVICE") {
        Some(simulated) => format!("GLAKE_DEVICE={}", quoted(simulated)),
        None => "GLAKE_WORKER=chat      # its name, another one for each".to_owned(),
    };
    format!("export GLAKE_AGENT={socket}\nexport {other}")
}

/// A word as a POSIX shell reads it.
fn quoted(word: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-+:@%,=".contains(&byte);
    match word.bytes().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

fn check(options: &Options, config: &Config, output: &mut Output) -> Result<(), Failure> {
    let gpus = options.check().map_err(failure)?;
    let notes = options.file.check_server(&gpus, config.lease.growth).map_err(Failure::usage)?;
    let node = &options.file.node;
    let mut rows = Vec::new();
    for (gpu, total) in gpus {
        let budget = node.budget.unwrap_or(total).min(total);
        let reserve = node.reserve_of(budget);
        if output.is_json() {
            output.object(&json!({
                "gpu": gpu, "total": total, "budget": budget, "reserve": reserve,
                "socket": options.socket, "workers": options.file.workers.len(),
                "started": options.started().0, "notes": notes, "ok": true,
            }))?;
        }
        rows.push([gpu, total.to_string(), budget.to_string(), reserve.to_string()].to_vec());
    }
    output.text(&table(1, &["gpu", "memory", "budget", "reserve"], &rows))?;
    let workers = options.file.workers.len();
    let (started, logs) = options.started();
    if started > 0 {
        output.text(&format!(
            "\n{started} of the workers are started by the agent, logs in {}",
            logs.display()
        ))?;
    }
    notes.iter().try_for_each(|note| output.text(&format!("\nnote: {note}")))?;
    output.text(&format!("\nin order: {workers} workers in the file, socket {}", options.socket.display()))
}

fn failure(error: ServeError) -> Failure {
    match error {
        ServeError::Budget { .. } | ServeError::Launch(_) => Failure::usage(error),
        _ => Failure::failed(error),
    }
}

/// Returns the device variables of workers if the device is simulated: they use the same one.
fn device(config: &Config) -> BTreeMap<String, String> {
    let is_simulated = matches!(config.device.choice, DeviceChoice::Sim { .. });
    let choice = is_simulated.then(|| ("GLAKE_DEVICE".to_owned(), config.device.choice.to_string()));
    choice.into_iter().collect()
}

/// Returns the command that checkpoints a process: this program, on the same device. The path stays valid if an upgrade removes the file.
fn driver(config: &Config) -> DriverCommand {
    let arguments = ["--device".into(), config.device.choice.to_string().into(), "checkpoint".into()].into();
    DriverCommand { program: "/proc/self/exe".into(), arguments, limit: DriverCommand::LIMIT }
}

/// Creates the meter of memory use: NVML, or the shared folder of simulated GPUs.
pub(super) fn meter(config: &Config) -> Result<Arc<dyn Meter>, Failure> {
    match &config.device.choice {
        DeviceChoice::Sim { topology, shared: Some(folder) } => {
            let model = load(topology.as_deref().unwrap_or("h200x4")).map_err(Failure::usage)?;
            let meter = SimMeter::open(folder, &model).map_err(Failure::failed)?;
            Ok(Arc::new(meter))
        }
        DeviceChoice::Sim { .. } => Err(Failure::usage(NOT_SHARED)),
        DeviceChoice::Auto | DeviceChoice::Cuda => match Nvml::open() {
            Some(nvml) => Ok(Arc::new(nvml)),
            None => Err(Failure::failed(
                "there is no NVIDIA driver whose GPUs could be served (libnvidia-ml.so.1); to try it without a GPU: \
                 --device sim:h200x4@/tmp/gpus",
            )),
        },
    }
}
