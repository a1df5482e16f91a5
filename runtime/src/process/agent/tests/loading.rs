//! Workers that load, each a process of its own, beside an agent that runs.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use glake_wire::{Answer, Ask, WorkerRow};

use super::served::real_agent;
use super::*;

/// The socket, the simulated server and the worker's name, for the process that the tests start.
const LOADER: &str = "GLAKE_TEST_LOADER";
/// Contexts of the simulated GPU's processes.
const CONTEXT: u64 = 640;

/// A process that joins by itself with its first block, and is told by lines what to do.
struct Loader {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Loader {
    fn start(path: &std::path::Path, device: &str, name: &str) -> Loader {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let test = "process::agent::tests::loading::loader";
        command.args(["--exact", test, "--ignored", "--nocapture"]);
        command.env(LOADER, format!("{} {device} {name}", path.display())).env("GLAKE_LOG", "off");
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (to, from) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Loader { child, to, from }
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.to, "{line}").unwrap();
    }

    fn hear(&mut self) -> String {
        let mut line = String::new();
        while self.from.read_line(&mut line).unwrap() > 0 {
            if let Some(answer) = line.strip_prefix("answer ") {
                return answer.trim_end().to_owned();
            }
            line.clear();
        }
        "died".to_owned()
    }

    fn does(&mut self, line: &str) -> String {
        self.tell(line);
        self.hear()
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Not a test: the process that the others start.
#[test]
#[ignore = "the process that the tests beside it start"]
fn loader() {
    let Ok(text) = std::env::var(LOADER) else { return };
    let [socket, device, name] = text.split(' ').collect::<Vec<_>>()[..] else { panic!("{text}") };
    let variables = [("GLAKE_AGENT", socket), ("GLAKE_DEVICE", device), ("GLAKE_WORKER", name)];
    let process = worker("lease.grow_timeout_ms = 2000", &variables);
    let mut blocks: Vec<(Address, Bytes)> = Vec::new();
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let said = |done: Result<(), ProcessError>| {
            done.map_or_else(|error| error.to_string(), |()| "done".to_owned())
        };
        let answer = match line.split(' ').collect::<Vec<_>>()[..] {
            ["make", size] => {
                let size = mib(size.parse().unwrap());
                said(process.malloc(0, size, STREAM).map(|block| {
                    process.fill(block, size, 7);
                    blocks.push((block, size));
                }))
            }
            ["use"] => said(use_all(&process)),
            ["join"] => said(process.agent().join(None, None)),
            // More time passes than a start may make nothing new in.
            ["rest"] => {
                let joiner = &process.agent().joiner;
                let made = joiner.regions.made();
                joiner.handle.note(|ledger, now| ledger.made(made, now));
                joiner.handle.note(|ledger, now| ledger.made(made, now + Duration::from_secs(3600)));
                "done".to_owned()
            }
            ["evicted"] => {
                let evicted: Bytes = process.regions().views().unwrap().iter().map(|view| view.evicted).sum();
                evicted.to_string()
            }
            _ => panic!("{line}"),
        };
        println!("\nanswer {answer}");
    }
    process.agent().leave();
}

fn rows(path: &std::path::Path) -> Vec<WorkerRow> {
    let answers = glake_agent::ask(path, Ask::Ps, |_| {}).unwrap().into_iter();
    answers.filter_map(|row| if let Answer::Row(row) = row { Some(row) } else { None }).collect()
}

fn row(path: &std::path::Path, name: &str) -> Option<WorkerRow> {
    rows(path).into_iter().find(|row| row.worker == name)
}

#[test]
fn a_start_that_waits_for_another_gets_all_that_the_file_says() {
    let folder = tempfile::tempdir().unwrap();
    let worker = |name: &str| format!("[[worker]]\nname = \"{name}\"\nweights = \"64MiB\"\n");
    let node = format!(
        "[node]\nbudget = \"4GiB\"\nfloor = \"{CONTEXT}MiB\"\n{}{}",
        worker("first"),
        worker("second")
    );
    let (path, device) = real_agent(&folder, &node);
    let mut first = Loader::start(&path, &device, "first");
    assert_eq!(first.does("make 16"), "done");
    assert_eq!(row(&path, "first").unwrap().leased, mib(64));
    let mut second = Loader::start(&path, &device, "second");
    second.tell("make 32");
    until("its want", || row(&path, "second").filter(|row| row.state == "waiting"));
    assert_eq!(first.does("use"), "done");
    assert_eq!(second.hear(), "done", "it was admitted with nothing");
    assert_eq!(row(&path, "second").unwrap().leased, mib(64));
    // What the file did not foretell is growth, also while it starts.
    assert_eq!(second.does("make 64"), "done");
}

#[test]
fn a_worker_that_joins_before_it_loads_gets_what_the_file_says_too() {
    let folder = tempfile::tempdir().unwrap();
    let file = "[[worker]]\nname = \"chat\"\nweights = \"64MiB\"\n";
    let (path, device) = real_agent(&folder, &format!("[node]\nfloor = \"{CONTEXT}MiB\"\n{file}"));
    let mut chat = Loader::start(&path, &device, "chat");
    assert_eq!((chat.does("join"), chat.does("make 16")), ("done".to_owned(), "done".to_owned()));
    assert_eq!(row(&path, "chat").map(|row| (row.leased, row.state)), Some((mib(64), "starting".to_owned())));
    assert_eq!(chat.does("join"), "done", "it has loaded");
    until("its start to be over", || row(&path, "chat").filter(|row| row.state == "idle"));
}

#[test]
fn nothing_is_taken_of_a_worker_that_loads_before_it_says_that_it_has() {
    for is_of_file in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let budget = 2 * CONTEXT + 64;
        let mut node =
            format!("[node]\nbudget = \"{budget}MiB\"\nreserve = \"0B\"\nfloor = \"{CONTEXT}MiB\"\n");
        if is_of_file {
            node += "[[worker]]\nname = \"loads\"\nweights = \"48MiB\"\n";
        }
        let (path, device) = real_agent(&folder, &node);
        let mut loads = Loader::start(&path, &device, "loads");
        assert_eq!(loads.does("make 32"), "done");
        assert_eq!(loads.does("rest"), "done");
        until("its start to be over", || row(&path, "loads").filter(|row| row.state != "starting"));
        // It was seen, and has had its memory for a quantum.
        let mut other = Loader::start(&path, &device, "other");
        std::thread::sleep(Duration::from_millis(350));
        let denied = other.does("make 48");
        assert_eq!(
            loads.does("evicted"),
            "0 B",
            "of a program whose kernels may run; the other one: {denied}"
        );
        assert!(denied.contains("out of memory"), "{denied}");
        let shrunk = glake_agent::ask(
            &path,
            glake_wire::Request::from(Ask::Shrink { worker: "loads".to_owned() })
                .within(Duration::from_millis(300)),
            |_| {},
        );
        assert!(shrunk.is_err(), "an operator takes nothing of it either");
        assert_eq!(loads.does("evicted"), "0 B");
        // It says so: from then on others may have it.
        assert_eq!(loads.does("join"), "done");
        until("room for the other one", || (other.does("make 48") == "done").then_some(()));
        assert_ne!(loads.does("evicted"), "0 B");
    }
}

#[test]
fn a_name_that_a_dying_process_still_has_is_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let (path, device) = real_agent(&folder, &format!("[node]\nfloor = \"{CONTEXT}MiB\"\n"));
    let mut before = Loader::start(&path, &device, "chat");
    assert_eq!(before.does("make 16"), "done");
    let mut next = Loader::start(&path, &device, "chat");
    assert_eq!(next.does("make 16"), "done", "without a lease for now");
    let own = next.child.id();
    drop(before);
    until("it joins", || row(&path, "chat").filter(|row| row.pid == own));
}
