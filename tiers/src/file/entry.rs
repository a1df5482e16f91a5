//! A file's name in the directory, kept as long as the file is in use.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use glake_units::Bytes;
use parking_lot::Mutex;

use super::{FileError, FileStatistics, FileStep, Result};

/// File that is counted in the statistics until it is dropped, and then removed.
#[derive(Debug)]
pub(super) struct Entry {
    path: PathBuf,
    size: Bytes,
    statistics: Arc<Mutex<FileStatistics>>,
}

impl Entry {
    /// Counts a newly created file in the statistics.
    pub(super) fn new(path: PathBuf, size: Bytes, statistics: &Arc<Mutex<FileStatistics>>) -> Self {
        let mut counted = statistics.lock();
        counted.files += 1;
        counted.bytes = counted.bytes.saturating_add(size);
        drop(counted);
        Entry { path, size, statistics: statistics.clone() }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Renames the file within its directory.
    pub(super) fn rename(&mut self, path: PathBuf) -> Result<()> {
        fs::rename(&self.path, &path).map_err(|source| self.failed(FileStep::Rename, source))?;
        self.path = path;
        Ok(())
    }

    pub(super) fn failed(&self, step: FileStep, source: io::Error) -> FileError {
        FileError::Io { step, path: self.path.clone(), source }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        // A closed tier has removed the file already.
        if let Err(error) = fs::remove_file(&self.path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(target: "glake::file", path = %self.path.display(), %error, "a file could not be removed");
        }
        let mut counted = self.statistics.lock();
        counted.files = counted.files.saturating_sub(1);
        counted.bytes = counted.bytes.saturating_sub(self.size);
    }
}
