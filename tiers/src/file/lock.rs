//! Owner file of a process, locked while the process is alive.
//!
//! Invariant: while a [`Lock`] exists, the directory holds its name and this process holds the lock.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::collect::failed;
use super::owner::{Kind, Owner};
use super::{FileError, FileStep, Result};

/// Owner file locked by this process. Dropping the lock removes the file.
#[derive(Debug)]
pub(super) struct Lock {
    path: PathBuf,
    _file: File,
}

/// Attempts to take a lock that another process holds: a collector holds it only briefly. About 100 ms in total.
const ATTEMPTS: u32 = 50;
const PAUSE: Duration = Duration::from_millis(2);

impl Lock {
    /// Creates and locks the owner file.
    ///
    /// # Errors
    /// [`FileError::InUse`]; [`FileError::Io`], after which the file is removed unless it existed before.
    pub(super) fn take(directory: &Path, owner: Owner) -> Result<Lock> {
        let path = directory.join(owner.name(Kind::Lock));
        for _ in 0..ATTEMPTS {
            let (file, made) = open(&path).map_err(failed(FileStep::Open, &path))?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    std::thread::sleep(PAUSE);
                    continue;
                }
                Err(TryLockError::Error(source)) => {
                    if made {
                        remove(&path);
                    }
                    return Err(failed(FileStep::Lock, &path)(source));
                }
            }
            // A collector may have removed the file before this process locked it.
            let ours = file.metadata().map_err(failed(FileStep::Lock, &path))?.ino();
            if fs::metadata(&path).is_ok_and(|found| found.ino() == ours) {
                return Ok(Lock { path, _file: file });
            }
        }
        Err(FileError::InUse { path: directory.to_path_buf() })
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // The file is still locked: a process that opens it meanwhile sees that the name is gone.
        remove(&self.path);
    }
}

/// Opens the owner file. Returns the file and whether this call created it.
fn open(path: &Path) -> io::Result<(File, bool)> {
    let mut options = OpenOptions::new();
    options.write(true).mode(0o600);
    match options.clone().create_new(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            Ok((options.create(true).truncate(false).open(path)?, false))
        }
        made => Ok((made?, true)),
    }
}

fn remove(path: &Path) {
    if let Err(error) = fs::remove_file(path) {
        tracing::warn!(target: "glake::file", path = %path.display(), %error, "the lock could not be removed");
    }
}
