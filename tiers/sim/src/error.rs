//! What can be wrong with a topology's name or file: one line each.

use std::path::PathBuf;

/// Why a topology could not be had.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum TopologyError {
    /// Neither a preset nor a file.
    #[error("topology {name:?} does not exist: allowed is {allowed}, or the path of a .toml file")]
    Unknown {
        /// What was asked for.
        name: String,
        /// The presets.
        allowed: String,
    },
    /// The file cannot be read.
    #[error("{} cannot be read: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: std::io::Error,
    },
    /// The file is not what a topology looks like: not TOML, a key that is missing, unknown, or of another type.
    #[error("{}:{line}: {text}: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Where.
        line: usize,
        /// That line.
        text: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A value that cannot be.
    #[error("{}: {key} = {found}: allowed is {allowed}", path.display())]
    Refused {
        /// The file.
        path: PathBuf,
        /// The key, from the root.
        key: String,
        /// Its value.
        found: String,
        /// What it may be.
        allowed: String,
    },
}
