//! `glake checkpoint` on simulated GPUs that processes share, with workers that are processes.

#![allow(clippy::unwrap_used)] // also in the functions that tests call

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use glake_device::{DeviceId, Driver as _, ExtentProperties, Place, Stream};
use glake_meter::Meter as _;
use glake_runtime::config::{Environment, Sources};
use glake_runtime::process::{Process, Tags, WhenClosed};
use glake_sim::{SimMeter, SimOptions, Simulator, load};
use glake_tiers::{Policy, RegionOptions};
use glake_units::Bytes;

const FOLDER: &str = "GLAKE_TEST_CHECKPOINT_FOLDER";
const WHAT: &str = "GLAKE_TEST_CHECKPOINT_WHAT";
const GPU: DeviceId = DeviceId(0);

/// The worker: it has a context and so many MiB, and says whether it still has what it wrote whenever it is asked.
#[test]
#[ignore = "the process that the tests beside it start"]
fn worker() {
    let (Some(folder), Ok(what)) = (std::env::var_os(FOLDER), std::env::var(WHAT)) else { return };
    let shared = Some(PathBuf::from(&folder));
    let topology = load("h200x4").unwrap();
    let sim = Simulator::new(SimOptions { topology, shared, ..SimOptions::default() }).unwrap();
    let mut parts = what.split(' ');
    let size = Bytes::mib(parts.next().unwrap().parse().unwrap());
    let properties = ExtentProperties { place: Place::Gpu(GPU), exportable: false, gpu_direct: false };
    sim.create(size, properties).unwrap();
    let stream = sim.stream_create(GPU, glake_device::Priority::Normal).unwrap();
    let mut beside = None;
    for part in parts {
        match part {
            "nccl" => {
                let watch = || std::thread::sleep(Duration::from_secs(600));
                std::thread::Builder::new().name("pt_nccl_watchdg".to_owned()).spawn(watch).unwrap();
            }
            _ => beside = Some(Worker::start(Path::new(&folder), "2")),
        }
    }
    println!("\nready");
    for line in std::io::stdin().lines() {
        if line.unwrap() == "end" {
            break;
        }
        sim.stream_synchronize(GPU, stream).unwrap();
        println!("\nworks");
    }
    drop(beside);
}

/// A worker of the library: it joins an agent, and uses its memory whenever it is asked.
#[test]
#[ignore = "the process that the tests beside it start"]
fn joined() {
    let (Some(folder), Ok(socket)) = (std::env::var_os(FOLDER), std::env::var(WHAT)) else { return };
    let device = format!("sim:h200x4@{}", Path::new(&folder).display());
    let environment = Environment::from_iter([("GLAKE_DEVICE", &*device), ("GLAKE_LOG", "off")]);
    let sources = Sources { environment, ..Sources::default() };
    let small = "tiers = { extent = \"4MiB\" }\ntransfer.calibrations = \"\"\n";
    let mut config = sources.with_overrides("test", small).unwrap().load().unwrap();
    config.tiers.host_arena = Bytes::mib(16);
    let process = Process::start(config).unwrap();
    process.agent().join(Some("chat"), Some(Path::new(&socket))).unwrap();
    process.regions().define(RegionOptions { policy: Policy::Keep, ..RegionOptions::of("weights") }).unwrap();
    process.regions().enter("weights").unwrap();
    process.malloc(0, Bytes::mib(32), Stream(0)).unwrap();
    process.regions().leave().unwrap();
    println!("\nready");
    for line in std::io::stdin().lines() {
        if line.unwrap() == "end" {
            break;
        }
        let id = process.regions().begin_use(&Tags::All, WhenClosed::Refill, None).unwrap();
        process.regions().gate().end_use(id).unwrap();
        println!("\nworks");
    }
}

pub(crate) struct Worker {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
}

impl Worker {
    fn start(folder: &Path, what: &str) -> Worker {
        Worker::of("checkpoint::worker", folder, what)
    }

    fn of(test: &str, folder: &Path, what: &str) -> Worker {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "--nocapture", test])
            .envs([(FOLDER, folder.as_os_str()), (WHAT, what.as_ref())])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (said, lines) = channel();
        let out = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || out.lines().map_while(Result::ok).try_for_each(|line| said.send(line)));
        let worker = Worker { stdin: child.stdin.take().unwrap(), child, lines };
        assert!(worker.says("ready", Duration::from_secs(30)));
        worker
    }

    fn ask(&mut self) {
        writeln!(self.stdin, "works?").unwrap();
    }

    fn says(&self, what: &str, within: Duration) -> bool {
        std::iter::from_fn(|| self.lines.recv_timeout(within).ok()).any(|line| line == what)
    }

    fn pid(&self) -> String {
        self.child.id().to_string()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Its child goes with it.
        let _ = writeln!(self.stdin, "end");
        let limit = std::time::Instant::now() + Duration::from_secs(5);
        while self.child.try_wait().is_ok_and(|ended| ended.is_none()) && std::time::Instant::now() < limit {
            std::thread::sleep(Duration::from_millis(2));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ran(folder: &Path, arguments: &[&str]) -> Output {
    ran_in(folder, folder, arguments)
}

/// The same, with another folder for what this user's programs keep while they run.
fn ran_in(runtime: &Path, folder: &Path, arguments: &[&str]) -> Output {
    let device = format!("sim:h200x4@{}", folder.display());
    let mut command = Command::new(env!("CARGO_BIN_EXE_glake"));
    command.args(["--device", &device, "checkpoint"]).args(arguments);
    command.env_clear().env("XDG_RUNTIME_DIR", runtime).output().unwrap()
}

/// What is written down beside the agent's socket.
fn records(folder: &Path) -> Vec<PathBuf> {
    let entries =
        std::fs::read_dir(folder.join("glake")).into_iter().flatten().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.extension().is_some_and(|extension| extension == "json")).collect()
}

fn done(folder: &Path, arguments: &[&str]) -> serde_json::Value {
    let output = ran(folder, &[&["--json"], arguments].concat());
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn refused(folder: &Path, arguments: &[&str]) -> String {
    failed(folder, arguments, 4)
}

fn failed(folder: &Path, arguments: &[&str], code: i32) -> String {
    says(ran(folder, arguments), code)
}

fn says(output: Output, code: i32) -> String {
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.stdout.is_empty() && error.lines().count() == 1, "{error}");
    assert_eq!(output.status.code(), Some(code), "{error}");
    error
}

fn used(folder: &Path, worker: &Worker) -> Bytes {
    let meter = SimMeter::open(folder, &load("h200x4").unwrap()).unwrap();
    meter.read("0").unwrap().of_process(worker.child.id())
}

const SHORT: Duration = Duration::from_millis(100);
const LONG: Duration = Duration::from_secs(30);

#[test]
fn a_worker_gives_its_context_back_and_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let mut worker = Worker::start(folder.path(), "2");
    let pid = worker.pid();
    let whole = Bytes::mib(642);
    assert_eq!(used(folder.path(), &worker), whole);
    for _ in 0..2 {
        let row = done(folder.path(), &[&pid]);
        assert_eq!((&row["state"], &row["bytes"]), (&"checkpointed".into(), &whole.get().into()), "{row}");
        assert_eq!(used(folder.path(), &worker), Bytes::ZERO);
        worker.ask();
        assert!(!worker.says("works", SHORT));
        // Asked again it is what it is.
        assert_eq!(done(folder.path(), &[&pid])["state"], "checkpointed");
        let row = done(folder.path(), &[&pid, "--restore"]);
        assert_eq!((&row["state"], &row["bytes"]), (&"running".into(), &whole.get().into()), "{row}");
        assert!(worker.says("works", LONG));
        assert_eq!(done(folder.path(), &[&pid, "--restore"])["bytes"], 0);
    }
    let text = String::from_utf8(ran(folder.path(), &[&pid]).stdout).unwrap();
    assert!(text.contains("checkpointed after ") && text.contains(" s, 642.00 MiB given back"), "{text}");
}

#[test]
fn what_cannot_be_checkpointed_is_refused_and_runs_on() {
    let folder = tempfile::tempdir().unwrap();
    for (what, says) in [
        ("2048", "has 2.62 GiB on GPU 0, and 1.00 GiB is allowed: shrink it first"),
        ("2 child", "uses a GPU too: end it first"),
        ("2 nccl", "communicators of NCCL (thread pt_nccl_watchdg)"),
    ] {
        let mut worker = Worker::start(folder.path(), what);
        let error = refused(folder.path(), &[&worker.pid()]);
        assert!(error.contains(says), "{what}: {error}");
        worker.ask();
        assert!(worker.says("works", LONG), "{what}");
    }
    let mut worker = Worker::start(folder.path(), "2048");
    done(folder.path(), &[&worker.pid(), "--most", "3GiB"]);
    done(folder.path(), &[&worker.pid(), "--restore"]);
    let error = refused(folder.path(), &[&worker.pid(), "--start", "1"]);
    assert!(error.contains("and not at 1: the one that was meant has ended"), "{error}");
    let error = refused(folder.path(), &[&std::process::id().to_string()]);
    assert!(error.contains("the meter lists it on no GPU: it has no context there"), "{error}");
    // It has nothing that could be locked.
    assert_eq!(done(folder.path(), &[&std::process::id().to_string(), "--restore"])["state"], "running");
    let error = refused(folder.path(), &["4194304"]);
    assert!(error.contains("there is no process 4194304 here"), "{error}");
    worker.ask();
    assert!(worker.says("works", LONG));
}

/// Takes all of the GPU but 560 MiB, less than a worker of 2 MiB needs.
fn full(folder: &Path) -> Worker {
    let total = SimMeter::open(folder, &load("h200x4").unwrap()).unwrap().read("0").unwrap().total;
    let rest = total.saturating_sub(Bytes::mib(1200)).get() >> 21 << 1;
    Worker::start(folder, &rest.to_string())
}

#[test]
fn a_restore_without_room_asks_for_nothing_and_is_done_when_there_is() {
    let folder = tempfile::tempdir().unwrap();
    let mut worker = Worker::start(folder.path(), "2");
    let pid = worker.pid();
    done(folder.path(), &[&pid]);
    let written = records(folder.path());
    assert_eq!(
        std::fs::read_to_string(&written[0]).unwrap(),
        format!("{{\"gpus\":{{\"0\":{}}}}}", 642 << 20)
    );
    let other = full(folder.path());
    for _ in 0..2 {
        let error = failed(folder.path(), &[&pid, "--restore"], 3);
        let says = "stays checkpointed: its GPUs have no room for what it had (GPU 0 has ";
        assert!(error.contains(says) && error.contains(" free, and 706.00 MiB are needed)"), "{error}");
    }
    assert_eq!(records(folder.path()), written);
    drop(other);
    done(folder.path(), &[&pid, "--restore"]);
    assert!(records(folder.path()).is_empty());
    worker.ask();
    assert!(worker.says("works", LONG));
}

#[test]
fn without_a_record_so_much_has_to_be_free_and_a_wrong_word_loses_the_process() {
    let folder = tempfile::tempdir().unwrap();
    let workers: Vec<Worker> = (0..3).map(|_| Worker::start(folder.path(), "2")).collect();
    let pids: Vec<String> = workers.iter().map(Worker::pid).collect();
    pids.iter().for_each(|pid| _ = done(folder.path(), &[pid]));
    records(folder.path()).iter().for_each(|path| std::fs::remove_file(path).unwrap());
    let other = full(folder.path());
    let error = failed(folder.path(), &[&pids[0], "--restore"], 3);
    assert!(
        error.contains("what it had is not written down") && error.contains("1.00 GiB are needed"),
        "{error}"
    );
    failed(folder.path(), &[&pids[0], "--restore", "--room", "2GiB"], 3);
    for (pid, room) in [(&pids[1], "300MiB"), (&pids[2], "0")] {
        let error = failed(folder.path(), &[pid, "--restore", "--room", room], 5);
        let says = "is lost, for this driver does not restore one whose restore has failed once";
        assert!(error.contains("not have enough free memory") && error.contains(says), "{error}");
    }
    drop(other);
    let error = failed(folder.path(), &[&pids[1], "--restore"], 5);
    assert!(error.contains("CUDA error 304") && error.contains("end it, and start it again"), "{error}");
    done(folder.path(), &[&pids[0], "--restore", "--room", "700MiB"]);
}

#[test]
fn what_is_free_is_known_before_the_driver_is_asked() {
    let folder = tempfile::tempdir().unwrap();
    let worker = Worker::start(folder.path(), "2");
    done(folder.path(), &[&worker.pid()]);
    // Of a GPU that the meter does not know.
    std::fs::write(&records(folder.path())[0], "{\"gpus\":{\"9\":1}}").unwrap();
    let error = failed(folder.path(), &[&worker.pid(), "--restore"], 4);
    assert!(error.contains("what is free of GPU 9 cannot be read") && error.contains("--room 0"), "{error}");
    done(folder.path(), &[&worker.pid(), "--restore", "--room", "0"]);
    // What it has is written down first.
    let nowhere = folder.path().join("no/such");
    let error = says(ran_in(&nowhere, folder.path(), &[&worker.pid()]), 4);
    assert!(error.contains("what it has cannot be written down") && error.contains("--socket"), "{error}");
    let open = folder.path().join("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(&open, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let socket = open.join("agent.sock").display().to_string();
    let error = failed(folder.path(), &[&worker.pid(), "--socket", &socket], 4);
    assert!(error.contains("has mode 0755"), "{error}");
    // One that runs on has none, and one that has ended leaves none.
    refused(folder.path(), &[&worker.pid(), "--most", "1MiB"]);
    assert!(records(folder.path()).is_empty());
    done(folder.path(), &[&worker.pid()]);
    assert_eq!(records(folder.path()).len(), 1);
    drop(worker);
    refused(folder.path(), &["4194304"]);
    assert!(records(folder.path()).is_empty());
}

#[test]
fn restores_take_turns() {
    let folder = tempfile::tempdir().unwrap();
    let worker = Worker::start(folder.path(), "2");
    let pid = worker.pid();
    done(folder.path(), &[&pid]);
    let lock = std::fs::File::create(folder.path().join("glake/checkpoint.lock")).unwrap();
    lock.lock().unwrap();
    std::thread::scope(|scope| {
        let restored = scope.spawn(|| done(folder.path(), &[&pid, "--restore"]));
        std::thread::sleep(SHORT);
        assert!(!restored.is_finished());
        lock.unlock().unwrap();
        assert_eq!(restored.join().unwrap()["state"], "running");
    });
}

/// `glake serve`, until it is dropped.
struct Agent {
    child: Child,
    socket: String,
    device: String,
}

impl Agent {
    fn start(folder: &Path, gpus: &Path) -> Agent {
        Agent::start_as(Path::new(env!("CARGO_BIN_EXE_glake")), folder, gpus)
    }

    fn start_as(program: &Path, folder: &Path, gpus: &Path) -> Agent {
        let node = folder.join("node.toml");
        std::fs::write(&node, "[node]\nbudget = \"4GiB\"\ncheckpoint_after_s = 1\n").unwrap();
        let socket = folder.join("glake/agent.sock").display().to_string();
        let device = format!("sim:h200x4@{}", gpus.display());
        let serve = ["--device", &device, "serve", node.to_str().unwrap(), "--socket", &socket];
        let mut command = Command::new(program);
        let mut child = command.args(serve).env_clear().stderr(Stdio::piped()).spawn().unwrap();
        let mut said = String::new();
        BufReader::new(child.stderr.as_mut().unwrap()).read_line(&mut said).unwrap();
        assert!(said.contains("serving"), "{said}");
        Agent { child, socket, device }
    }

    fn ask(&self, words: &[&str]) -> String {
        let asked = [&["--device", &self.device][..], words, &["--socket", &self.socket]].concat();
        let output = Command::new(env!("CARGO_BIN_EXE_glake")).args(asked).env_clear().output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Waits until the worker is in a state.
    fn until(&self, state: &str) {
        let end = std::time::Instant::now() + LONG;
        let row = || {
            serde_json::from_str::<serde_json::Value>(self.ask(&["ps", "--json"]).trim()).unwrap_or_default()
        };
        while row()["state"] != state {
            assert!(std::time::Instant::now() < end, "{state}: {}", row());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What was started is found though its file is gone, as after an upgrade.
#[test]
fn an_agent_whose_file_is_gone_checkpoints_all_the_same() {
    let (folder, gpus) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let program = folder.path().join("glake-before");
    std::fs::copy(env!("CARGO_BIN_EXE_glake"), &program).unwrap();
    let agent = Agent::start_as(&program, folder.path(), gpus.path());
    std::fs::remove_file(&program).unwrap();
    let mut worker = Worker::of("checkpoint::joined", gpus.path(), &agent.socket);
    worker.ask();
    assert!(worker.says("works", LONG));
    agent.ask(&["shrink", "chat"]);
    agent.until("checkpointed");
    worker.ask();
    assert!(worker.says("works", LONG));
}

#[test]
fn an_agent_checkpoints_and_restores_whoever_joined_it_and_so_does_the_next_one() {
    let (folder, gpus) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let agent = Agent::start(folder.path(), gpus.path());
    let mut worker = Worker::of("checkpoint::joined", gpus.path(), &agent.socket);
    worker.ask();
    assert!(worker.says("works", LONG));
    agent.ask(&["shrink", "chat"]);
    agent.until("checkpointed");
    assert_eq!(used(gpus.path(), &worker), Bytes::ZERO);
    assert_eq!(records(folder.path()).len(), 1);
    worker.ask();
    assert!(worker.says("works", LONG));
    assert!(used(gpus.path(), &worker) >= Bytes::mib(672));
    assert!(records(folder.path()).is_empty());
    assert!(agent.ask(&["explain"]).contains("idle for long: checkpointed"));
    agent.ask(&["shrink", "chat"]);
    agent.until("checkpointed");
    drop(agent);
    worker.ask();
    assert!(!worker.says("works", SHORT));
    let _next = Agent::start(folder.path(), gpus.path());
    assert!(worker.says("works", LONG));
}
