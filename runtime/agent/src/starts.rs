//! Record of the workers that the agent started, beside the socket, for the next agent.
//!
//! Invariant: a start is recorded before it happens. The next agent therefore finds the process of every start: by its process id and start
//! time, or, if the agent died in between, by the start number in the process's environment.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use glake_wire::Peer;
use serde::{Deserialize, Serialize};

use crate::host::{read_whole, write_whole};

/// Upper bound of the file's size.
const LONGEST: u64 = 16 << 20;

/// Recorded start of a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Started {
    pub(crate) name: String,
    /// Number of the start.
    pub(crate) mark: String,
    /// First process, once known.
    pub(crate) peer: Option<Peer>,
}

/// Content of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct Written {
    started: Vec<Started>,
    /// Workers that an operator stopped.
    stopped: BTreeSet<String>,
}

/// Open record of starts.
#[derive(Debug)]
pub(crate) struct Starts {
    path: PathBuf,
    now: Written,
    /// Whether the file is up to date.
    is_written: bool,
}

impl Starts {
    /// Reads the record of the previous agent. Damaged content is skipped, because the journal also names workers that have joined.
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

    /// Records a start, in place of the previous one of this name.
    pub(crate) fn put(&mut self, start: Started) -> io::Result<()> {
        self.now.started.retain(|other| other.name != start.name);
        self.now.started.push(start);
        self.is_written = false;
        self.write()
    }

    /// Removes the start of a name.
    pub(crate) fn remove(&mut self, name: &str) {
        self.now.started.retain(|other| other.name != name);
        self.is_written = false;
        self.tell_of(self.path.clone().as_path());
    }

    /// Records the workers that an operator stopped.
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
