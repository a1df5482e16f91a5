//! The journal: who was there and what each was granted, for the agent that comes after a crash. What a worker says of
//! itself goes over it.
//!
//! One JSON object a line, appended before a worker hears of a grant: so an agent that is killed has told nobody of
//! memory that the next one does not count, and has had nobody locked whom the next one does not restore.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use glake_units::Bytes;
use glake_wire::Peer;
use serde::{Deserialize, Serialize};

/// From this size on it is written anew when the agent starts, and while it serves.
const COMPACTED: u64 = 1 << 20;

/// A worker, as the journal has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Journalled {
    /// What it was called.
    pub name: String,
    /// Its process.
    pub peer: Peer,
    /// Whose.
    pub uid: u32,
    /// Its gang.
    pub gang: Option<String>,
    /// How many ranks that has.
    pub ranks: u32,
    /// What it might hold of each GPU.
    pub leases: Vec<(String, Bytes)>,
    /// The driver may have locked or checkpointed it.
    pub away: bool,
}

/// One line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Entry {
    /// It joined.
    Joined(Journalled),
    /// It may hold so much of a GPU.
    Lease {
        /// Who.
        peer: Peer,
        /// Where.
        gpu: String,
        /// How much.
        bytes: Bytes,
    },
    /// The driver is about to be asked to checkpoint it; or it is known to run again.
    Away {
        /// Who.
        peer: Peer,
        /// Whether it may be locked or checkpointed.
        away: bool,
    },
    /// It left, or died.
    Gone(Peer),
}

/// The file.
#[derive(Debug)]
pub(crate) struct Journal {
    path: PathBuf,
    file: Option<File>,
    length: u64,
}

impl Journal {
    /// Reads what an agent before left. One that is not there is empty; what is damaged, as the last line of one that
    /// was killed, is passed over.
    pub(crate) fn read(path: &Path) -> Vec<Journalled> {
        let text = match std::fs::read(path) {
            Ok(text) => text,
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    tracing::warn!(target: "glake::agent", path = %path.display(), %error, "the journal cannot be read: begun anew");
                }
                return Vec::new();
            }
        };
        let mut workers: Vec<Journalled> = Vec::new();
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

    /// Begins one that is empty.
    pub(crate) fn new(path: PathBuf) -> Self {
        Journal { path, file: None, length: 0 }
    }

    /// Whether it is to be written anew.
    pub(crate) fn is_long(&self) -> bool {
        self.file.is_none() || self.length > COMPACTED
    }

    /// Replaces all of it.
    ///
    /// # Errors
    /// What the file system answers; the old one stands then.
    pub(crate) fn replace(&mut self, workers: Vec<Journalled>) -> io::Result<()> {
        let beside = self.path.with_extension("new");
        // Not synced, here and below: after a loss of power there are no workers.
        let bytes = lines(workers.into_iter().map(Entry::Joined))?;
        let written = File::create(&beside).and_then(|mut file| file.write_all(&bytes).map(|()| file));
        let renamed = written.and_then(|file| std::fs::rename(&beside, &self.path).map(|()| file));
        let file = renamed.inspect_err(|_| {
            // What is half written helps nobody.
            let _ = std::fs::remove_file(&beside);
        })?;
        (self.file, self.length) = (Some(file), bytes.len() as u64);
        Ok(())
    }

    /// Adds to it.
    ///
    /// # Errors
    /// What the file system answers; it is written anew the next time.
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

    fn worker(pid: u32) -> Journalled {
        Journalled {
            name: format!("w{pid}"),
            peer: Peer { pid, start: 9 },
            ranks: 1,
            ..Journalled::default()
        }
    }

    #[test]
    fn what_was_written_is_read_and_what_is_damaged_passed_over() {
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
        let expected = [Journalled { leases, away: true, ..worker(1) }, worker(3)];
        assert_eq!(Journal::read(&path), expected);
        // An agent that was killed while it wrote.
        let text = std::fs::read(&path).unwrap();
        std::fs::write(&path, [&text[..], b"{\"lease\":{\"peer\""].concat()).unwrap();
        assert_eq!(Journal::read(&path), expected);
        std::fs::write(&path, b"\xff\xfe").unwrap();
        assert_eq!(Journal::read(&path), []);
    }

    #[test]
    fn a_full_disk_leaves_the_old_one() {
        // Nothing can be written there.
        let full = Path::new("/dev/full");
        if full.exists() {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("agent.journal");
            let mut journal = Journal::new(path.clone());
            journal.replace(vec![worker(1)]).unwrap();
            std::os::unix::fs::symlink(full, path.with_extension("new")).unwrap();
            let error = journal.replace(vec![worker(2)]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::StorageFull);
            assert_eq!(Journal::read(&path), [worker(1)]);
        }
    }
}
