//! Files of the tier and their layout: drafts, which are being written, and sealed files, which are complete.
//!
//! ```text
//!  0        4 KiB                                       4 KiB + length
//!  ├ header ┼ page 0 ┼ page 1 ┼ ─ ─ ─ ┼ last page, may be shorter ┼ table: a checksum of 8 bytes a page ┤
//! ```
//!
//! All numbers are little-endian. A page's checksum is XXH3 (64 bits) seeded with the page's index, so that swapped pages are detected as
//! damage. The header holds the table's checksum and its own.
//!
//! Invariant: until it is sealed, a file has a draft's name and no header, so that no reader accepts it. The file is renamed after all its
//! bytes are on the disk.

use std::fs::{File, OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fmt, fs, io};

use glake_units::Bytes;
use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, fallocate, statvfs};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use xxhash_rust::xxh3::{Xxh3, xxh3_64, xxh3_64_with_seed};

use super::{FileError, FileStatistics, FileStep, Flaw, Result, Shared};

/// Complete file with a checksum for every page. Dropping it removes the file.
#[derive(Debug)]
pub struct SealedFile {
    /// Open file and its checksums. Dropped before the name is removed.
    contents: Contents,
    _entry: Entry,
}

/// Open file, its length and its checksums.
#[derive(Debug)]
pub(super) struct Contents {
    path: PathBuf,
    file: File,
    length: Bytes,
    /// Checksum of every page.
    table: Vec<u64>,
}

impl SealedFile {
    pub(super) fn new(entry: Entry) -> Result<Self> {
        Ok(SealedFile { contents: Contents::open(entry.path())?, _entry: entry })
    }

    /// Returns the length of the contents.
    pub fn length(&self) -> Bytes {
        self.contents.length
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.contents.path
    }

    /// Reads whole pages from `offset` on and verifies them; the last page may be the file's shorter one.
    ///
    /// # Errors
    /// [`FileError::Unread`] and [`FileError::Damaged`] name the first bad page; [`FileError::NotWhole`] if the file is truncated;
    /// [`FileError::NoSuchRange`].
    pub fn read(&self, offset: Bytes, into: &mut [u8]) -> Result<()> {
        self.contents.read(offset, into)
    }
}

impl Contents {
    /// Opens a file that only its owner may write to, and verifies its header, length and checksum table.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let not_whole = |flaw| FileError::NotWhole { path: path.to_path_buf(), flaw };
        let failed = |step| move |source| FileError::Io { step, path: path.to_path_buf(), source };
        let file = File::open(path).map_err(failed(FileStep::Open))?;
        let found = file.metadata().map_err(failed(FileStep::Open))?;
        if !found.is_file() || found.uid() != rustix::process::geteuid().as_raw() || found.mode() & 0o022 != 0
        {
            return Err(not_whole(Flaw::Open));
        }
        let mut header = [0; FIELDS_BYTES];
        read_exact(&file, &mut header, 0)
            .map_err(failed(FileStep::Read))?
            .ok_or_else(|| not_whole(Flaw::Header))?;
        let (length, checksum) = parse(&header).ok_or_else(|| not_whole(Flaw::Header))?;
        if file_size(length) != Some(found.len()) {
            return Err(not_whole(Flaw::Length));
        }
        // The file is longer than its table.
        let mut table = vec![0; usize::try_from(pages(length) * 8).unwrap_or(0)];
        let read =
            read_exact(&file, &mut table, HEADER_BYTES + length.get()).map_err(failed(FileStep::Read))?;
        read.filter(|()| xxh3_64(&table) == checksum).ok_or_else(|| not_whole(Flaw::Table))?;
        let numbers = table.chunks_exact(8).filter_map(|number| number.try_into().ok());
        let table = numbers.map(u64::from_le_bytes).collect();
        Ok(Contents { path: path.to_path_buf(), file, length, table })
    }

    pub(super) fn read(&self, offset: Bytes, into: &mut [u8]) -> Result<()> {
        let size = Bytes::new(into.len() as u64);
        let end = offset.checked_add(size).filter(|end| *end <= self.length);
        let whole =
            offset.is_aligned(PAGE) && end.is_some_and(|end| end == self.length || end.is_aligned(PAGE));
        if !whole {
            return Err(self.no_such(offset, size));
        }
        for (page, bytes) in (offset.get() / PAGE.get()..).zip(into.chunks_mut(PAGE_LENGTH)) {
            let offset = page * PAGE.get();
            let read = read_exact(&self.file, bytes, HEADER_BYTES + offset);
            let size = Bytes::new(bytes.len() as u64);
            let unread = |source| FileError::Unread { path: self.path.clone(), offset, size, source };
            let read = read.map_err(unread)?;
            read.ok_or_else(|| FileError::NotWhole { path: self.path.clone(), flaw: Flaw::Length })?;
            self.check(page, bytes)?;
        }
        Ok(())
    }

    fn check(&self, page: u64, bytes: &[u8]) -> Result<()> {
        let written = usize::try_from(page).ok().and_then(|page| self.table.get(page));
        if written == Some(&checksum(page, bytes)) {
            return Ok(());
        }
        let (path, pages, offset) = (self.path.clone(), self.table.len() as u64, page * PAGE.get());
        Err(FileError::Damaged { path, page, pages, offset, end: offset + bytes.len() as u64 })
    }

    fn no_such(&self, offset: Bytes, size: Bytes) -> FileError {
        FileError::NoSuchRange { offset: offset.get(), size, length: self.length }
    }
}

/// Reads exactly `into.len()` bytes. Returns `None` if the file ends before.
fn read_exact(file: &File, into: &mut [u8], offset: u64) -> io::Result<Option<()>> {
    match file.read_exact_at(into, offset) {
        Ok(()) => Ok(Some(())),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        Err(error) => Err(error),
    }
}

/// Page size: the unit of checksums.
pub const PAGE: Bytes = Bytes::mib(1);
/// Offset of the first page.
pub(super) const HEADER_BYTES: u64 = 4096;
/// Magic number; the last digit is the version.
const MAGIC: [u8; 8] = *b"GLAKEF01";
/// Number of header bytes in use.
pub(super) const FIELDS_BYTES: usize = 40;

/// Page size as a slice length.
pub(super) const PAGE_LENGTH: usize = 1 << 20;
const _: () = assert!(PAGE.get() == PAGE_LENGTH as u64);

/// Returns the number of pages of a file with `length` bytes of contents.
pub(super) fn pages(length: Bytes) -> u64 {
    length.get().div_ceil(PAGE.get())
}

/// Returns the size of the whole file, or `None` if it would exceed the largest file offset.
pub(super) fn file_size(length: Bytes) -> Option<u64> {
    let table = pages(length).checked_mul(8)?;
    let size = HEADER_BYTES.checked_add(length.get())?.checked_add(table)?;
    i64::try_from(size).ok().map(|_| size)
}

/// Returns the checksum of a page.
pub(super) fn checksum(page: u64, bytes: &[u8]) -> u64 {
    xxh3_64_with_seed(bytes, page)
}

/// Encodes the header of a file with `length` bytes of contents and the given checksum table.
pub(super) fn header(length: Bytes, table: &[u8]) -> [u8; FIELDS_BYTES] {
    let mut header = [0; FIELDS_BYTES];
    let fields = [PAGE.get(), length.get(), xxh3_64(table)];
    let numbers = fields.iter().flat_map(|field| field.to_le_bytes());
    for (to, from) in header.iter_mut().zip(MAGIC.into_iter().chain(numbers)) {
        *to = from;
    }
    let (fields, own) = header.split_at_mut(FIELDS_BYTES - 8);
    own.copy_from_slice(&xxh3_64(fields).to_le_bytes());
    header
}

/// Decodes a header: the length of the contents and the table's checksum. Returns `None` for an invalid header or another version.
pub(super) fn parse(header: &[u8; FIELDS_BYTES]) -> Option<(Bytes, u64)> {
    let (fields, own) = header.split_last_chunk::<8>()?;
    let (magic, numbers) = fields.split_first_chunk::<8>()?;
    let mut numbers =
        numbers.chunks_exact(8).filter_map(|number| number.try_into().ok()).map(u64::from_le_bytes);
    let (page, length, table) = (numbers.next()?, numbers.next()?, numbers.next()?);
    let whole = *magic == MAGIC && page == PAGE.get() && xxh3_64(fields) == u64::from_le_bytes(*own);
    whole.then_some((Bytes::new(length), table))
}

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
        let size = file_size(length).ok_or_else(|| refused(Bytes::new(i64::MAX.unsigned_abs())))?;
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
        let header = header(length, &table);
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
        self.hasher = Xxh3::with_seed(pages(Bytes::new(self.written)));
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

#[cfg(test)]
mod layout_tests {
    use super::*;

    #[test]
    fn a_header_reads_back_and_no_bit_of_it_may_change() {
        let header = header(Bytes::new(12345), &[1, 2, 3]);
        assert_eq!(parse(&header), Some((Bytes::new(12345), xxh3_64(&[1, 2, 3]))));
        for bit in 0..FIELDS_BYTES * 8 {
            let mut changed = header;
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(parse(&changed), None, "{bit}");
        }
        assert_eq!(parse(&[0; FIELDS_BYTES]), None);
    }

    #[test]
    fn sizes_are_checked() {
        assert_eq!(file_size(Bytes::ZERO), Some(HEADER_BYTES));
        assert_eq!(file_size(Bytes::new((1 << 20) + 1)), Some(HEADER_BYTES + (1 << 20) + 1 + 16));
        assert_eq!((file_size(Bytes::MAX), file_size(Bytes::new(1 << 63))), (None, None));
        assert_ne!(checksum(0, b"same"), checksum(1, b"same"));
    }
}
