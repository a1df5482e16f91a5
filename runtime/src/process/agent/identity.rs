//! Name of a worker and the ranks it runs with (pure).
//!
//! In secure-execution mode, as ld.so calls it, the environment must not name the agent.

use rustix::process::{getegid, geteuid, getgid, getuid};

use super::AgentError;
use crate::config::{Launch, is_name};

/// Maximum length of a name without its rank.
const MOST: usize = 64;

/// Identity of a joining worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) name: String,
    pub(super) gang: Option<String>,
    pub(super) ranks: u32,
}

impl Identity {
    /// Builds the identity from the requested name, or else from the program's name and process id.
    ///
    /// # Errors
    /// [`AgentError::BadName`].
    pub(super) fn of(
        asked: Option<&str>,
        program: &str,
        pid: u32,
        launch: &Launch,
    ) -> Result<Identity, AgentError> {
        if let Some(bad) = asked.filter(|name| !is_name(name)) {
            return Err(AgentError::BadName { name: bad.to_owned() });
        }
        let (gang, ranks) = (launch.run.clone(), launch.ranks.max(1));
        let base = asked.map_or_else(|| stem(program), str::to_owned);
        let name = match (launch.rank, asked) {
            (Some(rank), _) => format!("{base}/{rank}"),
            (None, Some(_)) => base,
            (None, None) => {
                let pid = format!("-{pid}");
                format!("{}{pid}", base.get(..base.len().min(MOST - pid.len())).unwrap_or_default())
            }
        };
        Ok(Identity { name, gang, ranks })
    }
}

/// Returns the file stem of the program's path, reduced to the allowed characters.
fn stem(program: &str) -> String {
    let file = program.rsplit('/').next().unwrap_or_default();
    let stem = file.split_once('.').map_or(file, |(stem, _)| stem);
    let allowed = |c: char| if is_name(c.encode_utf8(&mut [0; 4])) { c } else { '_' };
    let stem: String = stem.chars().map(allowed).take(MOST).collect();
    if stem.is_empty() { "worker".to_owned() } else { stem }
}

/// Key in the kernel's auxiliary vector for secure-execution mode.
const AT_SECURE: usize = 23;

/// Returns whether the process has rights that its user lacks: set-uid, set-gid, file capabilities or a security module's. Returns `true`
/// if the kernel does not provide the vector.
pub(super) fn is_secure_execution() -> bool {
    let told = || std::fs::read("/proc/self/auxv").map_or(true, |vector| says_secure(&vector));
    getuid() != geteuid() || getgid() != getegid() || told()
}

/// Reads the flag from an auxiliary vector: pairs of a key and a value, one word each.
fn says_secure(vector: &[u8]) -> bool {
    let words = vector.chunks_exact(size_of::<usize>()).filter_map(|word| word.try_into().ok());
    let words: Vec<usize> = words.map(usize::from_ne_bytes).collect();
    words.chunks_exact(2).any(|pair| matches!(pair, [AT_SECURE, secure] if *secure != 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(asked: Option<&str>, program: &str, launch: &Launch) -> Result<Identity, String> {
        Identity::of(asked, program, 4711, launch).map_err(|error| error.to_string())
    }

    #[test]
    fn a_worker_is_called_as_asked_or_as_its_program() {
        let alone = Launch::default();
        assert_eq!(named(Some("chat.7b"), "x", &alone).unwrap().name, "chat.7b");
        for (program, name) in [
            ("/usr/bin/python3.11", "python3-4711"),
            ("serve model!", "serve_model_-4711"),
            ("", "worker-4711"),
            ("/bin/", "worker-4711"),
            (".hidden", "worker-4711"),
        ] {
            assert_eq!(named(None, program, &alone).unwrap().name, name);
        }
        let long = named(None, &"x".repeat(200), &alone).unwrap().name;
        assert!(long.len() == 64 && long.ends_with("-4711"));
        for bad in ["", "a b", "ü", &"x".repeat(65), "a/0"] {
            let error = named(Some(bad), "x", &alone).unwrap_err();
            assert!(error.contains("1 to 64"), "{error}");
        }
    }

    #[test]
    fn ranks_are_called_by_their_numbers() {
        let launch = Launch {
            rank: Some(3),
            ranks: 8,
            run: Some("job".to_owned()),
            runtime_dir: None,
            ..Launch::default()
        };
        let found = named(None, "/bin/python3", &launch).unwrap();
        assert_eq!((&*found.name, found.gang.as_deref(), found.ranks), ("python3/3", Some("job"), 8));
        assert_eq!(named(Some("train"), "x", &launch).unwrap().name, "train/3");
    }
}

#[cfg(test)]
mod rights_tests {
    use super::*;

    #[test]
    fn the_kernel_says_whether_a_program_has_more_rights_than_its_user() {
        let vector = |pairs: &[(usize, usize)]| -> Vec<u8> {
            pairs
                .iter()
                .flat_map(|(kind, value)| [kind.to_ne_bytes(), value.to_ne_bytes()].concat())
                .collect()
        };
        assert!(says_secure(&vector(&[(6, 4096), (23, 1), (0, 0)])));
        assert!(!says_secure(&vector(&[(6, 4096), (23, 0), (11, 1), (0, 0)])));
        assert!(!says_secure(&[]));
        assert!(!is_secure_execution(), "tests are as their user is");
    }
}
