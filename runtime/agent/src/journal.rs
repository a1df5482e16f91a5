//! Journal of workers and their leases, for the agent that starts after a crash. A worker's own account overrides it.
//!
//! The journal has one JSON object per line, appended before a worker learns of a grant. A killed agent has therefore announced no memory
//! that the next agent does not count, and has locked no process that the next agent does not restore.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use glake_units::Bytes;
use glake_wire::Peer;
use serde::{Deserialize, Serialize};

/// Size from which the journal is rewritten, at the start of the agent and while it serves.
const COMPACTED: u64 = 1 << 20;

/// State of a worker in the journal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct JournalRecord {
    /// Name of the worker.
    pub name: String,
    pub peer: Peer,
    /// User of the process.
    pub uid: u32,
    /// Name of its gang.
    pub gang: Option<String>,
    /// Number of ranks of the gang.
    pub ranks: u32,
    /// Lease of each GPU.
    pub leases: Vec<(String, Bytes)>,
    /// Whether the driver may have locked or checkpointed the process.
    pub away: bool,
}

/// Line of the journal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Entry {
    /// A worker joined.
    Joined(JournalRecord),
    /// A lease changed to `bytes`.
    Lease { peer: Peer, gpu: String, bytes: Bytes },
    /// The driver is about to checkpoint the process, or the process is known to run again.
    Away {
        peer: Peer,
        /// Whether the process may be locked or checkpointed.
        away: bool,
    },
    /// The worker left or died.
    Gone(Peer),
}

/// Open file of the journal.
#[derive(Debug)]
pub(crate) struct Journal {
    path: PathBuf,
    file: Option<File>,
    length: u64,
}

impl Journal {
    /// Reads the journal of the previous agent; empty if there is none. Damaged lines, such as the last line of a killed agent, are
    /// skipped.
    pub(crate) fn read(path: &Path) -> Vec<JournalRecord> {
        let text = match std::fs::read(path) {
            Ok(text) => text,
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    tracing::warn!(target: "glake::agent", path = %path.display(), %error, "the journal cannot be read: a new one is started");
                }
                return Vec::new();
            }
        };
        let mut workers: Vec<JournalRecord> = Vec::new();
        for entry in text.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()) {
            match entry {
                Entry::Joined(joined) => {
                    workers.retain(|worker| worker.peer != joined.peer);
                    workers.push(joined);
                }
                Entry::Lease { peer, gpu, bytes } => {
                    let Some(worker) = workers.iter_mut().find(|worker| worker.peer == peer) else {
                        continue;
                    };
                    match worker.leases.iter_mut().find(|(known, _)| *known == gpu) {
                        Some((_, lease)) => *lease = bytes,
                        None => worker.leases.push((gpu, bytes)),
                    }
                }
                Entry::Away { peer, away } => {
                    let known = workers.iter_mut().filter(|worker| worker.peer == peer);
                    known.for_each(|worker| worker.away = away);
                }
                Entry::Gone(peer) => workers.retain(|worker| worker.peer != peer),
            }
        }
        workers
    }

    /// Creates a journal that is written on the first `replace`.
    pub(crate) fn new(path: PathBuf) -> Self {
        Journal { path, file: None, length: 0 }
    }

    /// Returns whether the journal should be rewritten.
    pub(crate) fn is_long(&self) -> bool {
        self.file.is_none() || self.length > COMPACTED
    }

    /// Replaces the complete journal.
    ///
    /// # Errors
    /// The error of the file system; the old journal is unchanged.
    pub(crate) fn replace(&mut self, workers: Vec<JournalRecord>) -> io::Result<()> {
        let beside = self.path.with_added_extension("new");
        // Not synced, here and below: workers do not survive a loss of power.
        let bytes = lines(workers.into_iter().map(Entry::Joined))?;
        let written = File::create(&beside).and_then(|mut file| file.write_all(&bytes).map(|()| file));
        let renamed = written.and_then(|file| std::fs::rename(&beside, &self.path).map(|()| file));
        let file = renamed.inspect_err(|_| {
            // Remove the incomplete file.
            let _ = std::fs::remove_file(&beside);
        })?;
        (self.file, self.length) = (Some(file), bytes.len() as u64);
        Ok(())
    }

    /// Appends entries to the journal.
    ///
    /// # Errors
    /// The error of the file system; the journal is rewritten next time.
    pub(crate) fn append(&mut self, entries: Vec<Entry>) -> io::Result<()> {
        let bytes = lines(entries.into_iter())?;
        let file = self.file.as_mut().ok_or(io::ErrorKind::NotFound)?;
        let written = file.write_all(&bytes);
        self.length += bytes.len() as u64;
        if written.is_err() {
            self.file = None;
        }
        written
    }
}

fn lines(entries: impl Iterator<Item = Entry>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for entry in entries {
        serde_json::to_writer(&mut bytes, &entry)?;
        bytes.push(b'\n');
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(pid: u32) -> JournalRecord {
        JournalRecord {
            name: format!("w{pid}"),
            peer: Peer { pid, start: 9 },
            ranks: 1,
            ..JournalRecord::default()
        }
    }

    #[test]
    fn damaged_records_of_starts_are_skipped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.journal");
        assert_eq!(Journal::read(&path), []);
        let mut journal = Journal::new(path.clone());
        assert!(journal.is_long() && journal.append(Vec::new()).is_err());
        journal.replace(vec![worker(1), worker(2)]).unwrap();
        let lease = |pid, gib| Entry::Lease {
            peer: Peer { pid, start: 9 },
            gpu: "0".to_owned(),
            bytes: Bytes::gib(gib),
        };
        journal.append(vec![lease(1, 3), lease(1, 2), lease(7, 1), Entry::Joined(worker(3))]).unwrap();
        journal.append(vec![Entry::Gone(worker(2).peer)]).unwrap();
        let away = |pid, away| Entry::Away { peer: Peer { pid, start: 9 }, away };
        journal.append(vec![away(1, true), away(3, true), away(3, false), away(7, true)]).unwrap();
        let leases = vec![("0".to_owned(), Bytes::gib(2))];
        let expected = [JournalRecord { leases, away: true, ..worker(1) }, worker(3)];
        assert_eq!(Journal::read(&path), expected);
        // An agent was killed while writing.
        let text = std::fs::read(&path).unwrap();
        std::fs::write(&path, [&text[..], b"{\"lease\":{\"peer\""].concat()).unwrap();
        assert_eq!(Journal::read(&path), expected);
        std::fs::write(&path, b"\xff\xfe").unwrap();
        assert_eq!(Journal::read(&path), []);
    }

    #[test]
    fn a_full_disk_leaves_the_old_file() {
        // The folder is not writable.
        let full = Path::new("/dev/full");
        if full.exists() {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("agent.journal");
            let mut journal = Journal::new(path.clone());
            journal.replace(vec![worker(1)]).unwrap();
            std::os::unix::fs::symlink(full, path.with_added_extension("new")).unwrap();
            let error = journal.replace(vec![worker(2)]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::StorageFull);
            assert_eq!(Journal::read(&path), [worker(1)]);
        }
    }
}
