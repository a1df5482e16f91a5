//! A file's bytes as memory.
//!
//! Invariant: nobody writes to the file while it is mapped. When it is mapped the kernel says that nobody has it open for
//! writing; it belongs to this user, and its mode lets nobody open it so. Who overrides that (this user or the administrator, by
//! changing the mode) could as well write to this process's memory.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

use memmap2::Mmap;

/// A file that nobody writes to any more, mapped read-only.
#[derive(Debug)]
pub struct FileMap(Mmap);

impl FileMap {
    /// Maps a file that was opened for reading.
    ///
    /// # Errors
    /// [`io::ErrorKind::PermissionDenied`] where it is no regular file of this user, or its mode lets somebody write to it;
    /// [`io::ErrorKind::ResourceBusy`] where somebody has it open for writing; what the operating system answers, above all
    /// where its file system cannot say.
    pub fn new(file: &File) -> io::Result<Self> {
        let found = file.metadata()?;
        // SAFETY: it has no arguments and cannot fail.
        let user = unsafe { libc::geteuid() };
        if !found.is_file() || found.uid() != user || found.mode() & 0o222 != 0 {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        // A read lease is given only where nobody has the file open for writing; it is not needed longer than that.
        for lease in [libc::F_RDLCK, libc::F_UNLCK] {
            // SAFETY: a descriptor that is open, and a command that takes a number.
            if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, lease) } != 0 {
                let error = io::Error::last_os_error();
                let busy = error.kind() == io::ErrorKind::WouldBlock;
                return Err(if busy { io::ErrorKind::ResourceBusy.into() } else { error });
            }
        }
        // SAFETY: nobody writes to it while it is mapped: see the module.
        Ok(FileMap(unsafe { Mmap::map(file)? }))
    }

    /// Its bytes. A disk that cannot read them ends the process.
    pub fn as_slice(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, OpenOptions, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn only_what_nobody_writes_to_is_mapped() {
        let path = std::env::temp_dir().join(format!("glake-file-map-{}", std::process::id()));
        fs::write(&path, b"sealed").unwrap();
        let kind = |error: io::Error| error.kind();
        let reader = File::open(&path).unwrap();
        assert_eq!(FileMap::new(&reader).map_err(kind).unwrap_err(), io::ErrorKind::PermissionDenied);
        let writer = OpenOptions::new().write(true).open(&path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o400)).unwrap();
        assert_eq!(FileMap::new(&reader).map_err(kind).unwrap_err(), io::ErrorKind::ResourceBusy);
        drop(writer);
        let map = FileMap::new(&reader).unwrap();
        fs::remove_file(&path).unwrap();
        assert_eq!(map.as_slice(), b"sealed");
        let device = File::open("/dev/null").unwrap();
        assert!(FileMap::new(&device).is_err());
    }
}
