//! The command that asks the driver to checkpoint or restore a process, for the agent has none.
//!
//! Commands about one process run one after the other: one that is late is killed, and has ended before anything else is
//! asked about its process. Those of an agent that was killed go on: each holds its process's lock by its standard input,
//! so that the next agent's begin when they have ended.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::pin::pin;
use std::process::{Output, Stdio};
use std::rc::Rc;
use std::time::Duration;

use glake_arbiter::{Activity, Contexts};
use glake_wire::Peer;
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::Command;
use tokio::sync::Mutex;
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep, timeout};

use crate::peer::start_of;
use crate::server::Server;
use crate::translate::activity;
use crate::{Agent, DriverAction, DriverAsk};

/// How often is looked whether a command of an agent before has ended.
const LOOK: Duration = Duration::from_millis(20);
/// When a process that is no worker is restored once more.
const AGAIN: Duration = Duration::from_secs(1);
/// How long the restores of an agent that ends may take together.
const END: Duration = Duration::from_secs(20);
/// How a command ends that found no room for a restore, and did not ask the driver for it: all is as it was.
pub const NO_ROOM: u8 = 3;
/// How a command ends that did not get as far as to ask the driver for a change: all is as it was.
pub const UNTOUCHED: u8 = 4;
/// How a command ends whose process the driver did not restore, and does not another time: it is to be started again.
pub const LOST: u8 = 5;
/// How a command ends that was told what it does not understand: nor has it asked anything.
const MISUSED: u8 = 2;

/// What asks the driver: a program and its first arguments. It is given a process's number, `--start` and when that
/// started, for the way back `--restore`, and `--socket` and the agent's, beside which it may keep what it has to know of
/// a process. It ends with 0 when all is done, with [`NO_ROOM`] when there is none, with [`UNTOUCHED`] when it changed
/// nothing, with [`LOST`] when the process cannot be restored any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverCommand {
    /// The program.
    pub program: PathBuf,
    /// What it is told before.
    pub arguments: Vec<OsString>,
    /// How long one may take before it is killed.
    pub limit: Duration,
}

impl DriverCommand {
    /// It waits two seconds for the driver's lock, and copies some hundred MiB.
    pub const LIMIT: Duration = Duration::from_secs(60);
}

/// How one ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    Done,
    NoRoom,
    /// All is as it was: it never began, or asked the driver for no change.
    Untouched,
    /// It is not restored, and never will be.
    Lost,
    Failed,
}

/// What the server has for it.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) command: DriverCommand,
    /// The agent's.
    socket: PathBuf,
    turns: std::cell::RefCell<std::collections::HashMap<Peer, Rc<Mutex<()>>>>,
    is_ending: std::cell::Cell<bool>,
}

impl Driver {
    pub(crate) fn new(command: DriverCommand, socket: PathBuf) -> Self {
        let (turns, is_ending) = Default::default();
        Driver { command, socket, turns, is_ending }
    }

    fn turn(&self, peer: Peer) -> Rc<Mutex<()>> {
        self.turns.borrow_mut().entry(peer).or_default().clone()
    }

    /// Nobody waits for a process's turn any more.
    fn forget_turn(&self, peer: Peer) {
        let mut turns = self.turns.borrow_mut();
        if turns.get(&peer).is_some_and(|turn| Rc::strong_count(turn) == 1) {
            turns.remove(&peer);
        }
    }

    fn lock_of(&self, peer: Peer) -> PathBuf {
        self.socket.with_extension(format!("driver-{}-{}", peer.pid, peer.start))
    }

    /// What a command is given as standard input: its process's lock, which it holds as long as it lives.
    async fn lock(&self, ask: &DriverAsk) -> io::Result<File> {
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
                tracing::warn!(target: "glake::agent", worker = %ask.name, pid = ask.peer.pid, lock = %path.display(), "a command of the agent before does not end: this worker is asked for nothing until it has (fuser shows which it is)");
            }
            sleep(LOOK).await;
        }
        Ok(file)
    }

    /// How a command ended, and what it said.
    async fn run(&self, ask: &DriverAsk, action: DriverAction) -> (Ended, String) {
        let DriverAsk { peer, name, .. } = ask;
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
        // It has the lock as long as it is there to start another one.
        drop(command);
        let child = match started {
            Ok(child) => child,
            Err(error) => {
                let program = self.command.program.display();
                return (Ended::Untouched, format!("{program} cannot be started: {error}"));
            }
        };
        let pid = child.id().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
        let mut output = pin!(child.wait_with_output());
        let ended = match timeout(self.command.limit, &mut output).await {
            Ok(ended) => told(ended),
            Err(_) => {
                tracing::warn!(target: "glake::agent", worker = %name, ?action, "the driver does not answer: the command that asks it is killed");
                // It is not waited for yet: its number is its own.
                let _ = pid.map(|pid| kill_process(pid, Signal::KILL));
                let (_, said) = told(output.await);
                (Ended::Failed, format!("killed after {:?} {said}", self.command.limit))
            }
        };
        // Nobody holds it now.
        let _ = std::fs::remove_file(self.lock_of(*peer));
        ended
    }

    /// Where its contexts are after it.
    async fn drive(&self, ask: &DriverAsk) -> Contexts {
        let (ended, said) = self.run(ask, ask.action).await;
        if ended != Ended::Done {
            tracing::warn!(target: "glake::agent", worker = %ask.name, action = ?ask.action, %said, "a worker was not checkpointed, or not restored");
        }
        let back = |ended| match ended {
            Ended::Done => Contexts::Present,
            Ended::NoRoom => Contexts::Checkpointed,
            Ended::Lost => Contexts::Lost,
            Ended::Failed | Ended::Untouched => Contexts::Unknown,
        };
        match (ask.action, ended) {
            (DriverAction::Restore, ended) => back(ended),
            (DriverAction::Checkpoint, Ended::Done) => Contexts::Checkpointed,
            (DriverAction::Checkpoint, Ended::Untouched) => Contexts::Present,
            // It says that it has unlocked it; or was killed.
            (DriverAction::Checkpoint, Ended::Failed | Ended::NoRoom | Ended::Lost) => {
                let (ended, said) = self.run(ask, DriverAction::Restore).await;
                if ended != Ended::Done {
                    tracing::warn!(target: "glake::agent", worker = %ask.name, %said, "a worker may be locked");
                }
                back(ended)
            }
        }
    }
}

/// How it ended, and what it said.
fn told(output: io::Result<Output>) -> (Ended, String) {
    let output = match output {
        Ok(output) => output,
        Err(error) => return (Ended::Failed, format!("how it ended is not known: {error}")),
    };
    let is = |code: u8| output.status.code() == Some(i32::from(code));
    let ended = match output.status.success() {
        true => Ended::Done,
        false if is(NO_ROOM) => Ended::NoRoom,
        false if is(LOST) => Ended::Lost,
        false if is(UNTOUCHED) || is(MISUSED) => Ended::Untouched,
        false => Ended::Failed,
    };
    (ended, String::from_utf8_lossy(&output.stderr).trim_end().to_owned())
}

impl Server {
    /// Asks the driver whatever the agent wants of it.
    pub(crate) async fn drive(self: Rc<Self>) {
        loop {
            self.driver_asked.notified().await;
            for ask in self.driver_asks.take() {
                spawn_local(self.clone().drive_one(ask));
            }
        }
    }

    async fn drive_one(self: Rc<Self>, mut ask: DriverAsk) {
        let peer = ask.peer;
        loop {
            let turn = self.driver.turn(peer);
            let is_to_repeat = {
                let _turn = turn.lock().await;
                // What was asked since is done instead.
                self.ask(|agent| agent.is_last(&ask))
                    && {
                        let is_refused = ask.action == DriverAction::Checkpoint && !self.may_checkpoint(peer);
                        let contexts =
                            if is_refused { Contexts::Present } else { self.driver.drive(&ask).await };
                        tracing::info!(target: "glake::agent", worker = %ask.name, action = ?ask.action, ?contexts, "the driver was asked");
                        self.tell(|agent, now| agent.contexts(&ask, contexts, now))
                    }
            };
            drop(turn);
            if !is_to_repeat {
                return self.driver.forget_turn(peer);
            }
            // Whatever was asked first: it is to run again.
            ask.action = DriverAction::Restore;
            sleep(AGAIN).await;
        }
    }

    /// Whether the journal knows of it, and no use of it runs.
    fn may_checkpoint(&self, peer: Peer) -> bool {
        let is_idle = activity(self.page_of(peer)) == Activity::Idle;
        let is_known = self.ask(|agent| agent.is_away(peer)) && !self.is_journal_lost.get();
        is_idle && is_known && !self.driver.is_ending.get()
    }

    /// Whether the driver can be asked: by the way back of this process, which has nothing there.
    pub(crate) async fn probe_driver(self: Rc<Self>) {
        let pid = std::process::id();
        let Some(start) = start_of(pid) else { return };
        let (peer, name) = (Peer { pid, start }, "the agent".to_owned());
        let ask = DriverAsk { peer, name, action: DriverAction::Restore, number: 0 };
        let (ended, said) = self.driver.run(&ask, DriverAction::Restore).await;
        if ended != Ended::Done {
            tracing::warn!(target: "glake::agent", %said, "[node] checkpoint_after_s is set, and no worker can be checkpointed here");
        }
    }

    /// Nobody stays locked when an agent ends that was asked to, as far as there is time and room.
    pub(crate) async fn restore_all(&self) {
        self.driver.is_ending.set(true);
        let restores = async {
            for ask in self.tell(|agent, _| agent.restores()) {
                let turn = self.driver.turn(ask.peer);
                let _turn = turn.lock().await;
                let contexts = self.driver.drive(&ask).await;
                self.tell(|agent, now| agent.contexts(&ask, contexts, now));
            }
        };
        let _ = timeout(END, restores).await;
        for (peer, name) in self.ask(Agent::away) {
            tracing::warn!(target: "glake::agent", worker = %name, "a worker stays locked: the next agent restores it, or glake checkpoint {} --restore", peer.pid);
        }
    }
}
