//! Small private files beside the socket, written atomically.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::OFlags;

/// Opens or creates a file that only this user can access, without following links.
///
/// # Errors
/// The error of the file system.
pub fn open_private(path: &Path) -> io::Result<File> {
    private().truncate(false).write(true).open(path)
}

/// Opens a file like [`open_private`], for appending.
pub(crate) fn append_private(path: &Path) -> io::Result<File> {
    private().append(true).open(path)
}

fn private() -> fs::OpenOptions {
    let flags = i32::try_from(OFlags::NOFOLLOW.bits()).unwrap_or_default();
    let mut options = File::options();
    options.create(true).mode(0o600).custom_flags(flags);
    options
}

/// Replaces a file atomically through a temporary file. Without sync: processes do not survive a loss of power either.
///
/// # Errors
/// The error of the file system; the old file is unchanged.
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

/// Reads a file of at most `longest` bytes; `None` if it does not exist.
///
/// # Errors
/// The error of the file system, or the file is too long or not regular.
pub fn read_whole(path: &Path, longest: u64) -> io::Result<Option<Vec<u8>>> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Ok(found) if found.is_file() && found.len() <= longest => {}
        Ok(_) => return Err(io::Error::new(io::ErrorKind::InvalidData, "it is no record")),
        Err(error) => return Err(error),
    }
    fs::read(path).map(Some)
}
