//! `glake checkpoint`.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use glake_device::CudaCheckpoint;
use glake_meter::Meter;
use glake_meter::checkpoint::{CheckpointError, ProcessCheckpoint, ProcessState, bring_back, put_away_if};
use glake_runtime::config::{Config, DeviceChoice, Environment};
use glake_sim::{SimCheckpoint, load};
use glake_units::Bytes;
use nix::sys::signal::{SigSet, Signal};
use serde_json::json;

use super::node::socket;
use super::output::Output;
use super::{Failure, serve};
use crate::records::{self, NoRoom, Record, Records};
use crate::target::Target;

/// Free memory required on every GPU if the process's own use is unknown.
const ROOM: Bytes = Bytes::gib(1);
/// Timeout for the turn of a concurrent restore.
const TURN: Duration = Duration::from_secs(10);

/// Arguments of `glake checkpoint`.
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct CheckpointArguments {
    /// Process id, as glake ps shows it
    #[arg(value_name = "PID", allow_negative_numbers = true)]
    pid: u32,
    /// Restore and unlock the process, from any state
    #[arg(long)]
    restore: bool,
    /// Time limit of the driver's calls, after which the process is left alone: 2s, 500ms
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "2s")]
    timeout: Duration,
    /// The most that it may have on a GPU: with more it has not been shrunk
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    most: Bytes,
    /// Only if it started then, in the kernel's ticks since boot (field 22 of /proc/PID/stat)
    #[arg(long, value_name = "TICKS")]
    start: Option<u64>,
    /// With --restore, where what it had is not written down: how much has to be free of every GPU that the meter knows
    /// [default: 1GiB]; 0: ask the driver whatever is free
    #[arg(long, value_name = "SIZE", requires = "restore")]
    room: Option<Bytes>,
    /// Agent's socket; the process's memory use is recorded beside it [default: GLAKE_AGENT, else as for glake serve]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

const HELP: &str = "\
Examples:
  glake shrink chat && glake checkpoint 4711
      all of it leaves: the last 640 MiB are its context
  glake checkpoint 4711 --restore
      and comes back; then glake refill chat

A process that is checkpointed has nothing on its GPUs. Its calls of the driver
wait until it is restored, its other threads go on. The driver copies what it
has to host memory, and needs room for it on the same GPUs to restore it. It
needs CUDA 12.8's driver, 570 or later, and the same user.

Driver 580 does not restore a process whose restore found no room once: it is
lost. So what it had is written down before (beside the agent's socket, mode
0600), and the driver is asked only where the meter shows so much free of each
of its GPUs, and 5 % or 64 MiB more. Restores take turns. Nobody else must take
that room meanwhile.

A worker that is left to glake serve is shrunk and checkpointed by that
(checkpoint_after_s of its file), and not by hand beside it: the agent counts
what it takes to be there, and restores it.

Refused, and what it is found by:
  more than --most on a GPU    the meter (NVML): shrink it first; also where the
                               meter does not list the process (the driver says
                               of one without a context that it runs), or does
                               not answer
  children that use a GPU      /proc and the meter
  NCCL                         a segment /dev/shm/nccl-*, or a thread of torch's
                               process group
  MPS                          a living daemon in CUDA_MPS_PIPE_DIRECTORY, or in
                               /tmp/nvidia-mps
  memory shared by CUDA IPC    the driver itself; glake serve leaves a worker
                               alone that has exported or fixed memory

Where it cannot be checkpointed it is unlocked again. Exit codes:
  3  it stays checkpointed, for want of room: the driver was asked for nothing,
     restore it again
  4  it stays as it is: the driver was asked for nothing that changes it
  5  the driver did not restore it, and will not: end it, and start it again

JSON fields: pid, state (checkpointed or running), seconds, bytes (given back,
or taken again)";

/// A number of seconds, or of milliseconds where it says so.
fn time(text: &str) -> Result<Duration, String> {
    let (number, unit) = match text.strip_suffix("ms") {
        Some(number) => (number, 1e-3),
        None => (text.strip_suffix('s').unwrap_or(text), 1.0),
    };
    let seconds = number.parse::<f64>().ok().map(|number| number * unit);
    let time = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    time.filter(|time| *time >= Duration::from_millis(1))
        .ok_or_else(|| "it is a time of 1ms or more, as 2s or 500ms".to_owned())
}

pub(super) fn run(
    arguments: &CheckpointArguments,
    config: &Config,
    environment: &Environment,
    output: &mut Output,
) -> Result<(), Failure> {
    let socket = socket(arguments.socket.as_deref(), config, environment);
    let done = match arguments.restore {
        true => restore(arguments, config, socket),
        false => checkpoint(arguments, config, socket),
    };
    done?.tell(output)
}

fn checkpoint(
    arguments: &CheckpointArguments,
    config: &Config,
    socket: Result<PathBuf, Failure>,
) -> Result<Done, Failure> {
    let records = socket.and_then(|socket| Records::open(&socket).map_err(Failure::failed));
    let records =
        records.map_err(|failure| untouched(failure.about("what it has cannot be written down")))?;
    records.sweep();
    let target = target(arguments).map_err(untouched)?;
    let driver = driver(config).map_err(untouched)?;
    let meter = serve::meter(config).map_err(untouched)?;
    let before = Seen::of(meter.as_ref(), target.pid);
    let state = driver.state(target.pid).map_err(Failure::untouched)?;
    check(arguments, &target, &before, state)?;
    let is_on_gpus = matches!(state, ProcessState::Running | ProcessState::Locked);
    if is_on_gpus && !before.own.is_empty() {
        let record = Record { gpus: before.own.iter().cloned().collect() };
        let why = |error| format!("what process {} has cannot be written down: {error}", target.pid);
        records.write(&target, &record).map_err(|error| Failure::untouched(why(error)))?;
    }
    let begun = Instant::now();
    let is_meant = || Target::of(Path::new("/proc"), target.pid).is_some_and(|now| now == target);
    let blocked = Blocked::now();
    let put_away = put_away_if(driver.as_ref(), target.pid, arguments.timeout, &is_meant);
    drop(blocked);
    put_away.map_err(|error| {
        // One that is not known to run may be what it says.
        if !matches!(error, CheckpointError::Stays { .. }) {
            records.remove(&target);
        }
        Failure::failed(error)
    })?;
    let took = begun.elapsed();
    let given = before.less(&Seen::of(meter.as_ref(), target.pid));
    Ok(Done { pid: target.pid, state: ProcessState::Checkpointed, took, bytes: Some(given) })
}

fn restore(
    arguments: &CheckpointArguments,
    config: &Config,
    socket: Result<PathBuf, Failure>,
) -> Result<Done, Failure> {
    let records = socket.ok().and_then(|socket| Records::find(&socket).ok());
    records.iter().for_each(Records::sweep);
    let target = target(arguments).map_err(untouched)?;
    let pid = target.pid;
    let driver = driver(config).map_err(untouched)?;
    let meter = serve::meter(config);
    let is_checkpointed = matches!(driver.state(pid), Ok(ProcessState::Checkpointed));
    let asks_blindly = arguments.room.is_some_and(Bytes::is_zero);
    // Held until the driver has answered.
    let mut turn = None;
    if is_checkpointed && !asks_blindly {
        turn = records.as_ref().map(|records| my_turn(pid, records)).transpose()?;
        has_room(arguments, &target, records.as_ref(), meter.as_deref())?;
    }
    let begun = Instant::now();
    let before = meter.as_ref().ok().map(|meter| Seen::of(meter.as_ref(), pid));
    bring_back(driver.as_ref(), pid).map_err(|error| match error {
        CheckpointError::Lost { .. } => Failure::Lost(error.to_string()),
        _ => Failure::failed(error),
    })?;
    drop(turn);
    let took = begun.elapsed();
    let after = meter.as_ref().ok().map(|meter| Seen::of(meter.as_ref(), pid));
    let taken = after.zip(before).map(|(after, before)| after.less(&before));
    if let (Some(records), Ok(ProcessState::Running)) = (records, driver.state(pid)) {
        records.remove(&target);
    }
    Ok(Done { pid, state: ProcessState::Running, took, bytes: taken })
}

/// No other restore looks for room until what this answers is closed.
fn my_turn(pid: u32, records: &Records) -> Result<File, Failure> {
    match records.turn(TURN) {
        Ok(Some(turn)) => Ok(turn),
        Ok(None) => Err(Failure::NoRoom(format!(
            "process {pid} stays checkpointed: another restore was not over within {TURN:?}, and both could take the \
             same room; restore it again"
        ))),
        Err(error) => Err(Failure::untouched(format_args!(
            "process {pid} stays checkpointed, for other restores cannot be waited for: {error}"
        ))),
    }
}

/// Whether the driver may be asked to restore it: where it finds no room the process is lost.
fn has_room(
    arguments: &CheckpointArguments,
    target: &Target,
    records: Option<&Records>,
    meter: Result<&(dyn Meter + 'static), &Failure>,
) -> Result<(), Failure> {
    let pid = target.pid;
    let blindly = "--room 0 asks the driver all the same: if there is no room the process is lost";
    let unknown = |why: &str| {
        Failure::untouched(format_args!(
            "process {pid} stays checkpointed, for whether its GPUs have room is not known: {why}; {blindly}"
        ))
    };
    let meter = meter.map_err(|failure| unknown(failure.message()))?;
    let record = records.and_then(|records| records.read(target).ok().flatten());
    let no_room = records::look(meter, record.as_ref(), arguments.room.unwrap_or(ROOM));
    no_room.map_err(|why| match (&why, record) {
        (NoRoom::Unread { .. }, _) => unknown(&why.to_string()),
        (NoRoom::Short { .. }, Some(_)) => Failure::NoRoom(format!(
            "process {pid} stays checkpointed: its GPUs have no room for what it had ({why}); give memory back there, \
             and restore it again"
        )),
        (NoRoom::Short { .. }, None) => Failure::NoRoom(format!(
            "process {pid} stays checkpointed: what it had is not written down, and its GPUs may have no room for it \
             ({why}); give memory back there, or say how much it is (--room SIZE), and restore it again"
        )),
    })
}

/// Marks a failure that happened before the driver changed the process.
fn untouched(failure: Failure) -> Failure {
    match failure {
        Failure::Failed(message) => Failure::Untouched(message),
        failure => failure,
    }
}

/// No signal that asks to end is heard meanwhile, for a process would stay locked; it is heard then.
struct Blocked;

impl Blocked {
    fn signals() -> SigSet {
        [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP].into_iter().collect()
    }

    fn now() -> Blocked {
        // It fails of signals only that there are not.
        let _ = Blocked::signals().thread_block();
        Blocked
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        let _ = Blocked::signals().thread_unblock();
    }
}

/// Result of a completed change.
struct Done {
    pid: u32,
    state: ProcessState,
    took: Duration,
    bytes: Option<Bytes>,
}

impl Done {
    fn tell(&self, output: &mut Output) -> Result<(), Failure> {
        let Done { pid, state, took, bytes } = self;
        let seconds = took.as_secs_f64();
        if output.is_json() {
            return output.object(&json!({
                "pid": pid, "state": state.name(), "seconds": seconds, "bytes": bytes,
            }));
        }
        let moved = match (state, bytes) {
            (_, None) => String::new(),
            (ProcessState::Running, Some(bytes)) => format!(", {bytes} taken again"),
            (_, Some(bytes)) => format!(", {bytes} given back"),
        };
        output.text(&format!("process {pid}: {state} after {seconds:.3} s{moved}"))
    }
}

/// The process, if it is this user's and the one that is meant.
fn target(arguments: &CheckpointArguments) -> Result<Target, Failure> {
    let pid = arguments.pid;
    let gone =
        || Failure::failed(format_args!("there is no process {pid} here: glake ps shows those of workers"));
    let target = Target::of(Path::new("/proc"), pid).ok_or_else(gone)?;
    let own = rustix::process::geteuid().as_raw();
    if own != 0 && target.uid != own {
        return Err(Failure::failed(format_args!(
            "process {pid} is user {}'s, and this is user {own}: ask as that user, or as root",
            target.uid
        )));
    }
    if pid == std::process::id() {
        return Err(Failure::usage(format_args!("process {pid} is this command itself")));
    }
    match arguments.start.filter(|start| *start != target.start) {
        Some(start) => Err(Failure::failed(format_args!(
            "process {pid} started at tick {}, and not at {start}: the one that was meant has ended",
            target.start
        ))),
        None => Ok(target),
    }
}

/// Whether it can be checkpointed, as far as that is seen from outside; what is not seen is refused. One that the agent
/// has found locked is on its way, for the agent has had it looked at before.
fn check(
    arguments: &CheckpointArguments,
    target: &Target,
    seen: &Seen,
    state: ProcessState,
) -> Result<(), Failure> {
    let pid = target.pid;
    match state {
        ProcessState::Running => {}
        ProcessState::Locked if arguments.start.is_none() => {}
        _ => return Ok(()),
    }
    if let Some((gpu, error)) = seen.unread.first() {
        return Err(Failure::untouched(format_args!(
            "process {pid} is not checkpointed, for what it has on GPU {gpu} cannot be read: {error}"
        )));
    }
    if seen.own.is_empty() {
        return Err(Failure::untouched(format_args!(
            "process {pid} is not checkpointed, for the meter lists it on no GPU: it has no context there; or it is in \
             a container: then ask from the host (or with the host's process numbers: --pid=host)"
        )));
    }
    if let Some((gpu, used)) = seen.own.iter().find(|(_, used)| *used > arguments.most) {
        return Err(Failure::untouched(format_args!(
            "process {pid} has {used} on GPU {gpu}, and {} is allowed: shrink it first (glake shrink W), or raise --most",
            arguments.most
        )));
    }
    match target.obstacle(&seen.users) {
        Some(obstacle) => {
            Err(Failure::untouched(format_args!("process {pid} is not checkpointed: {obstacle}")))
        }
        None => Ok(()),
    }
}

/// Memory use of all GPUs, as read by the meter.
struct Seen {
    users: BTreeSet<u32>,
    used: Bytes,
    /// Memory use of the process by GPU, if the meter lists it.
    own: Vec<(String, Bytes)>,
    /// GPUs that do not answer, and why.
    unread: Vec<(String, String)>,
}

impl Seen {
    fn of(meter: &dyn Meter, pid: u32) -> Seen {
        let mut seen =
            Seen { users: BTreeSet::new(), used: Bytes::ZERO, own: Vec::new(), unread: Vec::new() };
        for gpu in meter.gpus() {
            let memory = match meter.read(&gpu) {
                Ok(memory) => memory,
                Err(error) => {
                    seen.unread.push((gpu, error.to_string()));
                    continue;
                }
            };
            let using = memory.processes.iter().filter(|process| !process.used.is_zero());
            seen.users.extend(using.map(|process| process.pid));
            seen.used = seen.used.saturating_add(memory.used);
            let own = memory.of_process(pid);
            if !own.is_zero() {
                seen.own.push((gpu, own));
            }
        }
        seen
    }

    fn sum(&self) -> Bytes {
        self.own.iter().map(|(_, used)| *used).sum()
    }

    /// Returns how much memory the process has released since `other`; that of all processes, if the meter lists it in neither reading.
    fn less(&self, other: &Seen) -> Bytes {
        match self.own.is_empty() && other.own.is_empty() {
            true => self.used.saturating_sub(other.used),
            false => self.sum().saturating_sub(other.sum()),
        }
    }
}

/// Creates the checkpoint backend: the driver, or the shared folder of simulated GPUs.
pub(super) fn driver(config: &Config) -> Result<Box<dyn ProcessCheckpoint>, Failure> {
    match &config.device.choice {
        DeviceChoice::Sim { topology, shared: Some(folder) } => {
            let model = load(topology.as_deref().unwrap_or("h200x4")).map_err(Failure::usage)?;
            Ok(Box::new(SimCheckpoint::open(folder, &model).map_err(Failure::failed)?))
        }
        DeviceChoice::Sim { .. } => Err(Failure::usage(serve::NOT_SHARED)),
        DeviceChoice::Auto | DeviceChoice::Cuda => {
            Ok(Box::new(CudaCheckpoint::open().map_err(Failure::failed)?))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_seconds_or_milliseconds() {
        assert_eq!(time("2s"), Ok(Duration::from_secs(2)));
        assert_eq!(time("2"), Ok(Duration::from_secs(2)));
        assert_eq!(time("500ms"), Ok(Duration::from_millis(500)));
        for wrong in ["", "s", "0", "-1s", "2m", "nan", "inf"] {
            assert!(time(wrong).is_err(), "{wrong}");
        }
    }
}
