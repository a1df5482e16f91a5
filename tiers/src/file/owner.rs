//! Owners of the files in a tier's directory: their names, their locks, and removal of files left behind by ended processes.
//!
//! ```text
//!  glake-<pid>-<start>.owner               locked by the process while it is alive
//!  glake-<pid>-<start>-<number>.part       draft being written
//!  glake-<pid>-<start>-<number>.extent     sealed file
//! ```
//!
//! Invariant: an owner counts as ended only if no visible process has its pid and start time *and* its lock can be taken. The start time
//! distinguishes a process from a later one with the same pid. The lock covers processes that are not visible here, such as those of
//! another container that shares the directory.
//!
//! While a [`Lock`] exists, the directory holds its name and this process holds the lock. [`collect`] removes the files of ended owners.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use glake_meter::ProcessStat;
use glake_units::Bytes;

use super::{FileError, FileStep, Result};

/// Identity of a process: its pid and start time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Owner {
    pid: u32,
    /// Start time in clock ticks since boot.
    start: u64,
}

/// Kind of a file in the directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Lock,
    Draft(u64),
    Sealed(u64),
}

impl Owner {
    /// Returns the identity of a running process.
    pub(super) fn of(pid: u32) -> io::Result<Owner> {
        Ok(Owner { pid, start: ProcessStat::of(pid)?.start })
    }

    /// Returns whether the process is running and visible to this one.
    pub(super) fn is_seen(self) -> bool {
        ProcessStat::of(self.pid).is_ok_and(|process| !process.has_ended() && process.start == self.start)
    }

    /// Returns the file name for a kind of file of this process.
    pub(super) fn name(self, kind: Kind) -> String {
        let Owner { pid, start } = self;
        match kind {
            Kind::Lock => format!("glake-{pid}-{start}.owner"),
            Kind::Draft(number) => format!("glake-{pid}-{start}-{number}.part"),
            Kind::Sealed(number) => format!("glake-{pid}-{start}-{number}.extent"),
        }
    }

    /// Parses a file name. Returns `None` for a file that is not of a tier.
    pub(super) fn parse(name: &str) -> Option<(Owner, Kind)> {
        let (stem, extension) = name.strip_prefix("glake-")?.rsplit_once('.')?;
        let mut fields = stem.split('-').map(|field| field.parse::<u64>().ok());
        let (pid, start) = (u32::try_from(fields.next()??).ok()?, fields.next()??);
        let kind = match (fields.next(), extension) {
            (None, "owner") => Kind::Lock,
            (Some(Some(number)), "part") => Kind::Draft(number),
            (Some(Some(number)), "extent") => Kind::Sealed(number),
            _ => return None,
        };
        let owner = Owner { pid, start };
        (owner.name(kind) == name).then_some((owner, kind))
    }
}

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

/// Files removed because their processes have ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Number of removed data files, drafts included.
    pub files: u64,
    /// Total length of the removed files.
    pub bytes: Bytes,
}

pub(super) fn failed(step: FileStep, path: &Path) -> impl FnOnce(io::Error) -> FileError {
    move |source| FileError::Io { step, path: path.to_path_buf(), source }
}

/// Opens the directory, creating it if necessary; refuses a directory that other users may write to.
pub(super) fn directory(path: &Path) -> Result<File> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(failed(FileStep::Open, path))?;
    let file = File::open(path).map_err(failed(FileStep::Open, path))?;
    let found = file.metadata().map_err(failed(FileStep::Open, path))?;
    let (owner, mode) = (found.uid(), found.mode() & 0o7777);
    if owner != rustix::process::geteuid().as_raw() || mode & 0o022 != 0 {
        return Err(FileError::OpenDirectory { path: path.to_path_buf(), owner, mode });
    }
    Ok(file)
}

/// Removes the files of processes that have ended. With `leftovers`, also this process's files from an earlier tier.
pub(super) fn collect(directory: &Path, this: Owner, leftovers: bool) -> Result<Collected> {
    let mut owners: BTreeMap<Owner, Vec<PathBuf>> = BTreeMap::new();
    for entry in fs::read_dir(directory).map_err(failed(FileStep::List, directory))? {
        let name = entry.map_err(failed(FileStep::List, directory))?.file_name();
        if let Some((owner, kind)) = name.to_str().and_then(Owner::parse) {
            let files = owners.entry(owner).or_default();
            if kind != Kind::Lock {
                files.push(directory.join(&name));
            }
        }
    }
    let mut collected = Collected::default();
    for (owner, files) in owners {
        if owner == this {
            let files = if leftovers { files } else { Vec::new() };
            remove_all(&files, &mut collected)?;
        } else if !owner.is_seen() {
            let path = directory.join(owner.name(Kind::Lock));
            // Held until the owner file itself has been removed.
            let Some(_lock) = try_lock(&path)? else { continue };
            remove_all(&files, &mut collected)?;
            remove_all(&[path], &mut Collected::default())?;
        }
    }
    Ok(collected)
}

/// Tries to lock a process's owner file. Returns `None` if the process holds the lock (it is alive), `Some(None)` if there is no such file.
fn try_lock(path: &Path) -> Result<Option<Option<File>>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Some(None)),
        Err(source) => return Err(failed(FileStep::Lock, path)(source)),
    };
    match file.try_lock() {
        Ok(()) => Ok(Some(Some(file))),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(source)) => Err(failed(FileStep::Lock, path)(source)),
    }
}

fn remove_all(files: &[PathBuf], collected: &mut Collected) -> Result<()> {
    for path in files {
        let size = fs::metadata(path).map_or(0, |found| found.len());
        match fs::remove_file(path) {
            Ok(()) => {
                collected.files += 1;
                collected.bytes = collected.bytes.saturating_add(Bytes::new(size));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(failed(FileStep::Remove, path)(source)),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back_and_nothing_else_does() {
        let owner = Owner { pid: 7, start: 99 };
        for kind in [Kind::Lock, Kind::Draft(0), Kind::Sealed(12)] {
            assert_eq!(Owner::parse(&owner.name(kind)), Some((owner, kind)));
        }
        let others = [
            "glake-7-99",
            "glake-7-99.part",
            "glake-7-99-1.owner",
            "glake-7-99-1-2.part",
            "glake-07-99.owner",
            "glake-7--1.owner",
            "glake-x-99.owner",
            "glake-4294967296-1.owner",
            "other-7-99.owner",
            "glake-7-99-1.txt",
        ];
        for other in others {
            assert_eq!(Owner::parse(other), None, "{other}");
        }
    }

    #[test]
    fn a_process_is_told_from_a_later_one_of_its_number() {
        let this = Owner::of(std::process::id()).unwrap();
        assert!(this.is_seen());
        assert!(!Owner { start: this.start + 1, ..this }.is_seen());
        assert!(!Owner { pid: u32::MAX, ..this }.is_seen());
    }
}
