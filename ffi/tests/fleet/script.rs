//! Runs programs: one thread for each model, one for events of the server, and one that checks leases.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use glake_agent::ask;
use glake_wire::Ask;

use crate::node::{Link, Node, Outcome, signal};
use crate::program::{By, End, IncidentKind, Life, Model, Program, Spin, Step};

/// Runs the program of a seed; returns a full description of a failure.
pub(crate) fn run(seed: u64) -> Outcome<()> {
    let program = Program::of(seed);
    let node = Node::new(program.clone());
    let script = Script { node: node.clone(), wait: program.longest_wait(), begin: Instant::now() };
    let outcome = script.run(&program);
    let report = outcome.as_ref().err().map(|_| node.report());
    node.end();
    outcome.map_err(|why| format!("{program}FAILED: {why}\n{}", report.unwrap_or_default()))
}

struct Script {
    node: Arc<Node>,
    /// Longest time that a request may take.
    wait: Duration,
    begin: Instant,
}

/// A worker's process, and whether the test has started it.
struct Process {
    link: Link,
    is_by_hand: bool,
}

/// A running `glake start` on a thread.
type Asked = Option<thread::JoinHandle<Outcome<()>>>;

impl Script {
    fn run(&self, program: &Program) -> Outcome<()> {
        self.node.serve()?;
        thread::scope(|scope| {
            scope.spawn(|| self.node.watch());
            scope.spawn(|| {
                if let Err(why) = self.happens(program) {
                    self.node.fail(why);
                }
            });
            let models: Vec<_> = program
                .models
                .iter()
                .enumerate()
                .map(|(number, model)| {
                    scope.spawn(move || {
                        let outcome = self.live(number, model);
                        if let Err(why) = &outcome {
                            self.node.fail(format!(
                                "{} after {:.2?}: {why}",
                                model.name,
                                self.begin.elapsed()
                            ));
                        }
                        self.node.set_busy(number, false);
                        self.node.over(number);
                    })
                })
                .collect();
            for model in models {
                if model.join().is_err() {
                    self.node.fail("a script panicked".to_owned());
                }
            }
            self.node.is_over.store(true, Ordering::SeqCst);
        });
        match self.node.failure() {
            Some(why) => Err(why),
            None => {
                self.node.end_agent()?;
                self.node.is_empty(self.wait)
            }
        }
    }

    /// Executes an event of the server.
    fn happens(&self, program: &Program) -> Outcome<()> {
        let mut beside = Vec::new();
        for incident in &program.incidents {
            if !self.node.wait_for_all(incident.after) {
                break;
            }
            match incident.kind {
                IncidentKind::AgentKilled { absent } => self.node.replace_agent(absent)?,
                IncidentKind::Context => {
                    let _starts = self.node.starts.read().unwrap();
                    let name = format!("beside-{}", beside.len());
                    self.node.spawn(&name, false);
                    let mut link = self.node.link(None, self.wait)?;
                    let join = format!("join_first {}", self.node.socket().display());
                    self.node.tell(&mut link, &join, self.wait)?;
                    self.node.tell(&mut link, "context", self.wait)?;
                    beside.push(Process { link, is_by_hand: true });
                }
            }
        }
        self.node.wait_for_all(u64::MAX);
        for mut process in beside {
            self.node.tell(&mut process.link, "exit", self.wait)?;
            self.gone(process)?;
        }
        Ok(())
    }

    /// Runs all processes of a model.
    fn live(&self, number: usize, model: &Model) -> Outcome<()> {
        for (at, life) in model.lives.iter().enumerate() {
            let (mut process, asked) = self.start(number, model, life, at)?;
            let Some(()) = self.load(number, model, life, &mut process, asked)? else {
                self.kill(process)?;
                continue;
            };
            for step in &life.steps {
                self.step(number, *step, &mut process).map_err(|why| format!("{step:?}: {why}"))?;
            }
            let is_last = at + 1 == model.lives.len();
            self.finish(number, model, life, process, is_last)
                .map_err(|why| format!("{:?}: {why}", life.end))?;
        }
        Ok(())
    }

    /// Starts the next process of a model, or waits until the agent has.
    fn start(&self, number: usize, model: &Model, life: &Life, at: usize) -> Outcome<(Process, Asked)> {
        match model.by {
            By::Hand | By::HandJoined => {
                self.node.spawn(model.name, model.by == By::Hand);
                let link = self.node.link(Some(number), self.start_limit())?;
                Ok((Process { link, is_by_hand: true }, None))
            }
            By::Boot | By::Request => {
                // After its first start the agent starts it again by itself.
                let asks = at == 0 && model.by == By::Request || at > 0 && life.is_asked_for;
                let asked = asks.then(|| {
                    let (node, name) = (self.node.clone(), model.name.to_owned());
                    thread::spawn(move || {
                        loop {
                            let agents = node.agents.load(Ordering::SeqCst);
                            let asked = ask(&node.socket(), Ask::Start { worker: name.clone() }, |_| {});
                            // An agent that is killed answers nothing.
                            match asked {
                                Err(_) if agents % 2 == 0 || agents != node.agents.load(Ordering::SeqCst) => {
                                    thread::sleep(Duration::from_millis(20));
                                }
                                asked => {
                                    return asked
                                        .map(drop)
                                        .map_err(|error| format!("glake start {name}: {error}"));
                                }
                            }
                        }
                    })
                });
                let link = self.node.link(Some(number), self.start_limit())?;
                Ok((Process { link, is_by_hand: false }, asked))
            }
        }
    }

    /// Loads all parts; afterwards the worker has joined, and serves. `None`: the process is to be killed.
    fn load(
        &self,
        number: usize,
        model: &Model,
        life: &Life,
        process: &mut Process,
        asked: Asked,
    ) -> Outcome<Option<()>> {
        let mut starts = Some(self.node.starts.read().unwrap());
        self.node.set_busy(number, true);
        if model.by == By::HandJoined {
            let join = format!("join_first {}", self.node.socket().display());
            self.node.tell(&mut process.link, &join, self.start_limit())?;
        }
        for (at, part) in life.parts.iter().enumerate() {
            let load = match model.by {
                By::HandJoined => format!("load_in_use {} {}", part.mib, self.wait.as_millis()),
                _ => format!("load {}", part.mib),
            };
            self.node.tell(&mut process.link, &load, self.start_limit())?;
            starts = None;
            thread::sleep(part.pause);
            if life.end == End::KillLoading(at + 1) {
                return Ok(None);
            }
        }
        drop(starts);
        if life.joins_when_loaded && model.by != By::HandJoined {
            self.node.tell(&mut process.link, "join", self.wait)?;
            self.node.set_busy(number, false);
        }
        self.request(number, process, "use 0 1")?;
        self.has_joined(model, process)?;
        match asked.map(thread::JoinHandle::join) {
            Some(asked) => asked.unwrap().map(Some),
            None => Ok(Some(())),
        }
    }

    /// Returns the longest time of a start, including the starts before it.
    fn start_limit(&self) -> Duration {
        self.wait * 2
    }

    /// Checks that the agent knows a worker's process by its name.
    fn has_joined(&self, model: &Model, process: &Process) -> Outcome<()> {
        let end = Instant::now() + self.wait;
        loop {
            let rows = self.node.ps();
            let is_it =
                |row: &&glake_wire::WorkerRow| row.worker == model.name && row.pid == process.link.pid;
            if rows.iter().flatten().any(|row| is_it(&row)) {
                return Ok(());
            }
            if self.node.has_failed() || Instant::now() > end {
                return Err(format!("process {} serves, and has not joined: {rows:?}", process.link.pid));
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Runs a use, which must be served in time.
    fn request(&self, number: usize, process: &mut Process, line: &str) -> Outcome<()> {
        self.node.set_busy(number, true);
        self.node.tell(&mut process.link, line, self.wait)?;
        self.node.set_busy(number, false);
        self.node.served(number);
        Ok(())
    }

    fn step(&self, number: usize, step: Step, process: &mut Process) -> Outcome<()> {
        match step {
            Step::Use { lasts, steps } => {
                self.request(number, process, &format!("use {} {steps}", lasts.as_millis()))
            }
            Step::Spin { kind } => {
                let times = self.node.times_served();
                self.spin(number, process, kind)?;
                let end = Instant::now() + self.start_limit() * 2;
                while !self.node.wait_for_others(number, times, Duration::from_millis(200)) {
                    self.node.complaint(&process.link)?;
                    if Instant::now() > end {
                        return Err("another model is not served meanwhile".to_owned());
                    }
                }
                let waited = self.node.tell(&mut process.link, "stop", self.wait)?;
                self.node.set_busy(number, false);
                self.node.served(number);
                match Duration::from_millis(waited.parse().unwrap_or(u64::MAX)) {
                    waited if waited > self.wait => Err(format!("a use has waited for {waited:?}")),
                    _ => Ok(()),
                }
            }
            Step::Grow { mib } => {
                let (agents, (turns, is_busy)) =
                    (self.node.agents.load(Ordering::SeqCst), self.node.others(number));
                let answer = self.node.tell(&mut process.link, &format!("grow {mib}"), self.wait)?;
                let (later, is_busy_later) = self.node.others(number);
                // A use that grows waits for no use of others.
                let excuses = is_busy || is_busy_later || turns != later;
                match excuses || agents != self.node.agents.load(Ordering::SeqCst) || answer == "grown" {
                    true => Ok(()),
                    false => Err(answer),
                }
            }
            Step::Shed => self.node.tell(&mut process.link, "shed", self.wait).map(drop),
            Step::Rest { lasts } => {
                thread::sleep(lasts);
                self.node.complaint(&process.link)
            }
        }
    }

    /// Begins uses without pauses between them.
    fn spin(&self, number: usize, process: &mut Process, kind: Spin) -> Outcome<()> {
        self.node.set_busy(number, true);
        self.node.tell(&mut process.link, &format!("spin {kind:?}"), self.wait).map(drop)
    }

    fn finish(
        &self,
        number: usize,
        model: &Model,
        life: &Life,
        mut process: Process,
        is_last: bool,
    ) -> Outcome<()> {
        match life.end {
            _ if is_last && !process.is_by_hand => {
                let _agent = self.node.starts.read().unwrap();
                let stopped = ask(&self.node.socket(), Ask::Stop { worker: model.name.to_owned() }, |_| {});
                stopped.map_err(|error| format!("glake stop {}: {error}", model.name))?;
                return self.gone(process);
            }
            End::Leave => {
                self.node.tell(&mut process.link, "leave", self.wait)?;
            }
            End::KillBusy(kind) => {
                self.spin(number, &mut process, kind)?;
                thread::sleep(Duration::from_millis(10));
                return self.kill(process);
            }
            End::Kill | End::KillLoading(_) => return self.kill(process),
            End::Exit => {}
        }
        self.node.tell(&mut process.link, "exit", self.wait)?;
        self.gone(process)
    }

    fn kill(&self, process: Process) -> Outcome<()> {
        signal(process.link.pid, libc::SIGKILL);
        self.gone(process)
    }

    /// Waits until a process has ended.
    fn gone(&self, process: Process) -> Outcome<()> {
        self.node.ended(&process.link, self.wait)
    }
}
