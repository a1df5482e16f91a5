//! A server in a folder: its GPU, its agent, its processes, and the conditions that must always hold.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Condvar, Mutex, RwLock};
use std::time::{Duration, Instant};

use glake_agent::ask;
use glake_meter::Meter as _;
use glake_sim::SimMeter;
use glake_units::Bytes;
use glake_wire::{Answer, Ask, WorkerRow};
use tempfile::TempDir;

use crate::program::{By, GROWTH, MODELS, Program, ROOM};

/// Environment variable that names the folder to processes started by the test.
pub(crate) const FOLDER: &str = "GLAKE_TEST_FLEET_FOLDER";
/// Memory of a context, and the agent's floor for each worker: so little that an absent worker leaves no room for a model.
const CONTEXT: Bytes = Bytes::mib(2);
/// Time between two checks of leases and memory.
const LOOK: Duration = Duration::from_millis(100);
/// Number of lines of each log that a failure shows.
const TAIL: usize = 12;

/// Reason of a program's failure.
pub(crate) type Outcome<T> = Result<T, String>;

/// A server with its processes.
pub(crate) struct Node {
    folder: TempDir,
    program: Program,
    meter: SimMeter,
    budget: Bytes,
    agent: Mutex<Option<Child>>,
    /// Held by each start until its worker has joined. The agent is not killed meanwhile, because a worker that finds no agent continues
    /// without a lease.
    pub(crate) starts: RwLock<()>,
    /// Number of agents that have begun to serve.
    pub(crate) agents: AtomicU64,
    links: Vec<Mutex<Receiver<Link>>>,
    extra: Mutex<Receiver<Link>>,
    served: Mutex<Served>,
    changed: Condvar,
    first_failure: Mutex<Option<String>>,
    pub(crate) is_over: AtomicBool,
    /// Ids of all processes so far.
    pids: Mutex<Vec<u32>>,
    /// Ids of processes that the test has started and not waited for.
    children: Mutex<BTreeMap<u32, Child>>,
}

/// Number of served uses of each model, and the models whose programs have ended.
#[derive(Debug, Default)]
struct Served {
    times: [u64; MODELS],
    is_over: [bool; MODELS],
    /// Whether a model is doing something that keeps its memory.
    is_busy: [bool; MODELS],
    /// Number of changes of `is_busy`.
    turns: u64,
}

/// Connection to a worker's process.
pub(crate) struct Link {
    pub(crate) pid: u32,
    stream: UnixStream,
    lines: Receiver<String>,
}

impl Node {
    /// Creates a server whose agent serves the file of a program.
    pub(crate) fn new(program: Program) -> std::sync::Arc<Node> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        // Sockets of others than this user's are not served.
        fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
        let of = |contexts: u64| Bytes::new(CONTEXT.get() * contexts);
        let models = u64::try_from(MODELS).unwrap();
        let budget = Bytes::mib(ROOM).saturating_add(of(models));
        // Beside it there is memory of processes that have died, which the driver gives back later, and contexts of those that join.
        let total = budget.saturating_add(budget);
        fs::write(path.join("gpu.toml"), topology(total)).unwrap();
        fs::write(path.join("worker.toml"), settings()).unwrap();
        fs::write(path.join("node.toml"), file(&program, budget, path)).unwrap();
        let model = glake_sim::load(path.join("gpu.toml").to_str().unwrap()).unwrap();
        let meter = SimMeter::open(&path.join("gpus"), &model).unwrap();
        let listener = UnixListener::bind(path.join("control")).unwrap();
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..=MODELS).map(|_| channel()).unzip();
        let mut links: Vec<Mutex<Receiver<Link>>> = receivers.into_iter().map(Mutex::new).collect();
        let extra = links.pop().unwrap();
        let node = std::sync::Arc::new(Node {
            folder,
            program,
            meter,
            budget,
            agent: Mutex::new(None),
            starts: RwLock::new(()),
            agents: AtomicU64::new(0),
            links,
            extra,
            served: Mutex::default(),
            changed: Condvar::new(),
            first_failure: Mutex::new(None),
            is_over: AtomicBool::new(false),
            pids: Mutex::new(Vec::new()),
            children: Mutex::default(),
        });
        let accepts = node.clone();
        std::thread::spawn(move || accepts.accept(&listener, &senders));
        node
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.path().join("agent.sock")
    }

    fn device(&self) -> String {
        let path = self.path().display();
        format!("sim:{path}/gpu.toml@{path}/gpus")
    }

    /// Connects each process that sends a hello with the script of its model.
    fn accept(self: std::sync::Arc<Node>, listener: &UnixListener, senders: &[Sender<Link>]) {
        while let Ok((stream, _)) = listener.accept() {
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let Some(Ok(hello)) = lines.next() else { continue };
            if hello == "over" {
                return;
            }
            let (name, pid) = hello.split_once(' ').unwrap();
            let model = self.program.models.iter().position(|model| model.name == name);
            let pid = pid.parse().unwrap();
            self.pids.lock().unwrap().push(pid);
            let (said, heard) = channel();
            let node = self.clone();
            std::thread::spawn(move || {
                for line in lines.map_while(Result::ok) {
                    match model.filter(|_| line == "served") {
                        Some(model) => node.served(model),
                        None => _ = said.send(line),
                    }
                }
            });
            let _ = senders[model.unwrap_or(MODELS)].send(Link { pid, stream, lines: heard });
        }
    }

    /// Starts an agent; returns once it serves.
    pub(crate) fn serve(&self) -> Outcome<()> {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "agent", "--ignored", "--nocapture"]);
        command.env(FOLDER, self.path()).env_remove("GLAKE_DEVICE").stdin(Stdio::piped());
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut log = File::options().create(true).append(true).open(self.path().join("agent.log")).unwrap();
        let (ready, is_ready) = channel();
        std::thread::spawn(move || {
            for line in lines.by_ref().map_while(Result::ok) {
                let _ = writeln!(log, "{line}");
                if line.contains("serving") {
                    let _ = ready.send(());
                }
            }
        });
        *self.agent.lock().unwrap() = Some(child);
        let served = is_ready.recv_timeout(Duration::from_secs(60));
        self.agents.fetch_add(1, Ordering::SeqCst);
        served.map_err(|_| "the agent does not serve".to_owned())
    }

    /// Kills the agent, and starts another one after a delay.
    pub(crate) fn replace_agent(&self, absent: Duration) -> Outcome<()> {
        let _none_starts = self.starts.write().unwrap();
        self.agents.fetch_add(1, Ordering::SeqCst);
        if let Some(mut agent) = self.agent.lock().unwrap().take() {
            agent.kill().unwrap();
            agent.wait().unwrap();
        }
        std::thread::sleep(absent);
        self.serve()
    }

    /// Stops the agent as a service manager does.
    pub(crate) fn end_agent(&self) -> Outcome<()> {
        let Some(mut agent) = self.agent.lock().unwrap().take() else { return Ok(()) };
        signal(agent.id(), libc::SIGTERM);
        let end = Instant::now() + self.program.longest_wait();
        loop {
            match agent.try_wait().unwrap() {
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(format!("the agent ends: {status}")),
                None if Instant::now() > end => {
                    let _ = agent.kill();
                    return Err("the agent does not end".to_owned());
                }
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    /// Starts a worker's process, with the agent in its environment if it joins by itself.
    pub(crate) fn spawn(&self, name: &str, joins: bool) {
        let log = self.path().join(format!("{name}.log"));
        let log = File::options().create(true).append(true).open(log).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "worker", "--ignored", "--nocapture"]).stdin(Stdio::null());
        command.stdout(log.try_clone().unwrap()).stderr(log);
        command.env(FOLDER, self.path()).env("GLAKE_CONFIG", self.path().join("worker.toml"));
        command.env("GLAKE_DEVICE", self.device()).env("GLAKE_WORKER", name);
        if joins {
            command.env("GLAKE_AGENT", self.socket());
        }
        let child = command.spawn().unwrap();
        self.children.lock().unwrap().insert(child.id(), child);
    }

    /// Returns the next process of a model, or of none, after its hello.
    pub(crate) fn link(&self, model: Option<usize>, within: Duration) -> Outcome<Link> {
        let links = model.map_or(&self.extra, |model| &self.links[model]).lock().unwrap();
        self.receive(&links, within, "a process that starts")?.ok_or_else(|| "the test ends".to_owned())
    }

    /// Returns the next item; `None` if the sender has gone.
    fn receive<T>(&self, from: &Receiver<T>, within: Duration, what: &str) -> Outcome<Option<T>> {
        let end = Instant::now() + within;
        loop {
            match from.recv_timeout(Duration::from_millis(50)) {
                Ok(next) => return Ok(Some(next)),
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) if self.has_failed() => {
                    return Err("another one failed".to_owned());
                }
                Err(RecvTimeoutError::Timeout) if Instant::now() > end => {
                    return Err(format!("{what} has taken longer than {:.1} s", within.as_secs_f64()));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Sends a command to a worker and returns its answer.
    pub(crate) fn tell(&self, link: &mut Link, line: &str, within: Duration) -> Outcome<String> {
        let _ = writeln!(link.stream, "{line}");
        self.hear(link, line, within)
    }

    /// Returns the next message of a worker.
    pub(crate) fn hear(&self, link: &mut Link, what: &str, within: Duration) -> Outcome<String> {
        let said =
            self.receive(&link.lines, within, what).map_err(|why| format!("process {}: {why}", link.pid))?;
        let said = said.ok_or_else(|| format!("process {} has died at {what:?}", link.pid))?;
        match said.strip_prefix("ok ") {
            Some(answer) => Ok(answer.to_owned()),
            None => Err(format!("process {} at {what:?}: {said}", link.pid)),
        }
    }

    /// Returns messages that a worker sent unasked.
    pub(crate) fn complaint(&self, link: &Link) -> Outcome<()> {
        match link.lines.try_recv() {
            Ok(said) => Err(format!("process {}: {said}", link.pid)),
            Err(std::sync::mpsc::TryRecvError::Disconnected) => Err(format!("process {} has died", link.pid)),
            Err(std::sync::mpsc::TryRecvError::Empty) => Ok(()),
        }
    }

    /// Waits until a worker's process has ended.
    pub(crate) fn ended(&self, link: &Link, within: Duration) -> Outcome<()> {
        while self.receive(&link.lines, within, "its end")?.is_some() {}
        let child = self.children.lock().unwrap().remove(&link.pid);
        child.map_or(Ok(()), |mut child| child.wait().map(drop).map_err(|error| error.to_string()))
    }

    /// Counts a served use of a model.
    pub(crate) fn served(&self, model: usize) {
        self.served.lock().unwrap().times[model] += 1;
        self.changed.notify_all();
    }

    /// Returns the number of served uses of each model.
    pub(crate) fn times_served(&self) -> [u64; MODELS] {
        self.served.lock().unwrap().times
    }

    /// Records that a model's script has ended.
    pub(crate) fn over(&self, model: usize) {
        self.served.lock().unwrap().is_over[model] = true;
        self.changed.notify_all();
    }

    /// Records whether a model keeps its memory now.
    pub(crate) fn set_busy(&self, model: usize, is_busy: bool) {
        let mut served = self.served.lock().unwrap();
        served.is_busy[model] = is_busy;
        served.turns += 1;
    }

    /// Returns the number of changes of `is_busy`, and whether another model keeps its memory.
    pub(crate) fn others(&self, model: usize) -> (u64, bool) {
        let served = self.served.lock().unwrap();
        (served.turns, (0..MODELS).any(|other| other != model && served.is_busy[other]))
    }

    /// Waits until each other model was served more often, or its script has ended. Returns false on timeout.
    pub(crate) fn wait_for_others(&self, model: usize, times: [u64; MODELS], within: Duration) -> bool {
        let is_served =
            |served: &Served, other: usize| served.times[other] > times[other] || served.is_over[other];
        self.wait_for(within, |served| (0..MODELS).all(|other| other == model || is_served(served, other)))
    }

    /// Waits until models were served the given number of times. Returns false if all scripts end first.
    pub(crate) fn wait_for_all(&self, times: u64) -> bool {
        self.wait_for(Duration::MAX, |served| {
            served.times.iter().sum::<u64>() >= times || served.is_over == [true; MODELS]
        });
        self.served.lock().unwrap().is_over != [true; MODELS] && !self.has_failed()
    }

    fn wait_for(&self, within: Duration, so: impl Fn(&Served) -> bool) -> bool {
        let begin = Instant::now();
        let mut served = self.served.lock().unwrap();
        while !so(&served) && !self.has_failed() {
            if begin.elapsed() > within {
                return false;
            }
            served = self.changed.wait_timeout(served, Duration::from_millis(100)).unwrap().0;
        }
        true
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.first_failure.lock().unwrap().is_some()
    }

    pub(crate) fn fail(&self, why: String) {
        self.first_failure.lock().unwrap().get_or_insert(why);
        self.changed.notify_all();
    }

    pub(crate) fn failure(&self) -> Option<String> {
        self.first_failure.lock().unwrap().clone()
    }

    /// Returns the workers as in `glake ps --json`; `None` if no agent answers now.
    pub(crate) fn ps(&self) -> Option<Vec<WorkerRow>> {
        let answers = ask(&self.socket(), Ask::Ps, |_| {}).ok()?.into_iter();
        Some(
            answers
                .filter_map(|answer| if let Answer::Row(row) = answer { Some(row) } else { None })
                .collect(),
        )
    }

    /// Checks leases and memory until the program has ended.
    pub(crate) fn watch(&self) {
        let mut within = Instant::now();
        while !self.is_over.load(Ordering::SeqCst) && !self.has_failed() {
            let now = Instant::now();
            match self.check() {
                Ok(false) if now > within + self.program.longest_wait() => {
                    self.fail("leases and contexts are above the budget for good".to_owned());
                }
                Ok(false) => {}
                Ok(true) => within = now,
                Err(why) => self.fail(why),
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Returns whether contexts fit within the budget too: a joining process has one before others have made room.
    fn check(&self) -> Outcome<bool> {
        let memory = self.meter.read("0").map_err(|error| error.to_string())?;
        if memory.used > memory.total {
            return Err(format!("{} of {} are used", memory.used, memory.total));
        }
        // Of a worker that has not joined an agent that begins, the agent knows what it had at most.
        let Some(rows) = self.ps().filter(|rows| rows.iter().all(|row| row.state != "silent")) else {
            return Ok(true);
        };
        let leased: Bytes = rows.iter().map(|row| row.leased).sum();
        if leased > self.budget {
            return Err(format!("leases of {leased} in a budget of {}: {rows:?}", self.budget));
        }
        let contexts = rows.iter().filter(|row| row.pid != 0 && row.note.is_none() && !row.gpus.is_empty());
        let contexts = Bytes::new(CONTEXT.get() * u64::try_from(contexts.count()).unwrap());
        Ok(leased.saturating_add(contexts) <= self.budget)
    }

    /// Waits until no process uses the GPU.
    pub(crate) fn is_empty(&self, within: Duration) -> Outcome<()> {
        let end = Instant::now() + within;
        loop {
            let memory = self.meter.read("0").map_err(|error| error.to_string())?;
            if memory.used.is_zero() {
                return Ok(());
            }
            if Instant::now() > end {
                return Err(format!("{} are still used: {:?}", memory.used, memory.processes));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Describes a failure: workers, decisions, the last lines of all logs.
    pub(crate) fn report(&self) -> String {
        let mut text = String::new();
        for row in self.ps().into_iter().flatten() {
            let _ = writeln!(text, "ps: {row:?}");
        }
        for answer in ask(&self.socket(), Ask::Explain, |_| {}).into_iter().flatten() {
            let _ = writeln!(text, "explain: {answer:?}");
        }
        let mut logs = vec![self.path().join("agent.log")];
        for folder in [self.path().to_owned(), self.path().join("logs")] {
            let entries = fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path());
            logs.extend(entries.filter(|path| path.extension().is_some_and(|extension| extension == "log")));
        }
        logs.sort();
        logs.dedup();
        for log in logs {
            let read = fs::read_to_string(&log).unwrap_or_default();
            let lines = read.lines().filter(|line| {
                !line.is_empty() && !line.starts_with("running ") && !line.starts_with("test ")
            });
            let last = lines.fold(VecDeque::new(), |mut last, line| {
                if last.len() == TAIL {
                    last.pop_front();
                }
                last.push_back(line);
                last
            });
            for line in last {
                let _ = writeln!(text, "{}: {line}", log.file_name().unwrap().display());
            }
        }
        text
    }

    /// Ends all remaining processes of the program.
    pub(crate) fn end(&self) {
        self.is_over.store(true, Ordering::SeqCst);
        if let Some(mut agent) = self.agent.lock().unwrap().take() {
            let _ = agent.kill();
            let _ = agent.wait();
        }
        for pid in self.pids.lock().unwrap().drain(..) {
            if is_ours(pid, self.path()) {
                signal(pid, libc::SIGKILL);
            }
        }
        for (_, mut child) in std::mem::take(&mut *self.children.lock().unwrap()) {
            let _ = child.kill();
            let _ = child.wait();
        }
        if let Ok(mut stream) = UnixStream::connect(self.path().join("control")) {
            let _ = writeln!(stream, "over");
        }
    }
}

/// Returns whether a process belongs to this folder: its id may have been reused.
fn is_ours(pid: u32, folder: &Path) -> bool {
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let ours = format!("{FOLDER}={}", folder.display());
    environment.split(|byte| *byte == 0).any(|variable| variable == ours.as_bytes())
}

pub(crate) fn signal(pid: u32, signal: i32) {
    // SAFETY: a signal to a process that the test or its agent has started.
    unsafe { libc::kill(i32::try_from(pid).unwrap(), signal) };
}

/// Runs `glake serve` with the file in a folder. It ends with the test, however the test ends.
pub(crate) fn serve(folder: &Path) -> std::process::ExitCode {
    std::thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(0)
    });
    let path = folder.display();
    let device = format!("sim:{path}/gpu.toml@{path}/gpus");
    let words = ["glake", "--device", &device, "serve", &format!("{path}/node.toml"), "--socket"];
    let words = words.into_iter().map(Into::into).chain([
        folder.join("agent.sock").into_os_string(),
        "--logs".into(),
        folder.join("logs").into_os_string(),
    ]);
    glake::commands::main(words, glake_runtime::config::Environment::of_process())
}

/// Configuration file of the agent.
fn file(program: &Program, budget: Bytes, folder: &Path) -> String {
    let own = std::env::current_exe().unwrap();
    let mut text =
        format!("[node]\nbudget = {}\nreserve = \"0B\"\nfloor = {}\n", budget.get(), CONTEXT.get());
    for model in &program.models {
        let Some([weights, kv]) = model.listed else { continue };
        let name = model.name;
        let _ = write!(text, "[[worker]]\nname = {name:?}\nweights = \"{weights}MiB\"\nkv = \"{kv}MiB\"\n");
        let start = match model.by {
            By::Boot => "boot",
            By::Request => "request",
            By::Hand | By::HandJoined => continue,
        };
        let config = folder.join("worker.toml");
        let _ = writeln!(
            text,
            "start = {start:?}\ncommand = [{own:?}, \"--exact\", \"worker\", \"--ignored\", \"--nocapture\"]\n\
             env = {{ GLAKE_CONFIG = {config:?} }}"
        );
    }
    text
}

/// Settings of all workers, in sizes for a test.
fn settings() -> String {
    format!(
        "transfer.calibrations = \"\"\n\
         tiers = {{ extent = \"2MiB\", host_budget = \"192MiB\", host_spare = 0, drain_timeout_ms = 60000 }}\n\
         lease = {{ growth = \"{GROWTH}MiB\", grow_timeout_ms = 5000, refill_timeout_ms = 60000 }}\n"
    )
}

/// Model of a machine with one GPU.
fn topology(memory: Bytes) -> String {
    format!(
        "name = \"small\"\n\
         gpus = [{{ name = \"Simulated H200\", memory = {}, link = {{ to_gpu = 55.5, from_gpu = 55.4 }}, \
         local = 1980.0, latency = 7.0, context = {} }}]\n\
         [host]\nread = 213.0\nwrite = 160.0\npageable_to_gpu = 9.5\npageable_from_gpu = 19.4\n",
        memory.get(),
        CONTEXT.get()
    )
}
