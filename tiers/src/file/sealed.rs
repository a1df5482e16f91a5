//! A complete file.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use glake_units::Bytes;
use xxhash_rust::xxh3::xxh3_64;

use super::entry::Entry;
use super::layout::{self, FIELDS, HEADER, PAGE, PAGE_LENGTH};
use super::{FileError, FileStep, Flaw, Result};

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
        let mut header = [0; FIELDS];
        read_exact(&file, &mut header, 0)
            .map_err(failed(FileStep::Read))?
            .ok_or_else(|| not_whole(Flaw::Header))?;
        let (length, checksum) = layout::parse(&header).ok_or_else(|| not_whole(Flaw::Header))?;
        if layout::file_size(length) != Some(found.len()) {
            return Err(not_whole(Flaw::Length));
        }
        // The file is longer than its table.
        let mut table = vec![0; usize::try_from(layout::pages(length) * 8).unwrap_or(0)];
        let read = read_exact(&file, &mut table, HEADER + length.get()).map_err(failed(FileStep::Read))?;
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
            let read = read_exact(&self.file, bytes, HEADER + offset);
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
        if written == Some(&layout::checksum(page, bytes)) {
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
