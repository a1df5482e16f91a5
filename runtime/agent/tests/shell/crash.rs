//! Kills of workers and agents at any point: other workers get their memory, and the budget is never exceeded.

use std::sync::atomic::{AtomicBool, Ordering};

use glake_units::Bytes;
use nix::errno::Errno;
use nix::sys::ptrace::{self, Options};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use rustix::process::Signal;

use crate::processes::{Node, Process, check};

/// Numbers of the system calls sendmsg and recvmsg on x86-64.
const FRAMES: [&str; 2] = ["46", "47"];

/// Returns the step between kill points: 1 in soak tests, otherwise 7.
fn stride() -> usize {
    if std::env::var_os("GLAKE_SOAK").is_some() { 1 } else { 7 }
}

/// Kills a worker before or after each of its frames, as a victim and as a requester.
#[test]
fn soak_a_worker_killed_at_any_frame_does_not_block_others() {
    let node = Node::new(Bytes::gib(24));
    let mut other = node.joined("other 21GiB");
    for when in ["before", "after"] {
        let mut killed = 0;
        for frame in 1.. {
            let mut worker = node.worker(&format!("worker 3GiB {frame} {when}"));
            let lived = visit(&mut worker);
            other.tell("want");
            other.hear("resident").expect("the other lives");
            node.check();
            if lived && worker.hear("shrunk").is_some() {
                break;
            }
            killed += 1;
            worker.kill();
            node.until("the dead one is gone", |rows| rows.len() == 1);
        }
        assert!(killed > 12, "{killed}");
    }
}

/// Joins, gets its memory and uses it; returns false if the worker died before.
fn visit(worker: &mut Process) -> bool {
    if worker.hear("joined").is_none() {
        return false;
    }
    worker.tell("want");
    if worker.hear("resident").is_none() {
        return false;
    }
    worker.tell("use");
    worker.tell("end");
    worker.hear("ended").is_some()
}

/// Kills an agent before and after every frame that it sends or receives. Workers join the next agent, and every want is granted.
#[test]
fn soak_an_agent_killed_at_any_frame_does_not_block_workers() {
    let mut node = Node::new(Bytes::gib(24));
    let mut workers: Vec<Process> = ["a", "b", "c"].map(|name| node.joined(&format!("{name} 10GiB"))).into();
    let mut killed = 0;
    for stop in (0..).step_by(stride()) {
        let is_over = AtomicBool::new(false);
        let thread = Pid::from_raw(node.thread);
        let folder = node.folder.path().to_owned();
        let (meter, budget, dying) = (&node.meter, node.budget, &mut node.agent);
        let ended = std::thread::scope(|scope| {
            let driver = scope.spawn(|| {
                let _over = EndSignal(&is_over);
                for place in [0, 1, 2] {
                    workers[place].tell("want");
                    workers[place].hear("resident").unwrap();
                    workers[place].tell("use");
                    workers[place].tell("end");
                    workers[place].hear("ended").unwrap();
                }
            });
            // The budget is never exceeded, under any agent.
            scope.spawn(|| {
                while !is_over.load(Ordering::Acquire) {
                    check(meter, budget);
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
            });
            let traced = kill_at(thread, stop, &is_over);
            if traced == Ok(true) {
                // The lock is released with its last descriptor.
                dying.child.wait().unwrap();
                let (agent, thread) = Node::start(&folder, &[]);
                driver.join().unwrap();
                return Ok(Some((agent, thread)));
            }
            driver.join().unwrap();
            traced.map(|_| None)
        });
        match ended {
            Err(Errno::EPERM) => return eprintln!("skipped: this process may not trace another"),
            Err(error) => panic!("{error}"),
            Ok(Some((agent, thread))) => {
                killed += 1;
                drop(std::mem::replace(&mut node.agent, agent));
                node.thread = thread;
            }
            Ok(None) => break,
        }
    }
    assert!(killed * stride() > 20, "{killed}");
    eprintln!("killed {killed} times");
}

/// Guard that signals the end, also after a panic.
struct EndSignal<'a>(&'a AtomicBool);

impl Drop for EndSignal<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Stops a thread at each begin or end of a send or receive, and kills it at the `stop`-th. Returns false if the program ended before.
fn kill_at(thread: Pid, stop: usize, is_over: &AtomicBool) -> nix::Result<bool> {
    ptrace::seize(thread, Options::PTRACE_O_TRACESYSGOOD | Options::PTRACE_O_EXITKILL)?;
    ptrace::interrupt(thread)?;
    waitpid(thread, Some(WaitPidFlag::__WALL))?;
    let mut stops = 0;
    loop {
        ptrace::syscall(thread, None)?;
        while waitpid(thread, Some(WaitPidFlag::__WALL | WaitPidFlag::WNOHANG))? == WaitStatus::StillAlive {
            if is_over.load(Ordering::Acquire) {
                ptrace::interrupt(thread)?;
                waitpid(thread, Some(WaitPidFlag::__WALL))?;
                ptrace::detach(thread, None)?;
                return Ok(false);
            }
            std::thread::sleep(std::time::Duration::from_micros(50));
        }
        let call = std::fs::read_to_string(format!("/proc/{thread}/syscall")).unwrap_or_default();
        if !FRAMES.contains(&call.split(' ').next().unwrap_or_default()) {
            continue;
        }
        if stops == stop {
            let process = std::fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
            let process = process.lines().find_map(|line| line.strip_prefix("Tgid:")).unwrap().trim().parse();
            nix::sys::signal::kill(Pid::from_raw(process.unwrap()), nix::sys::signal::Signal::SIGKILL)?;
            waitpid(thread, Some(WaitPidFlag::__WALL))?;
            return Ok(true);
        }
        stops += 1;
    }
}

#[test]
fn a_stopped_process_does_not_block_others_and_recovers() {
    let node = Node::new(Bytes::gib(24));
    let mut workers: Vec<Process> = ["a", "b", "c"].map(|name| node.joined(&format!("{name} 10GiB"))).into();
    for place in [0, 1] {
        node.visit(&mut workers[place], ["a", "b", "c"][place]);
    }
    // The preferred victim.
    workers[0].signal(Signal::STOP);
    workers[2].tell("want");
    workers[2].hear("resident").unwrap();
    workers[1].hear("shrunk").unwrap();
    node.check();
    // The slow worker has time left: others gave memory instead.
    assert_eq!(node.metrics().of("glake_distrusted_total"), 0.0);
    workers[0].signal(Signal::CONT);
    workers[0].hear("shrunk").unwrap();
    workers[0].tell("want");
    workers[0].hear("resident").unwrap();
    node.check();
}

#[test]
fn a_child_that_holds_the_socket_does_not_keep_a_dead_worker_alive() {
    let node = Node::new(Bytes::gib(14));
    let mut first = node.joined("first 10GiB");
    first.tell("want");
    first.hear("resident").unwrap();
    first.tell("use");
    first.tell("spawn");
    let child: i32 = first.hear("spawned ").unwrap()["spawned ".len()..].parse().unwrap();
    first.kill();
    let mut second = node.joined("second 10GiB");
    second.tell("want");
    second.hear("resident").unwrap();
    node.check();
    nix::sys::signal::kill(Pid::from_raw(child), nix::sys::signal::Signal::SIGKILL).unwrap();
}

#[test]
fn a_stopped_agent_is_continued_by_the_next_one() {
    let mut node = Node::new(Bytes::gib(14));
    let mut workers: Vec<Process> = ["a", "b"].map(|name| node.joined(&format!("{name} 10GiB"))).into();
    workers[0].tell("want");
    workers[0].hear("resident").unwrap();
    node.agent.signal(Signal::TERM);
    node.agent.hear("ended").unwrap();
    assert!(!crate::processes::socket(node.folder.path()).exists());
    // The want is sent while no agent is running.
    workers[1].tell("want");
    node.restart();
    workers[1].hear("resident").unwrap();
    workers[0].hear("shrunk").unwrap();
    assert_eq!(node.ps().len(), 2);
}

/// A silent worker in the journal counts in full and is never a victim.
#[test]
fn a_silent_worker_counts_and_is_no_victim_after_a_crash() {
    let mut node = Node::new(Bytes::gib(24));
    let mut workers: Vec<Process> = ["a", "b"].map(|name| node.joined(&format!("{name} 10GiB"))).into();
    workers[0].tell("want");
    workers[0].hear("resident").unwrap();
    workers[0].signal(Signal::STOP);
    node.agent.kill();
    node.restart();
    workers[1].tell("want");
    workers[1].hear("resident").unwrap();
    let mut third = node.joined("c 10GiB");
    third.tell("want");
    third.hear("resident").unwrap();
    workers[1].hear("shrunk").unwrap();
    let rows = node.ps();
    assert_eq!((rows[0].state.as_str(), rows[0].leased), ("silent", Bytes::gib(10)));
    node.check();
    // Memory of a dead worker is granted.
    workers[0].kill();
    workers[1].tell("want");
    workers[1].hear("resident").unwrap();
    node.check();
}

/// The worker left, or never returned, while no agent was running.
#[test]
fn a_worker_that_never_reconnects_is_removed() {
    let mut node = Node::new(Bytes::gib(14));
    let mut first = node.joined("first 10GiB");
    first.tell("want");
    first.hear("resident").unwrap();
    node.agent.kill();
    // The process is running but silent.
    first.tell("sulk");
    first.hear("sulking").unwrap();
    node.restart();
    node.until("it is waited for", |rows| rows.first().is_some_and(|row| row.state == "silent"));
    node.until("it is given up", <[_]>::is_empty);
    assert_eq!(node.metrics().of("glake_given_up_total"), 1.0);
    first.kill();
    let mut second = node.joined("first 10GiB");
    second.tell("want");
    second.hear("resident").unwrap();
}
