//! The journal: who was there, for the agent that comes after a crash. Advice only: what a worker says goes over it.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::Path;

use glake_wire::{Holding, Peer};
use serde::{Deserialize, Serialize};

/// Everything that is remembered.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Journal {
    /// The agent that wrote it.
    pub epoch: u64,
    /// The workers that it knew.
    pub workers: Vec<Journalled>,
}

/// A worker.
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
    /// What it held, with the leases that it was granted.
    pub holdings: Vec<Holding>,
}

impl Journal {
    /// Reads it. One that is not there, or is no journal, is empty: workers tell everything anew.
    pub fn read(path: &Path) -> Journal {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    tracing::warn!(target: "glake::agent", path = %path.display(), %error, "the journal cannot be read: begun anew");
                }
                return Journal::default();
            }
        };
        serde_json::from_str(&text).unwrap_or_else(|error| {
            tracing::warn!(target: "glake::agent", path = %path.display(), %error, "the journal is damaged: begun anew");
            Journal::default()
        })
    }

    /// Replaces it, wholly or not at all.
    ///
    /// # Errors
    /// What the file system answers; the old one stands then.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let beside = path.with_extension("new");
        let written = File::create(&beside).and_then(|mut file| {
            file.write_all(&serde_json::to_vec(self)?)?;
            file.sync_data()
        });
        written.and_then(|()| std::fs::rename(&beside, path)).inspect_err(|_| {
            // What is half written helps nobody.
            let _ = std::fs::remove_file(&beside);
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read_and_what_is_damaged_is_empty() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.json");
        assert_eq!(Journal::read(&path), Journal::default());
        let peer = Peer { pid: 7, start: 9 };
        let worker = Journalled { name: "a".to_owned(), peer, ranks: 1, ..Journalled::default() };
        let journal = Journal { epoch: 3, workers: vec![worker] };
        journal.write(&path).unwrap();
        assert_eq!(Journal::read(&path), journal);
        std::fs::write(&path, "{\"epoch\":").unwrap();
        assert_eq!(Journal::read(&path), Journal::default());
        assert!(journal.write(&folder.path().join("no/journal.json")).is_err());
    }

    #[test]
    fn a_full_disk_leaves_the_old_one() {
        // Nothing can be written there.
        let full = Path::new("/dev/full");
        let journal = Journal { epoch: 3, workers: Vec::new() };
        if full.exists() {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("journal.json");
            journal.write(&path).unwrap();
            std::os::unix::fs::symlink(full, path.with_extension("new")).unwrap();
            let error = Journal { epoch: 4, ..journal.clone() }.write(&path).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::StorageFull);
            assert_eq!(Journal::read(&path), journal);
        }
    }
}
