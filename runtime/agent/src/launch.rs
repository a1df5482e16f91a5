//! Start of a worker: its process, the processes that descend from it, and the record of starts.
//!
//! The process learns the agent's socket and its own name, with which it joins. Otherwise it is independent of the agent: it has its own
//! process group, no input, and holds its log file itself, so that it survives the agent. Its signals have their defaults and none is blocked.
//! Its working directory, mask of permissions and limits are those with which the agent was started.
//!
//! Processes of one start are recognized by their process group, which is the first process's number, and by the start number in their
//! environment: a launcher gives ranks their own groups, and a program that sets a process title overwrites its environment. A process that
//! hides both ways is not found.
//!
//! Invariant: a start is recorded, in a file beside the socket, before it happens. The next agent therefore finds the process of every start:
//! by its process id and start time, or, if the agent died in between, by the start number in the process's environment.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::{env, io};

use glake_arbiter::node::{STARTED_WITH, Worker};
use glake_meter::ProcessStat;
use glake_wire::Peer;
use rustix::fs::{Access, access};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use tokio::process::{Child, Command};

use crate::host::{OpenFiles, read_whole, write_whole};
use crate::logs;

/// Environment variables that systemd set for the agent only.
const OF_AGENT: [&str; 9] = [
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_FDS",
    "LISTEN_FDS_FIRST_FD",
    "LISTEN_FDNAMES",
    "LISTEN_PID",
    "JOURNAL_STREAM",
    "INVOCATION_ID",
];

/// Settings for starting workers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Launcher {
    /// Folder of the logs. It is created when the first worker starts.
    pub logs: PathBuf,
    /// Default environment; the agent's own environment and the file override it.
    pub environment: BTreeMap<String, String>,
}

/// Reason why a worker cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// The program is missing or not executable.
    #[error(
        "the command of worker {worker:?} starts {program:?}, {found}: name an executable file, or a program in PATH"
    )]
    Program {
        /// Name of the worker.
        worker: String,
        /// Name of the program.
        program: String,
        /// Description of the problem.
        found: &'static str,
    },
    /// The folder of the logs is unusable.
    #[error("the folder {} for logs of workers {why}: name another one (--logs DIR)", .folder.display())]
    Folder {
        folder: PathBuf,
        /// Description of the problem.
        why: String,
    },
    /// The log cannot be opened.
    #[error("its log {} cannot be written: {source}; make room, or name another folder (--logs DIR)", .path.display())]
    Log {
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// The start cannot be recorded.
    #[error("that it starts cannot be written down beside the socket: {0}; make room there")]
    Record(io::Error),
    /// The process cannot be created.
    #[error("{program:?} cannot be started: {source}")]
    Os {
        /// Name of the program.
        program: String,
        /// The operating system's error.
        source: io::Error,
    },
}

impl Launcher {
    /// Starts a worker's process.
    pub(crate) fn spawn(
        &self,
        worker: &Worker,
        socket: &Path,
        mark: &str,
        files: &OpenFiles,
    ) -> Result<Child, LaunchError> {
        let Some((program, arguments)) = worker.command.split_first() else {
            return Err(LaunchError::Program {
                worker: worker.name.clone(),
                program: String::new(),
                found: "nothing",
            });
        };
        let log = logs::open(&self.logs, &worker.name)?;
        let mut command = Command::new(program);
        command.args(arguments).process_group(0).stdin(Stdio::null());
        for name in OF_AGENT {
            command.env_remove(name);
        }
        let absent = self.environment.iter().filter(|(name, _)| env::var_os(name).is_none());
        command.envs(absent).envs(&worker.env);
        let told = [socket.as_os_str(), worker.name.as_ref(), mark.as_ref()];
        command.envs(STARTED_WITH.into_iter().zip(told));
        let os = |source| LaunchError::Os { program: program.clone(), source };
        // A missing program gets a better message than the operating system's.
        let child = files.with_original(|| {
            // The numbers of these copies are below the original limit, as `posix_spawn` demands.
            command.stderr(log.try_clone()?).stdout(log.try_clone()?);
            command.spawn()
        });
        child.map_err(|source| find(worker).err().unwrap_or_else(|| os(source)))
    }
}

/// Checks that a worker's program exists.
///
/// # Errors
/// [`LaunchError::Program`].
pub(crate) fn find(worker: &Worker) -> Result<(), LaunchError> {
    let Some(program) = worker.command.first() else { return Ok(()) };
    let refuse = |found| {
        let (worker, program) = (worker.name.clone(), program.clone());
        Err(LaunchError::Program { worker, program, found })
    };
    let is_executable = |path: &Path| path.is_file() && access(path, Access::EXEC_OK).is_ok();
    if program.contains('/') {
        let path = Path::new(program);
        return match path.is_file() {
            _ if is_executable(path) => Ok(()),
            true => refuse("which is not executable"),
            false => refuse("and no such file is there"),
        };
    }
    let path = worker.env.get("PATH").map(Into::into).or_else(|| env::var_os("PATH"));
    let path = path.unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    match env::split_paths(&path).any(|folder| is_executable(&folder.join(program))) {
        true => Ok(()),
        false => refuse("and no folder of PATH has it"),
    }
}

/// Environment variable with the number of the start.
pub(crate) const MARK: &str = "GLAKE_START";

/// Identification of the processes of a start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Family {
    /// Number of the start.
    pub(crate) mark: String,
    /// Process group of the first process; `None` if unknown or possibly reused.
    pub(crate) group: Option<u32>,
}

impl Family {
    /// Returns the living processes, each with a pidfd.
    pub(crate) fn members(&self) -> Vec<(u32, OwnedFd)> {
        let own = std::process::id();
        let entries = fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        pids.filter(|pid| *pid != own && self.has(*pid))
            .filter_map(|pid| {
                let pidfd = pidfd_open(Pid::from_raw(i32::try_from(pid).ok()?)?, PidfdFlags::empty()).ok()?;
                // Checked after opening the pidfd, because the number may have been reused before.
                self.has(pid).then_some((pid, pidfd))
            })
            .collect()
    }

    /// Sends a signal to all living processes and returns their pidfds.
    pub(crate) fn signal(&self, signal: Signal) -> Vec<OwnedFd> {
        let members = self.members();
        for (_, pidfd) in &members {
            // The process may have ended meanwhile.
            let _ = pidfd_send_signal(pidfd, signal);
        }
        members.into_iter().map(|(_, pidfd)| pidfd).collect()
    }

    /// Finds the process that the agent started by the start number alone: the leader of its group.
    pub(crate) fn leader(&self) -> Option<(u32, u64)> {
        let pids = self.members().into_iter().map(|(pid, _)| pid);
        let mut known = pids.into_iter().filter_map(|pid| Some((pid, ProcessStat::of(pid).ok()?)));
        known.find(|(pid, process)| process.group == *pid).map(|(pid, process)| (pid, process.start))
    }

    fn has(&self, pid: u32) -> bool {
        let running = ProcessStat::of(pid).ok().filter(|process| !process.has_ended());
        running.is_some_and(|process| self.group == Some(process.group) || self.is_marked(pid))
    }

    fn is_marked(&self, pid: u32) -> bool {
        let wanted = format!("{MARK}={}", self.mark);
        // The environment of another user's process is not readable.
        let environment =
            fs::read(Path::new("/proc").join(pid.to_string()).join("environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|variable| variable == wanted.as_bytes())
    }
}

/// Upper bound of the file's size.
const LONGEST: u64 = 16 << 20;

/// Recorded start of a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct StartRecord {
    pub(crate) name: String,
    /// Number of the start.
    pub(crate) mark: String,
    /// First process, once known.
    pub(crate) peer: Option<Peer>,
}

/// Content of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct StartFile {
    started: Vec<StartRecord>,
    /// Workers that an operator stopped.
    stopped: BTreeSet<String>,
}

/// Open record of starts.
#[derive(Debug)]
pub(crate) struct Starts {
    path: PathBuf,
    now: StartFile,
    /// Whether the file is up to date.
    is_written: bool,
}

impl Starts {
    /// Reads the record of the previous agent. Damaged content is skipped, because the journal also names workers that have joined.
    pub(crate) fn read(path: PathBuf) -> Starts {
        let read = read_whole(&path, LONGEST).and_then(|bytes| match bytes {
            Some(bytes) => Ok(serde_json::from_slice(&bytes)?),
            None => Ok(StartFile::default()),
        });
        let is_written = read.is_ok();
        let now = read.unwrap_or_else(|error| {
            tracing::warn!(target: "glake::agent", path = %path.display(), %error, "the record of starts cannot be read: a new one is started");
            StartFile::default()
        });
        Starts { path, now, is_written }
    }

    pub(crate) fn started(&self) -> &[StartRecord] {
        &self.now.started
    }

    pub(crate) fn stopped(&self) -> &BTreeSet<String> {
        &self.now.stopped
    }

    /// Records a start, in place of the previous one of this name.
    pub(crate) fn put(&mut self, start: StartRecord) -> io::Result<()> {
        self.now.started.retain(|other| other.name != start.name);
        self.now.started.push(start);
        self.is_written = false;
        self.write()
    }

    /// Removes the start of a name.
    pub(crate) fn remove(&mut self, name: &str) {
        self.now.started.retain(|other| other.name != name);
        self.is_written = false;
        self.tell_of(self.path.clone().as_path());
    }

    /// Records the workers that an operator stopped.
    pub(crate) fn set_stopped(&mut self, stopped: BTreeSet<String>) {
        if self.now.stopped != stopped {
            self.now.stopped = stopped;
            self.is_written = false;
            self.tell_of(self.path.clone().as_path());
        }
    }

    fn tell_of(&mut self, path: &Path) {
        if let Err(error) = self.write() {
            tracing::warn!(target: "glake::agent", path = %path.display(), %error, "the record of starts cannot be written");
        }
    }

    fn write(&mut self) -> io::Result<()> {
        if !self.is_written {
            let mut beside = self.path.clone().into_os_string();
            beside.push(".new");
            write_whole(&self.path, Path::new(&beside), &serde_json::to_vec(&self.now)?)?;
            self.is_written = true;
        }
        Ok(())
    }
}

#[cfg(test)]
mod family_tests {
    use std::os::unix::process::CommandExt as _;
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// Starts a process with a child in its group and another child in another group with the same environment.
    fn started(mark: &str, script: &str) -> (Child, Family) {
        let mut command = Command::new("sh");
        command
            .args(["-c", script])
            .env(MARK, mark)
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let child = command.spawn().unwrap();
        let family = Family { mark: mark.to_owned(), group: Some(child.id()) };
        (child, family)
    }

    fn ready(child: &mut Child) {
        let mut byte = [0; 1];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut byte).unwrap();
    }

    #[test]
    fn members_are_found_by_group_and_by_start_number() {
        let mark = format!("{}-a", std::process::id());
        let (mut child, family) = started(&mark, "env -i sleep 100 & setsid sleep 100 & echo; wait");
        ready(&mut child);
        let (mut other, _) = started(&format!("{mark}-other"), "echo; exec sleep 100");
        ready(&mut other);
        let count = |family: &Family| family.members().len();
        // A child may not have executed its program yet.
        while count(&Family { group: None, ..family.clone() }) != 2 || count(&family) != 3 {
            std::thread::yield_now();
        }
        assert_eq!(family.leader().map(|(pid, _)| pid), Some(child.id()));
        let deaths = family.signal(Signal::KILL);
        assert_eq!(deaths.len(), 3);
        child.wait().unwrap();
        while count(&family) > 0 {
            std::thread::yield_now();
        }
        assert!(other.try_wait().unwrap().is_none());
        other.kill().unwrap();
        other.wait().unwrap();
    }
}

#[cfg(test)]
mod starts_tests {
    use super::*;

    #[test]
    fn the_next_agent_skips_damaged_lines_of_the_journal() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.starts");
        let mut starts = Starts::read(path.clone());
        assert!(starts.started().is_empty() && starts.stopped().is_empty());
        let start = |name: &str, pid| StartRecord {
            name: name.to_owned(),
            mark: format!("7-{name}"),
            peer: Some(Peer { pid, start: 3 }),
        };
        let unknown = StartRecord { peer: None, ..start("chat", 0) };
        starts.put(unknown.clone()).unwrap();
        assert_eq!(Starts::read(path.clone()).started(), [unknown]);
        starts.put(start("code", 2)).unwrap();
        starts.put(start("chat", 1)).unwrap();
        starts.set_stopped(["search".to_owned()].into());
        let read = Starts::read(path.clone());
        assert_eq!(read.started(), [start("code", 2), start("chat", 1)]);
        assert_eq!(read.stopped(), starts.stopped());
        starts.remove("code");
        assert_eq!(Starts::read(path.clone()).started(), [start("chat", 1)]);
        for damaged in [&b"{\"started\":[{"[..], b"\xff", b"[]7"] {
            std::fs::write(&path, damaged).unwrap();
            assert!(Starts::read(path.clone()).started().is_empty());
        }
    }

    #[test]
    fn a_start_that_cannot_be_recorded_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let mut starts = Starts::read(folder.path().join("no/agent.starts"));
        starts.put(StartRecord::default()).unwrap_err();
        starts.set_stopped(["chat".to_owned()].into());
    }
}
