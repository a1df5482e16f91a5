//! Two processes take turns on a GPU that has no room for both, by leases; each is killed at every step once. The test plays the agent.
//! Their uses end before memory leaves, or stand at safe points and go on when it is back.
//!
//! ```text
//! wake ─► A: want ─► agent: shrink ─► B: returned ─► agent: grant ─► A: awake      bytes compared, everywhere and each time
//! ```
//!
//! Invariants, asked of the shared GPU's meter at every message: no process has more than its lease, and all leases fit.

use std::io::{BufRead, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use glake_meter::Meter as _;
use glake_sim::SimMeter;
use glake_tiers::LeaseEvent;
use parking_lot::Mutex;

use super::*;
use crate::process::UseId;

const FOLDER: &str = "GLAKE_TEST_SWAP_FOLDER";
/// A step, and which time it is taken the process is killed.
const KILL: &str = "GLAKE_TEST_SWAP_KILL";
/// Set where uses do not end.
const STAYS: &str = "GLAKE_TEST_SWAP_STAYS";
const BLOCKS: u64 = 12;
const BLOCK: Bytes = Bytes::mib(2);
const CONTEXT: Bytes = Bytes::mib(2);
/// What the pools of both may have: 1.6 times what one of them has.
const BUDGET: u64 = 38 << 20;
const LONG: Duration = Duration::from_secs(30);
const TOPOLOGY: &str = "
name = 'shared'
gpus = [{ name = 'GPU', memory = '46MiB', context = '2MiB', reclaim = 5000.0, local = 1980.0, latency = 7.0,
          link = { to_gpu = 55.5, from_gpu = 55.4, both = 101.7 } }]
[host]
read = 213.0
write = 160.0
both = 204.0
pageable_to_gpu = 9.5
pageable_from_gpu = 19.4
";
/// What can be killed at: messages and what they cause, and calls of the driver, of every kind in turn.
const STEPS: [(&str, &[u64]); 9] = [
    ("grow", &[1, 7]),
    ("ready", &[1]),
    ("want", &[1]),
    ("granted", &[1, 14]),
    ("mapped", &[1, 16, 20]),
    ("unmapping", &[1, 3]),
    ("returned", &[1]),
    ("asleep", &[1]),
    ("call", &[40, 90, 110, 120, 130, 140, 150, 160, 180, 200]),
];
/// The same where uses stay.
const STEPS_OF_PARKED: [(&str, &[u64]); 5] =
    [("arriving", &[1]), ("parked", &[1]), ("unmapping", &[2]), ("granted", &[16]), ("gone on", &[1])];

/// Ends this process at a step.
struct Steps(Option<(String, u64)>, Mutex<u64>);

impl Steps {
    fn take(&self, at: &str) {
        let Some((step, nth)) = &self.0 else { return };
        if step == at {
            let mut taken = self.1.lock();
            *taken += 1;
            if *taken == *nth {
                kill();
            }
        }
    }
}

fn kill() {
    let own = rustix::process::getpid();
    rustix::process::kill_process(own, rustix::process::Signal::KILL).unwrap();
}

fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n> {text}").unwrap();
    out.flush().unwrap();
}

/// Not a test: what those below start.
#[test]
#[ignore = "the process that the tests beside it start"]
fn worker() {
    let Ok(folder) = std::env::var(FOLDER) else { return };
    let kill_at = std::env::var(KILL).ok().map(|text| {
        let (step, nth) = text.split_once(':').unwrap();
        (step.to_owned(), nth.parse().unwrap())
    });
    let steps = Arc::new(Steps(kill_at.clone(), Mutex::new(0)));
    let choice = format!("sim:{folder}/shared.toml@{folder}");
    let environment = Environment::from_iter([("GLAKE_DEVICE", &*choice)]);
    let sources = Sources { environment, ..Sources::default() };
    let settings = "tiers = { extent = \"2MiB\", host_spare = 0 }\ntransfer.calibrations = \"\"\n\
                    lease = { growth = \"2MiB\", grow_timeout_ms = 60000, refill_timeout_ms = 60000 }\n";
    let mut config = sources.with_overrides("test", settings).unwrap().load().unwrap();
    (config.tiers.host_arena, config.tiers.park_quantum_ms) = (Bytes::mib(32), 0);
    let process = Arc::new(Process::start(config).unwrap());
    process.leases().set(0, Some(Bytes::ZERO)).unwrap();
    let at = steps.clone();
    process.observers().on_mapping(Some(Arc::new(move |_, mapped, _, _| {
        at.take(if mapped { "mapped" } else { "unmapping" });
    })));
    let at = steps.clone();
    process.leases().watch(Some(Arc::new(move |event, _, bytes: Bytes| {
        let name = match event {
            LeaseEvent::Want => "want",
            LeaseEvent::Grow => "grow",
            LeaseEvent::Returned => "returned",
            LeaseEvent::Waiting => return,
        };
        say(&format!("{name} {}", bytes.get()));
        at.take(name);
    })));
    if let Some((step, calls)) = kill_at.filter(|(step, _)| step == "call") {
        assert_eq!(step, "call");
        let process = process.clone();
        std::thread::spawn(move || {
            while process.reports().driver_calls().0 < calls {
                std::hint::spin_loop();
            }
            kill();
        });
    }
    let (sender, asked) = channel();
    let (granting, at) = (process.clone(), steps.clone());
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(|line| line.ok()) {
            match line.strip_prefix("grant ") {
                Some(bytes) => {
                    granting.leases().grant(0, Bytes::new(bytes.parse().unwrap())).unwrap();
                    at.take("granted");
                }
                None => sender.send(line).unwrap(),
            }
        }
        // The agent has gone.
        std::process::exit(1);
    });
    // One at a time: two that grow side by side hold what each other waits for.
    assert_eq!(asked.recv().unwrap(), "begin");
    process.regions().define(options("weights", Policy::Keep, CopyPolicy::Drop)).unwrap();
    let blocks: Arc<Vec<Written>> =
        Arc::new((0..BLOCKS).map(|seed| process.written_in("weights", 0, BLOCK, seed)).collect());
    say("ready");
    steps.take("ready");
    let mut stays = None;
    for line in asked {
        match &*line {
            "shrink" => _ = process.regions().shrink(&Shrink::default()).unwrap(),
            // It says itself that it has gone on.
            _ if stays.is_some() && process.regions().gate().view().parked > 0 => {
                process.regions().refill(&Refill::default()).unwrap();
                continue;
            }
            _ if stays.is_some() => {}
            _ => {
                let weights = Tags::of(&["weights"]);
                let id = process.regions().begin_use(&weights, WhenClosed::Refill, None).unwrap();
                blocks.iter().for_each(|block| process.check(block));
                match std::env::var_os(STAYS) {
                    Some(_) => {
                        let (process, blocks, steps) = (process.clone(), blocks.clone(), steps.clone());
                        stays = Some(std::thread::spawn(move || stay(&process, id, &blocks, &steps)));
                    }
                    None => process.regions().gate().end_use(id).unwrap(),
                }
            }
        }
        let done = if line == "shrink" { "asleep" } else { "awake" };
        say(done);
        steps.take(done);
    }
}

/// A use that does not end: it stands at a safe point while its memory is away.
fn stay(process: &Process, id: UseId, blocks: &[Written], steps: &Steps) {
    let gate = process.regions().gate();
    loop {
        if !gate.wants(id) {
            std::thread::sleep(Duration::from_micros(100));
            continue;
        }
        steps.take("arriving");
        if gate.arrive(id) {
            steps.take("parked");
            assert!(gate.go_on(id, None));
            steps.take("gone on");
            blocks.iter().for_each(|block| process.check(block));
            say("awake");
        }
    }
}

/// A worker as the agent sees it.
struct Worker {
    child: Child,
    stdin: ChildStdin,
    lease: u64,
    wanted: u64,
    /// It was told to leave, and has not said that it has.
    leaving: bool,
}

/// What a worker says; `None`: it has ended.
type Said = (usize, u32, Option<String>);

struct Agent {
    folder: tempfile::TempDir,
    meter: SimMeter,
    workers: [Worker; 2],
    said: Receiver<Said>,
    killed: u32,
    /// Whether uses stay.
    stays: bool,
}

fn start(folder: &Path, index: usize, kill: Option<&str>, stays: bool, sender: &Sender<Said>) -> Worker {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "process::regions::tests::swap::worker", "--ignored", "--nocapture"]);
    command.env(FOLDER, folder).stdin(Stdio::piped()).stdout(Stdio::piped());
    if let Some(kill) = kill {
        command.env(KILL, kill);
    }
    if stays {
        command.env(STAYS, "");
    }
    let mut child = command.spawn().unwrap();
    let (out, pid, sender) = (child.stdout.take().unwrap(), child.id(), sender.clone());
    std::thread::spawn(move || {
        for line in BufReader::new(out).lines().map_while(|line| line.ok()) {
            if let Some(text) = line.strip_prefix("> ") {
                _ = sender.send((index, pid, Some(text.to_owned())));
            }
        }
        _ = sender.send((index, pid, None));
    });
    let stdin = child.stdin.take().unwrap();
    Worker { child, stdin, lease: 0, wanted: 0, leaving: false }
}

impl Worker {
    fn tell(&mut self, text: &str) {
        // It may have ended.
        _ = writeln!(self.stdin, "{text}");
    }
}

impl Agent {
    /// The second worker is killed at a step.
    fn new(kill: Option<&str>, stays: bool) -> (Agent, Sender<Said>) {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("shared.toml");
        std::fs::write(&file, TOPOLOGY).unwrap();
        let meter = SimMeter::open(folder.path(), &glake_sim::load(file.to_str().unwrap()).unwrap()).unwrap();
        let (sender, said) = channel();
        let start = |(index, kill)| start(folder.path(), index, kill, stays, &sender);
        let workers = [(0, None), (1, kill)].map(start);
        (Agent { folder, meter, workers, said, killed: 0, stays }, sender)
    }

    /// Waits until a worker has said something, or has ended; grants what there is meanwhile. Whether it said it.
    fn until(&mut self, who: usize, what: &str) -> bool {
        loop {
            self.serve();
            let (index, pid, text) = self.said.recv_timeout(LONG).expect("nobody waits for ever");
            let worker = &mut self.workers[index];
            if worker.child.id() != pid {
                continue;
            }
            let Some(text) = text else {
                self.bury(index);
                if index == who {
                    return false;
                }
                continue;
            };
            let (name, bytes) = text.split_once(' ').unwrap_or((&text, "0"));
            let bytes: u64 = bytes.parse().unwrap();
            match name {
                "want" | "grow" => worker.wanted += bytes,
                "returned" => worker.lease -= bytes,
                "asleep" => worker.leaving = false,
                _ => {}
            }
            self.check();
            if index == who && name == what {
                return true;
            }
        }
    }

    /// What is free is granted; for what is not, the other one has to leave.
    fn serve(&mut self) {
        for index in 0..2 {
            let leased: u64 = self.workers.iter().map(|worker| worker.lease).sum();
            let worker = &mut self.workers[index];
            let granted = (BUDGET - leased).min(worker.wanted) / BLOCK.get() * BLOCK.get();
            if granted > 0 {
                worker.wanted -= granted;
                worker.lease += granted;
                worker.tell(&format!("grant {granted}"));
            }
            let waits = worker.wanted > 0;
            let other = &mut self.workers[1 - index];
            if waits && other.wanted == 0 && other.lease > 0 && !other.leaving {
                other.leaving = true;
                other.tell("shrink");
            }
        }
    }

    fn check(&self) {
        let leased: u64 = self.workers.iter().map(|worker| worker.lease).sum();
        assert!(leased <= BUDGET);
        let memory = self.meter.read("0").unwrap();
        for worker in &self.workers {
            let most = Bytes::new(worker.lease).saturating_add(CONTEXT);
            let used = memory.of_process(worker.child.id());
            assert!(used <= most, "{used} of {most}");
        }
    }

    /// What a dead worker had is granted to others when the GPU has it back.
    fn bury(&mut self, index: usize) {
        let pid = self.workers[index].child.id();
        self.workers[index].child.wait().unwrap();
        let begin = Instant::now();
        loop {
            let memory = self.meter.read("0").unwrap();
            let living: Bytes = memory.processes.iter().map(|process| process.used).sum();
            if memory.of_process(pid).is_zero() && memory.used == living {
                break;
            }
            assert!(begin.elapsed() < LONG, "memory of the dead comes back: {memory:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
        self.killed += 1;
        let worker = &mut self.workers[index];
        (worker.lease, worker.wanted, worker.leaving) = (0, 0, false);
    }

    /// One makes its memory; whether it lives.
    fn begin(&mut self, who: usize) -> bool {
        self.workers[who].tell("begin");
        self.until(who, "ready")
    }

    /// One wakes; whether it lives.
    fn wake(&mut self, who: usize) -> bool {
        self.workers[who].tell("wake");
        self.until(who, "awake")
    }

    fn end(mut self) {
        for worker in &mut self.workers {
            worker.child.kill().unwrap();
            worker.child.wait().unwrap();
        }
    }
}

#[test]
fn soak_two_processes_swap_by_leases() {
    let swaps = if std::env::var_os("GLAKE_SOAK").is_some() { 10_000 } else { 200 };
    for stays in [false, true] {
        let (mut agent, _sender) = Agent::new(None, stays);
        assert!(agent.begin(0) && agent.begin(1));
        for swap in 0..swaps / 2 {
            assert!(agent.wake(swap % 2), "swap {swap}");
        }
        assert_eq!(agent.killed, 0);
        agent.end();
    }
}

#[test]
fn whoever_is_killed_at_whatever_step_the_other_goes_on() {
    let steps = STEPS.map(|(step, times)| (step, times, false));
    for (step, times, stays) in
        steps.into_iter().chain(STEPS_OF_PARKED.map(|(step, times)| (step, times, true)))
    {
        for nth in times {
            let kill = format!("{step}:{nth}");
            let begin = Instant::now();
            let (mut agent, sender) = Agent::new(Some(&kill), stays);
            assert!(agent.begin(0));
            _ = agent.begin(1);
            // What the other has by then was granted in turns with the dead one.
            for swap in 0..4 {
                // It may have been killed while the other woke, too.
                _ = agent.killed == 0 && agent.wake(1);
                assert!(agent.wake(0), "{kill}, swap {swap}");
            }
            assert_eq!(agent.killed, 1, "{kill} was never taken");
            let folder = agent.folder.path().to_owned();
            agent.workers[1] = start(&folder, 1, None, agent.stays, &sender);
            assert!(agent.begin(1), "after {kill}");
            assert!(agent.wake(0) && agent.wake(1), "after {kill}");
            agent.end();
            eprintln!("killed at {kill}: {:.1?}", begin.elapsed());
        }
    }
}
