//! The command that asks the driver to checkpoint or restore a process, for the agent has none.
//!
//! Commands about one process run one after the other. Those of an agent that was killed go on: each holds the lock that
//! the agent took, by its standard input, so that the next agent begins when the last of them has ended.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::process::Stdio;
use std::rc::Rc;
use std::time::Duration;

use glake_arbiter::Contexts;
use glake_wire::Peer;
use rustix::fs::{FlockOperation, flock};
use tokio::process::Command;
use tokio::sync::Mutex;
use tokio::task::spawn_local;
use tokio::time::{sleep, timeout};

use crate::server::Server;
use crate::{Agent, DriverAsk, Way};

/// How long one may take: it waits two seconds for the lock, and copies some hundred MiB.
const LIMIT: Duration = Duration::from_secs(60);
/// How often is looked whether the commands of an agent before have ended.
const LOOK: Duration = Duration::from_millis(20);
/// When a process that is no worker is restored once more.
const AGAIN: Duration = Duration::from_secs(1);
/// How long the restores of an agent that ends may take together.
const END: Duration = Duration::from_secs(20);
/// How a command ends that found no room for a restore: all is as it was.
pub const NO_ROOM: u8 = 3;

/// What asks the driver: a program and its first arguments. It is given a process's number, `--start` and when that
/// started, and for the way back `--restore`; it ends with 0 when all is done, with [`NO_ROOM`] when there is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverCommand {
    /// The program.
    pub program: PathBuf,
    /// What it is told before.
    pub arguments: Vec<OsString>,
}

/// How one ended.
enum Ended {
    Done,
    NoRoom,
    Failed,
    /// It never began.
    NotStarted,
}

/// What the server has for it.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) command: DriverCommand,
    lock: PathBuf,
    /// Once it is this agent's.
    held: Mutex<Option<File>>,
    turns: std::cell::RefCell<std::collections::HashMap<Peer, Rc<Mutex<()>>>>,
    is_ending: std::cell::Cell<bool>,
}

impl Driver {
    pub(crate) fn new(command: DriverCommand, lock: PathBuf) -> Self {
        let (turns, is_ending) = Default::default();
        Driver { command, lock, held: Mutex::new(None), turns, is_ending }
    }

    fn turn(&self, peer: Peer) -> Rc<Mutex<()>> {
        self.turns.borrow_mut().entry(peer).or_default().clone()
    }

    /// What a command is given as standard input: the lock, which it holds as long as it lives.
    async fn lock(&self) -> io::Result<File> {
        let mut held = self.held.lock().await;
        let file = match held.take() {
            Some(file) => file,
            None => {
                let mut options = File::options();
                let file = options.create(true).truncate(false).write(true).mode(0o600).open(&self.lock)?;
                while let Err(error) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
                    if error != rustix::io::Errno::WOULDBLOCK {
                        return Err(error.into());
                    }
                    sleep(LOOK).await;
                }
                file
            }
        };
        let given = file.try_clone();
        *held = Some(file);
        given
    }

    async fn run(&self, ask: &DriverAsk, way: Way) -> Ended {
        let DriverAsk { peer, name, .. } = ask;
        let mut command = Command::new(&self.command.program);
        command.args(&self.command.arguments).arg(peer.pid.to_string());
        command.args(["--start".to_owned(), peer.start.to_string()]);
        if way == Way::Restore {
            command.arg("--restore");
        }
        let started = match self.lock().await {
            Ok(lock) => command.stdin(lock).stdout(Stdio::null()).stderr(Stdio::piped()).spawn(),
            Err(error) => Err(error),
        };
        let child = match started {
            Ok(child) => child,
            Err(error) => {
                let program = self.command.program.display();
                tracing::warn!(target: "glake::agent", worker = %name, %program, %error, "the command that checkpoints and restores cannot be started");
                return Ended::NotStarted;
            }
        };
        // One that is late goes on, and holds the lock; what it does is found by the next restore.
        match timeout(LIMIT, child.wait_with_output()).await {
            Ok(Ok(output)) if output.status.success() => Ended::Done,
            Ok(Ok(output)) => {
                let said = String::from_utf8_lossy(&output.stderr);
                tracing::warn!(target: "glake::agent", worker = %name, ?way, said = %said.trim_end(), "a worker was not checkpointed, or not restored");
                if output.status.code() == Some(i32::from(NO_ROOM)) { Ended::NoRoom } else { Ended::Failed }
            }
            Ok(Err(error)) => {
                tracing::warn!(target: "glake::agent", worker = %name, %error, "what the driver did is not known");
                Ended::Failed
            }
            Err(_) => {
                tracing::warn!(target: "glake::agent", worker = %name, ?way, "the driver does not answer");
                Ended::Failed
            }
        }
    }

    /// Where its contexts are after it.
    async fn drive(&self, ask: &DriverAsk) -> Contexts {
        let restored = |ended| match ended {
            Ended::Done => Contexts::Present,
            Ended::NoRoom => Contexts::Checkpointed,
            Ended::Failed | Ended::NotStarted => Contexts::Unknown,
        };
        match ask.way {
            Way::Restore => restored(self.run(ask, Way::Restore).await),
            Way::Checkpoint => match self.run(ask, Way::Checkpoint).await {
                Ended::Done => Contexts::Checkpointed,
                Ended::NotStarted => Contexts::Present,
                // It says that it has unlocked it; or was killed.
                Ended::Failed | Ended::NoRoom => restored(self.run(ask, Way::Restore).await),
            },
        }
    }
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

    async fn drive_one(self: Rc<Self>, ask: DriverAsk) {
        loop {
            let turn = self.driver.turn(ask.peer);
            let is_to_repeat = {
                let _turn = turn.lock().await;
                let is_refused = ask.way == Way::Checkpoint && !self.may_checkpoint(ask.peer);
                let contexts = if is_refused { Contexts::Present } else { self.driver.drive(&ask).await };
                tracing::info!(target: "glake::agent", worker = %ask.name, way = ?ask.way, ?contexts, "the driver was asked");
                self.tell(|agent, now| agent.contexts(ask.peer, contexts, now))
            };
            if !is_to_repeat {
                return;
            }
            sleep(AGAIN).await;
        }
    }

    /// Whether the journal knows of it, and no use of it runs.
    fn may_checkpoint(&self, peer: Peer) -> bool {
        let is_idle = self.page_of(peer).is_some_and(|page| page.uses == 0 && !page.captures);
        is_idle && !self.is_journal_lost.get() && !self.driver.is_ending.get()
    }

    /// Nobody stays locked when an agent ends that was asked to.
    pub(crate) async fn restore_all(&self) {
        self.driver.is_ending.set(true);
        let restores = async {
            for ask in self.ask(Agent::away) {
                let turn = self.driver.turn(ask.peer);
                let _turn = turn.lock().await;
                let contexts = self.driver.drive(&ask).await;
                self.tell(|agent, now| agent.contexts(ask.peer, contexts, now));
            }
        };
        let _ = timeout(END, restores).await;
        for DriverAsk { peer, name, .. } in self.ask(Agent::away) {
            tracing::warn!(target: "glake::agent", worker = %name, "a worker stays locked: the next agent restores it, or glake checkpoint {} --restore", peer.pid);
        }
    }
}
