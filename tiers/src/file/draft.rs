//! A file that is being written.
//!
//! Invariant: until it is sealed, the file has a draft's name and no header, so that no reader accepts it. The file is renamed after all
//! its bytes are on the disk.

use std::fs::{File, OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fmt, io};

use glake_units::Bytes;
use rustix::fs::{FallocateFlags, fallocate, statvfs};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use xxhash_rust::xxh3::Xxh3;

use super::sealed::{self, Entry, HEADER_BYTES, PAGE};
use super::{FileError, FileStep, Result, SealedFile, Shared};

/// File of a fixed length, written sequentially. Dropping a draft removes the file.
pub struct Draft {
    shared: Arc<Shared>,
    entry: Entry,
    file: File,
    sealed: PathBuf,
    length: Bytes,
    written: u64,
    hasher: Xxh3,
    table: Vec<u8>,
}

impl Draft {
    pub(super) fn new(shared: &Arc<Shared>, names: (PathBuf, PathBuf), length: Bytes) -> Result<Self> {
        let (path, sealed) = names;
        let refused = |limit| FileError::TooLarge { path: path.clone(), wanted: length, limit };
        let size = sealed::file_size(length).ok_or_else(|| refused(Bytes::new(i64::MAX.unsigned_abs())))?;
        // Beyond this limit the kernel would send SIGXFSZ, which ends the process.
        if let Some(limit) = getrlimit(Resource::Fsize).current.filter(|limit| *limit < size) {
            return Err(refused(Bytes::new(limit)));
        }
        let opened = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
        let file = opened.map_err(|source| {
            let path = path.clone();
            FileError::Io { step: FileStep::Open, path, source }
        })?;
        let entry = Entry::new(path, length, &shared.statistics);
        allocate(&file, &entry, size, length)?;
        let (shared, hasher) = (shared.clone(), Xxh3::with_seed(0));
        Ok(Draft { shared, entry, file, sealed, length, written: 0, hasher, table: Vec::new() })
    }

    /// Returns the final length of the contents.
    pub fn length(&self) -> Bytes {
        self.length
    }

    /// Returns the number of bytes written so far.
    pub fn written(&self) -> Bytes {
        Bytes::new(self.written)
    }

    /// Appends the next bytes.
    ///
    /// # Errors
    /// [`FileError::NoSuchRange`] beyond the file's length; [`FileError::Io`], after which the draft is unusable.
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        let size = bytes.len() as u64;
        if size > self.length.get() - self.written {
            let (size, length) = (Bytes::new(size), self.length);
            return Err(FileError::NoSuchRange { offset: self.written, size, length });
        }
        while !bytes.is_empty() {
            let left = PAGE.get() - self.written % PAGE.get();
            let count = usize::try_from(left).map_or(bytes.len(), |left| left.min(bytes.len()));
            let (part, rest) = bytes.split_at(count);
            let done = self.file.write_all_at(part, HEADER_BYTES + self.written);
            done.map_err(|source| self.entry.failed(FileStep::Write, source))?;
            self.hasher.update(part);
            self.written += part.len() as u64;
            if self.written.is_multiple_of(PAGE.get()) || self.written == self.length.get() {
                self.end_page();
            }
            bytes = rest;
        }
        Ok(())
    }

    /// Writes the header, flushes the file to the disk and gives it its final name.
    ///
    /// # Errors
    /// [`FileError::NoSuchRange`] unless all bytes were written; [`FileError::Closed`]; [`FileError::Io`]. The file is removed in each
    /// case.
    pub fn seal(self) -> Result<SealedFile> {
        let Draft { shared, mut entry, file, sealed, length, written, table, .. } = self;
        if written != length.get() {
            let size = length.saturating_sub(Bytes::new(written));
            return Err(FileError::NoSuchRange { offset: written, size, length });
        }
        let header = sealed::header(length, &table);
        let done =
            file.write_all_at(&table, HEADER_BYTES + written).and_then(|()| file.write_all_at(&header, 0));
        done.map_err(|source| entry.failed(FileStep::Write, source))?;
        let done = file.set_permissions(Permissions::from_mode(0o400));
        done.map_err(|source| entry.failed(FileStep::Protect, source))?;
        file.sync_all().map_err(|source| entry.failed(FileStep::Sync, source))?;
        // The file is read-only from here on.
        drop(file);
        let _open = shared.open()?;
        entry.rename(sealed)?;
        shared.sync_directory()?;
        SealedFile::new(entry)
    }

    fn end_page(&mut self) {
        self.table.extend_from_slice(&self.hasher.digest().to_le_bytes());
        self.hasher = Xxh3::with_seed(sealed::pages(Bytes::new(self.written)));
    }
}

impl fmt::Debug for Draft {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Draft { entry, length, written, .. } = self;
        let mut fields = f.debug_struct("Draft");
        fields.field("entry", entry).field("length", length).field("written", written).finish_non_exhaustive()
    }
}

/// Allocates disk space for the whole file.
fn allocate(file: &File, entry: &Entry, size: u64, length: Bytes) -> Result<()> {
    loop {
        let path = || entry.path().to_path_buf();
        return match fallocate(file, FallocateFlags::empty(), 0, size) {
            Ok(()) => Ok(()),
            Err(Errno::INTR) => continue,
            Err(Errno::NOSPC | Errno::DQUOT) => {
                Err(FileError::DiskFull { path: path(), wanted: length, free: free(entry.path()) })
            }
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => Err(FileError::NoAllocation { path: path() }),
            Err(error) => Err(entry.failed(FileStep::Allocate, io::Error::from(error))),
        };
    }
}

/// Returns the free space of the file system for unprivileged processes.
fn free(path: &Path) -> Bytes {
    statvfs(path).map_or(Bytes::ZERO, |stat| Bytes::new(stat.f_bavail.saturating_mul(stat.f_frsize)))
}
