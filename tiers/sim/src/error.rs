//! Errors in a topology's name or file, each one line long.

use std::path::PathBuf;

/// Reason why a topology could not be loaded.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum TopologyError {
    /// The name is neither a preset nor a file.
    #[error("topology {name:?} does not exist: allowed is {allowed}, or the path of a .toml file")]
    Unknown {
        /// Name that was requested.
        name: String,
        /// Names of the presets.
        allowed: String,
    },
    /// The file cannot be read.
    #[error("{} cannot be read: {source}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: std::io::Error,
    },
    /// The file is not a valid topology: not TOML, or a key is missing, unknown or of another type.
    #[error("{}:{line}: {text}: {reason}", path.display())]
    Malformed {
        /// Path of the file.
        path: PathBuf,
        /// Line number in the file.
        line: usize,
        /// Text of the line.
        text: String,
        /// Description of the mistake.
        reason: String,
    },
    /// A value is out of range.
    #[error("{}: {key} = {found}: allowed is {allowed}", path.display())]
    Refused {
        /// Path of the file.
        path: PathBuf,
        /// Key, from the root.
        key: String,
        /// Value that was found.
        found: String,
        /// Description of the allowed values.
        allowed: String,
    },
}
