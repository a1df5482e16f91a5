//! The tier's directory, and removal of files left behind by processes that have ended.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use glake_units::Bytes;

use super::owner::{Kind, Owner};
use super::{FileError, FileStep, Result};

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
            remove(&files, &mut collected)?;
        } else if !owner.is_seen() {
            let path = directory.join(owner.name(Kind::Lock));
            // Held until the owner file itself has been removed.
            let Some(_lock) = try_lock(&path)? else { continue };
            remove(&files, &mut collected)?;
            remove(&[path], &mut Collected::default())?;
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

fn remove(files: &[PathBuf], collected: &mut Collected) -> Result<()> {
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
