//! Which workers the agent has started, for the agent that comes after it: beside the socket.
//!
//! Invariant: a start is written down before it is made. So the next agent finds the process of whichever start there
//! was, by its number and when it started, or, where the agent died in between, by the number of the start that the
//! process has in its environment.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use glake_wire::Peer;
use serde::{Deserialize, Serialize};

use crate::beside::{read_whole, write_whole};

/// More than any of them has.
const LONGEST: u64 = 16 << 20;

/// A start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Started {
    pub(crate) name: String,
    /// The number of the start.
    pub(crate) mark: String,
    /// Its process, once that is known.
    pub(crate) peer: Option<Peer>,
}

/// All that is written down.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct Written {
    started: Vec<Started>,
    /// Those that an operator ended.
    stopped: BTreeSet<String>,
}

/// The file.
#[derive(Debug)]
pub(crate) struct Starts {
    path: PathBuf,
    now: Written,
    /// Whether the file says it.
    is_written: bool,
}

impl Starts {
    /// Reads what an agent before left. What is damaged is passed over: workers that have joined are known by the
    /// journal too.
    pub(crate) fn read(path: PathBuf) -> Starts {
        let read = read_whole(&path, LONGEST).and_then(|bytes| match bytes {
            Some(bytes) => Ok(serde_json::from_slice(&bytes)?),
            None => Ok(Written::default()),
        });
        let is_written = read.is_ok();
        let now = read.unwrap_or_else(|error| {
            tracing::warn!(target: "glake::agent", path = %path.display(), %error, "which workers were started cannot be read: begun anew");
            Written::default()
        });
        Starts { path, now, is_written }
    }

    pub(crate) fn started(&self) -> &[Started] {
        &self.now.started
    }

    pub(crate) fn stopped(&self) -> &BTreeSet<String> {
        &self.now.stopped
    }

    /// Puts a start in the place of the one of this name.
    pub(crate) fn put(&mut self, start: Started) -> io::Result<()> {
        self.now.started.retain(|other| other.name != start.name);
        self.now.started.push(start);
        self.is_written = false;
        self.write()
    }

    /// One is over.
    pub(crate) fn remove(&mut self, name: &str) {
        self.now.started.retain(|other| other.name != name);
        self.is_written = false;
        self.tell_of(self.path.clone().as_path());
    }

    /// Which are not started any more because an operator ended them.
    pub(crate) fn set_stopped(&mut self, stopped: BTreeSet<String>) {
        if self.now.stopped != stopped {
            self.now.stopped = stopped;
            self.is_written = false;
            self.tell_of(self.path.clone().as_path());
        }
    }

    fn tell_of(&mut self, path: &Path) {
        if let Err(error) = self.write() {
            tracing::warn!(target: "glake::agent", path = %path.display(), %error, "which workers were started cannot be written down");
        }
    }

    fn write(&mut self) -> io::Result<()> {
        if !self.is_written {
            let mut beside = self.path.clone().into_os_string();
            beside.push(".new");
            write_whole(&self.path, Path::new(&beside), &serde_json::to_vec(&self.now)?)?;
            self.is_written = true;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_agent_reads_what_was_written_and_passes_over_what_is_damaged() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.starts");
        let mut starts = Starts::read(path.clone());
        assert!(starts.started().is_empty() && starts.stopped().is_empty());
        let start = |name: &str, pid| Started {
            name: name.to_owned(),
            mark: format!("7-{name}"),
            peer: Some(Peer { pid, start: 3 }),
        };
        let unknown = Started { peer: None, ..start("chat", 0) };
        starts.put(unknown.clone()).unwrap();
        assert_eq!(Starts::read(path.clone()).started(), [unknown]);
        starts.put(start("code", 2)).unwrap();
        starts.put(start("chat", 1)).unwrap();
        starts.set_stopped(["search".to_owned()].into());
        let read = Starts::read(path.clone());
        assert_eq!(read.started(), [start("code", 2), start("chat", 1)]);
        assert_eq!(read.stopped(), starts.stopped());
        starts.remove("code");
        assert_eq!(Starts::read(path.clone()).started(), [start("chat", 1)]);
        for damaged in [&b"{\"started\":[{"[..], b"\xff", b"[]7"] {
            std::fs::write(&path, damaged).unwrap();
            assert!(Starts::read(path.clone()).started().is_empty());
        }
    }

    #[test]
    fn a_start_that_cannot_be_written_down_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let mut starts = Starts::read(folder.path().join("no/agent.starts"));
        starts.put(Started::default()).unwrap_err();
        starts.set_stopped(["chat".to_owned()].into());
    }
}
