//! `glake serve`: the agent on its one thread.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::future::pending;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

use glake_arbiter::WorkerId;
use glake_arbiter::node::NodeFile;
use glake_meter::{Meter, MeterError};
use glake_units::Bytes;
use glake_wire::{ActivityView, Hello, Peer, ToAgent};
use sd_notify::NotifyState;
use tokio::io::unix::AsyncFd;
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::Notify;
use tokio::task::{LocalSet, spawn_local};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::agent::{ConnectionError, PageReading};
use crate::checkpoints::CheckpointRunner;
use crate::host::{OpenFiles, OwnChildren, adopts_orphans, epoch, is_stopped, reap_orphans};
use crate::journal::{Journal, JournalRecord};
use crate::listener::{self, FileWatch, Listener};
use crate::meters::Meters;
use crate::supervise::{self, Children};
use crate::watch::Watchers;
use crate::{
    Agent, DriverCommand, DriverRequest, Identity, LaunchError, Launcher, ListenError, launch, link, logs,
};

/// Interval of reading pages while a worker waits for others' memory.
const PAGE_INTERVAL: Duration = Duration::from_millis(10);
/// Interval of meter readings meanwhile, and maximum age of a reading for decisions.
pub(crate) const METER_INTERVAL: Duration = Duration::from_secs(1);
/// Timeout of the first frame of a connection.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of connections before their first frame.
const MOST_GREETINGS: usize = 1024;
/// Interval of looks at the socket's file while it cannot be watched: a program that cleans the folder may have removed it.
const SOCKET_INTERVAL: Duration = Duration::from_secs(15);
/// Pause of accepting connections while no descriptor is available.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// Settings of the agent.
pub struct Options {
    /// Description of the server and its workers.
    pub file: NodeFile,
    /// Path of the file, which SIGHUP reads again; `None` without one.
    pub path: Option<PathBuf>,
    /// Path of the agent's socket.
    pub socket: PathBuf,
    /// Meter of the GPUs' memory.
    pub meter: Arc<dyn Meter>,
    /// Command that checkpoints and restores processes.
    pub driver: DriverCommand,
    /// Settings for starting the workers of the file.
    pub launcher: Launcher,
    /// Whether the workers that the agent started end with it.
    pub stops_workers: bool,
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("file", &self.file)
            .field("socket", &self.socket)
            .finish_non_exhaustive()
    }
}

/// Reason why the agent cannot serve.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The socket is unusable.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The meter is unusable.
    #[error(transparent)]
    Meter(#[from] MeterError),
    /// A worker cannot be started.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The operating system's error.
    #[error("the agent cannot go on: {0}")]
    Os(#[from] io::Error),
    /// A GPU has less memory than the budget.
    #[error("[node] budget is {budget}, and GPU {gpu} has {total}: give at most that, less what others use")]
    Budget {
        /// Budget of the file.
        budget: Bytes,
        /// Name of the GPU.
        gpu: String,
        /// Memory of the GPU.
        total: Bytes,
    },
    /// The machine has no GPU.
    #[error("there is no GPU to serve")]
    NoGpu,
}

impl Options {
    /// Checks that an agent could serve, as `glake serve --check` does. Returns the memory of each GPU.
    ///
    /// # Errors
    /// [`ServeError`].
    pub fn check(&self) -> Result<Vec<(String, Bytes)>, ServeError> {
        listener::check(&self.socket)?;
        let mut gpus = Vec::new();
        for gpu in self.meter.gpus() {
            let total = self.meter.read(&gpu)?.total;
            gpus.push((gpu, total));
        }
        self.check_file(&self.file, &gpus)?;
        if gpus.is_empty() { Err(ServeError::NoGpu) } else { Ok(gpus) }
    }

    /// Checks that a file can be served on these GPUs.
    fn check_file(&self, file: &NodeFile, gpus: &[(String, Bytes)]) -> Result<(), ServeError> {
        for (gpu, total) in gpus {
            if let Some(budget) = file.node.budget.filter(|budget| budget > total) {
                return Err(ServeError::Budget { budget, gpu: gpu.clone(), total: *total });
            }
        }
        match supervise::started(file).next() {
            Some(_) => Ok(logs::check_folder(&self.launcher.logs)?),
            None => Ok(()),
        }
    }

    /// Reads the file again for a running agent. An unusable file changes nothing.
    fn reload(&self, daemon: &Rc<Daemon>, gpus: &[(String, Bytes)]) {
        let Some(path) = &self.path else {
            tracing::info!(target: "glake::agent", "SIGHUP: the agent was started without a file, and reads none again");
            return;
        };
        let read = read_file(path).and_then(|file| {
            self.check_file(&file, gpus).map_err(|error| format!("{}: {error}", path.display()))?;
            Ok(file)
        });
        match read {
            Ok(file) => {
                warn_of_misfit(&file, gpus);
                daemon.set_file(file);
            }
            Err(error) => {
                tracing::warn!(target: "glake::agent", %error, "the file was read again and is refused: nothing has changed");
            }
        }
    }

    /// Checks that the programs of the workers exist. An agent starts without them too, because they may appear later.
    ///
    /// # Errors
    /// [`LaunchError::Program`], of the first that is not there.
    pub fn check_commands(&self) -> Result<(), LaunchError> {
        supervise::started(&self.file).try_for_each(launch::find)
    }

    /// Returns the number of workers that the agent starts, and the folder of their logs.
    pub fn started(&self) -> (usize, &Path) {
        (supervise::started(&self.file).count(), &self.launcher.logs)
    }
}

/// Reads and checks a file that describes a server and its workers.
///
/// # Errors
/// Text of the error, with the path.
pub fn read_file(path: &Path) -> Result<NodeFile, String> {
    let wrong = |error: &dyn fmt::Display| format!("{}: {error}", path.display());
    let file = NodeFile::parse(&std::fs::read_to_string(path).map_err(|error| wrong(&error))?);
    let file = file.map_err(|error| wrong(&error))?;
    if file.node.budget.is_some() && !file.workers.is_empty() {
        file.check_fit().map_err(|error| wrong(&error))?;
    }
    Ok(file)
}

/// Logs what of a file does not fit the server: a GPU may be there again later, and the other workers are served meanwhile.
fn warn_of_misfit(file: &NodeFile, gpus: &[(String, Bytes)]) {
    if let Err(error) = file.check_server(gpus, Bytes::ZERO) {
        tracing::warn!(target: "glake::agent", %error, "the file does not fit this server");
    }
}

/// Serves until SIGTERM or SIGINT. SIGHUP, also that of a closed terminal, reads the file again. Calls `ready` with the socket once workers can connect.
///
/// # Errors
/// [`ServeError`].
pub fn serve(options: &Options, ready: impl FnOnce(&Path)) -> Result<(), ServeError> {
    let gpus = options.check()?;
    warn_of_misfit(&options.file, &gpus);
    let files = OpenFiles::raise();
    let activated = listenfd::ListenFd::from_env().take_unix_listener(0).ok().flatten();
    let listener = match activated {
        Some(socket) => Listener::adopt(socket, &options.socket)?,
        None => Listener::bind(&options.socket)?,
    };
    let listener = Rc::new(listener);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
    let over = LocalSet::new().block_on(&runtime, async {
        listener.socket.set_nonblocking(true)?;
        let socket = UnixListener::from_std(listener.socket.try_clone()?)?;
        let daemon = Rc::new(Daemon::new(options, gpus.clone(), &listener, files));
        daemon.expect(&Journal::read(&listener.journal()));
        daemon.adopt();
        // Before the first grant.
        for (gpu, name) in daemon.ask(Agent::gpus) {
            let (begun, read) = (daemon.now(), daemon.meters.read_now(&name));
            daemon.measured(gpu, begun, read.map_err(|error| error.to_string()), &BTreeMap::new());
        }
        let (mut end, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let mut hangup = signal(SignalKind::hangup())?;
        spawn_local(daemon.clone().decide());
        spawn_local(daemon.clone().accept(socket, listener.clone()));
        spawn_local(daemon.clone().drive());
        daemon.begin_supervision();
        if adopts_orphans() {
            spawn_local(daemon.clone().reap(signal(SignalKind::child())?));
        }
        if options.file.node.checkpoint_after().is_some() {
            spawn_local(daemon.clone().probe_driver());
        }
        ready(&listener.path);
        let _ = sd_notify::notify(&[NotifyState::Ready]);
        loop {
            tokio::select! {
                _ = end.recv() => break,
                _ = interrupt.recv() => break,
                () = daemon.ended.notified() => break,
                _ = hangup.recv() => {
                    let since = NotifyState::monotonic_usec_now().ok();
                    let _ = sd_notify::notify(&[NotifyState::Reloading].into_iter().chain(since).collect::<Vec<_>>());
                    options.reload(&daemon, &gpus);
                    let _ = sd_notify::notify(&[NotifyState::Ready]);
                }
            }
        }
        let _ = sd_notify::notify(&[NotifyState::Stopping]);
        daemon.stop_starting();
        if options.stops_workers
            && let Err(error) = daemon.stop_all().await
        {
            tracing::warn!(target: "glake::agent", %error, "the agent ends before its workers");
        }
        daemon.restore_all().await;
        Ok(())
    });
    // Do not wait for a meter reading that hangs in the driver.
    runtime.shutdown_background();
    over
}

/// Waits for the death of a process.
pub(crate) async fn dead(pidfd: OwnedFd) -> io::Result<()> {
    #[expect(
        deprecated,
        reason = "what an OwnedFd is of stays open, which the type does not promise of others"
    )]
    let pidfd = AsyncFd::with_interest(pidfd, tokio::io::Interest::READABLE)?;
    pidfd.readable().await.map(drop)
}

/// State shared by the agent's tasks, which run on one thread. Borrows never extend over an await.
pub(crate) struct Daemon {
    agent: RefCell<Agent>,
    pub(crate) meters: Meters,
    pub(crate) begun: Instant,
    journal: RefCell<Journal>,
    links: RefCell<HashMap<WorkerId, Rc<Link>>>,
    /// Signals that the agent got an event.
    told: Notify,
    /// Signals a possible change to waiting operators.
    changed: Notify,
    /// Signals the end of the agent.
    ended: Notify,
    greetings: Cell<usize>,
    /// Processes whose death is awaited.
    watched: RefCell<HashSet<Peer>>,
    pub(crate) is_journal_lost: Cell<bool>,
    pub(crate) runner: CheckpointRunner,
    /// Pending requests to the driver; the next field signals them.
    pub(crate) driver_requests: RefCell<Vec<DriverRequest>>,
    pub(crate) driver_requested: Notify,
    pub(crate) children: Children,
    pub(crate) watchers: Watchers,
    pub(crate) own: OwnChildren,
}

/// Connection of a worker.
pub(crate) struct Link {
    /// Signals that there is something to send, or that the connection is over.
    pub(crate) wake: Notify,
    pub(crate) is_over: Cell<bool>,
    page: ActivityView,
}

impl Daemon {
    fn new(options: &Options, gpus: Vec<(String, Bytes)>, listener: &Listener, files: OpenFiles) -> Daemon {
        let own = OwnChildren::default();
        Daemon {
            children: Children::new(&options.file, &options.launcher, listener.path.clone(), files),
            agent: RefCell::new(Agent::new(options.file.clone(), gpus, epoch())),
            meters: Meters::new(options.meter.clone()),
            begun: Instant::now(),
            journal: RefCell::new(Journal::new(listener.journal())),
            links: RefCell::default(),
            told: Notify::new(),
            changed: Notify::new(),
            ended: Notify::new(),
            greetings: Cell::new(0),
            watched: RefCell::default(),
            is_journal_lost: Cell::new(false),
            runner: CheckpointRunner::new(options.driver.clone(), listener.path.clone(), own.clone()),
            driver_requests: RefCell::default(),
            driver_requested: Notify::new(),
            watchers: Watchers::default(),
            own,
        }
    }

    pub(crate) fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Calls a function on the agent and carries out the consequences.
    pub(crate) fn tell<T>(&self, what: impl FnOnce(&mut Agent, Duration) -> T) -> T {
        let answer = self.tell_quietly(what);
        self.wake();
        answer
    }

    /// Like [`Daemon::tell`], without waking the task that `told` wakes.
    pub(crate) fn tell_quietly<T>(&self, what: impl FnOnce(&mut Agent, Duration) -> T) -> T {
        let (answer, outbound) = {
            let mut agent = self.agent.borrow_mut();
            let begin = std::time::Instant::now();
            let answer = what(&mut agent, self.now());
            agent.counts.decisions.add(begin.elapsed());
            self.write_journal(&mut agent);
            let asks = agent.requests.take();
            if !asks.is_empty() {
                self.driver_requests.borrow_mut().extend(asks);
                self.driver_requested.notify_one();
            }
            (answer, agent.take_outbound())
        };
        let links = self.links.borrow();
        outbound.iter().filter_map(|id| links.get(id)).for_each(|link| link.wake.notify_one());
        self.announce();
        answer
    }

    /// Writes the journal before any decision is announced.
    fn write_journal(&self, agent: &mut Agent) {
        let entries = agent.take_entries();
        if entries.is_empty() {
            return;
        }
        let mut journal = self.journal.borrow_mut();
        let written =
            if journal.is_long() { journal.replace(agent.journal()) } else { journal.append(entries) };
        let was_lost = self.is_journal_lost.replace(written.is_err());
        match written {
            Err(error) if !was_lost => {
                tracing::warn!(target: "glake::agent", %error, "the journal cannot be written: after a crash, the next agent knows only workers that reconnect");
            }
            Ok(()) if was_lost => tracing::info!(target: "glake::agent", "the journal is written again"),
            _ => {}
        }
    }

    /// Returns the current status page of a process.
    pub(crate) fn page_of(&self, peer: Peer) -> Option<glake_wire::Activity> {
        let id = self.agent.borrow().roster.of(peer)?;
        self.links.borrow().get(&id)?.page.read().ok()
    }

    /// Wakes the deciding task, because a deadline may be earlier now.
    pub(crate) fn wake(&self) {
        self.told.notify_one();
    }

    /// Ends the agent.
    pub(crate) fn end(&self) {
        self.ended.notify_one();
    }

    /// Notifies waiting operators of a possible change.
    pub(crate) fn announce(&self) {
        self.changed.notify_waiters();
    }

    /// Calls a function on the agent that only reads.
    pub(crate) fn ask<T>(&self, what: impl FnOnce(&Agent) -> T) -> T {
        what(&self.agent.borrow())
    }

    /// Returns a future of the next possible change after this call.
    pub(crate) fn change(&self) -> tokio::sync::futures::Notified<'_> {
        self.changed.notified()
    }

    pub(crate) fn frame(&self, id: WorkerId) -> Result<Option<Vec<u8>>, ConnectionError> {
        self.agent.borrow_mut().frame(id)
    }

    /// Begins a worker's connection and ends its previous one.
    pub(crate) fn connect(&self, id: WorkerId, page: ActivityView) -> Rc<Link> {
        let link = Rc::new(Link { wake: Notify::new(), is_over: Cell::new(false), page });
        if let Some(before) = self.links.borrow_mut().insert(id, link.clone()) {
            before.is_over.set(true);
            before.wake.notify_one();
        }
        link.wake.notify_one();
        link
    }

    /// Ends the connection of a worker that has another number now.
    pub(crate) fn end_link(&self, id: WorkerId) {
        if let Some(link) = self.links.borrow_mut().remove(&id) {
            link.is_over.set(true);
            link.wake.notify_one();
        }
    }

    /// Ends a worker's connection.
    pub(crate) fn disconnect(&self, id: WorkerId, link: &Rc<Link>) {
        let is_own = self.links.borrow().get(&id).is_some_and(|known| Rc::ptr_eq(known, link));
        if is_own {
            self.links.borrow_mut().remove(&id);
            self.tell(|agent, now| agent.lost(id, now));
        }
    }

    /// Before a message that may take memory from others, reads pages and, if the last reading is old, the meter, because unmanaged
    /// programs come and go.
    pub(crate) async fn look_before(self: &Rc<Self>, id: WorkerId, message: &ToAgent) {
        let asks = matches!(message, ToAgent::Want { .. } | ToAgent::Grow { .. });
        if asks {
            self.measure_old(self.ask(|agent| agent.gpus_of(id))).await;
        }
        if asks || self.ask(Agent::is_anybody_waiting) {
            self.look();
        }
    }

    /// Does the same before a hello, because the worker may want memory at once.
    pub(crate) async fn look_before_hello(self: &Rc<Self>, hello: &Hello) {
        if hello.wants || hello.starting {
            self.measure_old(self.ask(Agent::gpus)).await;
            self.look();
        }
    }

    /// Reads the pages of workers with memory.
    pub(crate) fn look(&self) {
        self.look_at(self.ask(Agent::watched));
    }

    /// Reads the pages of these workers.
    pub(crate) fn look_at(&self, watched: impl IntoIterator<Item = WorkerId>) {
        let clock = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let clock = u64::try_from(clock.tv_sec * 1_000_000_000 + clock.tv_nsec).unwrap_or(0);
        let seen: Vec<(WorkerId, Option<PageReading>)> = {
            let links = self.links.borrow();
            let page = |id| links.get(&id).and_then(|link: &Rc<Link>| link.page.read().ok());
            let seen = |activity: glake_wire::Activity| {
                let idle_for = Duration::from_nanos(clock.saturating_sub(activity.idle_since_ns));
                PageReading { activity, idle_for }
            };
            watched.into_iter().map(|id| (id, page(id).map(seen))).collect()
        };
        // The new activities may already allow a decision.
        self.tell_quietly(|agent, now| seen.into_iter().for_each(|(id, seen)| agent.saw(id, seen, now)));
    }

    /// Adds the living workers of the journal, which count until they join or die. They are added together, because the journal is then
    /// rewritten with all of them.
    fn expect(self: &Rc<Self>, journal: &[JournalRecord]) {
        let known = |told: &JournalRecord| Identity::journalled(told.peer, told.uid);
        let mut alive: Vec<_> = journal.iter().filter_map(|told| Some((told, known(told)?))).collect();
        self.tell(|agent, now| {
            for (told, (who, _)) in &alive {
                agent.expect(*who, told, now);
            }
        });
        for (told, (who, pidfd)) in alive.drain(..) {
            match pidfd {
                Some(pidfd) => self.watch(who.peer, pidfd),
                None => {
                    tracing::warn!(target: "glake::agent", worker = %told.name, "a worker's death cannot be awaited");
                }
            }
        }
    }

    /// Notifies the agent of a process's death.
    pub(crate) fn watch(self: &Rc<Self>, peer: Peer, pidfd: OwnedFd) {
        if !self.watched.borrow_mut().insert(peer) {
            return;
        }
        let daemon = self.clone();
        spawn_local(async move {
            let death = dead(pidfd).await;
            daemon.watched.borrow_mut().remove(&peer);
            // Without a pidfd, the death is noticed only at the worker's next hello.
            if let Err(error) = death {
                tracing::warn!(target: "glake::agent", %error, "a worker's death cannot be awaited");
                return;
            }
            // The process may have left before, or rejoined under another number.
            let Some((id, name)) = daemon.tell(|agent, now| agent.died(peer, now)) else { return };
            tracing::info!(target: "glake::agent", worker = %name, "a worker is gone");
            if let Some(link) = daemon.links.borrow_mut().remove(&id) {
                link.is_over.set(true);
                link.wake.notify_one();
            }
        });
    }

    /// Reads the meter, writes the journal and advances the time whenever one of them is due.
    async fn decide(self: Rc<Self>) {
        let mut measured_at = Instant::now();
        loop {
            let (measures, deadline, waiting) = {
                let mut agent = self.agent.borrow_mut();
                (agent.take_measures(), agent.next_deadline(), agent.is_anybody_waiting())
            };
            for (gpu, name) in measures {
                self.measure(gpu, name);
            }
            if waiting && measured_at.elapsed() >= METER_INTERVAL {
                measured_at = Instant::now();
                for (gpu, name) in self.ask(Agent::gpus) {
                    self.measure(gpu, name);
                }
            }
            let look = waiting.then(|| Instant::now() + PAGE_INTERVAL);
            let deadline = deadline.map(|at| self.begun + at);
            let next = [look, deadline].into_iter().flatten().min();
            tokio::select! {
                () = self.told.notified() => {}
                () = async { match next { Some(at) => sleep_until(at).await, None => pending().await } } => {}
            }
            let now = Instant::now();
            // Read pages before deadlines too, because a worker with progress is not late.
            if waiting || deadline.is_some_and(|at| at <= now) {
                self.look();
            }
            for (id, peer) in self.tell_quietly(Agent::take_unheard) {
                if !is_stopped(peer.pid) {
                    self.tell_quietly(|agent, now| agent.give_up(id, now));
                }
            }
            if waiting || deadline.is_some_and(|at| at <= now) {
                self.tell_quietly(|agent, now| agent.tick(now));
            }
        }
    }

    /// Reaps adopted processes whenever a child ends.
    async fn reap(self: Rc<Self>, mut ended: Signal) {
        loop {
            reap_orphans(&self.own);
            if ended.recv().await.is_none() {
                return;
            }
        }
    }

    /// Creates the socket again if its file is missing.
    fn restore_socket(&self, listener: &Listener, has_warned: &mut bool) -> Option<UnixListener> {
        let socket = match listener.restore() {
            Ok(socket) => socket?,
            Err(error) => {
                if !std::mem::replace(has_warned, true) {
                    tracing::warn!(target: "glake::agent", %error, "the agent's socket was removed, and workers cannot connect until the agent is started again");
                }
                return None;
            }
        };
        let listening = socket.set_nonblocking(true).and_then(|()| UnixListener::from_std(socket));
        tracing::warn!(target: "glake::agent", socket = %listener.path.display(), is_back = listening.is_ok(), "the agent's socket was removed: it is created again");
        listening.ok()
    }

    async fn accept(self: Rc<Self>, mut socket: UnixListener, listener: Rc<Listener>) {
        // A spare descriptor, released to accept and close a connection when no other is left.
        let mut spare = std::fs::File::open("/dev/null").ok();
        let (mut is_short, mut has_warned) = (false, false);
        let (mut watch, mut look_at) = (None::<FileWatch>, Instant::now());
        loop {
            let event = async {
                match &watch {
                    Some(watch) => watch.changed().await,
                    None => sleep_until(look_at).await,
                }
            };
            let accepted = tokio::select! {
                accepted = socket.accept() => accepted,
                () = event => {
                    look_at = Instant::now() + SOCKET_INTERVAL;
                    if let Some(restored) = self.restore_socket(&listener, &mut has_warned) {
                        socket = restored;
                    }
                    // Of the file that is there now; none is there if it cannot be created.
                    watch = listener.watch();
                    continue;
                }
            };
            match accepted {
                Ok((stream, _)) => {
                    is_short = false;
                    if self.greetings.get() < MOST_GREETINGS {
                        self.greetings.set(self.greetings.get() + 1);
                        spawn_local(self.clone().greet(stream));
                    }
                }
                Err(error) => {
                    if !std::mem::replace(&mut is_short, true) {
                        tracing::warn!(target: "glake::agent", %error, "no connection can be accepted at the moment: raise the limit of open files (ulimit -n)");
                    }
                    drop(spare.take());
                    let _ = timeout(ACCEPT_PAUSE, socket.accept()).await;
                    spare = std::fs::File::open("/dev/null").ok();
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    async fn greet(self: Rc<Self>, stream: UnixStream) {
        let greeted = timeout(GREETING_TIMEOUT, link::greet(&self, stream)).await;
        self.greetings.set(self.greetings.get() - 1);
        match greeted {
            Ok(Some(greeted)) => greeted.go_on(self).await,
            Ok(None) => {}
            Err(_) => tracing::debug!(target: "glake::agent", "whoever connected said nothing"),
        }
    }
}
