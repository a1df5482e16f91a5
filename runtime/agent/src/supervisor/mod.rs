//! Which commands of the file are started, and when: pure.
//!
//! ```text
//!        asked, or boot           launched            it joined, its start is over
//! Down ───────────────► Launching ────────► Up, starting ────────► Up
//!  ▲   no other start of    │ it cannot be    │                     │
//!  │   its GPUs, no back-off▼                 ▼    its process ended▼
//!  └──────────────────────────── all gone ◄────────────────────── Ending
//! ```
//!
//! Invariants: a worker whose name is known, as that of one which was started before or by hand, is not started. Of the
//! workers of a GPU one starts at a time. A worker that ended by itself is started again, after a time that doubles.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use glake_arbiter::GpuId;
use glake_arbiter::node::{NodeFile, Start};
use glake_wire::WorkerRow;

#[cfg(test)]
mod tests;

/// How long one that ended waits, the first time; then twice as long.
const LEAST_BACK_OFF: Duration = Duration::from_secs(1);
/// And at most. One that lived for so long begins with the least again.
const LONGEST_BACK_OFF: Duration = Duration::from_secs(60);
/// How long a start may take before those of others go on; the arbiter's time for it.
pub(crate) const LONGEST_START: Duration = Duration::from_secs(600);
/// How long one that is asked to end may take before it is killed.
pub(crate) const GRACE: Duration = Duration::from_secs(10);

/// The workers of the file that have a command, in its order.
#[derive(Debug)]
pub(crate) struct Supervisor {
    workers: Vec<Supervised>,
    /// Those that others start.
    others: BTreeSet<String>,
    is_over: bool,
}

#[derive(Debug)]
struct Supervised {
    name: String,
    gpus: Vec<GpuId>,
    /// It is to run: since boot, or since it was asked for.
    is_wanted: bool,
    /// An operator ended it.
    is_stopped: bool,
    phase: Phase,
    /// How its last process ended, or why there was none.
    ended: Option<String>,
    /// Whether the last process that this agent started ended before it joined, or none was started.
    has_failed: bool,
    /// How often in a row.
    ends: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    /// It has no process, and gets none before a time.
    Down {
        again: Duration,
    },
    /// One is being made.
    Launching,
    Up(Up),
    /// Its process has ended; what that left behind has not.
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
    /// Its start is over, or takes too long for others to wait.
    is_started: bool,
    /// It was asked to end, and is killed then.
    kill_at: Option<Duration>,
}

/// What the agent knows of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    /// It has joined, or was there before this agent.
    Joined,
    /// It loads what it will hold, or some of its ranks have not joined.
    Starting,
}

/// What the supervisor looks at.
#[derive(Clone, Debug, Default)]
pub(crate) struct View {
    /// Of the names that are known; ranks by the name that they have in common.
    pub(crate) present: BTreeMap<String, Presence>,
    /// As what each process has joined.
    pub(crate) joined_as: BTreeMap<u32, String>,
    /// GPUs of which a worker starts that the supervisor has not started, and until when that counts.
    pub(crate) starts: BTreeMap<GpuId, Duration>,
}

/// What is to be done with a worker's processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    Launch {
        name: String,
    },
    /// Ask all of them to end.
    Terminate {
        name: String,
    },
    Kill {
        name: String,
    },
}

/// How a start by hand stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StartProgress {
    UnderWay,
    Done,
    Failed(String),
}

impl Supervisor {
    pub(crate) fn new(file: &NodeFile) -> Self {
        let (own, others): (Vec<_>, Vec<_>) =
            file.workers.iter().partition(|worker| !matches!(worker.start(), None | Some(Start::Never)));
        let supervised = |worker: &glake_arbiter::node::Worker| Supervised {
            name: worker.name.clone(),
            gpus: worker.gpus.iter().map(|gpu| GpuId(*gpu)).collect(),
            is_wanted: worker.start() == Some(Start::Boot),
            is_stopped: false,
            phase: Phase::Down { again: Duration::ZERO },
            ended: None,
            has_failed: false,
            ends: 0,
        };
        Supervisor {
            workers: own.into_iter().map(supervised).collect(),
            others: others.into_iter().map(|worker| worker.name.clone()).collect(),
            is_over: false,
        }
    }

    fn get(&mut self, name: &str) -> Option<&mut Supervised> {
        self.workers.iter_mut().find(|worker| worker.name == name)
    }

    /// Whether the supervisor has started a worker that runs.
    pub(crate) fn runs(&self, name: &str) -> bool {
        !self.is_down(name)
    }

    /// Whether a worker is the supervisor's.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.workers.iter().any(|worker| worker.name == name)
    }

    /// The agent before has started one. It is there as if it had been started now.
    pub(crate) fn adopt(&mut self, name: &str, pid: u32, now: Duration) {
        if let Some(worker) = self.get(name) {
            worker.is_wanted = !worker.is_stopped;
            let up = Up { pid, since: now, is_adopted: true, is_started: false, kill_at: None };
            worker.phase = Phase::Up(up);
        }
    }

    /// An operator has ended one while the agent before was there.
    pub(crate) fn keep_stopped(&mut self, name: &str) {
        if let Some(worker) = self.get(name) {
            (worker.is_wanted, worker.is_stopped) = (false, true);
        }
    }

    /// Which are not started because an operator ended them.
    pub(crate) fn stopped(&self) -> BTreeSet<String> {
        let stopped = self.workers.iter().filter(|worker| worker.is_stopped);
        stopped.map(|worker| worker.name.clone()).collect()
    }

    /// Nothing is started any more: the agent ends, its workers do not.
    pub(crate) fn end(&mut self) {
        self.is_over = true;
    }

    /// Somebody asks for a worker: now, whatever its back-off.
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
        (worker.is_wanted, worker.is_stopped) = (true, false);
        if let Phase::Down { again } = &mut worker.phase {
            *again = now.min(*again);
            (worker.ended, worker.ends) = (None, 0);
        }
        Ok(())
    }

    /// An operator ends one, which is not started again until somebody asks. Answers what is to be done.
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

    /// Whether nothing of a worker runs.
    pub(crate) fn is_down(&self, name: &str) -> bool {
        let worker = self.workers.iter().find(|worker| worker.name == name);
        worker.is_none_or(|worker| matches!(worker.phase, Phase::Down { .. }))
    }

    /// It was started, or why not.
    pub(crate) fn launched(
        &mut self,
        name: &str,
        launched: Result<u32, String>,
        now: Duration,
    ) -> Option<Act> {
        let worker = self.get(name)?;
        match launched {
            Ok(pid) => {
                let up = Up { pid, since: now, is_adopted: false, is_started: false, kill_at: None };
                worker.phase = Phase::Up(up);
                // Ended while it was made.
                if worker.is_wanted { None } else { self.stop(name, now).ok().flatten() }
            }
            Err(why) => {
                (worker.ended, worker.has_failed) = (Some(why), true);
                worker.back_off(Duration::ZERO, now);
                None
            }
        }
    }

    /// Its process has ended; what that left behind is being ended.
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

    /// Whether a worker is to run.
    pub(crate) fn wants(&self, name: &str) -> bool {
        self.workers.iter().any(|worker| worker.name == name && worker.is_wanted)
    }

    /// Nothing of it runs any more.
    pub(crate) fn gone(&mut self, name: &str, now: Duration) {
        if let Some(worker) = self.get(name) {
            let lived = if let Phase::Ending { lived } = worker.phase { lived } else { Duration::ZERO };
            worker.back_off(lived, now);
        }
    }

    /// What is to be done now.
    pub(crate) fn step(&mut self, view: &View, now: Duration) -> Vec<Act> {
        let mut acts = Vec::new();
        let mut busy: BTreeSet<GpuId> =
            view.starts.iter().filter(|(_, until)| now < **until).map(|(gpu, _)| *gpu).collect();
        for worker in &mut self.workers {
            let name = worker.name.clone();
            let Phase::Up(up) = &mut worker.phase else {
                if worker.phase == Phase::Launching {
                    busy.extend(&worker.gpus);
                }
                continue;
            };
            if up.kill_at.is_some_and(|at| at <= now) {
                up.kill_at = Some(Duration::MAX);
                acts.push(Act::Kill { name: name.clone() });
            }
            // Its program may give itself another name.
            let joined = match view.present.get(&name) {
                Some(presence) => *presence == Presence::Joined,
                None => view.joined_as.contains_key(&up.pid),
            };
            if !up.is_started && !joined && up.since + LONGEST_START <= now {
                tracing::warn!(target: "glake::agent", worker = %name, pid = up.pid, "a worker was started long ago and has not joined: others are started now (does its program call glake.enable(), with GLAKE_AGENT as it was given?)");
                up.is_started = true;
            }
            up.is_started |= joined;
            if !up.is_started {
                busy.extend(&worker.gpus);
            }
        }
        for worker in self.workers.iter_mut().filter(|_| !self.is_over) {
            let is_due = matches!(worker.phase, Phase::Down { again } if again <= now);
            let is_free = worker.gpus.iter().all(|gpu| !busy.contains(gpu));
            if worker.is_wanted && is_due && is_free && !view.present.contains_key(&worker.name) {
                worker.phase = Phase::Launching;
                busy.extend(&worker.gpus);
                acts.push(Act::Launch { name: worker.name.clone() });
            }
        }
        acts
    }

    /// When [`Supervisor::step`] has something to do that only time brings.
    pub(crate) fn next_deadline(&self, view: &View, now: Duration) -> Option<Duration> {
        let of = |worker: &Supervised| match worker.phase {
            Phase::Down { again } => (worker.is_wanted && !self.is_over).then_some(again),
            Phase::Up(up) => {
                let late = (!up.is_started).then(|| up.since + LONGEST_START);
                late.into_iter().chain(up.kill_at.filter(|at| *at < Duration::MAX)).min()
            }
            Phase::Launching | Phase::Ending { .. } => None,
        };
        let foreign = view.starts.values().copied().filter(|_| self.looks());
        self.workers.iter().filter_map(of).chain(foreign).filter(|at| *at > now).min()
    }

    /// Whether it matters what workers do: one starts, or is to.
    pub(crate) fn looks(&self) -> bool {
        self.workers.iter().any(|worker| match worker.phase {
            Phase::Down { .. } => worker.is_wanted && !self.is_over,
            Phase::Up(up) => !up.is_started,
            Phase::Launching | Phase::Ending { .. } => false,
        })
    }

    /// How the start of a worker stands that somebody asked for.
    pub(crate) fn progress(&self, name: &str, presence: Option<Presence>) -> StartProgress {
        let Some(worker) = self.workers.iter().find(|worker| worker.name == name) else {
            return StartProgress::Failed(format!("{name} is not in the agent's file"));
        };
        match (&worker.phase, presence, &worker.ended) {
            (_, Some(Presence::Joined), _) => StartProgress::Done,
            _ if worker.is_stopped => {
                StartProgress::Failed(format!("{name} was ended meanwhile (glake stop)"))
            }
            // One that had joined ended before it was asked for, or later: it is started again.
            (Phase::Down { .. }, _, Some(how)) if worker.has_failed => {
                StartProgress::Failed(format!("{name} was started, and ended: {how}"))
            }
            (Phase::Up(Up { is_started: true, pid, .. }), None, _) => StartProgress::Failed(format!(
                "{name} runs as process {pid}, and has not joined: does its program use GLake?"
            )),
            _ => StartProgress::UnderWay,
        }
    }

    /// Those workers that have not joined, as `glake ps` shows them; `gpu`: what one is called.
    pub(crate) fn rows(&self, view: &View, now: Duration, gpu: impl Fn(GpuId) -> String) -> Vec<WorkerRow> {
        let absent = self.workers.iter().filter(|worker| !view.present.contains_key(&worker.name));
        absent.map(|worker| worker.row(view, now, &gpu)).collect()
    }
}

impl Supervised {
    /// It has no process: another one is due after a time.
    fn back_off(&mut self, lived: Duration, now: Duration) {
        if lived >= LONGEST_BACK_OFF || !self.is_wanted {
            self.ends = 0;
        }
        let wait = LEAST_BACK_OFF.saturating_mul(1 << self.ends.min(6)).min(LONGEST_BACK_OFF);
        self.ends = self.ends.saturating_add(1);
        self.phase = Phase::Down { again: now + wait };
    }

    fn row(&self, view: &View, now: Duration, gpu: &impl Fn(GpuId) -> String) -> WorkerRow {
        let ended = self.ended.clone().unwrap_or_default();
        let (state, pid, note) = match self.phase {
            Phase::Down { .. } if !self.is_wanted => ("stopped", 0, ended),
            Phase::Down { again } if again > now => {
                let seconds = (again - now).as_secs_f64().ceil();
                ("ended", 0, format!("{ended}; started again in {seconds:.0} s"))
            }
            Phase::Down { .. } => ("queued", 0, ended),
            Phase::Launching => ("starting", 0, ended),
            Phase::Ending { .. } => ("stopping", 0, ended),
            Phase::Up(Up { kill_at: Some(_), pid, .. }) => ("stopping", pid, String::new()),
            Phase::Up(Up { is_started: false, pid, .. }) => {
                ("starting", pid, "has not joined yet".to_owned())
            }
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
