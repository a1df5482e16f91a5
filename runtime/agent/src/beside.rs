//! Small files beside the socket: this user's alone, and written whole or not at all.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::OFlags;

/// Opens a file, or makes one, that this user alone reads and writes; no link is followed.
///
/// # Errors
/// What the file system answers.
pub fn open_private(path: &Path) -> io::Result<File> {
    private().truncate(false).write(true).open(path)
}

/// As [`open_private`], to add to its end.
pub(crate) fn append_private(path: &Path) -> io::Result<File> {
    private().append(true).open(path)
}

fn private() -> fs::OpenOptions {
    let flags = i32::try_from(OFlags::NOFOLLOW.bits()).unwrap_or_default();
    let mut options = File::options();
    options.create(true).mode(0o600).custom_flags(flags);
    options
}

/// Writes a file by way of another one beside it. Not synced: after a loss of power there are no processes.
///
/// # Errors
/// What the file system answers; the file is as it was.
pub fn write_whole(path: &Path, beside: &Path, bytes: &[u8]) -> io::Result<()> {
    let written = open_private(beside).and_then(|mut file| {
        file.set_len(0)?;
        file.write_all(bytes)
    });
    written.and_then(|()| fs::rename(beside, path)).inspect_err(|_| {
        // What is half written helps nobody.
        let _ = fs::remove_file(beside);
    })
}

/// Reads a file of at most so many bytes; none: there is none.
///
/// # Errors
/// What the file system answers; it is no such file.
pub fn read_whole(path: &Path, longest: u64) -> io::Result<Option<Vec<u8>>> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Ok(found) if found.is_file() && found.len() <= longest => {}
        Ok(_) => return Err(io::Error::new(io::ErrorKind::InvalidData, "it is no record")),
        Err(error) => return Err(error),
    }
    fs::read(path).map(Some)
}
