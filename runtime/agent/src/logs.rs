//! Logs of started workers: one file for each, with a bounded size.
//!
//! The worker's processes hold the file themselves, without a pipe to the agent: a worker neither blocks nor gets a signal if the agent
//! dies or is slow. The agent therefore bounds a log from outside: it copies a long log to `NAME.log.1` and truncates it. The worker appends,
//! and so goes on at the beginning. Bytes written between the end of the copy and the truncation, some microseconds, are lost.
//!
//! The blocks of a log up to its bound are reserved when it is opened, as far as the file system can do so: other files that fill the disk
//! cause no failed write in a worker. A copy that fails, for example on a full disk, loses the log's text instead of the worker's writes.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{Access, FallocateFlags, access, fallocate};
use rustix::process::geteuid;

use crate::LaunchError;
use crate::host::{append_private, open_private};

/// Bound of a log, and of the earlier part beside it.
pub(crate) const LONGEST: u64 = 16 << 20;

/// Returns the path of a worker's log.
pub(crate) fn path(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.log"))
}

/// Opens the log of a worker for appending, and creates the folder if necessary.
///
/// # Errors
/// [`LaunchError::Folder`], [`LaunchError::Log`].
pub(crate) fn open(folder: &Path, name: &str) -> Result<File, LaunchError> {
    check_folder(folder)?;
    DirBuilder::new().mode(0o700).recursive(true).create(folder).map_err(|error| LaunchError::Folder {
        folder: folder.to_owned(),
        why: format!("cannot be created ({error})"),
    })?;
    let path = path(folder, name);
    rotate(&path, LONGEST);
    let log = append_private(&path).map_err(|source| LaunchError::Log { path, source })?;
    reserve(&log, LONGEST);
    Ok(log)
}

/// Reserves the blocks of a log without changing its size. File systems without this operation reserve nothing.
fn reserve(log: &File, longest: u64) {
    let _ = fallocate(log, FallocateFlags::KEEP_SIZE, 0, longest);
}

/// Moves the content of a log longer than `longest` bytes to `NAME.log.1`, of which the last `longest` bytes stay. Returns the remaining
/// length; 0 if there is no log.
pub(crate) fn rotate(path: &Path, longest: u64) -> u64 {
    let length = fs::symlink_metadata(path).map_or(0, |found| if found.is_file() { found.len() } else { 0 });
    if length <= longest {
        return length;
    }
    let log = match open_read_write(path) {
        Ok(log) => log,
        Err(error) => {
            tracing::warn!(target: "glake::agent", log = %path.display(), %error, "a log cannot be shortened");
            return length;
        }
    };
    if let Err(error) = copy_end(&log, length - longest, &path.with_added_extension("1")) {
        tracing::warn!(target: "glake::agent", log = %path.display(), %error, "a log is emptied without a copy of its text");
    }
    if let Err(error) = log.set_len(0) {
        tracing::warn!(target: "glake::agent", log = %path.display(), %error, "a log cannot be shortened");
        return length;
    }
    reserve(&log, longest);
    0
}

fn open_read_write(path: &Path) -> io::Result<File> {
    crate::host::private().create(false).read(true).write(true).open(path)
}

/// Copies a log from `begin` to its current end, which may move meanwhile.
fn copy_end(mut log: &File, begin: u64, to: &Path) -> io::Result<()> {
    let mut copy = open_private(to)?;
    // Before the copy: a full disk has no room for a third part.
    copy.set_len(0)?;
    io::Seek::seek(&mut log, io::SeekFrom::Start(begin))?;
    // `io::copy` ends at the end of the file; a worker that writes faster than this copies must not keep it here.
    io::copy(&mut io::Read::take(log, 2 * LONGEST), &mut copy).map(drop)
}

/// Checks that a folder exists or can be created, and that no other user can write to it. Creates nothing.
///
/// # Errors
/// [`LaunchError::Folder`].
pub(crate) fn check_folder(folder: &Path) -> Result<(), LaunchError> {
    let refuse = |why| Err(LaunchError::Folder { folder: folder.to_owned(), why });
    let own = geteuid().as_raw();
    match fs::symlink_metadata(folder) {
        _ if !folder.is_absolute() => refuse("does not begin at the root".to_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let above = folder.ancestors().find(|above| above.exists()).unwrap_or(folder);
            match above.is_dir() && access(above, Access::WRITE_OK | Access::EXEC_OK).is_ok() {
                true => Ok(()),
                false => refuse(format!("cannot be created: {} cannot be written", above.display())),
            }
        }
        Err(error) => refuse(format!("cannot be used ({error})")),
        Ok(found) if !found.is_dir() => refuse("is no folder, but a link or a file".to_owned()),
        Ok(found) if found.uid() != own => {
            refuse(format!("is user {}'s, and this is user {own}", found.uid()))
        }
        Ok(found) if found.mode() & 0o022 != 0 => {
            refuse(format!("has mode {:04o}: others may write to it", found.mode() & 0o777))
        }
        Ok(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn a_long_log_is_cut_while_a_process_writes() {
        let folder = tempfile::tempdir().unwrap();
        let (path, earlier) = (path(folder.path(), "w"), folder.path().join("w.log.1"));
        assert_eq!(rotate(&path, 8), 0);
        let mut worker = open(folder.path(), "w").unwrap();
        worker.write_all(b"12345678").unwrap();
        assert_eq!((rotate(&path, 8), earlier.exists()), (8, false));
        worker.write_all(b"9").unwrap();
        assert_eq!(rotate(&path, 8), 0);
        worker.write_all(b"abc").unwrap();
        let read = |path: &Path| fs::read_to_string(path).unwrap();
        assert_eq!((read(&path), read(&earlier)), ("abc".to_owned(), "23456789".to_owned()));
        worker.write_all(b"defghijkl").unwrap();
        rotate(&path, 8);
        assert_eq!((read(&path), read(&earlier)), (String::new(), "efghijkl".to_owned()));
        // Without room for the copy, the worker still goes on.
        fs::remove_file(&earlier).unwrap();
        fs::create_dir(&earlier).unwrap();
        worker.write_all(b"a longer text").unwrap();
        assert_eq!((rotate(&path, 8), read(&path)), (0, String::new()));
        // Another file in the log's place is left alone.
        fs::remove_file(&path).unwrap();
        let foreign = folder.path().join("foreign");
        fs::write(&foreign, "a longer text").unwrap();
        std::os::unix::fs::symlink(&foreign, &path).unwrap();
        assert_eq!((rotate(&path, 8), read(&foreign).len()), (0, 13));
    }

    #[test]
    fn the_folder_is_created_with_its_parents() {
        let base = tempfile::tempdir().unwrap();
        let folder = base.path().join("a/b");
        check_folder(&folder).unwrap();
        assert!(!base.path().join("a").exists());
        open(&folder, "w").unwrap();
        assert_eq!(fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);
        let refused = |path: &Path| check_folder(path).unwrap_err().to_string();
        assert!(refused(Path::new("/proc/self/no/such")).contains("/proc/self cannot be written"));
        assert!(refused(Path::new("logs")).contains("does not begin at the root"));
    }
}
