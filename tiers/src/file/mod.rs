//! Bytes in files, for when the host's memory is short.
//!
//! ```text
//!  create ─► Draft ── write, write … ─► seal ─► SealedFile ─► read      dropped: the file is removed
//!    │         │                         └ header, fsync, rename, fsync of the directory
//!    │         └ dropped: removed
//!    └ all its space is set aside: a full disk is an error before a byte is written
//! ```
//!
//! The files are a process's own and die with it: what a killed one leaves is removed by the next ([`FileTier::open`],
//! [`FileTier::collect`]). A reader takes no file for whole that is not: it has its last name only when all its bytes are on
//! the disk, and every page is checked where it was read to. No file is mapped: a disk that cannot read one is an error then, not
//! the end of the process. At a process's own end it closes its tier, which removes all of them ([`FileTier::close`]).

mod collect;
mod draft;
mod entry;
mod error;
mod layout;
mod lock;
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

pub use collect::Collected;
pub use draft::Draft;
pub use error::{FileError, FileStep, Flaw};
pub use layout::PAGE;
use lock::Lock;
use owner::{Kind, Owner};
pub use sealed::SealedFile;

type Result<T> = std::result::Result<T, FileError>;

/// What a process has in files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileStatistics {
    /// Drafts and sealed files.
    pub files: u64,
    /// The bytes that they are for.
    pub bytes: Bytes,
}

/// A directory for this process's bytes.
#[derive(Debug)]
pub struct FileTier {
    shared: Arc<Shared>,
    next: AtomicU64,
    /// What the directory held at first of processes that were gone.
    collected: Collected,
}

/// What files need of their tier.
#[derive(Debug)]
struct Shared {
    path: PathBuf,
    directory: File,
    owner: Owner,
    /// Locked while the tier or a file of it lives; none once the tier is closed. Whoever gives a file a name reads it meanwhile.
    lock: RwLock<Option<Lock>>,
    statistics: Arc<Mutex<FileStatistics>>,
}

impl FileTier {
    /// A tier in a directory, which is made if it is not there; removes what processes left that are gone.
    ///
    /// # Errors
    /// [`FileError::OpenDirectory`] where others may write to it; [`FileError::InUse`]; [`FileError::Io`].
    pub fn open(path: &Path) -> Result<Self> {
        let directory = collect::directory(path)?;
        let this = Owner::of(std::process::id());
        let owner = this.map_err(collect::failed(FileStep::Open, Path::new("/proc/self/stat")))?;
        let lock = Lock::take(path, owner)?;
        // Whoever locks has made no file yet: those of its name are of a process before the machine was started again.
        let collected = collect::collect(path, owner, true)?;
        let statistics = Arc::default();
        let lock = RwLock::new(Some(lock));
        let shared = Arc::new(Shared { path: path.to_path_buf(), directory, owner, lock, statistics });
        Ok(FileTier { shared, next: AtomicU64::new(0), collected })
    }

    /// A file for so many bytes, with space for all of them.
    ///
    /// # Errors
    /// [`FileError::DiskFull`], [`FileError::TooLarge`], [`FileError::NoAllocation`], [`FileError::Closed`], [`FileError::Io`];
    /// nothing is left then.
    pub fn create(&self, length: Bytes) -> Result<Draft> {
        let _open = self.shared.open()?;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let name = |kind| self.shared.path.join(self.shared.owner.name(kind));
        Draft::new(&self.shared, (name(Kind::Draft(number)), name(Kind::Sealed(number))), length)
    }

    /// Removes what processes left that are gone since.
    ///
    /// # Errors
    /// [`FileError::Io`]; what was removed by then is.
    pub fn collect(&self) -> Result<Collected> {
        collect::collect(&self.shared.path, self.shared.owner, false)
    }

    /// Removes all files of this process, whoever still has one, and makes none any more: the process ends, and what is in them
    /// with it.
    ///
    /// # Errors
    /// [`FileError::Io`]; what was removed by then is.
    pub fn close(&self) -> Result<Collected> {
        let mut lock = self.shared.lock.write();
        if lock.is_none() {
            return Ok(Collected::default());
        }
        let collected = collect::collect(&self.shared.path, self.shared.owner, true);
        *lock = None;
        collected
    }

    /// What was removed when this tier was opened.
    pub fn collected(&self) -> Collected {
        self.collected
    }

    /// What this process has there now.
    pub fn statistics(&self) -> FileStatistics {
        *self.shared.statistics.lock()
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.shared.path
    }
}

impl Shared {
    /// The tier is not closed while this lives.
    fn open(&self) -> Result<RwLockReadGuard<'_, Option<Lock>>> {
        let lock = self.lock.read();
        if lock.is_none() {
            return Err(FileError::Closed { path: self.path.clone() });
        }
        Ok(lock)
    }

    fn sync_directory(&self) -> Result<()> {
        self.directory.sync_all().map_err(collect::failed(FileStep::SyncDirectory, &self.path))
    }
}
