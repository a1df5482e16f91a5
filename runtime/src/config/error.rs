//! Errors of reading a configuration.

use std::path::PathBuf;

use super::{Origin, UnknownPreset};

/// Error of reading a configuration. Each message names in one line the place, the value and the allowed values.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Unreadable file: name another one.
    #[error("{}: {source}; name a TOML file with --config or GLAKE_CONFIG", path.display())]
    Unreadable {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: std::io::Error,
    },
    /// Syntax error: the file is not TOML.
    #[error("{}:{line}: not TOML: {reason}", path.display())]
    Syntax {
        /// Path of the file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// Message of the parser.
        reason: String,
    },
    /// Unknown key.
    #[error("{origin}: unknown key {key}; allowed: {}", allowed.join(", "))]
    UnknownKey {
        /// Place of the setting.
        origin: Origin,
        /// Full key, including its table.
        key: String,
        /// Keys of the same table; all keys if the table does not exist.
        allowed: Vec<&'static str>,
    },
    /// Removed key.
    #[error("{origin}: {key} is no key any more: {instead}")]
    RemovedKey {
        /// Place of the setting.
        origin: Origin,
        /// Full key, including its table.
        key: String,
        /// Key or behavior that replaces it.
        instead: &'static str,
    },
    /// Value of the wrong type or out of range.
    #[error("{origin}: {key} = {value}: allowed is {allowed}")]
    BadValue {
        /// Place of the setting.
        origin: Origin,
        /// Full key, or the name of the variable or flag.
        key: String,
        /// Value as it was written.
        value: String,
        /// Description of allowed values.
        allowed: &'static str,
    },
    /// Conflict: two spellings of one variable have different values.
    #[error(
        "environment: {first} = {first_value:?} but {second} = {second_value:?}: two spellings of one setting; \
         set one, or both to the same value"
    )]
    Conflict {
        /// First spelling.
        first: &'static str,
        /// Value of the first spelling.
        first_value: String,
        /// Second spelling.
        second: &'static str,
        /// Value of the second spelling.
        second_value: String,
    },
    /// Unknown preset.
    #[error(transparent)]
    Preset(#[from] UnknownPreset),
}
