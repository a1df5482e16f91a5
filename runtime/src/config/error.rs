//! Why a configuration is refused.

use std::path::PathBuf;

use super::{Origin, UnknownPreset};

/// Why a configuration is refused; each says in one line where, what and what is allowed.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read: name another.
    #[error("{}: {source}; name a TOML file with --config or GLAKE_CONFIG", path.display())]
    Unreadable {
        /// Which.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: std::io::Error,
    },
    /// The file is not TOML: mend the line.
    #[error("{}:{line}: not TOML: {reason}", path.display())]
    Syntax {
        /// Which.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What the parser says.
        reason: String,
    },
    /// There is no such key.
    #[error("{origin}: unknown key {key}; allowed: {}", allowed.join(", "))]
    UnknownKey {
        /// Where it stands.
        origin: Origin,
        /// From the table on.
        key: String,
        /// The keys of that table; all keys where there is no such table.
        allowed: Vec<&'static str>,
    },
    /// The key has another name now.
    #[error("{origin}: {key} is called {now} now: write that")]
    MovedKey {
        /// Where it stands.
        origin: Origin,
        /// From the table on.
        key: String,
        /// Its name, from the table on.
        now: &'static str,
    },
    /// The key is gone, and nothing has taken its place.
    #[error("{origin}: {key} is no key any more ({instead}): remove it")]
    RemovedKey {
        /// Where it stands.
        origin: Origin,
        /// From the table on.
        key: String,
        /// What holds now.
        instead: &'static str,
    },
    /// The value is of the wrong kind or out of range.
    #[error("{origin}: {key} = {value}: allowed is {allowed}")]
    BadValue {
        /// Where it stands.
        origin: Origin,
        /// From the table on, or the name of the variable or flag.
        key: String,
        /// As it was written.
        value: String,
        /// In words.
        allowed: &'static str,
    },
    /// Two spellings of one variable say different things: unset one.
    #[error(
        "environment: {first} = {first_value:?} but {second} = {second_value:?}: two spellings of one setting; \
         set one, or both to the same value"
    )]
    Conflict {
        /// One spelling.
        first: &'static str,
        /// Its value.
        first_value: String,
        /// The other.
        second: &'static str,
        /// Its value.
        second_value: String,
    },
    /// There is no such preset.
    #[error(transparent)]
    Preset(#[from] UnknownPreset),
}
