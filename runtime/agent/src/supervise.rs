//! Processes under the supervisor: their start, observation and end.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::pending;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::rc::Rc;
use std::time::Duration;

use glake_arbiter::GpuId;
use glake_arbiter::node::{NodeFile, Start};
use glake_meter::ProcessStat;
use glake_wire::{Peer, WorkerRow};
use rustix::process::{Signal, geteuid};
use tokio::process::Child;
use tokio::sync::Notify;
use tokio::task::{spawn_blocking, spawn_local};
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};

use crate::daemon::{Daemon, dead};
use crate::host::{OpenFiles, epoch};
use crate::launch::{Family, LaunchError, Launcher, StartRecord, Starts};
use crate::listener::{Listener, beside, has_ended, start_of};
use crate::supervisor::{Act, GRACE, Progress, Supervisor, View};
use crate::{Agent, Identity, ListenError, logs};

/// Poll interval for a process without a pidfd.
const POLL: Duration = Duration::from_secs(1);

/// Interval between two looks at the logs while one of them grows, and the longest interval.
const LOG_INTERVALS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(10)];

/// Timeout of the end of all workers, some time after the kill.
const LONGEST_STOP: Duration = Duration::from_secs(30);

/// State of the started processes.
#[derive(Debug)]
pub(crate) struct Children {
    launcher: Launcher,
    socket: PathBuf,
    supervisor: RefCell<Supervisor>,
    starts: RefCell<Starts>,
    families: RefCell<HashMap<String, Family>>,
    count: Cell<u64>,
    files: OpenFiles,
    /// Signals an event of the supervisor.
    told: Notify,
    /// Whether the tasks for started workers run.
    is_supervised: Cell<bool>,
}

/// Source of the notification that a worker's first process ended.
enum Watch {
    Child(Child),
    /// Process of a previous agent.
    Process(Peer, Option<OwnedFd>),
    /// The process has already ended.
    Gone,
}

impl Children {
    pub(crate) fn new(file: &NodeFile, launcher: &Launcher, socket: PathBuf, files: OpenFiles) -> Self {
        Children {
            supervisor: RefCell::new(Supervisor::new(file)),
            starts: RefCell::new(Starts::read(beside(&socket, "starts"))),
            launcher: launcher.clone(),
            socket,
            families: RefCell::default(),
            count: Cell::new(0),
            files,
            told: Notify::new(),
            is_supervised: Cell::new(false),
        }
    }
}

/// Returns the workers of a file that its agent starts.
pub(crate) fn started(file: &NodeFile) -> impl Iterator<Item = &glake_arbiter::node::Worker> {
    file.workers.iter().filter(|worker| !matches!(worker.start(), None | Some(Start::Never)))
}

impl Daemon {
    fn tell_supervisor<T>(&self, what: impl FnOnce(&mut Supervisor, Duration) -> T) -> T {
        let answer = what(&mut self.children.supervisor.borrow_mut(), self.now());
        self.children.told.notify_one();
        self.announce();
        answer
    }

    fn view(&self) -> View {
        let supervisor = self.children.supervisor.borrow();
        self.ask(|agent| agent.view(|name| supervisor.runs(name), self.now()))
    }

    /// Returns the rows of the file's workers that have not joined.
    pub(crate) fn child_rows(&self) -> Vec<WorkerRow> {
        if self.children.supervisor.borrow().is_empty() {
            return Vec::new();
        }
        let view = self.view();
        let called = |gpu: GpuId| match self.ask(|agent| agent.roster.gpu_name(gpu).to_owned()) {
            name if name.is_empty() => gpu.0.to_string(),
            name => name,
        };
        self.children.supervisor.borrow().rows(&view, self.now(), called)
    }

    /// Adopts the processes that the previous agent started.
    pub(crate) fn adopt(self: &Rc<Self>) {
        let (started, stopped) = {
            let starts = self.children.starts.borrow();
            (starts.started().to_vec(), starts.stopped().clone())
        };
        stopped.iter().for_each(|name| self.tell_supervisor(|supervisor, _| supervisor.keep_stopped(name)));
        for StartRecord { name, mark, peer } in started {
            let marked = Family { mark: mark.clone(), group: None };
            let found = || marked.leader().map(|(pid, start)| Peer { pid, start });
            let peer = peer.or_else(found);
            let alive = peer.and_then(|peer| Identity::journalled(peer, geteuid().as_raw()));
            if !self.children.supervisor.borrow().has(&name) {
                if let Some((who, _)) = alive {
                    tracing::warn!(target: "glake::agent", worker = %name, pid = who.peer.pid, "a previous agent started this worker, which is missing in the file now: it keeps running and is no longer supervised");
                }
                self.children.starts.borrow_mut().remove(&name);
                continue;
            }
            let pid = peer.map_or(0, |peer| peer.pid);
            self.tell_supervisor(|supervisor, now| supervisor.adopt(&name, pid, now));
            let (watch, family) = match alive {
                Some((who, pidfd)) => {
                    tracing::info!(target: "glake::agent", worker = %name, pid, "a worker that the previous agent started is running");
                    let _ = self.children.starts.borrow_mut().put(StartRecord {
                        name: name.clone(),
                        mark: mark.clone(),
                        peer: Some(who.peer),
                    });
                    (Watch::Process(who.peer, pidfd), Family { mark, group: Some(pid) })
                }
                // The process group may belong to other processes by now.
                None => (Watch::Gone, marked),
            };
            self.families_insert(&name, family.clone());
            spawn_local(self.clone().attend(name, family, watch));
        }
    }

    fn families_insert(&self, name: &str, family: Family) {
        self.children.families.borrow_mut().insert(name.to_owned(), family);
    }

    /// Begins to start workers, if the file has any to start.
    pub(crate) fn begin_supervision(self: &Rc<Self>) {
        let has_any = self.ask(|agent| started(agent.roster.file()).next().is_some());
        if has_any && !self.children.is_supervised.replace(true) {
            spawn_local(self.clone().supervise());
            spawn_local(self.clone().rotate_logs());
        }
    }

    /// Replaces the file that describes the server and its workers, and logs the changes.
    pub(crate) fn set_file(self: &Rc<Self>, file: NodeFile) {
        let before = self.ask(|agent| agent.roster.file().clone());
        for (change, workers) in changes(&before, &file) {
            tracing::info!(target: "glake::agent", workers, "{change}");
        }
        let is_probed = before.node.checkpoint_after().is_some() || file.node.checkpoint_after().is_none();
        self.tell_supervisor(|supervisor, _| supervisor.set_file(&file));
        self.tell(|agent, now| agent.set_file(file, now));
        self.begin_supervision();
        if !is_probed {
            spawn_local(self.clone().probe_driver());
        }
    }

    /// Carries out the supervisor's actions while the agent serves.
    async fn supervise(self: Rc<Self>) {
        loop {
            if self.children.supervisor.borrow().is_held_up(self.now()) {
                // Free memory decides about a start.
                self.measure_old(self.ask(Agent::gpus)).await;
            }
            let change = self.change();
            let (view, now) = (self.view(), self.now());
            let (acts, next, looks) = {
                let mut supervisor = self.children.supervisor.borrow_mut();
                let acts = supervisor.step(&view, now);
                (acts, supervisor.next_deadline(&view, now), supervisor.looks())
            };
            if !acts.is_empty() {
                acts.into_iter().for_each(|act| self.act(act));
                continue;
            }
            let next = next.map(|at| Instant::now() + at.saturating_sub(now));
            tokio::select! {
                () = self.children.told.notified() => {}
                () = change, if looks => {}
                () = async { match next { Some(at) => sleep_until(at).await, None => pending().await } } => {}
            }
        }
    }

    fn act(self: &Rc<Self>, act: Act) {
        match act {
            Act::Launch { name } => {
                let launched = self.launch(&name);
                let launched = launched.map_err(|why| why.to_string());
                match &launched {
                    Ok(pid) => {
                        tracing::info!(target: "glake::agent", worker = %name, pid, "a worker is started")
                    }
                    Err(why) => {
                        tracing::warn!(target: "glake::agent", worker = %name, %why, "a worker is not started");
                    }
                }
                let act = self.tell_supervisor(|supervisor, now| supervisor.launched(&name, launched, now));
                act.into_iter().for_each(|act| self.act(act));
            }
            Act::Terminate { name } => self.signal(&name, Signal::TERM),
            Act::Kill { name } => {
                tracing::warn!(target: "glake::agent", worker = %name, "a worker did not end in time: it is killed");
                self.signal(&name, Signal::KILL);
            }
        }
    }

    /// Bounds the logs of the workers while the agent serves.
    async fn rotate_logs(self: Rc<Self>) {
        let [least, longest] = LOG_INTERVALS;
        let (mut interval, mut lengths) = (least, Vec::new());
        loop {
            sleep(interval).await;
            let of = |name: &String| logs::path(&self.children.launcher.logs, name);
            let paths: Vec<PathBuf> = self.children.families.borrow().keys().map(of).collect();
            // A copy of a log takes some milliseconds on a fast disk.
            let now = spawn_blocking(move || {
                paths.into_iter().map(|path| (logs::rotate(&path, logs::LONGEST), path)).collect::<Vec<_>>()
            });
            let now = now.await.unwrap_or_default();
            interval = if now == lengths { (interval * 2).min(longest) } else { least };
            lengths = now;
        }
    }

    /// Returns a sentence that names the log of a worker.
    fn log_of(&self, name: &str) -> String {
        format!("its log is {}", logs::path(&self.children.launcher.logs, name).display())
    }

    fn signal(&self, name: &str, signal: Signal) {
        let Some(family) = self.children.families.borrow().get(name).cloned() else { return };
        drop(spawn_blocking(move || family.signal(signal)));
    }

    /// Starts a worker, after recording the start.
    fn launch(self: &Rc<Self>, name: &str) -> Result<u32, LaunchError> {
        let Children { launcher, socket, starts, count, files, .. } = &self.children;
        let find = |file: &NodeFile| file.workers.iter().find(|worker| worker.name == name).cloned();
        let worker = self.ask(|agent| find(agent.roster.file()));
        let worker = worker.ok_or_else(|| LaunchError::Record(std::io::ErrorKind::NotFound.into()))?;
        count.set(count.get() + 1);
        let mark = format!("{}-{}", epoch(), count.get());
        let mut start = StartRecord { name: name.to_owned(), mark: mark.clone(), peer: None };
        starts.borrow_mut().put(start.clone()).map_err(LaunchError::Record)?;
        let child = launcher.spawn(&worker, socket, &mark, files).inspect_err(|_| {
            starts.borrow_mut().remove(name);
        })?;
        let pid = child.id().unwrap_or_default();
        self.own.borrow_mut().insert(pid);
        start.peer = start_of(pid).map(|start| Peer { pid, start });
        if let Err(error) = starts.borrow_mut().put(start) {
            // The process is found by the number of its start.
            tracing::warn!(target: "glake::agent", worker = %name, %error, "the process of a worker cannot be recorded");
        }
        let family = Family { mark, group: Some(pid) };
        self.families_insert(name, family.clone());
        spawn_local(self.clone().attend(name.to_owned(), family, Watch::Child(child)));
        Ok(pid)
    }

    /// Waits for a worker's end, then ends its remaining processes, whose GPU memory the next start needs.
    async fn attend(self: Rc<Self>, name: String, family: Family, watch: Watch) {
        let how = match watch {
            Watch::Child(mut child) => {
                let pid = child.id().unwrap_or_default();
                let ended = child.wait().await;
                self.own.borrow_mut().remove(&pid);
                match ended {
                    Ok(status) => told(status),
                    Err(error) => format!("how it ended is not known: {error}"),
                }
            }
            Watch::Process(peer, pidfd) => {
                let is_watched = match pidfd {
                    Some(pidfd) => dead(pidfd).await.is_ok(),
                    None => false,
                };
                while !is_watched && !has_ended(peer) {
                    sleep(POLL).await;
                }
                "how it ended is not known".to_owned()
            }
            Watch::Gone => "it ended while there was no agent".to_owned(),
        };
        tracing::warn!(target: "glake::agent", worker = %name, %how, "a worker that was started has ended");
        self.tell_supervisor(|supervisor, now| supervisor.exited(&name, how, now));
        end(&name, family).await;
        self.children.families.borrow_mut().remove(&name);
        // The next agent must restart a worker that waits for its restart.
        if !self.children.supervisor.borrow().wants(&name) {
            self.children.starts.borrow_mut().remove(&name);
        }
        self.tell_supervisor(|supervisor, now| supervisor.gone(&name, now));
    }

    /// Stops starting workers for good.
    pub(crate) fn stop_starting(&self) {
        self.tell_supervisor(|supervisor, _| supervisor.end());
    }

    /// Stops all started workers, and waits until their processes have ended.
    ///
    /// # Errors
    /// The workers with processes that do not end after a kill.
    pub(crate) async fn stop_all(self: &Rc<Self>) -> Result<(), String> {
        let acts = self.tell_supervisor(|supervisor, now| supervisor.end_all(now));
        acts.into_iter().for_each(|act| self.act(act));
        let all = async {
            loop {
                let change = self.change();
                if self.children.supervisor.borrow().up().is_empty() {
                    return;
                }
                change.await;
            }
        };
        let ended = timeout(LONGEST_STOP, all).await;
        ended.map_err(|_| stuck(&self.children.supervisor.borrow().up()))
    }

    fn note_stopped(&self) {
        let stopped = self.children.supervisor.borrow().stopped();
        self.children.starts.borrow_mut().set_stopped(stopped);
    }

    /// Starts a worker for an operator and waits until its start is over.
    pub(crate) async fn start_worker(&self, name: &str) -> Result<(), String> {
        if self.ask(|agent| agent.find(name)).is_ok() && !self.children.supervisor.borrow().has(name) {
            return Ok(());
        }
        self.tell_supervisor(|supervisor, now| supervisor.ask(name, now))?;
        self.note_stopped();
        loop {
            let change = self.change();
            let presence = self.view().present.get(name).copied();
            let progress = self.children.supervisor.borrow().progress(name, presence);
            match progress {
                Progress::Done => return Ok(()),
                // The end is reported soon, and the worker is restarted.
                Progress::Failed(_) if self.is_ending(name) => change.await,
                Progress::Failed(why) => return Err(format!("{why}; {}", self.log_of(name))),
                Progress::UnderWay => change.await,
            }
        }
    }

    /// Returns whether a worker's process has ended and the supervisor does not know it yet.
    fn is_ending(&self, name: &str) -> bool {
        let starts = self.children.starts.borrow();
        let peer = starts.started().iter().find(|start| start.name == name).and_then(|start| start.peer);
        let is_zombie = |peer: Peer| ProcessStat::of(peer.pid).is_ok_and(|process| process.has_ended());
        let has_ended = |peer| has_ended(peer) || is_zombie(peer);
        self.children.families.borrow().contains_key(name) && peer.is_none_or(has_ended)
    }

    /// Stops a worker for an operator and waits until all of its processes have ended.
    pub(crate) async fn stop_worker(self: &Rc<Self>, name: &str) -> Result<(), String> {
        let is_down = self.children.supervisor.borrow().is_down(name);
        if let (true, Ok(id)) = (is_down, self.ask(|agent| agent.find(name))) {
            let pid = self.ask(|agent| agent.roster.get(id).map_or(0, |worker| worker.who.peer.pid));
            return Err(format!(
                "{name} is process {pid}, which this agent did not start: end that process (kill {pid})"
            ));
        }
        let act = self.tell_supervisor(|supervisor, now| supervisor.stop(name, now))?;
        self.note_stopped();
        act.into_iter().for_each(|act| self.act(act));
        loop {
            let change = self.change();
            if self.children.supervisor.borrow().is_down(name) {
                return Ok(());
            }
            change.await;
        }
    }

    /// Returns the event that an operator's command for a name waits for.
    pub(crate) fn awaited(&self, name: &str) -> String {
        if let Ok(id) = self.ask(|agent| agent.find(name)) {
            return self.ask(|agent| agent.awaited(id));
        }
        match self.child_rows().into_iter().find(|row| row.worker == name) {
            Some(WorkerRow { state, note: Some(note), .. }) => format!("it is {state}: {note}"),
            Some(WorkerRow { state, .. }) => format!("it is {state}"),
            None => "it has not joined".to_owned(),
        }
    }

    /// Returns whether a worker that has not joined can be started.
    pub(crate) fn is_startable(&self, name: &str) -> bool {
        self.children.supervisor.borrow().has(name) && self.ask(|agent: &Agent| agent.find(name)).is_err()
    }
}

/// Stops the workers that a dead agent of a socket has started, and waits until their processes have ended. Returns their names.
///
/// # Errors
/// An agent serves the socket, or processes do not end after a kill.
pub fn stop_started(socket: &Path) -> Result<Vec<String>, StopError> {
    let record = beside(socket, "starts");
    if !record.exists() {
        return Ok(Vec::new());
    }
    // No agent may start them again meanwhile.
    let _lock = Listener::lock(socket)?;
    let mut starts = Starts::read(record);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
    let ended = runtime.block_on(async {
        let mut stopped = Vec::new();
        for StartRecord { name, mark, peer } in starts.started() {
            let alive = peer.filter(|peer| Identity::journalled(*peer, geteuid().as_raw()).is_some());
            // The process group may belong to other processes by now.
            let family = Family { mark: mark.clone(), group: alive.map(|peer| peer.pid) };
            if !family.signal(Signal::TERM).is_empty() {
                stopped.push((name.clone(), family));
            }
        }
        let mut names = Vec::new();
        // All have got their signal, and end side by side.
        let until = Instant::now() + LONGEST_STOP;
        for (name, family) in stopped {
            timeout_at(until, end(&name, family))
                .await
                .map_err(|_| StopError::Stuck(stuck(std::slice::from_ref(&name))))?;
            names.push(name);
        }
        Ok(names)
    });
    let names: Vec<String> = starts.started().iter().map(|start| start.name.clone()).collect();
    if ended.is_ok() {
        names.iter().for_each(|name| starts.remove(name));
    }
    ended
}

/// Reason why workers of a dead agent were not stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StopError {
    /// The socket is served, or its folder is unusable.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// Processes do not end.
    #[error("{0}")]
    Stuck(String),
    /// The operating system's error.
    #[error("workers cannot be stopped: {0}")]
    Os(#[from] io::Error),
}

fn stuck(names: &[String]) -> String {
    format!("processes of {} do not end after a kill: the driver may hang", names.join(", "))
}

/// Returns the differences of two files, each as a sentence with the names of its workers.
fn changes(before: &NodeFile, now: &NodeFile) -> Vec<(&'static str, String)> {
    type Worker = glake_arbiter::node::Worker;
    let find = |file: &NodeFile, name: &str| file.workers.iter().find(|worker| worker.name == name).cloned();
    // Equal but for the attributes that apply at once.
    let is_started_alike = |before: &Worker, now: &Worker| {
        *now == Worker {
            priority: now.priority,
            tenant: now.tenant.clone(),
            preempt: now.preempt,
            max_pause: now.max_pause,
            deadline_s: now.deadline_s,
            ..before.clone()
        }
    };
    let (mut added, mut changed, mut later) = (Vec::new(), Vec::new(), Vec::new());
    for worker in &now.workers {
        match find(before, &worker.name) {
            None => added.push(worker.name.clone()),
            Some(known) if known == *worker => {}
            Some(known) if is_started_alike(&known, worker) => changed.push(worker.name.clone()),
            Some(_) => later.push(worker.name.clone()),
        }
    }
    let removed = before.workers.iter().filter(|worker| find(now, &worker.name).is_none());
    let removed: Vec<String> = removed.map(|worker| worker.name.clone()).collect();
    let node = if before.node == now.node { Vec::new() } else { vec![String::new()] };
    let all = [
        ("the file was read again: [node] has changed, and applies now", node),
        ("the file was read again: workers are new", added),
        ("the file was read again: scheduling of workers has changed, and applies now", changed),
        (
            "the file was read again: workers have changed; command, env, gpus and sizes apply at their next start",
            later,
        ),
        (
            "the file was read again: workers are missing; their processes go on and are not started again",
            removed,
        ),
    ];
    let all = all.into_iter().filter(|(_, workers)| !workers.is_empty());
    let all: Vec<_> = all.map(|(change, workers)| (change, workers.join(", "))).collect();
    if all.is_empty() { vec![("the file was read again: nothing has changed", String::new())] } else { all }
}

/// Requests the processes of a start to end, and kills the remaining ones after a grace period.
async fn end(name: &str, family: Family) {
    let (mut signal, mut until) = (Signal::TERM, Instant::now() + GRACE);
    loop {
        let those = family.clone();
        let deaths = spawn_blocking(move || those.signal(signal)).await.unwrap_or_default();
        if deaths.is_empty() {
            return;
        }
        tracing::info!(target: "glake::agent", worker = %name, processes = deaths.len(), ?signal, "remaining processes of a worker are ended");
        let all = async {
            for pidfd in deaths {
                let _ = dead(pidfd).await;
            }
        };
        let is_late = timeout_at(until, all).await.is_err() || until <= Instant::now();
        match (is_late, signal) {
            (false, _) => {}
            (true, Signal::TERM) => (signal, until) = (Signal::KILL, Instant::now() + GRACE),
            // The process is blocked in the kernel, for example in a hanging driver, and may still hold GPU memory.
            (true, _) => {
                tracing::warn!(target: "glake::agent", worker = %name, "remaining processes of a worker do not end after a kill: the worker is not restarted before");
                until = Instant::now() + GRACE;
            }
        }
    }
}

fn told(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    }
}
