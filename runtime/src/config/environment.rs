//! Environment variables: the configuration that they set, and what a launcher says of the process. The variables are an argument, so that
//! tests need not change the process.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use toml::Value;

use super::setting::respelled;
use super::{ConfigError, Origin, Setting};

/// Environment variables of a process. Only [`Environment::of_process`] reads the real ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Environment {
    variables: BTreeMap<OsString, OsString>,
}

/// Environment variable that sets a key: its spellings, the key and the parser of its value.
struct Variable {
    names: &'static [&'static str],
    key: &'static str,
    allowed: &'static str,
    read: fn(&str) -> Option<Value>,
}

/// Variables of the GMLake tutorial, and GLake's own.
const VARIABLES: &[Variable] = &[
    Variable { names: &["vmmDefragment"], key: "pool.alias", allowed: "0 or 1", read: switch },
    Variable {
        names: &["fragment_limit", "fragLimit"],
        key: "pool.fragment_limit",
        allowed: "bytes, or a size such as 512MiB",
        read: text,
    },
    Variable {
        names: &["reuseLimit"],
        key: "pool.reuse_limit",
        allowed: "a number from 0 on, or inf",
        read: |text| text.trim().parse().ok().map(Value::Float),
    },
    Variable {
        names: &["defragment_level", "defragLevel"],
        key: "pool.defragment_level",
        allowed: "0 or 1",
        read: whole,
    },
    Variable {
        names: &["auto_gc_limits", "autoGC"],
        key: "pool.auto_gc_limit",
        allowed: "a whole number of GiB, at most 8589934591",
        read: |text| {
            let bytes = text.trim().parse::<u64>().ok()?.checked_mul(1 << 30)?;
            i64::try_from(bytes).ok().map(Value::Integer)
        },
    },
    Variable {
        names: &["GLAKE_DEVICE"],
        key: "device.choice",
        allowed: "auto, cuda, sim, sim:TOPOLOGY or sim:TOPOLOGY@/FOLDER",
        read: text,
    },
    Variable {
        names: &["GLAKE_AGENT"],
        key: "agent.socket",
        allowed: "the path of an agent's socket, from the root",
        read: text,
    },
    Variable {
        names: &["GLAKE_WORKER"],
        key: "agent.name",
        allowed: "1 to 64 of A-Z a-z 0-9 . _ -",
        read: text,
    },
    Variable { names: &["GLAKE_LOG"], key: "log.filter", allowed: "a level or a tracing filter", read: text },
    Variable {
        names: &["GLAKE_MULTI_PATH"],
        key: "transfer.multi_path",
        allowed: "0 or 1",
        read: multi_path,
    },
];

/// Variables in which launchers state the number of local processes: torchrun, Open MPI, Intel MPI and MPICH, MVAPICH, and launchers that
/// set `LOCAL_SIZE`. They belong to other programs: an unreadable value is ignored.
const LOCAL_RANKS: [&str; 5] = [
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "LOCAL_SIZE",
];

/// Slurm: tasks per node of the step that this process belongs to.
const SLURM_STEP: &str = "SLURM_STEP_TASKS_PER_NODE";
/// Slurm: tasks per node of the whole job. Used only by tasks, because processes outside of tasks see it too.
const SLURM_JOB: [&str; 2] = ["SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"];
/// Slurm: set only for the tasks of a step.
const SLURM_TASK: &str = "SLURM_PROCID";
/// Slurm: index of this node in the step.
const SLURM_NODE: &str = "SLURM_NODEID";

impl Environment {
    /// Reads the environment of this process.
    pub fn of_process() -> Self {
        Environment { variables: std::env::vars_os().collect() }
    }

    /// Returns the spellings of all variables that set a key.
    pub fn names(key: &str) -> impl Iterator<Item = &'static str> {
        VARIABLES
            .iter()
            .filter(move |variable| variable.key == key)
            .flat_map(|variable| variable.names)
            .copied()
    }

    /// Returns the value of a variable.
    pub fn get(&self, name: &str) -> Option<&OsStr> {
        self.variables.get(OsStr::new(name)).map(OsString::as_os_str)
    }

    /// Returns the names of all variables in sorted order.
    pub fn variables(&self) -> impl Iterator<Item = &OsStr> {
        self.variables.keys().map(OsString::as_os_str)
    }

    /// Returns whether `GLAKE_DISABLE` switches GLake off in this process: any value but 0 and an empty one. `ffi/preload` and the Python
    /// package parse it in the same way.
    fn is_disabled(&self) -> bool {
        let value = self.get("GLAKE_DISABLE").unwrap_or_default();
        !matches!(value.to_string_lossy().trim(), "" | "0")
    }

    /// Returns the file named by `GLAKE_CONFIG`.
    pub(super) fn config_file(&self) -> Option<PathBuf> {
        self.get("GLAKE_CONFIG").map(PathBuf::from)
    }

    /// Returns the settings made by variables. Two spellings may both be set if their values are equal.
    pub(super) fn settings(&self) -> Result<Vec<Setting>, ConfigError> {
        let mut settings = Vec::new();
        for variable in VARIABLES {
            let mut before: Option<(&'static str, String, Value)> = None;
            for name in variable.names {
                let Some(raw) = self.get(name) else { continue };
                let shown = raw.to_string_lossy().into_owned();
                let refused = || ConfigError::BadValue {
                    origin: Origin::Variable(name),
                    key: (*name).to_owned(),
                    value: format!("{shown:?}"),
                    allowed: variable.allowed,
                    instead: respelled(&shown, variable.allowed),
                };
                let value = raw.to_str().and_then(variable.read).ok_or_else(refused)?;
                let setting = set(variable.key, value.clone(), name);
                setting.check().map_err(|_| refused())?;
                settings.push(setting);
                match before {
                    Some((first, first_value, meant)) if !same(&meant, &value) => {
                        return Err(ConfigError::Conflict {
                            first,
                            first_value,
                            second: name,
                            second_value: shown,
                        });
                    }
                    _ => before = Some((name, shown, value)),
                }
            }
        }
        settings.extend(self.local_ranks());
        Ok(settings)
    }

    /// Returns the setting of the cache folder, which has the lowest precedence.
    pub(super) fn cache_folder(&self) -> Option<Setting> {
        let path = |name| self.get(name).map(Path::new);
        let folder = glake_transfer::paths::cache::folder(path("XDG_CACHE_HOME"), path("HOME"))?;
        let name = if path("XDG_CACHE_HOME").is_some_and(|cache| folder.starts_with(cache)) {
            "XDG_CACHE_HOME"
        } else {
            "HOME"
        };
        Some(set("transfer.calibrations", Value::String(folder.to_str()?.to_owned()), name))
    }

    /// Returns the number of local ranks; the largest one if launchers are nested.
    fn local_ranks(&self) -> Option<Setting> {
        let said = |name| self.get(name)?.to_str()?.trim().parse::<u32>().ok().map(|ranks| (ranks, name));
        let all = LOCAL_RANKS.into_iter().filter_map(said).chain(self.slurm());
        let (ranks, name) = all.max_by_key(|(ranks, _)| *ranks)?;
        Some(set("transfer.local_ranks", Value::Integer(ranks.into()), name))
    }

    /// Returns the number of tasks on this node: that of the step, else, for tasks, that of the job.
    fn slurm(&self) -> Option<(u32, &'static str)> {
        let text =
            |name| self.get(name).and_then(OsStr::to_str).map(str::trim).filter(|text| !text.is_empty());
        let node = text(SLURM_NODE).and_then(|text| text.parse().ok());
        let said = |name| text(name).and_then(|list| tasks_on(list, node)).map(|ranks| (ranks, name));
        let of_job = || text(SLURM_TASK).and_then(|_| SLURM_JOB.into_iter().find_map(said));
        said(SLURM_STEP).or_else(of_job)
    }
}

/// Returns the tasks on a node from a list such as `4(x2),3` (4, 4 and 3 tasks). If the node is unknown or not in the list, returns the
/// largest number; `None` if the text is no such list.
fn tasks_on(list: &str, node: Option<usize>) -> Option<u32> {
    let (mut most, mut first) = (None, 0_usize);
    for entry in list.split(',') {
        let (tasks, nodes) = match entry.trim().split_once('(') {
            Some((tasks, rest)) => (tasks, rest.strip_prefix('x')?.strip_suffix(')')?.parse().ok()?),
            None => (entry.trim(), 1_usize),
        };
        let (tasks, end) = (tasks.parse::<u32>().ok()?, first.saturating_add(nodes));
        if node.is_some_and(|node| (first..end).contains(&node)) {
            return Some(tasks);
        }
        (most, first) = (most.max(Some(tasks)), end);
    }
    most
}

fn set(key: &str, value: Value, name: &'static str) -> Setting {
    Setting::new(key.to_owned(), value, Origin::Variable(name))
}

impl<K: Into<OsString>, V: Into<OsString>> FromIterator<(K, V)> for Environment {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(variables: I) -> Self {
        Environment {
            variables: variables.into_iter().map(|(name, text)| (name.into(), text.into())).collect(),
        }
    }
}

fn text(text: &str) -> Option<Value> {
    Some(Value::String(text.to_owned()))
}

fn whole(text: &str) -> Option<Value> {
    text.trim().parse().ok().map(Value::Integer)
}

fn switch(text: &str) -> Option<Value> {
    match text.trim() {
        "0" => Some(Value::Boolean(false)),
        "1" => Some(Value::Boolean(true)),
        _ => None,
    }
}

/// Parses `GLAKE_MULTI_PATH`; an empty value means 0. `ffi/preload` parses it in the same way.
fn multi_path(text: &str) -> Option<Value> {
    if text.trim().is_empty() { Some(Value::Boolean(false)) } else { switch(text) }
}

/// Returns whether two values of a variable are equal: 512MiB equals 536870912.
fn same(one: &Value, other: &Value) -> bool {
    let size = |value: &Value| value.as_str().and_then(|text| text.parse::<glake_units::Bytes>().ok());
    one == other || (size(one).is_some() && size(one) == size(other))
}

/// Name that torchrun gives to an unnamed run.
const UNNAMED: &str = "none";

/// Identity of this process for an agent, as stated by its launcher.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Launch {
    /// Rank of the process; `None`: a single process.
    pub rank: Option<u32>,
    /// Number of local ranks, which receive memory together.
    pub ranks: u32,
    /// Identifier shared by all ranks of the run and by no other run.
    pub run: Option<String>,
    /// Folder of the user's sockets (`XDG_RUNTIME_DIR`).
    pub runtime_dir: Option<PathBuf>,
    /// Whether `GLAKE_DISABLE` keeps the process from joining an agent.
    pub is_disabled: bool,
}

impl Launch {
    /// Reads the launch environment. Unreadable values are ignored.
    pub fn of(environment: &Environment) -> Launch {
        let text = |name| {
            environment.get(name).and_then(OsStr::to_str).map(str::trim).filter(|text| !text.is_empty())
        };
        let number = |name| text(name).and_then(|text| text.parse::<u32>().ok());
        let runtime_dir = environment.get("XDG_RUNTIME_DIR").map(PathBuf::from);
        let rank = number("RANK").filter(|_| number("WORLD_SIZE").is_some_and(|ranks| ranks > 1));
        let master = || Some(format!("{}:{}", text("MASTER_ADDR")?, text("MASTER_PORT")?));
        let named = text("TORCHELASTIC_RUN_ID").filter(|run| *run != UNNAMED).map(str::to_owned);
        let run = rank.and_then(|_| named.or_else(master));
        // An agent sees the ranks of its own machine.
        let here = number("LOCAL_WORLD_SIZE").or(number("WORLD_SIZE"));
        let ranks = if run.is_some() { here.unwrap_or(1).max(1) } else { 1 };
        let is_disabled = environment.is_disabled();
        Launch { rank, ranks: if rank.is_some() { ranks } else { 0 }, run, runtime_dir, is_disabled }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{DefragmentLevel, DeviceChoice, MultiPath, Sources};
    use glake_units::Bytes;

    fn load(variables: &[(&str, &str)]) -> Result<super::super::Config, String> {
        let environment = variables.iter().copied().collect();
        Sources { environment, ..Sources::default() }.load().map_err(|error| error.to_string())
    }

    #[test]
    fn the_tutorials_names_keep_their_meaning() {
        for (fragment, level, gc) in
            [("fragment_limit", "defragment_level", "auto_gc_limits"), ("fragLimit", "defragLevel", "autoGC")]
        {
            let pool = load(&[
                ("vmmDefragment", "0"),
                (fragment, "268435456"),
                ("reuseLimit", "2.5"),
                (level, "1"),
                (gc, "10000"),
                ("PATH", "/bin"),
            ])
            .unwrap()
            .pool;
            assert!(!pool.alias);
            assert_eq!(pool.fragment_limit, Some(Bytes::mib(256)));
            assert_eq!(pool.reuse_limit.to_bits(), 2.5_f64.to_bits());
            assert_eq!(pool.defragment_level, DefragmentLevel::WhenFull);
            assert_eq!(pool.auto_gc_limit, Bytes::gib(10_000));
        }
    }

    #[test]
    fn our_own_names_are_read() {
        let config =
            load(&[("GLAKE_DEVICE", "sim:h20x8"), ("GLAKE_LOG", "debug"), ("GLAKE_MULTI_PATH", "1")])
                .unwrap();
        assert_eq!(
            config.device.choice,
            DeviceChoice::Sim { topology: Some("h20x8".to_owned()), shared: None }
        );
        assert_eq!(config.log.filter, "debug");
        assert!(config.transfer.multi_path == MultiPath::FromStart && config.transfer.starts_relays());
        assert_eq!(load(&[("GLAKE_MULTI_PATH", "0")]).unwrap().transfer.multi_path, MultiPath::OnRequest);
    }

    const MEANINGS: &[(&str, Option<bool>)] = &include!("../../../tests/tables/multi_path.rs");

    #[test]
    fn the_switch_means_what_it_means_to_the_preload_library() {
        assert_eq!(load(&[]).unwrap().transfer.multi_path, MultiPath::OnRequest);
        for (value, means) in MEANINGS {
            let switched = load(&[("GLAKE_MULTI_PATH", value)]).map(|config| config.transfer.multi_path);
            let is_on = switched.ok().map(|switched| switched == MultiPath::FromStart);
            assert_eq!(is_on, *means, "{value:?}");
        }
    }

    #[test]
    fn calibrations_are_in_the_users_cache() {
        let folder = |variables: &[(&str, &str)]| load(variables).unwrap().transfer.calibrations;
        let kept = |path: &str| Some(std::path::PathBuf::from(path));
        assert_eq!(folder(&[("HOME", "/home/me")]), kept("/home/me/.cache/glake/paths"));
        assert_eq!(folder(&[("HOME", "/home/me"), ("XDG_CACHE_HOME", "/c")]), kept("/c/glake/paths"));
        assert_eq!(folder(&[("HOME", "here")]), None);
    }

    #[test]
    fn launchers_say_how_many_ranks_there_are() {
        let ranks = |variables: &[(&str, &str)]| load(variables).unwrap().transfer.local_ranks;
        assert_eq!(ranks(&[("LOCAL_WORLD_SIZE", "4"), ("SLURM_NTASKS_PER_NODE", "1")]), Some(4));
        assert_eq!(ranks(&[("OMPI_COMM_WORLD_LOCAL_SIZE", "1")]), Some(1));
        assert_eq!(ranks(&[("LOCAL_SIZE", "8"), ("LOCAL_WORLD_SIZE", "")]), Some(8));
        let transfer = load(&[("GLAKE_MULTI_PATH", "1"), ("LOCAL_WORLD_SIZE", "2")]).unwrap().transfer;
        assert!(transfer.multi_path == MultiPath::FromStart && !transfer.starts_relays());
    }

    #[test]
    fn slurm_says_it_of_the_step_and_of_the_job_to_tasks_alone() {
        const STEP: &str = "SLURM_STEP_TASKS_PER_NODE";
        const JOB: &str = "SLURM_TASKS_PER_NODE";
        const EACH: &str = "SLURM_NTASKS_PER_NODE";
        let (task, node) = (("SLURM_PROCID", "5"), |node| ("SLURM_NODEID", node));
        type Variables<'a> = &'a [(&'a str, &'a str)];
        let table: &[(Variables<'_>, Option<u32>)] = &[
            (&[(STEP, "4")], Some(4)),
            (&[(STEP, "1"), (JOB, "8"), (EACH, "8"), task], Some(1)),
            // In a batch script one process runs on behalf of the whole job.
            (&[(JOB, "8"), (EACH, "8")], None),
            (&[(JOB, "8"), task], Some(8)),
            (&[(EACH, "2"), task], Some(2)),
            (&[(STEP, "4(x2),3"), node("0")], Some(4)),
            (&[(STEP, "4(x2),3"), node("1")], Some(4)),
            (&[(STEP, "4(x2),3"), node("2")], Some(3)),
            (&[(STEP, "1,2(x3),1"), node("3")], Some(2)),
            (&[(STEP, "4(x2),3"), node("9")], Some(4)),
            (&[(STEP, "1,3")], Some(3)),
            (&[(STEP, " 2 "), ("LOCAL_WORLD_SIZE", "4")], Some(4)),
            (&[(STEP, "4(x"), task, (JOB, "2")], Some(2)),
            (&[(STEP, "many")], None),
            (&[(STEP, ""), task, (JOB, "2(x1)")], Some(2)),
        ];
        for (variables, ranks) in table {
            assert_eq!(load(variables).unwrap().transfer.local_ranks, *ranks, "{variables:?}");
        }
    }

    #[test]
    fn two_spellings_must_agree() {
        assert!(load(&[("fragment_limit", "256MiB"), ("fragLimit", "268435456")]).is_ok());
        assert_eq!(
            load(&[("fragment_limit", "1"), ("fragLimit", "2")]).unwrap_err(),
            "environment: fragment_limit = \"1\" but fragLimit = \"2\": two spellings of one setting; set one, or \
             both to the same value"
        );
        assert!(load(&[("autoGC", "1"), ("auto_gc_limits", "2")]).is_err());
        assert!(load(&[("defragLevel", "1"), ("defragment_level", "0")]).is_err());
    }

    #[test]
    fn a_bad_value_names_variable_value_and_what_is_allowed() {
        for (name, value, allowed) in [
            ("vmmDefragment", "yes", "0 or 1"),
            ("fragLimit", "12 parsecs", "bytes, or a size such as 512MiB"),
            ("fragment_limit", "-1", "bytes, or a size such as 512MiB"),
            ("reuseLimit", "-1", "a number from 0 on, or inf"),
            ("reuseLimit", "NaN", "a number from 0 on, or inf"),
            ("defragment_level", "2", "0 or 1"),
            ("autoGC", "1.5", "a whole number of GiB, at most 8589934591"),
            ("autoGC", "99999999999", "a whole number of GiB, at most 8589934591"),
            ("GLAKE_DEVICE", "gpu", "auto, cuda, sim, sim:TOPOLOGY or sim:TOPOLOGY@/FOLDER"),
            ("GLAKE_LOG", "loud=very", "a level or a tracing filter"),
            ("GLAKE_LOG", "debgu", "a level or a tracing filter"),
            ("GLAKE_LOG", "debug ", "a level or a tracing filter"),
            ("GLAKE_MULTI_PATH", "2", "0 or 1"),
        ] {
            assert_eq!(
                load(&[(name, value)]).unwrap_err(),
                format!("environment: {name} = {value:?}: allowed is {allowed}")
            );
        }
    }
}

#[cfg(test)]
mod launch_tests {
    use super::*;

    #[test]
    fn any_other_value_than_0_disables() {
        for (value, is_disabled) in [("", false), (" 0 ", false), ("1", true), ("yes", true)] {
            assert_eq!(launch(&[("GLAKE_DISABLE", value)]).is_disabled, is_disabled, "{value:?}");
        }
        assert!(!launch(&[]).is_disabled);
    }

    fn launch(variables: &[(&str, &str)]) -> Launch {
        Launch::of(&variables.iter().copied().collect())
    }

    #[test]
    fn ranks_of_a_run_have_its_name() {
        assert_eq!(launch(&[]), Launch::default());
        let alone = launch(&[("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "1")]);
        assert_eq!(alone, Launch::default());
        let of_torch = [("RANK", "3"), ("WORLD_SIZE", "8"), ("MASTER_ADDR", "n0"), ("MASTER_PORT", "29500")];
        let found = launch(&of_torch);
        assert_eq!((found.rank, found.ranks, found.run.as_deref()), (Some(3), 8, Some("n0:29500")));
        let named = [&of_torch[..], &[("TORCHELASTIC_RUN_ID", "job"), ("LOCAL_WORLD_SIZE", "4")]].concat();
        let found = launch(&named);
        assert_eq!((found.rank, found.ranks, found.run.as_deref()), (Some(3), 4, Some("job")));
        let unnamed = [&of_torch[..], &[("TORCHELASTIC_RUN_ID", "none")]].concat();
        assert_eq!(launch(&unnamed).run.as_deref(), Some("n0:29500"));
        let lost = launch(&[("RANK", "1"), ("WORLD_SIZE", "2")]);
        assert_eq!((lost.rank, lost.ranks, lost.run), (Some(1), 1, None));
        assert_eq!(launch(&[("RANK", "x"), ("WORLD_SIZE", "2")]).rank, None);
    }
}
