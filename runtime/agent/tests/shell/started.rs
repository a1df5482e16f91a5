//! Tests of workers that the agent starts by its file.

use std::path::{Path, PathBuf};

use glake_units::Bytes;
use glake_wire::{Ask, WorkerRow};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use crate::processes::Node;

const BUDGET: Bytes = Bytes::gib(24);
const JOINED: [&str; 3] = ["idle", "resident", "asleep"];

/// Returns an entry of the file whose command is a worker of these tests.
fn worker(name: &str, lines: &str) -> String {
    let own = std::env::current_exe().unwrap();
    let arguments = "\"--exact\", \"processes::supervised\", \"--ignored\", \"--nocapture\"";
    format!(
        "[[worker]]\nname = {name:?}\ncommand = [{own:?}, {arguments}]\nenv = {{ GLAKE_TEST_AGENT_FLOOR = \"512\" }}\n{lines}\n"
    )
}

/// Returns an entry whose command is a script.
fn script(name: &str, script: &str) -> String {
    format!("[[worker]]\nname = {name:?}\ncommand = [\"sh\", \"-c\", {script:?}]\n")
}

fn node(workers: &[String]) -> Node {
    Node::with(BUDGET, 512, &workers.concat())
}

fn row<'a>(rows: &'a [WorkerRow], name: &str) -> Option<&'a WorkerRow> {
    rows.iter().find(|row| row.worker == name)
}

fn has_joined(rows: &[WorkerRow], name: &str) -> bool {
    row(rows, name).is_some_and(|row| JOINED.contains(&row.state.as_str()))
}

/// Waits until all of these have joined and returns their process ids.
fn joined(node: &Node, names: &[&str]) -> Vec<u32> {
    let rows = node.until("they join", |rows| names.iter().all(|name| has_joined(rows, name)));
    names.iter().map(|name| row(&rows, name).unwrap().pid).collect()
}

fn log(node: &Node, name: &str) -> PathBuf {
    node.folder.path().join(format!("logs/{name}.log"))
}

fn said(node: &Node, name: &str) -> String {
    std::fs::read_to_string(log(node, name)).unwrap()
}

fn kill(pid: u32) {
    kill_process(Pid::from_raw(pid.try_into().unwrap()).unwrap(), Signal::KILL).unwrap();
}

fn lives(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let pid = Pid::from_raw(pid.try_into().unwrap()).unwrap();
    test_kill_process(pid).is_ok() && !stat.contains(") Z ")
}

#[test]
fn workers_of_the_file_are_started_and_have_nothing_of_the_agent_s() {
    let node = node(&[worker("a", ""), worker("b", "")]);
    let pids = joined(&node, &["a", "b"]);
    for (name, pid) in ["a", "b"].into_iter().zip(pids) {
        let said = said(&node, name);
        assert!(said.contains(&format!("started as {name}\n")), "{said}");
        assert!(said.contains("said on the other stream too\n") && said.contains("group true\n"), "{said}");
        let log = log(&node, name).display().to_string();
        let descriptors = said.lines().filter_map(|line| line.strip_prefix("descriptor "));
        let descriptors: Vec<&str> = descriptors.collect();
        for descriptor in &descriptors {
            let (number, target) = descriptor.split_once(' ').unwrap();
            let expected = match number {
                "0" => "/dev/null".to_owned(),
                "1" | "2" => log.clone(),
                _ => format!("/proc/{pid}/fd"),
            };
            assert_eq!(target, expected, "{descriptors:?}");
        }
        assert_eq!(descriptors.len(), 4, "{descriptors:?}");
        let own = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        assert!(said.contains(&format!("limit {own:?}\n")), "{said}");
        let directory = std::env::current_dir().unwrap();
        assert!(said.contains(&format!("directory {}\n", directory.display())), "{said}");
    }
    use std::os::unix::fs::PermissionsExt as _;
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&log(&node, "a")), mode(log(&node, "a").parent().unwrap())), (0o600, 0o700));
}

#[test]
fn the_log_of_a_running_worker_is_bounded() {
    // It speaks again once its log is empty.
    let talks = "head -c 20000000 /dev/zero; while [ -s /proc/self/fd/1 ]; do sleep 0.05; done; echo again; exec sleep 300";
    let node = node(&[script("talks", talks)]);
    let earlier = log(&node, "talks").with_added_extension("1");
    let is_cut = |_: &[WorkerRow]| std::fs::metadata(&earlier).is_ok_and(|found| found.len() >= 16 << 20);
    node.until("it is cut", is_cut);
    node.until("it goes on at the beginning", |_| said(&node, "talks").starts_with("again\n"));
}

#[test]
fn all_workers_are_stopped_with_the_agent_and_after_its_death() {
    let slow = "trap 'echo ends; exit' TERM; while :; do sleep 0.05; done";
    let mut node =
        node(&[worker("a", ""), script("slow", slow).replace("[[worker]]", "[[worker]]\ngpus = [1]")]);
    let both = |node: &Node| {
        let is_up =
            |rows: &[WorkerRow]| has_joined(rows, "a") && row(rows, "slow").is_some_and(|row| row.pid != 0);
        let rows = node.until("both run", is_up);
        ["a", "slow"].map(|name| row(&rows, name).unwrap().pid)
    };
    // With the agent, which answers what goes on.
    let by_hand = node.joined("by-hand 1GiB");
    let pids = both(&node);
    let answers = node.ask(Ask::StopAll).unwrap();
    let left: Vec<u32> = answers
        .iter()
        .filter_map(|row| if let glake_wire::Answer::Row(row) = row { Some(row.pid) } else { None })
        .collect();
    assert_eq!(left, [by_hand.child.id()]);
    assert!(pids.iter().all(|pid| !lives(*pid)) && lives(by_hand.child.id()));
    node.agent.hear("ended").unwrap();
    assert!(said(&node, "slow").ends_with("ends\n"));
    // They start again with the next agent, and end after its death.
    node.restart();
    let pids = both(&node);
    node.agent.kill();
    let socket = crate::processes::socket(node.folder.path());
    assert_eq!(glake_agent::stop_started(&socket).unwrap(), ["a", "slow"]);
    assert!(pids.iter().all(|pid| !lives(*pid)));
    assert_eq!(glake_agent::stop_started(&socket).unwrap(), [""; 0]);
    // With an agent that is told so at its start.
    std::fs::write(node.folder.path().join("stops"), "").unwrap();
    node.restart();
    let pids = both(&node);
    assert!(matches!(glake_agent::stop_started(&socket), Err(glake_agent::StopError::Listen(_))));
    node.agent.signal(Signal::TERM);
    node.agent.hear("ended").unwrap();
    assert!(pids.iter().all(|pid| !lives(*pid)));
}

/// The agent has more descriptors than its original limit allows, and the worker's first instruction sees that limit.
#[test]
fn workers_start_with_the_original_limit_of_open_files() {
    let limits =
        script("limited", "ulimit -Sn; ulimit -Hn").replace("[[worker]]", "[[worker]]\nstart = \"request\"");
    let mut node = node(&[limits]);
    node.restart_under(&["sh", "-c", "ulimit -Sn 40; ulimit -Hn 2000; exec \"$0\" \"$@\""]);
    let workers: Vec<_> = (0..20).map(|number| node.joined(&format!("w{number} 1GiB"))).collect();
    let descriptors = std::fs::read_dir(format!("/proc/{}/fd", node.agent.child.id())).unwrap().count();
    assert!(descriptors > 60, "{descriptors}");
    let error = node.ask(Ask::Start { worker: "limited".to_owned() }).unwrap_err();
    assert!(error.contains("exit 0"), "{error}");
    let said = said(&node, "limited");
    assert!(said.starts_with("40\n2000\n"), "{said}");
    drop(workers);
}

/// As process 1 of a container, the agent is the parent of all orphans.
#[test]
fn orphans_are_reaped_and_exit_codes_kept() {
    // The child of a subshell loses its parent, and ends.
    let orphans = "for n in 1 2 3; do (sleep 0.2 & echo left $!); done; sleep 0.4; exit 3";
    let mut node = node(&[script("leaves", orphans)]);
    std::fs::write(node.folder.path().join("subreaper"), "").unwrap();
    node.agent.kill();
    std::fs::remove_file(log(&node, "leaves")).unwrap_or_default();
    node.restart();
    let told = |rows: &[WorkerRow]| row(rows, "leaves").and_then(|row| row.note.clone()).unwrap_or_default();
    let mut agent = node.agent.child.id().to_string();
    agent.insert_str(0, "PPid:\t");
    let zombies = || {
        let entries = std::fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path().join("status"));
        let statuses = entries.filter_map(|path| std::fs::read_to_string(path).ok());
        statuses
            .filter(|status| status.contains("State:\tZ") && status.lines().any(|line| line == agent))
            .count()
    };
    node.until("its exit code is known", |rows| told(rows).starts_with("exit 3"));
    node.until("its orphans are reaped", |_| {
        said(&node, "leaves").matches("left").count() >= 3 && zombies() == 0
    });
}

#[test]
fn a_hangup_reads_the_file_again() {
    let node = node(&[]);
    let write = |text: &str| {
        std::fs::write(node.folder.path().join("node.toml"), text).unwrap();
        node.agent.signal(Signal::HUP);
    };
    let file = |budget: u64, workers: &[String]| {
        let node = format!("[node]\nbudget = {}\nfloor = \"512MiB\"\n", Bytes::gib(budget).get());
        node + &workers.concat()
    };
    write(&file(24, &[worker("a", "weights = \"1GiB\""), worker("b", "gpus = [1]\nweights = \"1GiB\"")]));
    let pids = joined(&node, &["a", "b"]);
    let limit = || node.metrics().of("glake_gpu_limit_bytes{gpu=\"0\"}");
    let before = limit();
    // A file that is refused changes nothing: a later one is read.
    for refused in ["budget = ", &file(100_000, &[]), &file(1, &[worker("c", "weights = \"2GiB\"")])] {
        write(refused);
    }
    write(&file(20, &[worker("b", "gpus = [1]\nweights = \"1GiB\"\npriority = 3")]));
    node.until("the budget falls", |_| limit() < before);
    assert_eq!(joined(&node, &["a", "b"]), pids, "a missing worker goes on");
    kill(pids[0]);
    node.until("it ends", |rows| row(rows, "a").is_none());
    assert!(lives(pids[1]));
    node.ask(Ask::Start { worker: "a".to_owned() }).unwrap_err();
}

#[test]
fn workers_outlive_the_agent_and_the_next_one_starts_no_second_ones() {
    let mut node = node(&[worker("a", ""), worker("b", "")]);
    let pids = joined(&node, &["a", "b"]);
    for is_killed in [true, false] {
        if is_killed {
            node.agent.kill();
        } else {
            node.agent.signal(Signal::TERM);
            node.agent.hear("ended").unwrap();
            assert!(node.agent.child.wait().unwrap().success());
        }
        assert!(pids.iter().all(|pid| lives(*pid)));
        node.restart();
        assert_eq!(joined(&node, &["a", "b"]), pids);
    }
    // The agent died between a start and the record of its process.
    node.agent.kill();
    let starts = node.folder.path().join("glake/agent.sock.starts");
    let text = std::fs::read_to_string(&starts).unwrap();
    let cut = |text: &str| {
        let mut written: serde_json::Value = serde_json::from_str(text).unwrap();
        let all = written["started"].as_array_mut().unwrap().iter_mut();
        all.for_each(|start| start["peer"] = serde_json::Value::Null);
        written.to_string()
    };
    assert_ne!(cut(&text), text);
    std::fs::write(&starts, cut(&text)).unwrap();
    std::fs::remove_file(node.folder.path().join("glake/agent.sock.journal")).unwrap();
    node.restart();
    assert_eq!(joined(&node, &["a", "b"]), pids);
    for name in ["a", "b"] {
        assert_eq!(said(&node, name).matches("started as").count(), 1);
    }
}

#[test]
fn a_reused_process_number_is_not_the_old_process() {
    let mut node = node(&[worker("a", "")]);
    let pids = joined(&node, &["a"]);
    node.agent.kill();
    kill(pids[0]);
    // The record now names this process.
    let started = format!(
        "{{\"started\":[{{\"name\":\"a\",\"mark\":\"1-1\",\"peer\":{{\"pid\":{},\"start\":1}}}}],\"stopped\":[]}}",
        std::process::id()
    );
    std::fs::write(node.folder.path().join("glake/agent.sock.starts"), started).unwrap();
    node.restart();
    let again = node.until("it is started", |rows| has_joined(rows, "a") && rows[0].pid != pids[0]);
    assert_ne!(again[0].pid, std::process::id());
}

#[test]
fn a_dead_worker_is_restarted_after_a_delay() {
    let mut node = node(&[worker("a", ""), worker("b", "")]);
    let pids = joined(&node, &["a", "b"]);
    kill(pids[0]);
    let ended = |rows: &[WorkerRow]| {
        let note = row(rows, "a").and_then(|row| row.note.clone());
        note.is_some_and(|note| note.contains("signal 9; started again in"))
    };
    node.until("its end is told", ended);
    let again =
        node.until("it joins", |rows| has_joined(rows, "a") && row(rows, "a").unwrap().pid != pids[0]);
    assert_eq!(row(&again, "b").unwrap().pid, pids[1]);
    // Also a worker that the previous agent started.
    node.agent.kill();
    kill(pids[1]);
    node.restart();
    node.until("it joins", |rows| has_joined(rows, "b") && row(rows, "b").unwrap().pid != pids[1]);
    assert_eq!(said(&node, "b").matches("started as").count(), 2, "the log goes on");
}

#[test]
fn the_next_agent_restarts_a_worker_in_back_off() {
    let mut node = node(&[worker("asked", "start = \"request\"")]);
    node.ask(Ask::Start { worker: "asked".to_owned() }).unwrap();
    let pid = joined(&node, &["asked"])[0];
    kill(pid);
    node.until("it waits", |rows| row(rows, "asked").is_some_and(|row| row.state == "ended"));
    node.agent.kill();
    node.restart();
    node.until("it joins", |rows| has_joined(rows, "asked") && row(rows, "asked").unwrap().pid != pid);
    // A worker stopped meanwhile is not restarted.
    kill(joined(&node, &["asked"])[0]);
    node.until("it waits", |rows| row(rows, "asked").is_some_and(|row| row.state == "ended"));
    node.ask(Ask::Stop { worker: "asked".to_owned() }).unwrap();
    node.agent.kill();
    node.restart();
    node.until("it is stopped", |rows| row(rows, "asked").is_some_and(|row| row.state == "stopped"));
}

#[test]
fn a_failed_start_is_reported_and_others_run() {
    let bad = "[[worker]]\nname = \"bad\"\ncommand = [\"no-such-program-here\"]\n";
    let node = node(&[bad.to_owned(), script("short", "echo once; exit 3"), worker("a", "")]);
    joined(&node, &["a"]);
    let told = |rows: &[WorkerRow], name: &str, what: &str| {
        row(rows, name).and_then(|row| row.note.as_ref()).is_some_and(|note| note.contains(what))
    };
    node.until("why is told", |rows| {
        told(rows, "bad", "starts \"no-such-program-here\", and no folder of PATH has it")
            && told(rows, "short", "exit 3; started again in")
    });
    assert!(said(&node, "short").starts_with("once\n"));
    let error = node.ask(Ask::Refill { worker: "bad".to_owned() }).unwrap_err();
    assert!(error.contains("bad was started, and ended"), "{error}");
}

#[test]
fn workers_are_started_and_ended_by_hand() {
    let mut node = node(&[
        worker("asked", "start = \"request\""),
        worker("never", "start = \"never\""),
        worker("boot", "gpus = [1]"),
    ]);
    let of = |name: &str| name.to_owned();
    joined(&node, &["boot"]);
    let rows = node.ps();
    assert_eq!((row(&rows, "asked").unwrap().state.as_str(), row(&rows, "never")), ("stopped", None));
    node.ask(Ask::Refill { worker: of("asked") }).unwrap();
    let resident = node.ps().into_iter().find(|row| row.worker == "asked").unwrap();
    assert_eq!(resident.resident, Bytes::gib(1));
    let error = node.ask(Ask::Start { worker: of("never") }).unwrap_err();
    assert!(error.contains("start it yourself"), "{error}");
    node.ask(Ask::Stop { worker: of("boot") }).unwrap();
    node.ask(Ask::Stop { worker: of("asked") }).unwrap();
    assert!(!lives(resident.pid));
    node.agent.kill();
    node.restart();
    let stopped = |rows: &[WorkerRow]| rows.len() == 2 && rows.iter().all(|row| row.state == "stopped");
    node.until("they stay so", stopped);
    node.ask(Ask::Start { worker: of("boot") }).unwrap();
    let pid = joined(&node, &["boot"])[0];
    node.ask(Ask::Start { worker: of("boot") }).unwrap();
    assert_eq!(joined(&node, &["boot"]), [pid]);
    node.agent.kill();
    node.restart();
    assert_eq!(joined(&node, &["boot"]), [pid], "and is not ended by hand any more");
}

#[test]
fn a_worker_started_by_hand_is_not_stopped() {
    let mut node = node(&[worker("never", "start = \"never\"")]);
    let first = node.joined("a 1GiB");
    let path = node.folder.path().join("node.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text + &worker("a", "")).unwrap();
    node.agent.kill();
    node.restart();
    assert_eq!(joined(&node, &["a"]), [first.child.id()]);
    let error = node.ask(Ask::Stop { worker: "a".to_owned() }).unwrap_err();
    assert!(error.contains("which this agent did not start"), "{error}");
    drop(first);
    let rows =
        node.until("it is started in its place", |rows| has_joined(rows, "a") && log(&node, "a").exists());
    assert_ne!(rows[0].pid, 0);
}

#[test]
fn remaining_processes_are_ended_before_a_restart() {
    // The command leaves processes in the background, one in its group and one in another session.
    let node = node(&[script("daemon", "sleep 300 & echo left $!; setsid sleep 300 & echo left $!; exit 0")]);
    let twice = |rows: &[WorkerRow]| {
        let _ = rows;
        std::fs::read_to_string(log(&node, "daemon")).unwrap_or_default().matches("left").count() >= 4
    };
    node.until("it is started again", twice);
    let said = said(&node, "daemon");
    let left: Vec<u32> =
        said.lines().filter_map(|line| line.strip_prefix("left ")?.parse().ok()).take(2).collect();
    assert!(left.iter().all(|pid| !lives(*pid)), "{left:?}");
    node.ask(Ask::Stop { worker: "daemon".to_owned() }).unwrap();
}
