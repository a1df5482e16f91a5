//! `glake checkpoint`.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use clap::Args;
use glake_device::CudaCheckpoint;
use glake_meter::Meter;
use glake_meter::checkpoint::{CheckpointError, ProcessCheckpoint, ProcessState, bring_back, put_away_if};
use glake_runtime::config::{Config, DeviceChoice};
use glake_sim::{SimCheckpoint, load};
use glake_units::Bytes;
use nix::sys::signal::{SigSet, Signal};
use serde_json::json;

use super::output::Output;
use super::{Failure, serve};
use crate::target::Target;

/// What `glake checkpoint` can be asked.
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct CheckpointArguments {
    /// Which process: its id, as glake ps shows it
    #[arg(value_name = "PID")]
    pid: u32,
    /// Bring it back: restore and unlock it, from whatever state it is in
    #[arg(long)]
    restore: bool,
    /// How long its calls of the driver may take to end before it is left alone: 2s, 500ms
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "2s")]
    timeout: Duration,
    /// The most that it may have on a GPU: with more it has not been shrunk
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    most: Bytes,
    /// Only if it started then, in the kernel's ticks since boot (field 22 of /proc/PID/stat)
    #[arg(long, value_name = "TICKS")]
    start: Option<u64>,
}

const HELP: &str = "\
Examples:
  glake shrink chat && glake checkpoint 4711       all of it leaves: the last 640 MiB are its context
  glake checkpoint 4711 --restore                  and comes back; then glake refill chat

A process that is checkpointed has nothing on its GPUs. Its calls of the driver wait until it is
restored, its other threads go on. The driver copies what it has to host memory, and needs room for
it on the same GPUs to restore it. It needs CUDA 12.8's driver, 570 or later, and the same user.

A worker that is left to glake serve is shrunk and checkpointed by that (checkpoint_after_s of its
file), and not by hand beside it: the agent counts what it takes to be there, and restores it.

Refused, and what it is found by:
  more than --most on a GPU    the meter (NVML): shrink it first; also where the meter does not list
                               the process, or does not answer
  children that use a GPU      /proc and the meter
  NCCL                         a segment /dev/shm/nccl-*, or a thread of torch's process group
  MPS                          a living daemon in CUDA_MPS_PIPE_DIRECTORY, or in /tmp/nvidia-mps
  memory shared by CUDA IPC    the driver itself; glake serve leaves a worker alone that has exported
                               or fixed memory

Where it cannot be checkpointed it is unlocked again. Exit code 3: it stays checkpointed, for want of
room. Exit code 4: nothing was asked of the driver that changes the process.

JSON fields: pid, state (checkpointed or running), seconds, bytes (given back, or taken again)";

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
    output: &mut Output,
) -> Result<(), Failure> {
    let target = target(arguments).map_err(untouched)?;
    // The driver's threads leave signals alone too.
    let blocked = Blocked::now();
    let driver = driver(config).map_err(untouched)?;
    drop(blocked);
    let meter = serve::meter(config);
    let state = if arguments.restore {
        let begun = Instant::now();
        let before = meter.as_ref().ok().map(|meter| Seen::of(meter.as_ref(), target.pid));
        bring_back(driver.as_ref(), target.pid).map_err(|error| match error {
            CheckpointError::NoRoom { .. } => Failure::NoRoom(error.to_string()),
            _ => Failure::failed(error),
        })?;
        let after = meter.as_ref().ok().map(|meter| Seen::of(meter.as_ref(), target.pid));
        let taken = after.zip(before).map(|(after, before)| after.less(&before));
        Done { pid: target.pid, state: ProcessState::Running, took: begun.elapsed(), bytes: taken }
    } else {
        let meter = meter.map_err(untouched)?;
        let before = Seen::of(meter.as_ref(), target.pid);
        check(arguments, &target, &before, driver.as_ref())?;
        let begun = Instant::now();
        let is_meant = || Target::of(Path::new("/proc"), target.pid).is_some_and(|now| now == target);
        let blocked = Blocked::now();
        put_away_if(driver.as_ref(), target.pid, arguments.timeout, &is_meant).map_err(Failure::failed)?;
        drop(blocked);
        let took = begun.elapsed();
        let given = before.less(&Seen::of(meter.as_ref(), target.pid));
        Done { pid: target.pid, state: ProcessState::Checkpointed, took, bytes: Some(given) }
    };
    state.tell(output)
}

/// What came before the driver was asked for a change.
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

/// What came of it.
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
    driver: &dyn ProcessCheckpoint,
) -> Result<(), Failure> {
    let pid = target.pid;
    match driver.state(pid).map_err(Failure::untouched)? {
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
            "process {pid} is not checkpointed, for the meter lists it on no GPU: what it has is not known; in a \
             container, ask from the host (or with the host's process numbers: --pid=host)"
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

/// What the meter shows of all GPUs.
struct Seen {
    users: BTreeSet<u32>,
    used: Bytes,
    /// What the process has, where the meter lists it.
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

    /// What the process has more than in another reading; of all processes, where the meter lists it in neither.
    fn less(&self, other: &Seen) -> Bytes {
        match self.own.is_empty() && other.own.is_empty() {
            true => self.used.saturating_sub(other.used),
            false => self.sum().saturating_sub(other.sum()),
        }
    }
}

/// Who checkpoints: the driver, or the folder that simulated GPUs are shared through.
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
