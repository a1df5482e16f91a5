//! Why a file tier does not do what it is asked.

use std::fmt;
use std::io;
use std::path::PathBuf;

use glake_units::Bytes;

/// A refusal of the file tier; a variant is what the caller can do about it.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file system has not so much space: free some, or choose another directory. No byte was written.
    #[error(
        "{}: {wanted} was to be set aside, and the file system has {free} free; free space there, or choose another directory",
        path.display()
    )]
    DiskFull {
        /// The file that was to be.
        path: PathBuf,
        /// How long it was to be.
        wanted: Bytes,
        /// What the file system has.
        free: Bytes,
    },
    /// The process may not write so long a file. No byte was written.
    #[error(
        "{}: {wanted} was to be set aside, and this process may write files of {limit} (RLIMIT_FSIZE); raise it with ulimit -f",
        path.display()
    )]
    TooLarge {
        /// The file that was to be.
        path: PathBuf,
        /// How long it was to be.
        wanted: Bytes,
        /// The limit.
        limit: Bytes,
    },
    /// The file system cannot set space aside: choose a directory on another (ext4, xfs, tmpfs can).
    #[error(
        "{}: this file system cannot set space aside before it is written; choose a directory on another one",
        path.display()
    )]
    NoAllocation {
        /// The file that was to be.
        path: PathBuf,
    },
    /// The process ends, and its files are gone.
    #[error("{}: the process ends, and its files with it: nothing is written there any more", path.display())]
    Closed {
        /// The directory.
        path: PathBuf,
    },
    /// The operating system failed. Nothing was given up for what was to be done: it can be done again.
    #[error("{}: {step}: {source}; {}", path.display(), step.advice())]
    Io {
        /// What was done.
        step: FileStep,
        /// With what.
        path: PathBuf,
        /// Its answer.
        #[source]
        source: io::Error,
    },
    /// The disk could not read some of a file. The file stays as it is: try again; if the disk stays broken, load these bytes from
    /// their source.
    #[error(
        "{}: {size} at {offset} could not be read: {source}; the file stays: refill again, and if the disk stays broken load these \
         bytes from their source",
        path.display()
    )]
    Unread {
        /// The file.
        path: PathBuf,
        /// Where it begins in what was written.
        offset: u64,
        /// How much of it is read at once.
        size: Bytes,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// The bytes of a page are not those that were written: the copy is lost, and so is what nothing else holds.
    #[error(
        "{}: page {page} of {pages} is damaged (bytes {offset} to {end}); the disk or somebody changed it, and this copy \
         cannot be used",
        path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Which page, from 0.
        page: u64,
        /// How many there are.
        pages: u64,
        /// Where it begins in what was written.
        offset: u64,
        /// Where it ends.
        end: u64,
    },
    /// No file that was sealed: cut off, of another version, or its table of checksums is damaged.
    #[error("{}: this is no whole file of this version: {flaw}; delete it", path.display())]
    NotWhole {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        flaw: Flaw,
    },
    /// Somebody else could change the files.
    #[error(
        "{}: belongs to user {owner} with mode {mode:o}: others could change the files in it; choose a directory of your own \
         that only you may write to",
        path.display()
    )]
    OpenDirectory {
        /// The directory.
        path: PathBuf,
        /// Whose it is.
        owner: u32,
        /// Its permissions.
        mode: u32,
    },
    /// This process has a tier there already: use that one.
    #[error("{}: this process has a file tier here already; use that one, or another directory", path.display())]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// A range that is not in the file, or not of whole pages: a bug of the caller.
    #[error(
        "{size} at {offset} of a file of {length}: pages of {} are written in order and read as a whole",
        super::PAGE
    )]
    NoSuchRange {
        /// Where it begins.
        offset: u64,
        /// How long it is.
        size: Bytes,
        /// How long the file is.
        length: Bytes,
    },
}

/// What was being done when the operating system failed.
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

/// What is wrong with a file.
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
    /// What to do when it failed.
    fn advice(self) -> &'static str {
        match self {
            FileStep::Open | FileStep::List | FileStep::Lock | FileStep::Remove => {
                "look what is wrong with this directory, or choose another one"
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
