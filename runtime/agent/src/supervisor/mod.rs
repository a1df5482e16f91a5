//! Supervisor: decides which workers of the file are started and when, without I/O.
//!
//! ```text
//!        asked, or boot           launched            it joined, its start is over
//! Down ───────────────► Launching ────────► Up, starting ────────► Up
//!  ▲   no other start of    │ it cannot be    │                     │
//!  │   its GPUs, no back-off▼                 ▼    its process ended▼
//!  └──────────────────────────── all gone ◄────────────────────── Ending
//! ```
//!
//! Invariants: a worker whose name is already present, started by a previous agent or by hand, is not started again. Workers that share a
//! GPU start one at a time. A worker that ended by itself is restarted after a delay that doubles each time.
//!
//! A process that has not joined within a minute may never join. Its GPUs then have further starts only if the free memory holds the whole
//! worker to start beside the whole late one: the late one may load its memory at any time, and the agent cannot stop it. If the file does not
//! give both sizes, other starts wait for the full timeout.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use glake_arbiter::GpuId;
use glake_arbiter::node::{NodeFile, Start};
use glake_units::Bytes;
use glake_wire::WorkerRow;

#[cfg(test)]
mod tests;

/// Initial delay before a restart; doubles with each failure.
const LEAST_BACK_OFF: Duration = Duration::from_secs(1);
/// Upper bound of the delay. A process that lived at least this long resets the delay.
const LONGEST_BACK_OFF: Duration = Duration::from_secs(60);
/// Timeout of a start, after which other workers may start; the same as the arbiter's.
pub(crate) const LONGEST_START: Duration = Duration::from_secs(600);
/// Age of a start without a join from which it keeps only its memory from other starts.
const LATE_START: Duration = Duration::from_secs(60);
/// Ages of a start without a join at which the log notes it.
const NOTES: [Duration; 3] = [Duration::from_secs(30), Duration::from_secs(120), Duration::from_secs(300)];
/// Interval of looks at the free memory while a worker waits for a late start.
const LATE_LOOK: Duration = Duration::from_secs(10);
/// Time between the request to end and the kill.
pub(crate) const GRACE: Duration = Duration::from_secs(10);

/// Workers of the file that have a command, in the order of the file.
#[derive(Debug)]
pub(crate) struct Supervisor {
    workers: Vec<SupervisedWorker>,
    /// Workers that the agent never starts.
    others: BTreeSet<String>,
    is_over: bool,
}

#[derive(Debug)]
struct SupervisedWorker {
    name: String,
    gpus: Vec<GpuId>,
    /// Memory of the worker on each of its GPUs, its context included; `None` if the file gives no size.
    size: Option<Bytes>,
    /// Whether the worker should run, since boot or since a request.
    is_wanted: bool,
    /// Whether an operator stopped the worker.
    is_stopped: bool,
    /// Whether the file has the worker no more, and its process still runs.
    is_removed: bool,
    phase: Phase,
    /// Exit of its last process, or the reason why it could not start.
    ended: Option<String>,
    /// Whether the last process that this agent started ended before it joined, or could not start.
    has_failed: bool,
    /// Number of consecutive failures.
    ends: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    /// No process exists; the next start is due at `again`.
    Down {
        again: Duration,
    },
    /// A process is being created.
    Launching,
    Up(Up),
    /// The worker's first process has ended; other processes of the worker still run.
    Ending {
        lived: Duration,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Up {
    pid: u32,
    since: Duration,
    /// Whether the previous agent started the process.
    is_adopted: bool,
    /// Whether its start is over, or takes too long to delay other starts.
    is_started: bool,
    /// Number of notes in the log that it has not joined.
    notes: usize,
    /// Time of the kill, after the request to end.
    kill_at: Option<Duration>,
}

/// State of a name in the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    /// The worker has joined, or joined the previous agent.
    Joined,
    /// The worker is loading, or some of its ranks have not joined.
    Starting,
}

/// Inputs of the supervisor.
#[derive(Clone, Debug, Default)]
pub(crate) struct View {
    /// State of each known name; ranks under their common name.
    pub(crate) present: BTreeMap<String, Presence>,
    /// Name under which each process has joined.
    pub(crate) joined_as: BTreeMap<u32, String>,
    /// GPUs with starts that are not the supervisor's, and the time until which they count.
    pub(crate) starts: BTreeMap<GpuId, Duration>,
    /// Free memory of each GPU.
    pub(crate) free: BTreeMap<GpuId, Bytes>,
}

/// Starts under way on the GPUs.
#[derive(Debug, Default)]
struct Starts {
    /// GPUs without further starts.
    busy: BTreeSet<GpuId>,
    /// Memory that late starts may still take.
    late: BTreeMap<GpuId, Bytes>,
}

impl Starts {
    /// Adds a worker that has not joined since `up`.
    fn add(&mut self, worker: &SupervisedWorker, up: Up, now: Duration) {
        match worker.size.filter(|_| up.since + LATE_START <= now) {
            Some(size) => worker.gpus.iter().for_each(|gpu| {
                let late = self.late.entry(*gpu).or_default();
                *late = late.saturating_add(size);
            }),
            None => self.busy.extend(&worker.gpus),
        }
    }

    /// Returns whether a worker may start beside them.
    fn admit(&self, worker: &SupervisedWorker, view: &View) -> bool {
        worker.gpus.iter().all(|gpu| {
            let fits = |late: &Bytes| {
                let free = view.free.get(gpu).copied().unwrap_or_default();
                worker.size.is_some_and(|size| late.saturating_add(size) <= free)
            };
            !self.busy.contains(gpu) && self.late.get(gpu).is_none_or(fits)
        })
    }
}

/// Action on a worker's processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    Launch {
        name: String,
    },
    /// Ask all processes to end.
    Terminate {
        name: String,
    },
    Kill {
        name: String,
    },
}

/// Progress of an operator's command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    UnderWay,
    Done,
    Failed(String),
}

impl Supervisor {
    pub(crate) fn new(file: &NodeFile) -> Self {
        let mut supervisor = Supervisor { workers: Vec::new(), others: BTreeSet::new(), is_over: false };
        supervisor.set_file(file);
        supervisor
    }

    /// Replaces the file. New workers start like those of a new agent. A removed worker keeps its process until that ends, and is not
    /// started again; an operator can still stop it.
    pub(crate) fn set_file(&mut self, file: &NodeFile) {
        let (own, others): (Vec<_>, Vec<_>) =
            file.workers.iter().partition(|worker| !matches!(worker.start(), None | Some(Start::Never)));
        self.others = others.into_iter().map(|worker| worker.name.clone()).collect();
        let mut known = std::mem::take(&mut self.workers);
        for worker in own {
            let before = known.iter().position(|other| other.name == worker.name).map(|at| known.remove(at));
            self.workers.push(SupervisedWorker::new(worker, file.node.floor(), before));
        }
        for worker in &mut known {
            (worker.is_wanted, worker.is_removed) = (false, true);
        }
        known.retain(|worker| !matches!(worker.phase, Phase::Down { .. }));
        self.workers.append(&mut known);
    }

    fn get(&mut self, name: &str) -> Option<&mut SupervisedWorker> {
        self.workers.iter_mut().find(|worker| worker.name == name)
    }

    /// Returns whether a worker that the supervisor started is running.
    pub(crate) fn runs(&self, name: &str) -> bool {
        !self.is_down(name)
    }

    /// Returns whether the supervisor manages a worker.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.workers.iter().any(|worker| worker.name == name)
    }

    /// Adopts a process that the previous agent started, as if it had started now.
    pub(crate) fn adopt(&mut self, name: &str, pid: u32, now: Duration) {
        if let Some(worker) = self.get(name) {
            worker.is_wanted = !worker.is_stopped;
            let up = Up { pid, since: now, is_adopted: true, is_started: false, notes: 0, kill_at: None };
            worker.phase = Phase::Up(up);
        }
    }

    /// Restores the record that an operator stopped a worker under the previous agent.
    pub(crate) fn keep_stopped(&mut self, name: &str) {
        if let Some(worker) = self.get(name) {
            (worker.is_wanted, worker.is_stopped) = (false, true);
        }
    }

    /// Returns the workers that an operator stopped.
    pub(crate) fn stopped(&self) -> BTreeSet<String> {
        let stopped = self.workers.iter().filter(|worker| worker.is_stopped && !worker.is_removed);
        stopped.map(|worker| worker.name.clone()).collect()
    }

    /// Ends all starts: the agent exits, and its workers continue.
    pub(crate) fn end(&mut self) {
        self.is_over = true;
    }

    /// Ends all starts and stops all workers, which the next agent starts again. Returns the actions to carry out.
    pub(crate) fn end_all(&mut self, now: Duration) -> Vec<Act> {
        self.end();
        let mut acts = Vec::new();
        for worker in &mut self.workers {
            worker.is_wanted = false;
            if let Phase::Up(up) = &mut worker.phase
                && up.kill_at.is_none()
            {
                up.kill_at = Some(now + GRACE);
                acts.push(Act::Terminate { name: worker.name.clone() });
            }
        }
        acts
    }

    /// Returns the workers with processes.
    pub(crate) fn up(&self) -> Vec<String> {
        let up = self.workers.iter().filter(|worker| !matches!(worker.phase, Phase::Down { .. }));
        up.map(|worker| worker.name.clone()).collect()
    }

    /// Requests a worker immediately, regardless of its back-off.
    pub(crate) fn ask(&mut self, name: &str, now: Duration) -> Result<(), String> {
        if self.others.contains(name) {
            return Err(format!(
                "{name} has no command that this agent starts (start = \"never\", or no command in its file): start it \
                 yourself, with GLAKE_AGENT in its environment"
            ));
        }
        let Some(worker) = self.get(name) else {
            let known: Vec<&str> = self.workers.iter().map(|worker| worker.name.as_str()).collect();
            return Err(match known.is_empty() {
                true => format!("no worker {name:?} can be started: the agent's file gives none a command"),
                false => {
                    format!("no worker {name:?} can be started: the agent's file has {}", known.join(", "))
                }
            });
        };
        if worker.is_removed {
            return Err(format!("{name} is not in the agent's file any more: it runs on until it ends"));
        }
        (worker.is_wanted, worker.is_stopped) = (true, false);
        if let Phase::Down { again } = &mut worker.phase {
            *again = now.min(*again);
            (worker.ended, worker.ends) = (None, 0);
        }
        Ok(())
    }

    /// Stops a worker until the next request. Returns the action to carry out.
    pub(crate) fn stop(&mut self, name: &str, now: Duration) -> Result<Option<Act>, String> {
        let Some(worker) = self.get(name) else {
            return Err(format!(
                "{name:?} is no worker that this agent has started: one that joined by itself is ended by its process (glake ps shows which it is)"
            ));
        };
        (worker.is_wanted, worker.is_stopped) = (false, true);
        let Phase::Up(up) = &mut worker.phase else { return Ok(None) };
        if up.kill_at.is_some() {
            return Ok(None);
        }
        up.kill_at = Some(now + GRACE);
        Ok(Some(Act::Terminate { name: name.to_owned() }))
    }

    /// Returns whether no process of a worker is running.
    pub(crate) fn is_down(&self, name: &str) -> bool {
        let worker = self.workers.iter().find(|worker| worker.name == name);
        worker.is_none_or(|worker| matches!(worker.phase, Phase::Down { .. }))
    }

    /// Records the result of a start.
    pub(crate) fn launched(
        &mut self,
        name: &str,
        launched: Result<u32, String>,
        now: Duration,
    ) -> Option<Act> {
        let worker = self.get(name)?;
        match launched {
            Ok(pid) => {
                let up =
                    Up { pid, since: now, is_adopted: false, is_started: false, notes: 0, kill_at: None };
                worker.phase = Phase::Up(up);
                // CommandResult while it was made.
                if worker.is_wanted { None } else { self.stop(name, now).ok().flatten() }
            }
            Err(why) => {
                (worker.ended, worker.has_failed) = (Some(why), true);
                worker.back_off(Duration::ZERO, now);
                None
            }
        }
    }

    /// Records that a worker's process has ended and its remaining processes are being ended.
    pub(crate) fn exited(&mut self, name: &str, how: String, now: Duration) {
        if let Some(worker) = self.get(name) {
            let (since, has_joined) = match worker.phase {
                Phase::Up(up) => (up.since, up.is_started || up.is_adopted),
                _ => (now, false),
            };
            (worker.ended, worker.has_failed) = (Some(how), !has_joined);
            worker.phase = Phase::Ending { lived: now.saturating_sub(since) };
        }
    }

    /// Returns whether a worker should run.
    pub(crate) fn wants(&self, name: &str) -> bool {
        self.workers.iter().any(|worker| worker.name == name && worker.is_wanted)
    }

    /// Records that all processes of a worker have ended.
    pub(crate) fn gone(&mut self, name: &str, now: Duration) {
        if let Some(worker) = self.get(name) {
            let lived = if let Phase::Ending { lived } = worker.phase { lived } else { Duration::ZERO };
            worker.back_off(lived, now);
            self.workers.retain(|worker| !worker.is_removed || worker.name != name);
        }
    }

    /// Returns the actions that are due.
    pub(crate) fn step(&mut self, view: &View, now: Duration) -> Vec<Act> {
        let mut acts = Vec::new();
        let foreign = view.starts.iter().filter(|(_, until)| now < **until).map(|(gpu, _)| *gpu);
        let mut starts = Starts { busy: foreign.collect(), ..Starts::default() };
        for worker in &mut self.workers {
            let name = worker.name.clone();
            let Phase::Up(up) = &mut worker.phase else {
                if worker.phase == Phase::Launching {
                    starts.busy.extend(&worker.gpus);
                }
                continue;
            };
            if up.kill_at.is_some_and(|at| at <= now) {
                up.kill_at = Some(Duration::MAX);
                acts.push(Act::Kill { name: name.clone() });
            }
            // The program may join under another name.
            let joined = match view.present.get(&name) {
                Some(presence) => *presence == Presence::Joined,
                None => view.joined_as.contains_key(&up.pid),
            };
            if !up.is_started && !joined && up.since + LONGEST_START <= now {
                tracing::warn!(target: "glake::agent", worker = %name, pid = up.pid, "a started worker has not joined in time: other starts continue (does its program call glake.enable(), with the GLAKE_AGENT of its environment?)");
                up.is_started = true;
            }
            up.is_started |= joined;
            let age = now.saturating_sub(up.since);
            if !up.is_started && NOTES.get(up.notes).is_some_and(|at| *at <= age) {
                up.notes = NOTES.iter().filter(|at| **at <= age).count();
                tracing::warn!(target: "glake::agent", worker = %name, pid = up.pid, seconds = age.as_secs(), "a started worker has not joined yet: other starts of its GPUs wait, from a minute on only where memory is not free for both (does its program call glake.enable(), with the GLAKE_AGENT of its environment?)");
            }
            let up = *up;
            if !up.is_started {
                starts.add(worker, up, now);
            }
        }
        for worker in self.workers.iter_mut().filter(|_| !self.is_over) {
            let is_due = matches!(worker.phase, Phase::Down { again } if again <= now);
            let is_absent = !view.present.contains_key(&worker.name);
            if worker.is_wanted && is_due && is_absent && starts.admit(worker, view) {
                worker.phase = Phase::Launching;
                starts.busy.extend(&worker.gpus);
                acts.push(Act::Launch { name: worker.name.clone() });
            }
        }
        acts
    }

    /// Returns the time at which [`Supervisor::step`] is due without another event.
    pub(crate) fn next_deadline(&self, view: &View, now: Duration) -> Option<Duration> {
        let of = |worker: &SupervisedWorker| match worker.phase {
            Phase::Down { again } => (worker.is_wanted && !self.is_over).then_some(again),
            Phase::Up(up) => {
                let note = NOTES.get(up.notes).map(|at| up.since + *at);
                let late = note.into_iter().chain([up.since + LATE_START, up.since + LONGEST_START]);
                let late = late.filter(|at| !up.is_started && *at > now);
                late.chain(up.kill_at.filter(|at| *at < Duration::MAX)).min()
            }
            Phase::Launching | Phase::Ending { .. } => None,
        };
        let look = self.is_held_up(now).then(|| now + LATE_LOOK);
        let foreign = view.starts.values().copied().filter(|_| self.looks());
        self.workers.iter().filter_map(of).chain(foreign).chain(look).filter(|at| *at > now).min()
    }

    /// Returns whether changes of workers matter: a worker is starting or is about to.
    pub(crate) fn looks(&self) -> bool {
        self.workers.iter().any(|worker| match worker.phase {
            Phase::Down { .. } => worker.is_wanted && !self.is_over,
            Phase::Up(up) => !up.is_started,
            Phase::Launching | Phase::Ending { .. } => false,
        })
    }

    /// Returns whether a worker waits for a late start, so that the free memory decides.
    pub(crate) fn is_held_up(&self, now: Duration) -> bool {
        let is_due = |worker: &&SupervisedWorker| {
            worker.is_wanted && matches!(worker.phase, Phase::Down { again } if again <= now)
        };
        let is_late = |(_, up): (&SupervisedWorker, Up)| up.since + LATE_START <= now;
        !self.is_over && self.workers.iter().filter(is_due).any(|worker| self.ahead(worker).any(is_late))
    }

    /// Returns the starts under way on a worker's GPUs.
    fn ahead(&self, worker: &SupervisedWorker) -> impl Iterator<Item = (&SupervisedWorker, Up)> {
        let shares = |other: &SupervisedWorker| other.gpus.iter().any(|gpu| worker.gpus.contains(gpu));
        self.workers.iter().filter_map(move |other| match other.phase {
            Phase::Up(up) if !up.is_started && shares(other) => Some((other, up)),
            _ => None,
        })
    }

    /// Returns the progress of a requested start.
    pub(crate) fn progress(&self, name: &str, presence: Option<Presence>) -> Progress {
        let Some(worker) = self.workers.iter().find(|worker| worker.name == name) else {
            return Progress::Failed(format!("{name} is not in the agent's file"));
        };
        match (&worker.phase, presence, &worker.ended) {
            (_, Some(Presence::Joined), _) => Progress::Done,
            _ if worker.is_stopped => Progress::Failed(format!("{name} was ended meanwhile (glake stop)")),
            // A joined worker ended before or after the request, and is restarted.
            (Phase::Down { .. }, _, Some(how)) if worker.has_failed => {
                Progress::Failed(format!("{name} was started, and ended: {how}"))
            }
            (Phase::Up(Up { is_started: true, pid, .. }), None, _) => Progress::Failed(format!(
                "{name} runs as process {pid}, and has not joined: does its program use GLake?"
            )),
            _ => Progress::UnderWay,
        }
    }

    /// Returns whether the file has no worker with a command.
    pub(crate) fn is_empty(&self) -> bool {
        self.workers.is_empty()
    }

    /// Returns the rows of workers that have not joined, for `glake ps`; `gpu` returns a GPU's name.
    pub(crate) fn rows(&self, view: &View, now: Duration, gpu: impl Fn(GpuId) -> String) -> Vec<WorkerRow> {
        let absent = self.workers.iter().filter(|worker| !view.present.contains_key(&worker.name));
        absent.map(|worker| worker.row(view, now, &gpu, self.ahead(worker).next())).collect()
    }
}

impl SupervisedWorker {
    /// Creates the state of a worker of the file; `before`: its state under the previous file.
    fn new(worker: &glake_arbiter::node::Worker, floor: Bytes, before: Option<SupervisedWorker>) -> Self {
        let gpus = worker.gpus.iter().map(|gpu| GpuId(*gpu)).collect();
        let size = Some(worker.share()).filter(|size| !size.is_zero()).map(|size| size.saturating_add(floor));
        let is_boot = worker.start() == Some(Start::Boot);
        match before {
            Some(before) => {
                let is_wanted = before.is_wanted || (is_boot || before.is_removed) && !before.is_stopped;
                SupervisedWorker { gpus, size, is_wanted, is_removed: false, ..before }
            }
            None => SupervisedWorker {
                name: worker.name.clone(),
                gpus,
                size,
                is_wanted: is_boot,
                is_stopped: false,
                is_removed: false,
                phase: Phase::Down { again: Duration::ZERO },
                ended: None,
                has_failed: false,
                ends: 0,
            },
        }
    }

    /// Schedules the next start after the end of a process.
    fn back_off(&mut self, lived: Duration, now: Duration) {
        if lived >= LONGEST_BACK_OFF || !self.is_wanted {
            self.ends = 0;
        }
        let wait = LEAST_BACK_OFF.saturating_mul(1 << self.ends.min(6)).min(LONGEST_BACK_OFF);
        self.ends = self.ends.saturating_add(1);
        self.phase = Phase::Down { again: now + wait };
    }

    fn row(
        &self,
        view: &View,
        now: Duration,
        gpu: &impl Fn(GpuId) -> String,
        ahead: Option<(&SupervisedWorker, Up)>,
    ) -> WorkerRow {
        let ended = self.ended.clone().unwrap_or_default();
        let not_joined = |up: Up| match now.saturating_sub(up.since) {
            age if age < NOTES[0] => "has not joined yet".to_owned(),
            age => format!("has not joined for {} s", age.as_secs()),
        };
        let (state, pid, note) = match self.phase {
            Phase::Down { .. } if !self.is_wanted => ("stopped", 0, ended),
            Phase::Down { again } if again > now => {
                let seconds = (again - now).as_secs_f64().ceil();
                ("ended", 0, format!("{ended}; started again in {seconds:.0} s"))
            }
            Phase::Down { .. } => {
                let waits = ahead
                    .map(|(of, up)| format!("waits for the start of {}, which {}", of.name, not_joined(up)));
                let notes: Vec<String> =
                    [ended].into_iter().chain(waits).filter(|note| !note.is_empty()).collect();
                ("queued", 0, notes.join("; "))
            }
            Phase::Launching => ("starting", 0, ended),
            Phase::Ending { .. } => ("stopping", 0, ended),
            Phase::Up(Up { kill_at: Some(_), pid, .. }) => ("stopping", pid, String::new()),
            Phase::Up(up @ Up { is_started: false, .. }) => ("starting", up.pid, not_joined(up)),
            Phase::Up(Up { pid, .. }) => match view.joined_as.get(&pid) {
                Some(other) => ("running", pid, format!("has joined as {other}")),
                None => ("running", pid, "has not joined".to_owned()),
            },
        };
        let gpus = self.gpus.iter().map(|number| gpu(*number)).collect();
        let note = Some(note).filter(|note| !note.is_empty());
        WorkerRow {
            worker: self.name.clone(),
            pid,
            gpus,
            state: state.to_owned(),
            note,
            ..WorkerRow::default()
        }
    }
}
