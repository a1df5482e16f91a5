//! `glake serve` with workers of the library that it starts, on simulated GPUs that processes share.

#![allow(clippy::unwrap_used)] // also in the functions that tests call

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use glake_device::Stream;
use glake_runtime::config::{Environment, Sources};
use glake_runtime::process::{Process, Shrink, Tags, WhenClosed};
use glake_units::Bytes;
use serde_json::Value;

const FOLDER: &str = "GLAKE_TEST_SUPERVISE_FOLDER";
/// However busy the machine is, it is done by then.
pub(super) const LONG: Duration = Duration::from_secs(60);

/// A worker as its program is: it joins by itself, by what the agent has put into its environment, until its folder is
/// gone.
#[test]
#[ignore = "the process that an agent starts"]
fn worker() {
    let Some(folder) = std::env::var_os(FOLDER).map(PathBuf::from) else { return };
    let sources = Sources { environment: Environment::of_process(), ..Sources::default() };
    let small = format!(
        "tiers = {{ extent = \"4MiB\", files = {:?} }}\ntransfer.calibrations = \"\"\n",
        folder.join("extents")
    );
    let mut config = sources.with_overrides("test", &small).unwrap().load().unwrap();
    config.tiers.host_arena = Bytes::mib(16);
    let process = Process::start(config).unwrap();
    process.malloc(0, Bytes::mib(32), Stream(0)).unwrap();
    let id = process.regions().begin_use(&Tags::All, WhenClosed::Refill, None).unwrap();
    process.regions().gate().end_use(id).unwrap();
    println!("\nserves");
    if folder.join("shrinks").exists() {
        process.regions().shrink(&Shrink::default()).unwrap();
    }
    while folder.exists() {
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// `glake serve`, until it is dropped: started with a file open that is none of its business.
pub(super) struct Agent {
    pub(super) child: Child,
    pub(super) folder: tempfile::TempDir,
}

pub(super) fn command(folder: &Path, words: &[&str]) -> Command {
    let device = format!("sim:h200x4@{}", folder.join("gpus").display());
    let mut command = Command::new("sh");
    command.args(["-c", "exec \"$@\" 7</dev/zero", "sh", env!("CARGO_BIN_EXE_glake"), "--device", &device]);
    command
        .args(words)
        .env_clear()
        .env("XDG_RUNTIME_DIR", folder)
        .env("XDG_STATE_HOME", folder.join("state"))
        .env("PATH", "/usr/bin:/bin")
        .env(FOLDER, folder);
    command
}

impl Agent {
    pub(super) fn start(workers: &str) -> Agent {
        Agent::of(tempfile::tempdir().unwrap(), "", workers)
    }

    fn of(folder: tempfile::TempDir, more: &str, workers: &str) -> Agent {
        let text = format!("[node]\nbudget = \"4GiB\"\n{more}{workers}");
        std::fs::write(folder.path().join("node.toml"), text).unwrap();
        Agent { child: Agent::serve(folder.path()), folder }
    }

    pub(super) fn serve(folder: &Path) -> Child {
        let mut command = command(folder, &["serve", folder.join("node.toml").to_str().unwrap()]);
        let mut child = command.env("GLAKE_LOG", "info").stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stderr.as_mut().unwrap()).lines().map_while(Result::ok);
        let said = lines.into_iter().find(|line| line.contains("serving")).unwrap_or_default();
        let logs = format!("; logs of workers in {};", folder.join("state/glake").display());
        let has_workers = std::fs::read_to_string(folder.join("node.toml")).unwrap().contains("command");
        assert!(said.contains("serving") && said.contains(&logs) == has_workers, "{said}");
        child
    }

    pub(super) fn ask(&self, words: &[&str]) -> Output {
        command(self.folder.path(), words).output().unwrap()
    }

    fn row(&self, name: &str) -> Value {
        let output = self.ask(&["ps", "--json"]);
        let text = String::from_utf8(output.stdout).unwrap();
        let mut rows = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        rows.find(|row| row["worker"] == name).unwrap_or_default()
    }

    pub(super) fn until(&self, name: &str, so: impl Fn(&Value) -> bool) -> Value {
        let end = Instant::now() + LONG;
        loop {
            let row = self.row(name);
            if so(&row) {
                return row;
            }
            assert!(Instant::now() < end, "{row}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(super) fn file(more: &str) -> String {
    let own = std::env::current_exe().unwrap();
    let arguments = "\"--exact\", \"supervise::worker\", \"--ignored\", \"--nocapture\"";
    format!("[[worker]]\nname = \"chat\"\nweights = \"32MiB\"\ncommand = [{own:?}, {arguments}]\n{more}\n")
}

#[test]
fn a_worker_of_the_file_joins_by_its_name_and_outlives_the_agent() {
    let mut agent = Agent::start(&file(""));
    let is_resident = |row: &Value| ["idle", "resident"].contains(&row["state"].as_str().unwrap_or_default());
    let row = agent.until("chat", is_resident);
    let pid = row["pid"].as_u64().unwrap();
    assert!(row["resident"].as_u64() >= Some(32 << 20) && row["note"].is_null(), "{row}");
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().map(Result::unwrap);
    let has_zero =
        |path: PathBuf| std::fs::read_link(path).is_ok_and(|target| target == Path::new("/dev/zero"));
    assert!(!descriptors.into_iter().any(|entry| has_zero(entry.path())), "what the agent was started with");
    agent.child.kill().unwrap();
    agent.child.wait().unwrap();
    agent.child = Agent::serve(agent.folder.path());
    assert_eq!(agent.until("chat", is_resident)["pid"], pid);
    let stopped = agent.ask(&["stop", "chat"]);
    assert!(stopped.status.success() && stopped.stdout == b"chat: stopped\n", "{stopped:?}");
    assert_eq!(agent.row("chat")["state"], "stopped");
    assert!(agent.ask(&["start", "chat"]).status.success());
    let again = agent.row("chat");
    assert!(again["pid"] != pid && again["pid"] != 0, "{again}");
    let log = std::fs::read_to_string(agent.folder.path().join("state/glake/chat.log")).unwrap();
    assert_eq!(log.matches("\nserves\n").count(), 2, "{log}");
    agent.ask(&["stop", "chat"]);
}

/// The terminal's end is a SIGHUP, and no message can be written from then on.
#[test]
fn a_closed_terminal_ends_neither_the_agent_nor_its_workers() {
    let mut agent = Agent::start("");
    drop(agent.child.stderr.take());
    let path = agent.folder.path().join("node.toml");
    std::fs::write(&path, "[[worker]]\nname = \"w\"\ncommand = [\"sleep\", \"300\"]\n").unwrap();
    let pid = rustix::process::Pid::from_child(&agent.child);
    rustix::process::kill_process(pid, rustix::process::Signal::HUP).unwrap();
    // The agent has logged what changed.
    agent.until("w", |row| row["state"] == "starting");
    // The agent ends, and its worker does not; it can be ended afterwards.
    let worker = agent.row("w")["pid"].as_i64().unwrap();
    agent.child.kill().unwrap();
    agent.child.wait().unwrap();
    let status = || std::fs::read_to_string(format!("/proc/{worker}/stat")).unwrap_or_default();
    let lives = || !status().is_empty() && !status().contains(") Z ");
    assert!(lives());
    let stopped = agent.ask(&["stop", "--all"]);
    assert!(stopped.status.success() && stopped.stdout == b"w: stopped\n", "{stopped:?}");
    assert!(!lives());
    let error = String::from_utf8(agent.ask(&["stop", "--all"]).stderr).unwrap();
    assert!(error.contains("and none has left workers behind there"), "{error}");
    agent.child = Agent::serve(agent.folder.path());
    let stopped = agent.ask(&["stop", "--all"]);
    assert_eq!(String::from_utf8(stopped.stdout).unwrap(), "the agent and its workers: stopped\n");
    assert!(agent.child.wait().unwrap().success());
}

/// The worker's own shrink puts more into host memory than the agent's file allows all workers.
#[test]
fn host_memory_above_its_budget_goes_to_files_and_comes_back_from_there() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("shrinks"), "").unwrap();
    let agent = Agent::of(folder, "host_budget = \"20MiB\"\n", &file(""));
    let files = || {
        let entries = std::fs::read_dir(agent.folder.path().join("extents")).into_iter().flatten();
        entries.map(Result::unwrap).map(|entry| entry.metadata().map_or(0, |data| data.len())).sum::<u64>()
    };
    agent.until("chat", |row| row["evicted"].as_u64() >= Some(32 << 20));
    // 32 MiB of 20: down to 80 %, in extents of 4 MiB.
    agent.until("chat", |_| files() >= 16 << 20);
    assert!(agent.ask(&["refill", "chat"]).status.success());
    agent.until("chat", |row| row["evicted"] == 0 && row["resident"].as_u64() >= Some(32 << 20));
    let end = Instant::now() + LONG;
    while files() >= 1 << 20 {
        assert!(Instant::now() < end, "{} bytes of files are left", files());
        std::thread::sleep(Duration::from_millis(20));
    }
    agent.ask(&["stop", "chat"]);
}

#[test]
fn how_a_worker_ended_stands_in_the_table() {
    let agent = Agent::start("[[worker]]\nname = \"w\"\nweights = \"1GiB\"\ncommand = [\"false\"]\n");
    agent.until("w", |row| row["note"].as_str().unwrap_or_default().starts_with("exit 1"));
    let text = String::from_utf8(agent.ask(&["ps"]).stdout).unwrap();
    assert!(text.lines().next().unwrap().trim_end().ends_with("note") && text.contains("exit 1"), "{text}");
    let failed = agent.ask(&["start", "w"]);
    let log = format!("its log is {}\n", agent.folder.path().join("state/glake/w.log").display());
    let error = String::from_utf8(failed.stderr).unwrap();
    assert!(error.contains("ended: exit 1") && error.ends_with(&log), "{error}");
    let unknown = agent.ask(&["start", "x"]);
    let error = String::from_utf8(unknown.stderr).unwrap();
    assert!(unknown.status.code() == Some(1) && error.contains("the agent's file has w"), "{error}");
}

#[test]
fn what_cannot_be_started_is_said_by_a_check() {
    let folder = tempfile::tempdir().unwrap();
    let open = folder.path().join("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(&open, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let path = folder.path().join("node.toml");
    let logs = open.display().to_string();
    let socket = folder.path().join("other/a.sock").display().to_string();
    let logs_of_socket = format!("logs in {}/state/glake{socket}\n", folder.path().display());
    let worker = |name: &str, lines: &str| format!("[[worker]]\nname = {name:?}\n{lines}\n");
    for (text, more, says) in [
        (worker("w", "command = [\"true\"]"), &[][..], "1 of the workers are started by the agent, logs in"),
        (worker("w", "command = [\"true\"]"), &["--logs", &logs], "has mode 0777: others may write to it"),
        (worker("w", "command = [\"true\"]"), &["--logs", "logs"], "does not begin at the root"),
        (worker("w", "command = [\"true\"]"), &["--socket", &socket], &logs_of_socket),
        (worker("w", "command = [\"no-such\"]"), &[], "starts \"no-such\", and no folder of PATH has it"),
        (worker("w", "command = [\"/etc/passwd\"]"), &[], "starts \"/etc/passwd\", which is not executable"),
        (worker("w", "command = [\"/no/such\"]"), &[], "and no such file is there"),
        (worker("w", "command = [\"no-such\"]\nstart = \"never\""), &[], "in order"),
        (worker("w", "gpus = [9]"), &[], "names GPU 9 in gpus, and this server has 0, 1, 2, 3"),
        (
            worker("w", "weights = \"140GiB\""),
            &[],
            "worker \"w\" never fits: it needs 140.00 GiB of GPU 0, which has",
        ),
        (worker("w", "weights = \"138GiB\""), &[], "fits into GPU 0 with "),
        (worker("w", "command = \"python a.py\""), &[], "write [\"python\", \"a.py\"]"),
        (worker("w", "command = 3"), &[], "expected a list of strings, without a shell"),
        (worker("w", "start = \"boot\""), &[], "start of worker \"w\" is Boot: give its command too"),
        (worker("a/b", "command = [\"true\"]"), &[], "1 to 64 of A-Z a-z 0-9 . _ -"),
        (worker("w", "command = [\"true\"]\nenv = { GLAKE_AGENT = \"/x\" }"), &[], "are the agent's to set"),
    ] {
        std::fs::write(&path, &text).unwrap();
        let words = [&["serve", path.to_str().unwrap(), "--check"], more].concat();
        let output = command(folder.path(), &words).output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8(said).unwrap();
        assert!(said.contains(says), "{text}: {said}");
    }
}
