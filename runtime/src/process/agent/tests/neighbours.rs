//! Two workers in two processes share a simulated GPU under an agent that runs: one is the test's own process, the other a
//! neighbour that it starts.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use super::served::real_agent;
use super::*;

/// What the neighbour does, and the size of its memory in MiB.
const ROLE: &str = "GLAKE_TEST_NEIGHBOUR";
/// The socket of its agent.
const SOCKET: &str = "GLAKE_TEST_NEIGHBOUR_SOCKET";
/// Room for 64 MiB beside the contexts of both.
const NODE: &str = "[node]\nbudget = \"1344MiB\"\nreserve = \"0B\"\nfloor = \"640MiB\"\n";

fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n> {text}").unwrap();
    out.flush().unwrap();
}

fn next_line() -> Option<String> {
    std::io::stdin().lines().next().map(|line| line.unwrap())
}

/// Keeps the worker busy without a pause: uses of two threads overlap, and meet no safe point.
fn use_without_pause(process: &Process, is_over: &AtomicBool) {
    let long = Duration::from_millis(200);
    std::thread::scope(|scope| {
        for delay in [Duration::ZERO, long / 2] {
            scope.spawn(move || {
                std::thread::sleep(delay);
                while !is_over.load(Ordering::SeqCst) {
                    let id = process.regions().begin_use(&Tags::All, WhenClosed::Refill, Some(LONG)).unwrap();
                    std::thread::sleep(long);
                    process.regions().gate().end_use(id).unwrap();
                }
            });
        }
    });
}

/// Not a test: the process that the tests below start.
#[test]
#[ignore = "the process that the tests beside it start"]
fn neighbour() {
    let (Ok(role), Ok(socket)) = (std::env::var(ROLE), std::env::var(SOCKET)) else { return };
    let (role, size) = role.split_once(' ').unwrap();
    let size = mib(size.parse().unwrap());
    let process = worker("", &[("GLAKE_DEVICE", &std::env::var("GLAKE_DEVICE").unwrap())]);
    process.agent().join(Some("neighbour"), Some(std::path::Path::new(&socket))).unwrap();
    let block = process.block("weights", size);
    use_all(&process).unwrap();
    if role == "slow" {
        // As on a host where the first shrink pins memory; here in a hook of the program's.
        let slow = |event: &str| {
            if event.contains("\"shrink\"") {
                std::thread::sleep(Duration::from_millis(900));
            }
            0
        };
        process.regions().set_hooks(Some(Arc::new(slow)), None, None);
    }
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        if role == "busy" {
            scope.spawn(|| use_without_pause(&process, &is_over));
        }
        say("ready");
        next_line();
        say(&format!("{}", process.leases().view(0).unwrap().made.get()));
        next_line();
        is_over.store(true, Ordering::SeqCst);
    });
    process.regions().set_hooks(None, None, None);
    process.agent().leave();
    process.regions().refill(&Refill::default()).unwrap();
    assert!(process.has(block, size, 7));
    process.free(block).unwrap();
    say("kept");
}

struct Neighbour {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Neighbour {
    /// One that has joined and has its memory.
    fn start(role: &str, socket: &std::path::Path, device: &str) -> Neighbour {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "process::agent::tests::neighbours::neighbour", "--nocapture", "--ignored"]);
        command.env(ROLE, role).env(SOCKET, socket).env("GLAKE_DEVICE", device);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut started = Neighbour { child, input, output };
        assert_eq!(started.hear(), "ready");
        started
    }

    fn hear(&mut self) -> String {
        let mut line = String::new();
        while self.output.read_line(&mut line).unwrap() > 0 {
            if let Some(said) = line.trim().strip_prefix("> ") {
                return said.to_owned();
            }
            line.clear();
        }
        panic!("the neighbour has ended");
    }

    /// What its pool has made.
    fn made(&mut self) -> Bytes {
        writeln!(self.input).unwrap();
        Bytes::new(self.hear().parse().unwrap())
    }

    /// It leaves, and has all of its bytes.
    fn end(mut self) {
        writeln!(self.input).unwrap();
        assert_eq!(self.hear(), "kept");
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        // It has ended already, but where a test fails.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn leave(process: &Process, block: Address, size: Bytes) {
    process.agent().leave();
    process.regions().refill(&Refill::default()).unwrap();
    assert!(process.has(block, size, 7));
    process.free(block).unwrap();
}

#[test]
fn a_worker_without_safe_points_gives_way_between_two_uses() {
    let folder = tempfile::tempdir().unwrap();
    let (path, device) = real_agent(&folder, NODE);
    let process = worker("lease = { growth = 0, refill_timeout_ms = 15000 }", &[("GLAKE_DEVICE", &device)]);
    process.agent().join(Some("own"), Some(&path)).unwrap();
    let block = process.block("weights", mib(48));
    use_all(&process).unwrap();
    std::thread::sleep(Duration::from_millis(400));
    let mut neighbour = Neighbour::start("busy 48", &path, &device);
    let used = use_all(&process).map_err(|error| error.to_string());
    let made = neighbour.made();
    neighbour.end();
    leave(&process, block, mib(48));
    used.unwrap();
    assert!(made < mib(48), "{made}");
}

#[test]
fn growth_waits_for_a_victim_whose_first_bytes_take_long() {
    let folder = tempfile::tempdir().unwrap();
    let (path, device) = real_agent(&folder, NODE);
    let process = worker("lease = { growth = 0, grow_timeout_ms = 20000 }", &[("GLAKE_DEVICE", &device)]);
    process.agent().join(Some("own"), Some(&path)).unwrap();
    let mut neighbour = Neighbour::start("slow 48", &path, &device);
    std::thread::sleep(Duration::from_millis(400));
    let id = process.regions().begin_use(&Tags::All, WhenClosed::Refill, None).unwrap();
    let grown = process.malloc(0, mib(48), STREAM).map_err(|error| error.to_string());
    process.regions().gate().end_use(id).unwrap();
    let made = neighbour.made();
    process.agent().leave();
    if let Ok(grown) = grown {
        process.free(grown).unwrap();
    }
    neighbour.end();
    grown.unwrap();
    assert!(made < mib(48), "{made}");
}

#[test]
fn room_to_grow_evicts_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let (path, device) = real_agent(&folder, NODE);
    // 32 MiB, and 16 MiB of room to grow.
    let process = worker("", &[("GLAKE_DEVICE", &device)]);
    process.agent().join(Some("own"), Some(&path)).unwrap();
    let block = process.block("weights", mib(32));
    use_all(&process).unwrap();
    let mut neighbour = Neighbour::start("idle 24", &path, &device);
    glake_agent::ask(&path, glake_wire::Ask::Shrink { worker: "own".to_owned() }, |_| {}).unwrap();
    std::thread::sleep(Duration::from_millis(400));
    use_all(&process).unwrap();
    assert_eq!(neighbour.made(), mib(24), "it was evicted for another one's growth");
    neighbour.end();
    leave(&process, block, mib(32));
}
