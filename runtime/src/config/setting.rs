//! Single setting: a key, a value and its place; and the errors of reading settings.

use std::fmt;
use std::path::PathBuf;

use glake_units::Bytes;
use toml::{Table, Value};

use super::knob::{allowed_beside, is_table, removed};
use super::{Config, Knob, UnknownPreset};

/// Key, its value and the place where it is set.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    key: String,
    value: Value,
    origin: Origin,
}

/// Place of a setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Line of a file.
    Line {
        /// Path of the file.
        file: PathBuf,
        /// Line number, from 1.
        line: usize,
    },
    /// Environment variable of this name.
    Variable(&'static str),
    /// Command-line flag.
    Flag(&'static str),
}

impl Setting {
    pub(super) fn key(&self) -> &str {
        &self.key
    }

    pub(super) fn is_text(&self) -> bool {
        self.value.is_str()
    }

    /// Creates the setting of a flag; `key` is a full key, including its table.
    pub fn flag(flag: &'static str, key: &str, value: impl Into<Value>) -> Self {
        Setting::new(key.to_owned(), value.into(), Origin::Flag(flag))
    }

    pub(super) fn new(key: String, value: Value, origin: Origin) -> Self {
        Setting { key, value, origin }
    }

    /// Checks the setting by itself: the key exists, and the value is of its type and in range.
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let Some(knob) = Knob::of(&self.key) else { return Err(self.unknown()) };
        let mut document = Table::new();
        self.put(&mut document);
        match document.try_into::<Config>() {
            Ok(config) if (knob.holds)(&config) => Ok(()),
            _ => Err(self.refused(knob.key, knob.allowed)),
        }
    }

    /// Explains an unknown key: it is a table, lies within a value, was removed, or never existed.
    fn unknown(&self) -> ConfigError {
        let (origin, key) = (self.origin.clone(), self.key.clone());
        if is_table(&key) {
            return self.refused(&key, "a table");
        }
        if let Some(outer) = key.match_indices('.').find_map(|(dot, _)| Knob::of(&key[..dot])) {
            return self.refused(outer.key, outer.allowed);
        }
        if let Some(instead) = removed(&key) {
            return ConfigError::RemovedKey { origin, key, instead };
        }
        ConfigError::UnknownKey { origin, allowed: allowed_beside(&key), key }
    }

    /// Writes the setting into a document of [`Config`], replacing an earlier value.
    pub(super) fn put(&self, document: &mut Table) {
        let Some((section, field)) = Knob::of(&self.key).map(|knob| knob.field) else { return };
        let section = document.entry(section).or_insert_with(|| Value::Table(Table::new()));
        if let Value::Table(section) = section {
            section.insert(field.to_owned(), self.value.clone());
        }
    }

    /// Creates the error of a rejected value, under the name used where it was set.
    pub(super) fn refused(&self, key: &str, allowed: &'static str) -> ConfigError {
        let key = match self.origin {
            Origin::Variable(name) | Origin::Flag(name) => name.to_owned(),
            Origin::Line { .. } => key.to_owned(),
        };
        let instead = respelled(self.value.as_str().unwrap_or_default(), allowed);
        ConfigError::BadValue {
            origin: self.origin.clone(),
            key,
            value: self.value.to_string(),
            allowed,
            instead,
        }
    }
}

/// Returns the proposal of a message for a size with another unit; empty if none is allowed, or the value is no size.
pub(super) fn respelled(value: &str, allowed: &str) -> String {
    let spelled = Bytes::spelled(value).filter(|_| allowed.contains("MiB"));
    spelled.map(|spelled| format!("; write {spelled:?}")).unwrap_or_default()
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Line { file, line } => write!(f, "{}:{line}", file.display()),
            Origin::Variable(_) => f.write_str("environment"),
            Origin::Flag(_) => f.write_str("command line"),
        }
    }
}

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
    /// A relative path without a working directory.
    #[error("{key} is {}, and the working directory is not known ({source}); give the path from the root", path.display())]
    WorkingDirectory {
        /// Key of the setting.
        key: &'static str,
        /// Path in the setting.
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
    #[error("{origin}: {key} = {value}: allowed is {allowed}{instead}")]
    BadValue {
        /// Place of the setting.
        origin: Origin,
        /// Full key, or the name of the variable or flag.
        key: String,
        /// Value as it was written.
        value: String,
        /// Description of allowed values.
        allowed: &'static str,
        /// Proposal, if the value is a size with another unit; else empty.
        instead: String,
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
