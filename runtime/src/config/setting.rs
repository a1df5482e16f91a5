//! One key set to one value, somewhere.

use std::fmt;
use std::path::PathBuf;

use toml::{Table, Value};

use super::knob::{allowed_beside, is_table, moved, removed};
use super::{Config, ConfigError, Knob};

/// A key, its value, and where it stands.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    key: String,
    value: Value,
    origin: Origin,
}

/// Where a setting stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// In a file.
    Line {
        /// Which.
        file: PathBuf,
        /// Counted from 1.
        line: usize,
    },
    /// In the environment, under this name.
    Variable(&'static str),
    /// On the command line, as this flag.
    Flag(&'static str),
}

impl Setting {
    /// What a flag asks for: `key` is a knob's, from the table on.
    pub fn flag(flag: &'static str, key: &str, value: impl Into<Value>) -> Self {
        Setting::new(key.to_owned(), value.into(), Origin::Flag(flag))
    }

    pub(super) fn new(key: String, value: Value, origin: Origin) -> Self {
        Setting { key, value, origin }
    }

    /// Checks it by itself: the key exists, the value is of its kind and allowed.
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let Some(knob) = Knob::of(&self.key) else { return Err(self.unknown()) };
        let mut document = Table::new();
        self.put(&mut document);
        match document.try_into::<Config>() {
            Ok(config) if (knob.holds)(&config) => Ok(()),
            _ => Err(self.refused(knob.key, knob.allowed)),
        }
    }

    /// Why no knob has this key: it is a table's, lies within a value, is called otherwise now, or is none at all.
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
        match moved(&key) {
            Some(now) => ConfigError::MovedKey { origin, key, now },
            None => ConfigError::UnknownKey { origin, allowed: allowed_beside(&key), key },
        }
    }

    /// Writes it into a document of [`Config`], over what stands there.
    pub(super) fn put(&self, document: &mut Table) {
        let Some((section, field)) = Knob::of(&self.key).map(|knob| knob.field) else { return };
        let section = document.entry(section).or_insert_with(|| Value::Table(Table::new()));
        if let Value::Table(section) = section {
            section.insert(field.to_owned(), self.value.clone());
        }
    }

    /// Whether it sets the knob of this key.
    pub(super) fn is_of(&self, key: &str) -> bool {
        self.key == key
    }

    /// Why it is refused, under the name that stands where it was set.
    pub(super) fn refused(&self, key: &str, allowed: &'static str) -> ConfigError {
        let key = match self.origin {
            Origin::Variable(name) | Origin::Flag(name) => name.to_owned(),
            Origin::Line { .. } => key.to_owned(),
        };
        ConfigError::BadValue { origin: self.origin.clone(), key, value: self.value.to_string(), allowed }
    }
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
