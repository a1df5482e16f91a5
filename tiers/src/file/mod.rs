//! A tier of files on disk, used when host memory is short.
//!
//! ```text
//!  create ─► Draft ── write, write … ─► seal ─► SealedFile ─► read      dropped: the file is removed
//!    │         │                         └ header, fsync, rename, fsync of the directory
//!    │         └ dropped: removed
//!    └ preallocates all space: a full disk is an error before a byte is written
//! ```
//!
//! Files belong to one process and are removed when it ends. The next process removes the files of a killed one ([`FileTier::open`],
//! [`FileTier::collect`]). A reader accepts only complete files: a file gets its final name once all its bytes are on the disk, and every
//! read verifies the checksum of each page. Files are not mapped into memory, so that a read failure of the disk is an error instead of a
//! signal. At its end a process closes its tier, which removes all its files ([`FileTier::close`]).

mod error;
mod owner;
mod sealed;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use glake_units::Bytes;
use parking_lot::{Mutex, RwLock, RwLockReadGuard};

pub use error::{FileError, FileStep, Flaw};
pub use owner::Collected;
use owner::{Kind, Lock, Owner};
pub use sealed::{Draft, PAGE, SealedFile};

type Result<T> = std::result::Result<T, FileError>;

/// Files and bytes of this process in a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileStatistics {
    /// Number of drafts and sealed files.
    pub files: u64,
    /// Total length of their contents.
    pub bytes: Bytes,
}

/// Directory for the evicted bytes of this process.
#[derive(Debug)]
pub struct FileTier {
    shared: Arc<Shared>,
    next: AtomicU64,
    /// Leftovers of ended processes that were removed when the tier was opened.
    collected: Collected,
}

/// State shared by the tier and its files.
#[derive(Debug)]
struct Shared {
    path: PathBuf,
    directory: File,
    owner: Owner,
    /// Lock on the owner file, held while the tier or one of its files exists; `None` once the tier is closed. Creating or renaming a file
    /// holds the read lock.
    lock: RwLock<Option<Lock>>,
    statistics: Arc<Mutex<FileStatistics>>,
}

impl FileTier {
    /// Opens a tier in a directory, creating the directory if necessary, and removes the files of processes that have ended.
    ///
    /// # Errors
    /// [`FileError::OpenDirectory`] if other users may write to the directory; [`FileError::InUse`]; [`FileError::Io`].
    pub fn open(path: &Path) -> Result<Self> {
        let directory = owner::directory(path)?;
        let this = Owner::of(std::process::id());
        let owner = this.map_err(owner::failed(FileStep::Open, Path::new("/proc/self/stat")))?;
        let lock = Lock::take(path, owner)?;
        // This process has created no file yet: files with its name belong to a process from before a reboot.
        let collected = owner::collect(path, owner, true)?;
        let statistics = Arc::default();
        let lock = RwLock::new(Some(lock));
        let shared = Arc::new(Shared { path: path.to_path_buf(), directory, owner, lock, statistics });
        Ok(FileTier { shared, next: AtomicU64::new(0), collected })
    }

    /// Creates a file of the given length and allocates space for all of it.
    ///
    /// # Errors
    /// [`FileError::DiskFull`], [`FileError::TooLarge`], [`FileError::NoAllocation`], [`FileError::Closed`], [`FileError::Io`]; no file is
    /// left behind.
    pub fn create(&self, length: Bytes) -> Result<Draft> {
        let _open = self.shared.open()?;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let name = |kind| self.shared.path.join(self.shared.owner.name(kind));
        Draft::new(&self.shared, (name(Kind::Draft(number)), name(Kind::Sealed(number))), length)
    }

    /// Removes the files of processes that have ended since the tier was opened.
    ///
    /// # Errors
    /// [`FileError::Io`]; files removed before the failure stay removed.
    pub fn collect(&self) -> Result<Collected> {
        owner::collect(&self.shared.path, self.shared.owner, false)
    }

    /// Removes all files of this process, those in use included, and refuses to create new ones. Called when the process ends.
    ///
    /// # Errors
    /// [`FileError::Io`]; files removed before the failure stay removed.
    pub fn close(&self) -> Result<Collected> {
        let mut lock = self.shared.lock.write();
        if lock.is_none() {
            return Ok(Collected::default());
        }
        let collected = owner::collect(&self.shared.path, self.shared.owner, true);
        *lock = None;
        collected
    }

    /// Returns the files removed when this tier was opened.
    pub fn collected(&self) -> Collected {
        self.collected
    }

    /// Returns the files and bytes of this process.
    pub fn statistics(&self) -> FileStatistics {
        *self.shared.statistics.lock()
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.shared.path
    }
}

impl Shared {
    /// Returns a guard that keeps the tier open.
    fn open(&self) -> Result<RwLockReadGuard<'_, Option<Lock>>> {
        let lock = self.lock.read();
        if lock.is_none() {
            return Err(FileError::Closed { path: self.path.clone() });
        }
        Ok(lock)
    }

    fn sync_directory(&self) -> Result<()> {
        self.directory.sync_all().map_err(owner::failed(FileStep::SyncDirectory, &self.path))
    }
}
