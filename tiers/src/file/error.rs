//! Errors of the file tier.

use std::fmt;
use std::io;
use std::path::PathBuf;

use glake_units::Bytes;

/// Error of the file tier. Each variant stands for one possible reaction of the caller.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file system has too little free space: free some, or choose another directory. No byte was written.
    #[error(
        "{}: {wanted} was to be set aside, and the file system has {free} free; free space there, or choose another directory",
        path.display()
    )]
    DiskFull {
        /// Path of the intended file.
        path: PathBuf,
        /// Length of the intended file.
        wanted: Bytes,
        /// Free space of the file system.
        free: Bytes,
    },
    /// The file would exceed the process's file size limit. No byte was written.
    #[error(
        "{}: {wanted} was to be set aside, and this process may write files of {limit} (RLIMIT_FSIZE); raise it with ulimit -f",
        path.display()
    )]
    TooLarge {
        /// Path of the intended file.
        path: PathBuf,
        /// Length of the intended file.
        wanted: Bytes,
        /// Value of the `RLIMIT_FSIZE` limit.
        limit: Bytes,
    },
    /// The file system cannot preallocate space: choose a directory on another one (ext4, xfs and tmpfs can).
    #[error(
        "{}: this file system cannot set space aside before it is written; choose a directory on another one",
        path.display()
    )]
    NoAllocation {
        /// Path of the intended file.
        path: PathBuf,
    },
    /// The tier was closed because the process is ending, and its files were removed.
    #[error("{}: the process ends, and its files with it: nothing is written there any more", path.display())]
    Closed {
        /// Directory of the tier.
        path: PathBuf,
    },
    /// A system call failed. No data was lost; the operation can be retried.
    #[error("{}: {step}: {source}; {}", path.display(), step.advice())]
    Io {
        /// Operation that failed.
        step: FileStep,
        /// Path of the file or directory.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// A read from the disk failed. The file is kept: retry; if the disk stays broken, load the bytes from their source.
    #[error(
        "{}: {size} at {offset} could not be read: {source}; the file stays: refill again, and if the disk stays broken load these \
         bytes from their source",
        path.display()
    )]
    Unread {
        /// Path of the file.
        path: PathBuf,
        /// Offset of the failed read in the contents.
        offset: u64,
        /// Number of bytes of the failed read.
        size: Bytes,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// A page's checksum does not match: this copy of the bytes is lost.
    #[error(
        "{}: page {page} of {pages} is damaged (bytes {offset} to {end}); the disk or somebody changed it, and this copy \
         cannot be used",
        path.display()
    )]
    Damaged {
        /// Path of the file.
        path: PathBuf,
        /// Index of the damaged page, from 0.
        page: u64,
        /// Number of pages in the file.
        pages: u64,
        /// Offset of the page in the contents.
        offset: u64,
        /// Offset of the end of the page in the contents.
        end: u64,
    },
    /// Not a valid sealed file: truncated, of another version, or with a damaged checksum table.
    #[error("{}: not a valid stored copy: {flaw}; delete it", path.display())]
    NotWhole {
        /// Path of the file.
        path: PathBuf,
        /// Defect found in the file.
        flaw: Flaw,
    },
    /// Other users could modify the files.
    #[error(
        "{}: belongs to user {owner} with mode {mode:o}: others could change the files in it; choose a directory of your own \
         that only you may write to",
        path.display()
    )]
    OpenDirectory {
        /// Directory of the tier.
        path: PathBuf,
        /// User id of its owner.
        owner: u32,
        /// Permission bits of the directory.
        mode: u32,
    },
    /// This process already has a tier in this directory: use that one.
    #[error("{}: this process has a file tier here already; use that one, or another directory", path.display())]
    InUse {
        /// Directory of the tier.
        path: PathBuf,
    },
    /// The range lies outside the file or is not page aligned: a bug in the caller.
    #[error(
        "{size} at {offset} of a file of {length}: pages of {} are written in order and read as a whole",
        super::PAGE
    )]
    NoSuchRange {
        /// Offset of the range.
        offset: u64,
        /// Size of the range.
        size: Bytes,
        /// Length of the file's contents.
        length: Bytes,
    },
}

/// Operation during which the operating system failed.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum FileStep {
    Open,
    List,
    Lock,
    Allocate,
    Write,
    Protect,
    Sync,
    Rename,
    SyncDirectory,
    Read,
    Remove,
}

/// Defect that makes a file invalid.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum Flaw {
    #[error("it is no file that only its own user may write to")]
    Open,
    #[error("it has no header of this version")]
    Header,
    #[error("it is not as long as its header says")]
    Length,
    #[error("its table of checksums is damaged")]
    Table,
}

impl FileStep {
    /// Returns the advice for the user in the error message.
    fn advice(self) -> &'static str {
        match self {
            FileStep::Open | FileStep::List | FileStep::Lock | FileStep::Remove => {
                "check this directory, or choose another one"
            }
            _ => "what was to go there stays where it is: try again, or choose a directory on another disk",
        }
    }
}

impl fmt::Display for FileStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            FileStep::Open => "open",
            FileStep::List => "list",
            FileStep::Lock => "lock",
            FileStep::Allocate => "set space aside",
            FileStep::Write => "write",
            FileStep::Protect => "take write permission away",
            FileStep::Sync => "bring to the disk",
            FileStep::Rename => "rename",
            FileStep::SyncDirectory => "bring its name to the disk",
            FileStep::Read => "read",
            FileStep::Remove => "remove",
        })
    }
}
