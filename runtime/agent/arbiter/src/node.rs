//! File that describes a server's workers: one schema for `glake plan` and `glake serve`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use glake_units::Bytes;
use serde::de::{self, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::Preempt;

/// Description of a server and its workers.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeFile {
    /// Settings of the server and of each GPU.
    #[serde(default)]
    pub node: Node,
    /// Workers of the server.
    #[serde(default, rename = "worker")]
    pub workers: Vec<Worker>,
}

/// Settings of the server and of each GPU.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Node {
    /// Memory of a GPU for all managed processes, as NVML counts it, contexts included.
    pub budget: Option<Bytes>,
    /// Host memory for the pinned copies of all workers.
    pub host_budget: Option<Bytes>,
    /// Memory kept free within the budget; default 1 %, at least 512 MiB.
    pub reserve: Option<Bytes>,
    /// Rate of a GPU's host link in each direction, in GB/s.
    pub link_gbps: Option<f64>,
    /// GPU memory of a process whose pools are empty: context, modules, libraries.
    pub floor: Option<Bytes>,
    /// Idle time in seconds after which the driver checkpoints a worker without GPU memory, so that its floor leaves too. Default: never.
    pub checkpoint_after_s: Option<f64>,
}

/// Description of a worker.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Worker {
    /// Unique name of the worker.
    pub name: String,
    /// Size of the memory with constant content.
    #[serde(default)]
    pub weights: Bytes,
    /// Size of its KV cache.
    #[serde(default)]
    pub kv: Bytes,
    /// Size of a token in the KV cache.
    #[serde(default = "kv_per_token")]
    pub kv_per_token: Bytes,
    /// Prompt tokens per second, alone on its GPUs.
    #[serde(default = "prefill_tok_s")]
    pub prefill_tok_s: f64,
    /// Time per generated token in milliseconds, alone on its GPUs.
    #[serde(default = "decode_ms")]
    pub decode_ms: f64,
    /// Priority; higher ones go first.
    #[serde(default)]
    pub priority: i32,
    /// Tenant of the worker; tenants have equal shares.
    #[serde(default)]
    pub tenant: String,
    /// Longest wait of a request for memory, in seconds.
    pub deadline_s: Option<f64>,
    /// Condition under which its memory may be taken: never, idle or step.
    #[serde(default)]
    pub preempt: Preempt,
    /// Longest pause of its uses in seconds. If a waiter's turn, with the copies before and after it, is predicted to take longer, the uses
    /// are not parked until the waiter has waited for a quarter of its deadline, at most 15 s.
    pub max_pause: Option<f64>,
    /// Start command: a program and its arguments, without a shell.
    #[serde(default, deserialize_with = "list")]
    pub command: Vec<String>,
    /// Environment variables added to those of the agent.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// GPUs by the agent's numbers; the worker's memory is divided equally among them. Without any, it counts where it is.
    #[serde(default = "first_gpu")]
    pub gpus: Vec<u16>,
    /// Condition for starting the command.
    pub start: Option<Start>,
}

/// Condition for starting a worker's command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Start {
    /// At the start of the agent.
    #[default]
    Boot,
    /// At the first request for the worker.
    Request,
    /// Never by the agent.
    Never,
}

/// Environment variables that the agent sets for a worker that it starts: its socket, the worker's name, and the number of the start, which
/// identifies the processes of that start.
pub const STARTED_WITH: [&str; 3] = ["GLAKE_AGENT", "GLAKE_WORKER", "GLAKE_START"];

fn list<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    deserializer.deserialize_any(List)
}

/// Deserializer of a list of strings.
struct List;

impl<'de> Visitor<'de> for List {
    type Value = Vec<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of strings, without a shell, as [\"python\", \"worker.py\"]")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Vec<String>, E> {
        let words: Vec<&str> = text.split_whitespace().collect();
        Err(E::custom(format_args!("command is a list, for it is started without a shell: write {words:?}")))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<String>, A::Error> {
        let mut words = Vec::new();
        while let Some(word) = list.next_element()? {
            words.push(word);
        }
        Ok(words)
    }
}

fn kv_per_token() -> Bytes {
    Bytes::kib(128)
}

fn prefill_tok_s() -> f64 {
    20_000.0
}

fn decode_ms() -> f64 {
    12.0
}

fn first_gpu() -> Vec<u16> {
    vec![0]
}

/// Reason why a file does not describe a server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// The file does not follow the schema.
    #[error("{}", .0.to_string().trim_end())]
    Syntax(#[from] toml::de::Error),
    /// The file has no worker.
    #[error("there is no worker: write one table [[worker]] for each, with name, weights and kv")]
    NoWorker,
    /// Two workers have the same name.
    #[error("two workers are called {name:?}: give each a name of its own")]
    Twice { name: String },
    /// The file has more workers than a server runs.
    #[error("there are {found} workers: a server has at most {most}")]
    TooMany { found: usize, most: usize },
    /// A value is out of range.
    #[error("{key} of {whom} is {found}: {allowed}")]
    Value {
        /// `[node]`, or the name of a worker.
        whom: String,
        /// Key of the value.
        key: &'static str,
        /// Value in the file.
        found: String,
        /// Description of allowed values.
        allowed: &'static str,
    },
    /// The server has no such GPU.
    #[error("worker {name:?} names GPU {gpu} in gpus, and this server has {}: name some of these, as gpus = [0]", numbered(.known))]
    NoGpu {
        /// Name of the worker.
        name: String,
        /// Number of the GPU.
        gpu: u16,
        /// Names of the server's GPUs, by number.
        known: Vec<String>,
    },
    /// The worker does not fit beside memory that never leaves.
    #[error(
        "worker {name:?} never fits: it needs {needs} of GPU {gpu}, which has {room} for it: {budget} less a reserve of {reserve}, \
         {contexts} for the contexts of its workers ([node] floor each), and {kept} of workers with preempt = \"never\"; raise [node] \
         budget, move workers to other gpus, or let memory be taken of those workers"
    )]
    NeverFits {
        /// Name of the worker.
        name: String,
        /// Number of the GPU.
        gpu: u16,
        /// Weights and KV cache of the worker on the GPU.
        needs: Bytes,
        /// Largest possible lease of the worker.
        room: Bytes,
        /// Memory of the GPU for workers.
        budget: Bytes,
        /// Part of the budget that stays free.
        reserve: Bytes,
        /// Contexts of all workers of the GPU.
        contexts: Bytes,
        /// Memory of other workers that is never taken.
        kept: Bytes,
    },
    /// The worker is too large for its GPU.
    #[error(
        "worker {name:?} fits nowhere: it needs {needs} of GPU {gpu}, which has {room} for it: a budget of {budget} less \
         the reserve and {contexts} for the contexts of all its workers; raise [node] budget, or move workers to other \
         gpus"
    )]
    FitsNowhere {
        /// Name of the worker.
        name: String,
        /// Number of the GPU.
        gpu: u16,
        /// Weights and KV cache of the worker on the GPU.
        needs: Bytes,
        /// Largest possible lease of the worker.
        room: Bytes,
        /// Budget in the file.
        budget: Bytes,
        /// Contexts of all workers of the GPU.
        contexts: Bytes,
    },
}

/// Range of a figure. Figures outside are mistakes, and the times that are computed from them would overflow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Range {
    /// Tokens per second.
    Tokens,
    /// Milliseconds of a step.
    Step,
    Seconds,
    Milliseconds,
    /// Rate of a link in GB/s.
    Link,
}

impl Range {
    pub(crate) fn has(self, found: f64) -> bool {
        let allowed = match self {
            Range::Tokens => 0.1..=1e9,
            Range::Step => 0.001..=60_000.0,
            Range::Seconds => f64::MIN_POSITIVE..=1e9,
            Range::Milliseconds => f64::MIN_POSITIVE..=1e6,
            Range::Link => 0.001..=1e6,
        };
        allowed.contains(&found)
    }

    pub(crate) const fn allowed(self) -> &'static str {
        match self {
            Range::Tokens => "give tokens per second, from 0.1 to 1e9",
            Range::Step => "give milliseconds, from 0.001 to 60000",
            Range::Seconds => "give seconds, above 0 and at most 1e9",
            Range::Milliseconds => "give milliseconds, above 0 and at most 1e6",
            Range::Link => "give GB/s, from 0.001 to 1e6",
        }
    }
}

impl Node {
    /// Minimum of `checkpoint_after_s`, so that a worker is not checkpointed between two requests.
    const LEAST_CHECKPOINT_AFTER: Duration = Duration::from_secs(1);

    /// Returns the rate of a GPU's host link in bytes per second, if given.
    pub fn link(&self) -> Option<Bytes> {
        // Checked when the file was read: finite and above 0.
        let gigabytes = Duration::try_from_secs_f64(self.link_gbps?);
        Some(gigabytes.map_or(Bytes::MAX, |gb| Bytes::new(u64::try_from(gb.as_nanos()).unwrap_or(u64::MAX))))
    }

    /// Returns the idle time after which the driver checkpoints a worker without GPU memory.
    pub fn checkpoint_after(&self) -> Option<Duration> {
        // Validated when the file was parsed.
        self.checkpoint_after_s.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
    }

    /// Returns the floor of a worker: 640 MiB by default, as on an H200 with torch.
    pub fn floor(&self) -> Bytes {
        self.floor.unwrap_or(Bytes::mib(640))
    }

    /// Returns the reserve of a budget: 1 % by default, at least 512 MiB.
    pub fn reserve_of(&self, budget: Bytes) -> Bytes {
        self.reserve.unwrap_or_else(|| Bytes::mib(512).max(Bytes::new(budget.get() / 100)))
    }

    /// Returns the budget of a GPU without the reserve.
    pub fn capacity(&self) -> Bytes {
        let budget = self.budget.unwrap_or(Bytes::ZERO);
        budget.saturating_sub(self.reserve_of(budget))
    }
}

impl NodeFile {
    /// Maximum number of workers.
    pub const MOST_WORKERS: usize = 1024;
    /// Maximum number of GPUs of a worker.
    const MOST_GPUS: usize = 64;

    /// Parses the text of a file and validates its values.
    ///
    /// # Errors
    /// [`NodeError`].
    pub fn parse(text: &str) -> Result<Self, NodeError> {
        let file: NodeFile = toml::from_str(text)?;
        if file.workers.len() > Self::MOST_WORKERS {
            return Err(NodeError::TooMany { found: file.workers.len(), most: Self::MOST_WORKERS });
        }
        let mut names = BTreeSet::new();
        for worker in &file.workers {
            if !names.insert(&worker.name) {
                return Err(NodeError::Twice { name: worker.name.clone() });
            }
            let whom = || format!("worker {:?}", worker.name);
            let value = |key, found: f64, range: Range| match range.has(found) {
                true => Ok(()),
                false => Err(NodeError::Value {
                    whom: whom(),
                    key,
                    found: format!("{found:?}"),
                    allowed: range.allowed(),
                }),
            };
            value("prefill_tok_s", worker.prefill_tok_s, Range::Tokens)?;
            value("decode_ms", worker.decode_ms, Range::Step)?;
            worker.deadline_s.map_or(Ok(()), |seconds| value("deadline_s", seconds, Range::Seconds))?;
            worker.max_pause.map_or(Ok(()), |seconds| value("max_pause", seconds, Range::Seconds))?;
            if worker.gpus.len() > Self::MOST_GPUS {
                let (found, allowed) = (format!("a list of {}", worker.gpus.len()), "give at most 64 GPUs");
                return Err(NodeError::Value { whom: whom(), key: "gpus", found, allowed });
            }
            let gpus: BTreeSet<_> = worker.gpus.iter().collect();
            if gpus.is_empty() || gpus.len() != worker.gpus.len() {
                let (found, allowed) = (format!("{:?}", worker.gpus), "name each GPU once, as [0]");
                return Err(NodeError::Value { whom: whom(), key: "gpus", found, allowed });
            }
            worker.check_command()?;
        }
        let value = |key, found: String, allowed| {
            Err(NodeError::Value { whom: "[node]".to_owned(), key, found, allowed })
        };
        if let Some(rate) = file.node.link_gbps.filter(|rate| !Range::Link.has(*rate)) {
            return value("link_gbps", format!("{rate:?}"), Range::Link.allowed());
        }
        if let Some(after) = file.node.checkpoint_after_s
            && !(Range::Seconds.has(after) && after >= Node::LEAST_CHECKPOINT_AFTER.as_secs_f64())
        {
            return value("checkpoint_after_s", format!("{after:?}"), "give seconds, 1 or more, at most 1e9");
        }
        if file.node.budget.is_some() && file.node.capacity().is_zero() {
            let found = file.node.budget.unwrap_or_default().to_string();
            return value("budget", found, "give more than the reserve of 1 %, 512 MiB at least");
        }
        Ok(file)
    }

    /// Checks that a budget and workers are given, and that each worker fits beside the contexts of all workers of its GPU, as a plan
    /// requires.
    ///
    /// # Errors
    /// [`NodeError`].
    pub fn check_fit(&self) -> Result<(), NodeError> {
        let Some(budget) = self.node.budget else {
            let (whom, found) = ("[node]".to_owned(), "not given".to_owned());
            let allowed = "give what workers may use of a GPU together, as budget = \"23GiB\"";
            return Err(NodeError::Value { whom, key: "budget", found, allowed });
        };
        if self.workers.is_empty() {
            return Err(NodeError::NoWorker);
        }
        let mut workers: BTreeMap<u16, u64> = BTreeMap::new();
        self.workers
            .iter()
            .flat_map(|worker| &worker.gpus)
            .for_each(|gpu| *workers.entry(*gpu).or_default() += 1);
        for worker in &self.workers {
            let needs = worker.share();
            if needs.is_zero() {
                let (whom, found) = (format!("worker {:?}", worker.name), "0 B, or not given".to_owned());
                return Err(NodeError::Value {
                    whom,
                    key: "weights",
                    found,
                    allowed: "give its weights, and kv beside",
                });
            }
            for &gpu in &worker.gpus {
                let there = workers.get(&gpu).copied().unwrap_or(0);
                let contexts = self.node.floor().checked_mul(there).unwrap_or(Bytes::MAX);
                let room = self.node.capacity().saturating_sub(contexts);
                if needs > room {
                    let name = worker.name.clone();
                    return Err(NodeError::FitsNowhere { name, gpu, needs, room, budget, contexts });
                }
            }
        }
        Ok(())
    }
}

impl NodeFile {
    /// Checks the workers against the GPUs of a server, given by name and memory. Workers without sizes take memory as they grow. Returns
    /// notes about workers that fit, and have no room for `growth` beside.
    ///
    /// # Errors
    /// [`NodeError::NoGpu`], [`NodeError::NeverFits`].
    pub fn check_server(&self, gpus: &[(String, Bytes)], growth: Bytes) -> Result<Vec<String>, NodeError> {
        let mut notes = Vec::new();
        for (worker, &gpu) in self.workers.iter().flat_map(|of| of.gpus.iter().map(move |gpu| (of, gpu))) {
            let name = worker.name.clone();
            let Some((_, total)) = gpus.get(usize::from(gpu)) else {
                let known = gpus.iter().map(|(name, _)| name.clone()).collect();
                return Err(NodeError::NoGpu { name, gpu, known });
            };
            let (needs, budget) = (worker.share(), self.node.budget.unwrap_or(*total).min(*total));
            if needs.is_zero() {
                continue;
            }
            let there = || self.workers.iter().filter(|other| other.gpus.contains(&gpu));
            let contexts = self.node.floor().checked_mul(there().count() as u64).unwrap_or(Bytes::MAX);
            let stays = |other: &&Worker| other.name != name && other.preempt == Preempt::Never;
            let kept: Bytes = there().filter(stays).map(Worker::share).sum();
            let reserve = self.node.reserve_of(budget);
            let taken = reserve.saturating_add(contexts).saturating_add(kept);
            let room = budget.saturating_sub(taken);
            if needs > room {
                return Err(NodeError::NeverFits { name, gpu, needs, room, budget, reserve, contexts, kept });
            }
            let left = room.saturating_sub(needs);
            if left < growth {
                notes.push(format!(
                    "worker {name:?} fits into GPU {gpu} with {left} to grow, and asks for {growth} (lease.growth): what it needs beyond \
                     weights and kv may be denied"
                ));
            }
        }
        Ok(notes)
    }
}

/// Returns the numbers and names of GPUs.
fn numbered(names: &[String]) -> String {
    let gpu = |(number, name): (usize, &String)| match *name == number.to_string() {
        true => name.clone(),
        false => format!("{number} ({name})"),
    };
    names.iter().enumerate().map(gpu).collect::<Vec<_>>().join(", ")
}

impl Worker {
    /// Returns the memory of the worker on each of its GPUs.
    pub fn share(&self) -> Bytes {
        self.part(self.weights).saturating_add(self.part(self.kv))
    }

    /// Returns the condition for starting the command; `None` without a command.
    pub fn start(&self) -> Option<Start> {
        (!self.command.is_empty()).then(|| self.start.unwrap_or_default())
    }

    /// Checks that the command can be started with its environment.
    fn check_command(&self) -> Result<(), NodeError> {
        let value = |key, found: &dyn fmt::Debug, allowed| {
            let (whom, found) = (format!("worker {:?}", self.name), format!("{found:?}"));
            Err(NodeError::Value { whom, key, found, allowed })
        };
        let (Some(program), start) = (self.command.first(), self.start.unwrap_or_default()) else {
            return match self.start {
                Some(start @ (Start::Boot | Start::Request)) => value(
                    "start",
                    &start,
                    "give its command too, as [\"python\", \"worker.py\"]; or start = \"never\"",
                ),
                _ => Ok(()),
            };
        };
        // The worker joins under this name, and its log file has it.
        let is_allowed = |letter: char| letter.is_ascii_alphanumeric() || "._-".contains(letter);
        if start != Start::Never
            && !((1..=64).contains(&self.name.len()) && self.name.chars().all(is_allowed))
        {
            return value(
                "name",
                &self.name,
                "of a worker with a command it is 1 to 64 of A-Z a-z 0-9 . _ -",
            );
        }
        let has_nul = |text: &String| text.contains('\0');
        if program.is_empty() || self.command.iter().any(has_nul) {
            return value(
                "command",
                &self.command,
                "name a program, then its arguments, without the character 0",
            );
        }
        let is_bad = |(key, text): &(&String, &String)| {
            key.is_empty()
                || key.contains(['=', '\0'])
                || has_nul(text)
                || STARTED_WITH.contains(&key.as_str())
        };
        match self.env.iter().find(is_bad) {
            Some((key, _)) => value(
                "env",
                key,
                "GLAKE_AGENT, GLAKE_WORKER and GLAKE_START are the agent's to set; a name is not empty, and without = \
                 and the character 0",
            ),
            None => Ok(()),
        }
    }

    /// Returns the longest pause of the worker's uses.
    pub fn max_pause(&self) -> Option<Duration> {
        self.max_pause.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
    }

    pub(crate) fn part(&self, bytes: Bytes) -> Bytes {
        Bytes::new(bytes.get() / (self.gpus.len() as u64).max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_are_checked_against_the_server() {
        let gib = Bytes::gib;
        let gpus: Vec<_> = (0..4).map(|gpu| (gpu.to_string(), gib(80))).collect();
        let check = |text: &str| NodeFile::parse(text).unwrap().check_server(&gpus, gib(1));
        let worker = |name: &str, weights: u64, more: &str| {
            format!("[[worker]]\nname = {name:?}\nweights = \"{weights}GiB\"\n{more}\n")
        };
        let unknown = check(&worker("a", 1, "gpus = [9]")).unwrap_err().to_string();
        assert_eq!(
            unknown,
            "worker \"a\" names GPU 9 in gpus, and this server has 0, 1, 2, 3: name some of these, as gpus = [0]"
        );
        // The memory of the GPU bounds workers without a budget, and contexts take 640 MiB each.
        assert_eq!(check(&worker("a", 77, "")).unwrap(), [""; 0]);
        let notes = check(&worker("a", 78, "")).unwrap();
        assert!(notes.len() == 1 && notes[0].contains("lease.growth"), "{notes:?}");
        let needs = check(&worker("a", 79, "")).unwrap_err().to_string();
        assert!(needs.contains("it needs 79.00 GiB of GPU 0, which has 78.5"), "{needs}");
        let many: String = (0..9).map(|n| worker(&format!("w{n}"), 74, "")).collect();
        assert!(matches!(check(&many), Err(NodeError::NeverFits { .. })));
        // Memory that is never taken leaves no room for others.
        let never = worker("kept", 50, "preempt = \"never\"") + &worker("other", 40, "");
        let kept = check(&never).unwrap_err().to_string();
        assert!(
            kept.contains("worker \"other\" never fits") && kept.contains("50.00 GiB of workers"),
            "{kept}"
        );
        assert_eq!(
            check(&(worker("kept", 50, "preempt = \"never\"") + &worker("other", 20, ""))).unwrap(),
            [""; 0]
        );
        // Its size is known once it has loaded.
        assert_eq!(check(&worker("a", 0, "gpus = [3]")).unwrap(), [""; 0]);
    }
}
