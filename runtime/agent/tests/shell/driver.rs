//! Tests of checkpoints of idle workers with a script as the driver, and of agents killed meanwhile.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use glake_meter::Meter as _;
use glake_units::Bytes;
use glake_wire::{Answer, Ask, WorkerRow};

use crate::processes::{LIMIT, Node, Process};

/// Simulated driver that works on files: `state-PID`, and the meter's files. It announces each point and waits there while a file of that
/// name exists.
const SCRIPT: &str = r#"#!/bin/sh
cd "$(dirname "$0")" || exit 1
pid=$1
# An agent asks whether there is a driver, and may have been killed since: it is in no meter.
if [ "$pid" = "$PPID" ] || [ ! -e "meter/$pid" ]; then exit 0; fi
way=checkpoint
[ "$4" = --restore ] && way=restore
at() {
    echo "$way-$1 $$" >> moments
    while [ -e "stall-$way-$1" ]; do sleep 0.01; done
}
state() { cat "state-$pid" 2> /dev/null || echo running; }
become() { echo "$1" > "state-$pid.new" && mv "state-$pid.new" "state-$pid"; }
at begin
if [ $way = checkpoint ]; then
    [ -e untouched ] && { echo "no driver" >&2; exit 4; }
    [ -e refused ] && { echo "it has communicators of NCCL" >&2; exit 1; }
    [ "$(state)" = running ] && become locked
    at locked
    cp "meter/$pid" "saved-$pid" && printf %020d 0 > "meter/$pid" && become checkpointed
    at checkpointed
    exit 0
fi
if [ "$(state)" = checkpointed ]; then
    [ -e full ] && { echo "no room" >&2; exit 3; }
    [ -e lost ] && { echo "the driver does not restore it" >&2; exit 5; }
    [ "$(cat "meter/$pid")" = 00000000000000000000 ] || { echo "it has something" >&2; exit 1; }
    cp "saved-$pid" "meter/$pid" && become locked
fi
at restored
become running
at unlocked
"#;

const AFTER: &str = "checkpoint_after_s = 1\n";

fn node(budget: Bytes, lines: &str) -> Node {
    let node = Node::with(budget, 512, lines);
    write(node.folder.path());
    node
}

/// Writes the script into a folder.
fn write(folder: &Path) {
    let path = folder.join("driver.new");
    fs::write(&path, SCRIPT).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    fs::set_permissions(&path, mode).unwrap();
    fs::rename(path, folder.join("driver")).unwrap();
}

fn state(node: &Node, worker: &Process) -> String {
    let path = node.folder.path().join(format!("state-{}", worker.child.id()));
    fs::read_to_string(path).map_or_else(|_| "running".to_owned(), |state| state.trim_end().to_owned())
}

/// Waits until the script has reached a point `times` times; returns the last process.
fn until(node: &Node, moment: &str, times: usize) -> i32 {
    let end = Instant::now() + LIMIT;
    loop {
        let text = fs::read_to_string(node.folder.path().join("moments")).unwrap_or_default();
        let mut found = text.lines().filter_map(|line| line.strip_prefix(moment)?.strip_prefix(' '));
        if let Some(pid) = found.nth(times - 1) {
            return pid.parse().unwrap();
        }
        assert!(Instant::now() < end, "{moment}: {text}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn is_so(what: &str, so: impl Fn() -> bool) {
    let end = Instant::now() + LIMIT;
    while !so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Creates a worker that had memory and now has only its context.
fn asleep(node: &Node, name: &str) -> Process {
    let mut worker = node.joined(&format!("{name} 8GiB"));
    node.visit(&mut worker, name);
    node.ask(Ask::Shrink { worker: name.to_owned() }).unwrap();
    worker
}

fn checkpointed(node: &Node, name: &str) -> Process {
    let worker = asleep(node, name);
    node.until("it is checkpointed", |rows| {
        rows.iter().any(|row| row.worker == name && row.state == "checkpointed")
    });
    assert_eq!(state(node, &worker), "checkpointed");
    worker
}

fn comes_back(node: &Node, worker: &mut Process) {
    worker.tell("want");
    worker.hear("resident").unwrap();
    assert_eq!(state(node, worker), "running");
    let used = node.meter.read("0").unwrap().of_process(worker.child.id());
    assert_eq!(used, Bytes::mib(512 + (8 << 10)));
}

#[test]
fn an_idle_worker_is_checkpointed_and_restored_on_a_want() {
    let node = node(Bytes::gib(14), AFTER);
    let mut first = checkpointed(&node, "first");
    assert_eq!(node.meter.read("0").unwrap().used, Bytes::ZERO);
    let row = node.ps().remove(0);
    assert!(row.predicted_wake_s > 0.5 && row.leased.is_zero(), "{row:?}");
    let said = |what: &str| {
        let decisions = node.ask(Ask::Explain).unwrap();
        decisions.iter().any(|row| matches!(row, Answer::Decision(row) if row.outcome.contains(what)))
    };
    assert!(said("idle for long: checkpointed"));
    for _ in 0..2 {
        comes_back(&node, &mut first);
        node.ask(Ask::Shrink { worker: "first".to_owned() }).unwrap();
        node.until("it leaves again", |rows| rows[0].state == "checkpointed");
    }
    // The worker has no memory on the GPU, and sends no message for this.
    node.ask(Ask::Shrink { worker: "first".to_owned() }).unwrap();
    // A refill by the operator restores it.
    node.ask(Ask::Refill { worker: "first".to_owned() }).unwrap();
    first.hear("resident").unwrap();
    assert_eq!((state(&node, &first), node.ps()[0].resident), ("running".to_owned(), Bytes::gib(8)));
    // Its floor is accounted beside the others' memory.
    node.ask(Ask::Shrink { worker: "first".to_owned() }).unwrap();
    node.until("it leaves again", |rows| rows[0].state == "checkpointed");
    let mut second = node.joined("second 8GiB");
    node.visit(&mut second, "second");
    comes_back(&node, &mut first);
    second.hear("shrunk").unwrap();
    node.check();
}

#[test]
fn checkpoints_need_a_key_in_the_file() {
    let node = node(Bytes::gib(14), "");
    let worker = asleep(&node, "model");
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!((node.ps()[0].state.as_str(), state(&node, &worker).as_str()), ("asleep", "running"));
    assert!(!node.folder.path().join("moments").exists());
}

#[test]
fn a_worker_runs_on_after_a_failed_checkpoint() {
    let node = node(Bytes::gib(14), AFTER);
    fs::write(node.folder.path().join("refused"), "").unwrap();
    let mut worker = asleep(&node, "model");
    until(&node, "restore-unlocked", 1);
    comes_back(&node, &mut worker);
    // A worker with a running use is not locked, even without memory.
    node.ask(Ask::Shrink { worker: "model".to_owned() }).unwrap();
    worker.tell("use");
    fs::remove_file(node.folder.path().join("refused")).unwrap();
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(state(&node, &worker), "running");
}

/// No process was locked, so that none needs a restore.
#[test]
fn a_missing_driver_does_not_block_workers() {
    let node = node(Bytes::gib(14), AFTER);
    fs::write(node.folder.path().join("untouched"), "").unwrap();
    let mut worker = asleep(&node, "model");
    until(&node, "checkpoint-begin", 1);
    comes_back(&node, &mut worker);
    let journal = fs::read_to_string(node.folder.path().join("glake/agent.sock.journal")).unwrap();
    assert!(journal.contains("\"away\":false"), "{journal}");
    let moments = fs::read_to_string(node.folder.path().join("moments")).unwrap();
    assert!(!moments.contains("restore"), "{moments}");
}

/// The late command is killed and has ended before the restore starts.
#[test]
fn a_command_that_does_not_end_is_killed_before_anything_else_is_asked() {
    for moment in ["checkpoint-locked", "checkpoint-checkpointed"] {
        let mut node = node(Bytes::gib(14), AFTER);
        node.agent.kill();
        fs::write(node.folder.path().join("limit"), "2000").unwrap();
        node.restart();
        fs::write(node.folder.path().join(format!("stall-{moment}")), "").unwrap();
        let mut worker = asleep(&node, "model");
        let command = until(&node, moment, 1);
        until(&node, "restore-begin", 1);
        assert!(!Path::new(&format!("/proc/{command}")).exists());
        until(&node, "restore-unlocked", 1);
        comes_back(&node, &mut worker);
    }
}

/// The hanging command does not block other workers of the next agent either.
#[test]
fn a_hanging_command_of_an_earlier_agent_blocks_only_its_own_worker() {
    let mut node = node(Bytes::gib(14), AFTER);
    let mut first = checkpointed(&node, "first");
    let stall = node.folder.path().join("stall-checkpoint-locked");
    fs::write(&stall, "").unwrap();
    let second = asleep(&node, "second");
    until(&node, "checkpoint-locked", 2);
    node.agent.kill();
    node.restart();
    is_so("it is restored", || state(&node, &first) == "running");
    comes_back(&node, &mut first);
    assert_eq!(state(&node, &second), "locked");
    fs::remove_file(stall).unwrap();
    is_so("it is restored", || state(&node, &second) == "running");
}

/// Without a journal, the next agent would not know which processes to restore.
#[test]
fn checkpoints_need_a_writable_journal() {
    let mut node = node(Bytes::gib(14), AFTER);
    node.agent.kill();
    // A folder blocks the path of the journal.
    fs::create_dir(node.folder.path().join("glake/agent.sock.journal.new")).unwrap();
    node.restart();
    let worker = asleep(&node, "model");
    std::thread::sleep(Duration::from_millis(2500));
    assert_eq!(state(&node, &worker), "running");
    assert!(!node.folder.path().join("moments").exists());
}

#[test]
fn a_restore_waits_for_room() {
    let node = node(Bytes::gib(14), AFTER);
    let mut worker = checkpointed(&node, "model");
    let full = node.folder.path().join("full");
    fs::write(&full, "").unwrap();
    worker.tell("want");
    until(&node, "restore-begin", 2);
    assert_eq!(state(&node, &worker), "checkpointed");
    fs::remove_file(full).unwrap();
    worker.hear("resident").unwrap();
    assert_eq!(state(&node, &worker), "running");
}

/// The driver fails every restore: each agent asks once.
#[test]
fn a_lost_worker_is_failed_and_not_restored_again() {
    let mut node = node(Bytes::gib(14), AFTER);
    let mut worker = checkpointed(&node, "model");
    let stray = checkpointed(&node, "stray");
    fs::write(node.folder.path().join("lost"), "").unwrap();
    let has_failed =
        |rows: &[WorkerRow]| rows.iter().any(|row| row.worker == "model" && row.state == "failed");
    worker.tell("want");
    node.until("it has failed", has_failed);
    for asked in ["refill", "shrink"] {
        let worker = "model".to_owned();
        let ask = if asked == "refill" { Ask::Refill { worker } } else { Ask::Shrink { worker } };
        let said = node.ask(ask).unwrap_err().to_string();
        assert!(said.contains("end it, and start it again"), "{asked}: {said}");
    }
    let decisions = node.ask(Ask::Explain).unwrap();
    let failed =
        |row: &Answer| matches!(row, Answer::Decision(row) if row.outcome.starts_with("failed: the driver"));
    assert!(decisions.iter().any(failed));
    // Neither is a process that is no worker any more.
    let mut stray = stray;
    stray.tell("bye");
    node.until("it is gone", |rows| rows.len() == 1);
    until(&node, "restore-begin", 2);
    std::thread::sleep(Duration::from_millis(2500));
    let asked = || {
        let text = fs::read_to_string(node.folder.path().join("moments")).unwrap();
        text.lines().filter(|line| line.starts_with("restore-begin")).count()
    };
    assert_eq!(asked(), 2);
    node.agent.kill();
    node.restart();
    node.until("it has failed", has_failed);
    assert_eq!(
        (state(&node, &worker).as_str(), state(&node, &stray).as_str()),
        ("checkpointed", "checkpointed")
    );
    worker.kill();
    node.until("its name is free", <[_]>::is_empty);
    let mut again = node.joined("model 8GiB");
    node.visit(&mut again, "model");
}

const MOMENTS: [&str; 6] = [
    "checkpoint-begin",
    "checkpoint-locked",
    "checkpoint-checkpointed",
    "restore-begin",
    "restore-restored",
    "restore-unlocked",
];

/// Kills the agent at each point of the script; its command survives or dies with it.
fn killed_at_each_moment(with_command: bool) {
    for moment in MOMENTS {
        let mut node = node(Bytes::gib(14), AFTER);
        let stall = node.folder.path().join(format!("stall-{moment}"));
        let mut worker = if moment.starts_with("restore") {
            let mut worker = checkpointed(&node, "model");
            fs::write(&stall, "").unwrap();
            worker.tell("want");
            worker
        } else {
            fs::write(&stall, "").unwrap();
            asleep(&node, "model")
        };
        let command = until(&node, moment, 1);
        // Starting before the lock is taken.
        let journal = fs::read_to_string(node.folder.path().join("glake/agent.sock.journal")).unwrap();
        assert!(journal.contains("\"away\":true"), "{moment}: {journal}");
        node.agent.kill();
        if with_command {
            nix::sys::signal::kill(nix::unistd::Pid::from_raw(command), nix::sys::signal::Signal::SIGKILL)
                .unwrap();
            fs::remove_file(&stall).unwrap();
        }
        node.restart();
        if !with_command {
            // The earlier agent's command is still running, and no further command starts.
            std::thread::sleep(Duration::from_millis(100));
            let text = fs::read_to_string(node.folder.path().join("moments")).unwrap();
            assert_eq!(text.lines().last().unwrap(), format!("{moment} {command}"));
            fs::remove_file(&stall).unwrap();
        }
        is_so(moment, || state(&node, &worker) == "running");
        if !moment.starts_with("restore") {
            worker.tell("want");
        }
        worker.hear("resident").unwrap();
        let used = node.meter.read("0").unwrap().of_process(worker.child.id());
        assert_eq!(used, Bytes::mib(512 + (8 << 10)), "{moment}");
        node.check();
    }
}

#[test]
fn soak_an_agent_killed_at_any_moment_leaves_no_process_locked() {
    killed_at_each_moment(false);
}

#[test]
fn soak_an_agent_killed_with_its_command_leaves_no_process_locked() {
    killed_at_each_moment(true);
}

#[test]
fn a_stopped_agent_leaves_no_process_locked() {
    let node = node(Bytes::gib(14), AFTER);
    let worker = checkpointed(&node, "model");
    node.agent.signal(rustix::process::Signal::TERM);
    node.agent.hear("ended").unwrap();
    assert_eq!(state(&node, &worker), "running");
}

#[test]
fn a_worker_that_leaves_while_it_is_checkpointed_is_restored() {
    let node = node(Bytes::gib(14), AFTER);
    let mut worker = checkpointed(&node, "model");
    // The process reports it and continues.
    worker.tell("bye");
    is_so("it is restored", || state(&node, &worker) == "running");
    // No further command starts for a dead process.
    let mut second = checkpointed(&node, "second");
    second.kill();
    node.until("it is gone", |rows| rows.iter().all(|row| row.worker != "second"));
    assert_eq!(state(&node, &second), "checkpointed");
}

/// The result of the checkpoint is ignored then.
#[test]
fn a_worker_that_leaves_while_it_is_being_checkpointed_is_restored() {
    let node = node(Bytes::gib(14), AFTER);
    let stall = node.folder.path().join("stall-checkpoint-checkpointed");
    fs::write(&stall, "").unwrap();
    let mut worker = asleep(&node, "model");
    until(&node, "checkpoint-checkpointed", 1);
    worker.tell("bye");
    node.until("it is gone", <[_]>::is_empty);
    fs::write(node.folder.path().join("full"), "").unwrap();
    fs::remove_file(stall).unwrap();
    until(&node, "restore-begin", 2);
    assert_eq!(state(&node, &worker), "checkpointed");
    fs::remove_file(node.folder.path().join("full")).unwrap();
    is_so("it is restored", || state(&node, &worker) == "running");
}

/// The worker starts a new conversation, or stays silent until the agent removes it.
#[test]
fn a_worker_that_rejoins_or_is_removed_is_restored() {
    let node = node(Bytes::gib(14), AFTER);
    let mut worker = checkpointed(&node, "model");
    worker.tell("anew");
    worker.hear("joined").unwrap();
    is_so("it is restored", || state(&node, &worker) == "running");
    comes_back(&node, &mut worker);
    node.ask(Ask::Shrink { worker: "model".to_owned() }).unwrap();
    node.until("it leaves again", |rows| rows[0].state == "checkpointed");
    worker.tell("sulk");
    worker.hear("sulking").unwrap();
    node.until("it is given up", <[_]>::is_empty);
    is_so("it is restored", || state(&node, &worker) == "running");
}
