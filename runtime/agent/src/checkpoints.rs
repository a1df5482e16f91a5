//! Commands that checkpoint or restore a process through the driver, because the agent has none.
//!
//! Commands about one process run one after the other. A late command is killed, and ends before the next one about its process starts.
//! Commands of a killed agent continue: each holds its process's lock as standard input, so that the next agent's commands wait for it.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::pin::pin;
use std::process::{Output, Stdio};
use std::rc::Rc;
use std::time::Duration;

use glake_arbiter::{Contexts, UseState};
use glake_wire::Peer;
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::Command;
use tokio::sync::Mutex;
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep, timeout};

use crate::daemon::Daemon;
use crate::host::OwnChildren;
use crate::listener::{beside, start_of};
use crate::roster::activity_of;
use crate::{Agent, DriverAction, DriverRequest};

/// Poll interval for the lock of an earlier agent's command.
const LOCK_POLL: Duration = Duration::from_millis(20);
/// Delay before a further restore of a process that is no worker.
const RESTORE_AGAIN: Duration = Duration::from_secs(1);
/// Timeout of all restores at the end of the agent.
const END_TIMEOUT: Duration = Duration::from_secs(20);
/// Exit code of a command that lacked room for a restore and did not call the driver; the process is unchanged.
pub const NO_ROOM: u8 = 3;
/// Exit code of a command that failed before it asked the driver for a change; the process is unchanged.
pub const UNTOUCHED: u8 = 4;
/// Exit code of a command whose process the driver can never restore: the worker must be started again.
pub const LOST: u8 = 5;
/// Exit code of a command with invalid arguments; the process is unchanged.
const MISUSED: u8 = 2;

/// Command that calls the driver: a program and its first arguments. The agent appends the process id, `--start` and the start time of the
/// process, `--restore` for a restore, and `--socket` with the agent's socket, beside which the command may keep files about a process.
/// Exit codes: 0 for success, [`NO_ROOM`] without room for a restore, [`UNTOUCHED`] if the process is unchanged, [`LOST`] if the process
/// can never be restored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverCommand {
    /// Path of the program.
    pub program: PathBuf,
    /// First arguments of the program.
    pub arguments: Vec<OsString>,
    /// Timeout of a command, after which it is killed.
    pub limit: Duration,
}

impl DriverCommand {
    /// Default timeout of a command, which waits two seconds for the driver's lock and copies some hundred MiB.
    pub const LIMIT: Duration = Duration::from_secs(60);
}

/// Result of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CommandResult {
    Done,
    NoRoom,
    /// The process is unchanged: the command did not start, or asked the driver for no change.
    Untouched,
    /// The process can never be restored.
    Lost,
    Failed,
}

/// Runner of the checkpoint commands.
#[derive(Debug)]
pub(crate) struct CheckpointRunner {
    pub(crate) command: DriverCommand,
    /// Socket of the agent.
    socket: PathBuf,
    turns: std::cell::RefCell<std::collections::HashMap<Peer, Rc<Mutex<()>>>>,
    is_ending: std::cell::Cell<bool>,
    own: OwnChildren,
}

impl CheckpointRunner {
    pub(crate) fn new(command: DriverCommand, socket: PathBuf, own: OwnChildren) -> Self {
        let (turns, is_ending) = Default::default();
        CheckpointRunner { command, socket, turns, is_ending, own }
    }

    fn turn(&self, peer: Peer) -> Rc<Mutex<()>> {
        self.turns.borrow_mut().entry(peer).or_default().clone()
    }

    /// Removes the lock of a process without waiters.
    fn forget_turn(&self, peer: Peer) {
        let mut turns = self.turns.borrow_mut();
        if turns.get(&peer).is_some_and(|turn| Rc::strong_count(turn) == 1) {
            turns.remove(&peer);
        }
    }

    fn lock_of(&self, peer: Peer) -> PathBuf {
        beside(&self.socket, &format!("driver-{}-{}", peer.pid, peer.start))
    }

    /// Locks the file that a command gets as standard input and holds as long as it lives.
    async fn lock(&self, ask: &DriverRequest) -> io::Result<File> {
        let path = self.lock_of(ask.peer);
        let mut options = File::options();
        let file = options.create(true).truncate(false).write(true).mode(0o600).open(&path)?;
        let mut late_at = Some(Instant::now() + self.command.limit);
        while let Err(error) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
            if error != rustix::io::Errno::WOULDBLOCK {
                return Err(error.into());
            }
            if late_at.is_some_and(|at| at <= Instant::now()) {
                late_at = None;
                tracing::warn!(target: "glake::agent", worker = %ask.name, pid = ask.peer.pid, lock = %path.display(), "a checkpoint command of the previous agent does not end: its worker gets no further command until then (fuser shows the process)");
            }
            sleep(LOCK_POLL).await;
        }
        Ok(file)
    }

    /// Runs a command and returns its result and output.
    async fn run(&self, ask: &DriverRequest, action: DriverAction) -> (CommandResult, String) {
        let DriverRequest { peer, name, .. } = ask;
        let mut command = Command::new(&self.command.program);
        command.args(&self.command.arguments).arg(peer.pid.to_string());
        command.args(["--start".to_owned(), peer.start.to_string()]);
        if action == DriverAction::Restore {
            command.arg("--restore");
        }
        command.arg("--socket").arg(&self.socket);
        let started = match self.lock(ask).await {
            Ok(lock) => command.stdin(lock).stdout(Stdio::null()).stderr(Stdio::piped()).spawn(),
            Err(error) => Err(error),
        };
        // The handle keeps the lock until a further command may start.
        drop(command);
        let child = match started {
            Ok(child) => child,
            Err(error) => {
                let program = self.command.program.display();
                return (CommandResult::Untouched, format!("{program} cannot be started: {error}"));
            }
        };
        let number = child.id().unwrap_or_default();
        self.own.borrow_mut().insert(number);
        let pid = i32::try_from(number).ok().and_then(Pid::from_raw);
        let mut output = pin!(child.wait_with_output());
        let ended = match timeout(self.command.limit, &mut output).await {
            Ok(ended) => told(ended),
            Err(_) => {
                tracing::warn!(target: "glake::agent", worker = %name, ?action, "the driver does not respond: the checkpoint command is killed");
                // The process is not reaped yet, so that its number is not reused.
                let _ = pid.map(|pid| kill_process(pid, Signal::KILL));
                let (_, said) = told(output.await);
                (CommandResult::Failed, format!("killed after {:?} {said}", self.command.limit))
            }
        };
        self.own.borrow_mut().remove(&number);
        // No process holds the lock any more.
        let _ = std::fs::remove_file(self.lock_of(*peer));
        ended
    }

    /// Carries out a request and returns the location of the contexts afterwards.
    async fn drive(&self, ask: &DriverRequest) -> Contexts {
        let (ended, said) = self.run(ask, ask.action).await;
        if ended != CommandResult::Done {
            tracing::warn!(target: "glake::agent", worker = %ask.name, action = ?ask.action, %said, "a worker was not checkpointed, or not restored");
        }
        let back = |ended| match ended {
            CommandResult::Done => Contexts::Present,
            CommandResult::NoRoom => Contexts::Checkpointed,
            CommandResult::Lost => Contexts::Lost,
            CommandResult::Failed | CommandResult::Untouched => Contexts::Unknown,
        };
        match (ask.action, ended) {
            (DriverAction::Restore, ended) => back(ended),
            (DriverAction::Checkpoint, CommandResult::Done) => Contexts::Checkpointed,
            (DriverAction::Checkpoint, CommandResult::Untouched) => Contexts::Present,
            // The command reports that it unlocked the process, or was killed.
            (
                DriverAction::Checkpoint,
                CommandResult::Failed | CommandResult::NoRoom | CommandResult::Lost,
            ) => {
                let (ended, said) = self.run(ask, DriverAction::Restore).await;
                if ended != CommandResult::Done {
                    tracing::warn!(target: "glake::agent", worker = %ask.name, %said, "a worker may be locked");
                }
                back(ended)
            }
        }
    }
}

/// Classifies the exit of a command; returns its result and output.
fn told(output: io::Result<Output>) -> (CommandResult, String) {
    let output = match output {
        Ok(output) => output,
        Err(error) => return (CommandResult::Failed, format!("how it ended is not known: {error}")),
    };
    let is = |code: u8| output.status.code() == Some(i32::from(code));
    let ended = match output.status.success() {
        true => CommandResult::Done,
        false if is(NO_ROOM) => CommandResult::NoRoom,
        false if is(LOST) => CommandResult::Lost,
        false if is(UNTOUCHED) || is(MISUSED) => CommandResult::Untouched,
        false => CommandResult::Failed,
    };
    (ended, String::from_utf8_lossy(&output.stderr).trim_end().to_owned())
}

impl Daemon {
    /// Carries out all requests of the agent to the driver.
    pub(crate) async fn drive(self: Rc<Self>) {
        loop {
            self.driver_requested.notified().await;
            for ask in self.driver_requests.take() {
                spawn_local(self.clone().drive_one(ask));
            }
        }
    }

    async fn drive_one(self: Rc<Self>, mut ask: DriverRequest) {
        let peer = ask.peer;
        loop {
            let turn = self.runner.turn(peer);
            let is_to_repeat = {
                let _turn = turn.lock().await;
                // A newer request replaces this one.
                self.ask(|agent| agent.requests.is_last(&ask))
                    && {
                        let is_refused = ask.action == DriverAction::Checkpoint && !self.may_checkpoint(peer);
                        let contexts =
                            if is_refused { Contexts::Present } else { self.runner.drive(&ask).await };
                        tracing::info!(target: "glake::agent", worker = %ask.name, action = ?ask.action, ?contexts, "the driver has carried out a request");
                        self.tell(|agent, now| agent.contexts(&ask, contexts, now))
                    }
            };
            drop(turn);
            if !is_to_repeat {
                return self.runner.forget_turn(peer);
            }
            // Whatever the first request was, the process must run again.
            ask.action = DriverAction::Restore;
            sleep(RESTORE_AGAIN).await;
        }
    }

    /// Returns whether the journal contains the request and no use of the process runs.
    fn may_checkpoint(&self, peer: Peer) -> bool {
        let is_idle = activity_of(self.page_of(peer)) == UseState::Idle;
        let is_known = self.ask(|agent| agent.is_away(peer)) && !self.is_journal_lost.get();
        is_idle && is_known && !self.runner.is_ending.get()
    }

    /// Checks that the driver responds, by a restore of this process, which has nothing to restore.
    pub(crate) async fn probe_driver(self: Rc<Self>) {
        let pid = std::process::id();
        let Some(start) = start_of(pid) else { return };
        let (peer, name) = (Peer { pid, start }, "the agent".to_owned());
        let ask = DriverRequest { peer, name, action: DriverAction::Restore, number: 0 };
        let (ended, said) = self.runner.run(&ask, DriverAction::Restore).await;
        if ended != CommandResult::Done {
            tracing::warn!(target: "glake::agent", %said, "[node] checkpoint_after_s is set, and no worker can be checkpointed here");
        }
    }

    /// Restores all locked processes before an orderly end of the agent, as far as time and memory allow.
    pub(crate) async fn restore_all(&self) {
        self.runner.is_ending.set(true);
        let restores = async {
            for ask in self.tell(|agent, _| agent.restores()) {
                let turn = self.runner.turn(ask.peer);
                let _turn = turn.lock().await;
                let contexts = self.runner.drive(&ask).await;
                self.tell(|agent, now| agent.contexts(&ask, contexts, now));
            }
        };
        let _ = timeout(END_TIMEOUT, restores).await;
        for (peer, name) in self.ask(Agent::away) {
            tracing::warn!(target: "glake::agent", worker = %name, "a worker stays locked: the next agent restores it, or glake checkpoint {} --restore", peer.pid);
        }
    }
}
