//! One key set to one value, somewhere.

use std::fmt;
use std::path::PathBuf;

use toml::{Table, Value};

use super::knob::{allowed_beside, moved};
use super::{Config, ConfigError, Knob};

/// A key, its value, and where it stands.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    key: Vec<String>,
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
        Setting::new(key.split('.').map(str::to_owned).collect(), value.into(), Origin::Flag(flag))
    }

    pub(super) fn new(key: Vec<String>, value: Value, origin: Origin) -> Self {
        Setting { key, value, origin }
    }

    /// Checks it by itself: the key exists, the value is of its kind and allowed.
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let key = self.key.join(".");
        let Some(knob) = Knob::of(&key) else {
            // A table that holds something else than a table, or a value that is one.
            let inner = KNOB_TABLES.iter().find(|table| **table == key);
            let outer =
                self.key.iter().enumerate().skip(1).find_map(|(n, _)| Knob::of(&self.key[..n].join(".")));
            return match (inner, outer, moved(&key)) {
                (Some(table), ..) => Err(self.refused(table, "a table")),
                (None, Some(knob), _) => Err(self.refused(knob.key, knob.allowed)),
                (None, None, Some(now)) => {
                    Err(ConfigError::MovedKey { origin: self.origin.clone(), key, now })
                }
                (None, None, None) => Err(ConfigError::UnknownKey {
                    origin: self.origin.clone(),
                    allowed: allowed_beside(&key),
                    key,
                }),
            };
        };
        let mut table = Table::new();
        self.put(&mut table);
        match table.try_into::<Config>() {
            Ok(config) if knob.holds_in(&config) => Ok(()),
            _ => Err(self.refused(knob.key, knob.allowed)),
        }
    }

    /// Writes it into a document, over what stands there.
    pub(super) fn put(&self, mut table: &mut Table) {
        let Some((last, tables)) = self.key.split_last() else { return };
        for name in tables {
            let inner = table.entry(name).or_insert_with(|| Value::Table(Table::new()));
            match inner {
                Value::Table(inner) => table = inner,
                _ => return,
            }
        }
        table.insert(last.clone(), self.value.clone());
    }

    fn refused(&self, key: &str, allowed: &'static str) -> ConfigError {
        let key = match self.origin {
            Origin::Variable(name) | Origin::Flag(name) => name.to_owned(),
            Origin::Line { .. } => key.to_owned(),
        };
        ConfigError::BadValue { origin: self.origin.clone(), key, value: self.value.to_string(), allowed }
    }
}

/// The tables that hold the knobs.
const KNOB_TABLES: [&str; 6] = ["pool", "pool.wait", "transfer", "tiers", "device", "log"];

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Line { file, line } => write!(f, "{}:{line}", file.display()),
            Origin::Variable(_) => f.write_str("environment"),
            Origin::Flag(_) => f.write_str("command line"),
        }
    }
}
