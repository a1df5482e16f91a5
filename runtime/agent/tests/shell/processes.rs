//! Processes under test: an agent, and workers.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use glake_agent::{DriverCommand, Launcher, Options, ask, close_inherited, serve};
use glake_arbiter::node::NodeFile;
use glake_meter::Meter as _;
use glake_units::Bytes;
use glake_wire::{Answer, Ask, Request, WorkerRow};

use crate::meter::FolderMeter;
use crate::puppet::{FLOOR, Puppet};

/// Timeout of all waits, generous for a busy machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);
const FOLDER: &str = "GLAKE_TEST_AGENT_FOLDER";
const WORKER: &str = "GLAKE_TEST_AGENT_WORKER";
const TOTAL: Bytes = Bytes::gib(80);

/// Entry point of a process under test, not a test.
#[test]
#[ignore = "the process that the tests beside it start"]
fn agent() {
    let Some(folder) = std::env::var_os(FOLDER).map(PathBuf::from) else { return };
    close_inherited();
    if folder.join("subreaper").exists() {
        // As process 1 of a container.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid())).unwrap();
    }
    let path = folder.join("node.toml");
    let file = NodeFile::parse(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let meter = std::sync::Arc::new(FolderMeter::new(&folder.join("meter"), TOTAL));
    // Duration in milliseconds.
    let limit = std::fs::read_to_string(folder.join("limit")).ok().and_then(|text| text.parse().ok());
    let limit = limit.map_or(DriverCommand::LIMIT, Duration::from_millis);
    let driver = DriverCommand { program: folder.join("driver"), arguments: Vec::new(), limit };
    let launcher = Launcher { logs: folder.join("logs"), ..Launcher::default() };
    let options = Options {
        file,
        path: Some(path),
        socket: socket(&folder),
        meter,
        driver,
        launcher,
        stops_workers: folder.join("stops").exists(),
    };
    let thread = std::fs::read_link("/proc/thread-self").unwrap();
    serve(&options, |_| println!("\nserving {}", thread.file_name().unwrap().to_str().unwrap())).unwrap();
    println!("\nended");
}

/// Entry point of a process under test, not a test.
#[test]
#[ignore = "the process that the tests beside it start"]
fn worker() {
    let (Some(folder), Ok(what)) = (std::env::var_os(FOLDER).map(PathBuf::from), std::env::var(WORKER))
    else {
        return;
    };
    let words: Vec<&str> = what.split(' ').collect();
    let mut puppet = Puppet::new(words[0], socket(&folder), folder.join("meter"), words[1].parse().unwrap());
    let left = words.get(2).map(|left| (left.parse().unwrap(), words[3] == "before"));
    puppet.dies_at(left);
    puppet.run();
}

/// Entry point of a process that an agent starts by its file, not a test. It prints its environment.
#[test]
#[ignore = "the process that an agent starts"]
fn supervised() {
    let Some(folder) = std::env::var_os(FOLDER).map(PathBuf::from) else { return };
    let variable = |name| std::env::var(name).unwrap();
    let (name, socket) = (variable("GLAKE_WORKER"), PathBuf::from(variable("GLAKE_AGENT")));
    println!("\nstarted as {name}");
    for entry in std::fs::read_dir("/proc/self/fd").unwrap().map(Result::unwrap) {
        let target = std::fs::read_link(entry.path()).unwrap_or_default();
        println!("descriptor {} {}", entry.file_name().display(), target.display());
    }
    println!("group {}", rustix::process::getpgrp() == rustix::process::getpid());
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    println!("limit {:?}", limit.current);
    println!("directory {}", std::env::current_dir().unwrap().display());
    eprintln!("said on the other stream too");
    Puppet::new(&name, socket, folder.join("meter"), Bytes::gib(1)).run_alone();
}

pub(crate) fn socket(folder: &Path) -> PathBuf {
    folder.join("glake/agent.sock")
}

/// Process under test, and its output.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl Process {
    fn start(test: &str, folder: &Path, worker: Option<(&str, u64)>, before: &[&str]) -> Process {
        let own = std::env::current_exe().unwrap();
        let mut command = match before {
            [] => Command::new(own),
            [first, rest @ ..] => {
                let mut command = Command::new(first);
                command.args(rest).arg(own);
                command
            }
        };
        command.args(["--exact", test, "--ignored", "--nocapture"]).env(FOLDER, folder);
        command.env("GLAKE_LOG", "off").stdin(Stdio::piped()).stdout(Stdio::piped());
        if let Some((what, floor_mib)) = worker {
            command.env(WORKER, what).env(FLOOR, floor_mib.to_string());
        }
        let mut child = command.spawn().unwrap();
        let (said, lines) = channel();
        let out = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || out.lines().map_while(Result::ok).try_for_each(|line| said.send(line)));
        Process { stdin: child.stdin.take(), child, lines }
    }

    pub(crate) fn tell(&mut self, line: &str) {
        // A dead process receives nothing.
        let _ = writeln!(self.stdin.as_mut().unwrap(), "{line}");
    }

    /// Returns the next output line with this prefix; `None` if the process died before.
    #[track_caller]
    pub(crate) fn hear(&self, what: &str) -> Option<String> {
        let end = Instant::now() + LIMIT;
        loop {
            match self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(line) if line.starts_with(what) => return Some(line),
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) => panic!("{what} was not said within {LIMIT:?}"),
            }
        }
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.child.id().try_into().unwrap()).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
        // The process may still act until the stop takes effect.
        let state = || std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        while signal == rustix::process::Signal::STOP && !state().contains(") T ") {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Server under test: its agent, and its meter.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) meter: FolderMeter,
    pub(crate) agent: Process,
    /// Only thread of the agent.
    pub(crate) thread: i32,
    pub(crate) budget: Bytes,
    floor_mib: u64,
}

/// Metrics of an agent.
#[derive(Debug)]
pub(crate) struct Metrics(String);

impl Metrics {
    /// Returns the value of a sample.
    #[track_caller]
    pub(crate) fn of(&self, sample: &str) -> f64 {
        let line = self.0.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {sample} in {}", self.0)).parse().unwrap()
    }
}

impl Node {
    /// Creates a node with this budget, plus half a GiB for each context and half a GiB of reserve.
    pub(crate) fn new(budget: Bytes) -> Node {
        Node::with_floor(budget, 512)
    }

    /// Creates a node with contexts of `floor_mib` MiB.
    pub(crate) fn with_floor(budget: Bytes, floor_mib: u64) -> Node {
        Node::with(budget, floor_mib, "")
    }

    /// Creates a node with additional lines in its file.
    pub(crate) fn with(budget: Bytes, floor_mib: u64, lines: &str) -> Node {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("meter")).unwrap();
        let node = format!("[node]\nbudget = {}\nfloor = \"{floor_mib}MiB\"\n{lines}", budget.get());
        std::fs::write(folder.path().join("node.toml"), node).unwrap();
        let meter = FolderMeter::new(&folder.path().join("meter"), TOTAL);
        let (agent, thread) = Node::start(folder.path(), &[]);
        Node { folder, meter, agent, thread, budget, floor_mib }
    }

    pub(crate) fn start(folder: &Path, before: &[&str]) -> (Process, i32) {
        let agent = Process::start("processes::agent", folder, None, before);
        let serving = agent.hear("serving ").unwrap();
        (agent, serving["serving ".len()..].parse().unwrap())
    }

    /// Starts a new agent after the kill of the old one.
    pub(crate) fn restart(&mut self) {
        (self.agent, self.thread) = Node::start(self.folder.path(), &[]);
    }

    /// Starts a new agent through the command `before`.
    pub(crate) fn restart_under(&mut self, before: &[&str]) {
        self.agent.kill();
        (self.agent, self.thread) = Node::start(self.folder.path(), before);
    }

    pub(crate) fn worker(&self, what: &str) -> Process {
        Process::start("processes::worker", self.folder.path(), Some((what, self.floor_mib)), &[])
    }

    pub(crate) fn joined(&self, what: &str) -> Process {
        let worker = self.worker(what);
        worker.hear("joined").unwrap();
        worker
    }

    pub(crate) fn ask(&self, request: impl Into<Request>) -> Result<Vec<Answer>, String> {
        ask(&socket(self.folder.path()), request, |_| {}).map_err(|error| error.to_string())
    }

    pub(crate) fn ps(&self) -> Vec<WorkerRow> {
        let answers = self.ask(Ask::Ps).unwrap().into_iter();
        answers.filter_map(|row| if let Answer::Row(row) = row { Some(row) } else { None }).collect()
    }

    /// Reads the current metrics of the agent.
    pub(crate) fn metrics(&self) -> Metrics {
        let parts = self.ask(Ask::Metrics).unwrap().into_iter();
        let texts = parts.filter_map(|part| if let Answer::Text { text } = part { Some(text) } else { None });
        Metrics(texts.collect())
    }

    /// Waits until the condition holds for the rows of `glake ps`.
    pub(crate) fn until(&self, what: &str, so: impl Fn(&[WorkerRow]) -> bool) -> Vec<WorkerRow> {
        let end = Instant::now() + LIMIT;
        loop {
            let rows = self.ps();
            if so(&rows) {
                return rows;
            }
            assert!(Instant::now() < end, "{what}: {rows:#?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Returns the number of wake-ups of the agent's thread.
    pub(crate) fn wakes(&self) -> u64 {
        let (process, thread) = (self.agent.child.id(), self.thread);
        let status = std::fs::read_to_string(format!("/proc/{process}/task/{thread}/status")).unwrap();
        let lines = status.lines().filter(|line| line.contains("ctxt_switches"));
        lines.map(|line| line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()).sum()
    }

    /// Lets a worker get its memory, use it, and become idle.
    pub(crate) fn visit(&self, worker: &mut Process, name: &str) {
        worker.tell("want");
        worker.hear("resident").unwrap();
        // The agent must get the message before the use starts; otherwise it would wait for the use.
        let settled =
            |row: &WorkerRow| row.worker == name && ["idle", "resident"].contains(&row.state.as_str());
        self.until("its refill is over", |rows| rows.iter().any(settled));
        worker.tell("use");
        worker.tell("end");
        worker.hear("ended").unwrap();
    }

    /// Checks that all processes together use at most the budget.
    pub(crate) fn check(&self) {
        check(&self.meter, self.budget);
    }
}

pub(crate) fn check(meter: &FolderMeter, budget: Bytes) {
    let used = meter.read("0").unwrap().used;
    assert!(used <= budget, "{used} of {budget}");
}
