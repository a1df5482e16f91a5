//! Memory files, each mapped as a whole.
//!
//! The kernel takes longer to create a page than the simulator needs for everything else it does with one. So the file of a dropped owner
//! is kept with its pages for the next owner of a file of that name and size, and cleared before reuse. Not kept are files that another
//! process may have open, and files of the process that this one was forked from.
//!
//! Invariants: a new file reads as zeroes; at most [`KEPT_FILES`] files and [`KEPT_BYTES`] of pages are kept.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;

use super::denial::Checked;
use super::system;

/// Cached files without an owner, oldest first, each with the bytes of its pages.
static KEPT: Mutex<VecDeque<(Arc<Named>, u64)>> = Mutex::new(VecDeque::new());

const KEPT_FILES: usize = 64;
/// Limit of unused pages in bytes: in all cached files together, and in each owned file.
const KEPT_BYTES: u64 = 512 << 20;
const CLEARED_RUNS: usize = 8;

/// Memory file owned by an arena or an extent.
#[derive(Debug)]
pub(super) struct MemoryFile {
    named: Arc<Named>,
    /// Whether another process may have the file open.
    shared: bool,
}

#[derive(Debug)]
struct Named {
    name: String,
    file: OwnedFd,
    mapped: MappedFile,
}

/// A file that is mapped whole, without keeping its descriptor open.
#[derive(Debug)]
pub(super) struct MappedFile {
    base: u64,
    size: u64,
    /// Process that mapped the file: a forked child inherits the value but not the mapping.
    process: u32,
}

impl MemoryFile {
    /// Creates a file that reads as zeroes. A sealed file never changes its size, so that it can be shared with other processes.
    pub(super) fn new(name: &str, size: u64, sealed: bool) -> Checked<Self> {
        if let Some(named) = take_kept(name, size) {
            let file = MemoryFile { named, shared: false };
            file.clear(0, size)?;
            return Ok(file);
        }
        let file = system::memory_file(name, size, sealed)?;
        let mapped = MappedFile::new(file.as_fd(), size)?;
        Ok(MemoryFile { named: Arc::new(Named { name: name.to_owned(), file, mapped }), shared: false })
    }

    /// Returns a descriptor for another process, which may keep it indefinitely.
    pub(super) fn share(&mut self) -> Checked<OwnedFd> {
        self.shared = true;
        Ok(self.named.file.try_clone()?)
    }

    /// Returns the host address of the byte at `offset`.
    pub(super) fn pointer(&self, offset: u64) -> u64 {
        self.named.mapped.pointer(offset)
    }

    /// Makes a range read as zeroes. Contiguous pages are kept; scattered pages, which would accumulate with each use, are freed.
    pub(super) fn clear(&self, offset: u64, size: u64) -> Checked<()> {
        let (mut at, end) = (offset, offset + size);
        for _ in 0..CLEARED_RUNS {
            let data = system::next_data(self.as_fd(), at)?;
            let Some((start, hole)) = data.filter(|(start, _)| *start < end) else { return Ok(()) };
            at = hole.min(end);
            // SAFETY: the range lies in this file's own mapping, and its last user has gone.
            unsafe { system::fill_bytes(self.pointer(start), 0, at - start) };
        }
        if at < end {
            system::punch(self.as_fd(), at, end - at)?;
        }
        Ok(())
    }

    /// Returns the pages of a range to the operating system if the file has more than the limit.
    pub(super) fn trim(&self, offset: u64, size: u64) -> Checked<()> {
        if system::pages(self.as_fd())? > KEPT_BYTES {
            system::punch(self.as_fd(), offset, size)?;
        }
        Ok(())
    }
}

impl AsFd for MemoryFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.named.file.as_fd()
    }
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        if !self.shared && self.named.mapped.is_of_this_process() {
            keep(self.named.clone());
        }
    }
}

impl MappedFile {
    /// Maps a file, which may be closed afterwards.
    pub(super) fn new(file: BorrowedFd<'_>, size: u64) -> Checked<Self> {
        let base = system::map_whole(file, size)?;
        Ok(MappedFile { base, size, process: std::process::id() })
    }

    /// Returns the host address of the byte at `offset`.
    pub(super) fn pointer(&self, offset: u64) -> u64 {
        self.base + offset
    }

    fn is_of_this_process(&self) -> bool {
        self.process == std::process::id()
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        if self.is_of_this_process() {
            // SAFETY: the mapping is this file's own, and the owner that read through it has gone.
            let _ = unsafe { system::unreserve(self.base, self.size) };
        }
    }
}

// Neither function waits for the lock: in a forked child, another thread of the parent may have held it.

fn take_kept(name: &str, size: u64) -> Option<Arc<Named>> {
    let mut kept = KEPT.try_lock()?;
    let fits =
        |file: &Named| file.mapped.size == size && file.name == name && file.mapped.is_of_this_process();
    let index = kept.iter().rposition(|(file, _)| fits(file))?;
    kept.remove(index).map(|(file, _)| file)
}

fn keep(file: Arc<Named>) {
    let Ok(pages) = system::pages(file.file.as_fd()) else { return };
    let Some(mut kept) = KEPT.try_lock() else { return };
    kept.push_back((file, pages));
    while kept.len() > KEPT_FILES || kept.iter().map(|(_, pages)| pages).sum::<u64>() > KEPT_BYTES {
        kept.pop_front();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn byte(file: &MemoryFile, at: u64) -> u8 {
        let mut byte = [0];
        // SAFETY: in the file's mapping.
        unsafe { system::read_bytes(file.pointer(at), &mut byte) };
        byte[0]
    }

    fn dirty(name: &str) -> MemoryFile {
        let file = MemoryFile::new(name, 64 * MIB, true).unwrap();
        for at in [0, 5 * MIB, 5 * MIB + 4096, 64 * MIB - 1] {
            assert_eq!(byte(&file, at), 0, "of {name} at {at}");
            // SAFETY: in the file's mapping.
            unsafe { system::fill_bytes(file.pointer(at), 7, 1) };
        }
        file
    }

    #[test]
    fn a_reused_file_keeps_its_pages_but_not_its_bytes() {
        let file = dirty("kept");
        let (base, pages) = (file.pointer(0), system::pages(file.as_fd()).unwrap());
        assert_eq!(pages, 4 * 4096);
        drop(file);
        let file = dirty("kept");
        assert_eq!((file.pointer(0), system::pages(file.as_fd()).unwrap()), (base, pages));
        assert_ne!(dirty("kept").pointer(0), base, "it has an owner");
        assert_ne!(dirty("of another name").pointer(0), base);
    }

    #[test]
    fn scattered_pages_are_freed() {
        let scattered = || {
            let file = MemoryFile::new("scattered", 64 * MIB, false).unwrap();
            for at in (0..64).map(|page| page * MIB) {
                assert_eq!(byte(&file, at), 0, "at {at}");
                // SAFETY: in the file's mapping.
                unsafe { system::fill_bytes(file.pointer(at), 7, 1) };
            }
            file
        };
        drop(scattered());
        let file = scattered();
        file.clear(0, 64 * MIB).unwrap();
        assert_eq!(system::pages(file.as_fd()).unwrap(), CLEARED_RUNS as u64 * 4096);
    }

    #[test]
    fn shared_files_are_not_cached() {
        let mut file = dirty("shared");
        let theirs = file.share().unwrap();
        drop(file);
        dirty("shared");
        let imported = MappedFile::new(theirs.as_fd(), 64 * MIB).unwrap();
        // SAFETY: in the file's mapping.
        unsafe { system::fill_bytes(imported.pointer(0), 9, 1) };
        drop(imported);
        dirty("shared");
    }

    #[test]
    fn excess_pages_are_freed() {
        let file = MemoryFile::new("large", 2 * KEPT_BYTES, false).unwrap();
        let fill = |offset: u64, size: u64| {
            // SAFETY: in the file's mapping.
            unsafe { system::fill_bytes(file.pointer(offset), 7, size) };
        };
        fill(0, KEPT_BYTES);
        file.trim(0, MIB).unwrap();
        assert_eq!(system::pages(file.as_fd()).unwrap(), KEPT_BYTES);
        fill(KEPT_BYTES, MIB);
        file.trim(0, 2 * MIB).unwrap();
        assert_eq!(system::pages(file.as_fd()).unwrap(), KEPT_BYTES - MIB);
        fill(0, 4 * MIB);
        drop(file);
        assert!(take_kept("large", 2 * KEPT_BYTES).is_none(), "it has too many");
    }
}
