//! Start of a worker's process: its program, its environment, its log.
//!
//! The process learns the agent's socket and its own name, with which it joins. Otherwise it is independent of the agent: it has its own
//! process group, no input, and holds its log file itself, so that it survives the agent.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::{env, io};

use glake_arbiter::node::{STARTED_WITH, Worker};
use rustix::fs::{Access, access};
use rustix::process::{Pid, Resource, Rlimit, geteuid, prlimit};
use tokio::process::{Child, Command};

use crate::host::append_private;

/// Size of a log that is rotated at the next start; only one earlier log is kept.
const LONGEST_LOG: u64 = 64 << 20;

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
    /// Folder of the logs; `None`: beside the socket.
    pub logs: Option<PathBuf>,
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
    /// Returns the folder of the logs for an agent at this socket.
    pub fn folder(&self, socket: &Path) -> PathBuf {
        self.logs.clone().unwrap_or_else(|| socket.with_extension("logs"))
    }

    /// Checks that the folder of the logs exists or can be created, without creating it.
    ///
    /// # Errors
    /// [`LaunchError::Folder`].
    pub(crate) fn check_logs(&self, socket: &Path) -> Result<(), LaunchError> {
        let folder = self.folder(socket);
        // What is beside the socket lies in a folder that is looked at too.
        if self.logs.is_some() || folder.exists() { check_folder(&folder) } else { Ok(()) }
    }

    /// Starts a worker's process. `limit`: original limit of open files of the agent.
    pub(crate) fn spawn(
        &self,
        worker: &Worker,
        socket: &Path,
        mark: &str,
        limit: Option<Rlimit>,
    ) -> Result<Child, LaunchError> {
        let Some((program, arguments)) = worker.command.split_first() else {
            return Err(LaunchError::Program {
                worker: worker.name.clone(),
                program: String::new(),
                found: "nothing",
            });
        };
        let log = self.log(socket, &worker.name)?;
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
        command.stderr(log.try_clone().map_err(os)?).stdout(log);
        // What is not there is said better than by the operating system.
        let child = command.spawn().map_err(|source| find(worker).err().unwrap_or_else(|| os(source)))?;
        // The agent has raised its own, which a worker inherits: programs may use what is as large as that.
        let pid = child.id().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
        if let (Some(pid), Some(limit)) = (pid, limit) {
            let _ = prlimit(Some(pid), Resource::Nofile, limit);
        }
        Ok(child)
    }

    /// Opens the log of a worker for appending.
    fn log(&self, socket: &Path, name: &str) -> Result<File, LaunchError> {
        let folder = self.folder(socket);
        match DirBuilder::new().mode(0o700).create(&folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(LaunchError::Folder { folder, why: format!("cannot be made ({error})") });
            }
            _ => check_folder(&folder)?,
        }
        let path = folder.join(format!("{name}.log"));
        let is_long =
            fs::symlink_metadata(&path).is_ok_and(|found| found.is_file() && found.len() > LONGEST_LOG);
        let kept = if is_long { fs::rename(&path, folder.join(format!("{name}.log.1"))) } else { Ok(()) };
        let log = kept.and_then(|()| append_private(&path));
        log.map_err(|source| LaunchError::Log { path, source })
    }
}

/// Checks that a folder exists and that no other user can write to it.
fn check_folder(folder: &Path) -> Result<(), LaunchError> {
    let refuse = |why| Err(LaunchError::Folder { folder: folder.to_owned(), why });
    let own = geteuid().as_raw();
    match fs::symlink_metadata(folder) {
        _ if !folder.is_absolute() => refuse("does not begin at the root".to_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            match folder.parent().is_some_and(Path::is_dir) {
                true => Ok(()),
                false => refuse("cannot be made: the one above it is not there".to_owned()),
            }
        }
        Err(error) => refuse(format!("cannot be used ({error})")),
        Ok(found) if !found.is_dir() => refuse("is no folder, but a link or a file".to_owned()),
        Ok(found) if found.uid() != own => {
            refuse(format!("is user {}'s, and this is user {own}", found.uid()))
        }
        Ok(found) if found.mode() & 0o022 != 0 => {
            refuse(format!("has mode {:04o}: others may write to it", found.mode() & 0o777))
        }
        Ok(_) => Ok(()),
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
