//! Socket for workers: its path, its protection from other users, and the lock that allows one agent.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::process::geteuid;

/// Listening socket and its lock.
#[derive(Debug)]
pub(crate) struct Listener {
    pub(crate) socket: UnixListener,
    pub(crate) path: PathBuf,
    /// Lock held while listening, so that there is no second agent.
    _lock: File,
    /// Whether this process removes the socket; systemd removes its own.
    is_own: bool,
}

/// Reason why the agent cannot listen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListenError {
    /// The path is not absolute.
    #[error("--socket {}: give an absolute path", .0.display())]
    Relative(PathBuf),
    /// Other users could replace the folder.
    #[error("the folder {} {why}: name a socket in a folder of your own, of mode 0700 (--socket PATH)", .folder.display())]
    Folder {
        folder: PathBuf,
        /// Description of the problem.
        why: String,
    },
    /// Another agent serves the socket.
    #[error("an agent serves {} already: stop that one, or name another socket (--socket PATH)", .0.display())]
    Served(PathBuf),
    /// The path exists and is no socket.
    #[error("{} is there and is no socket: name another one (--socket PATH)", .0.display())]
    Other(PathBuf),
    /// The operating system's error.
    #[error("{}: {source}", .path.display())]
    Os {
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
}

impl Listener {
    /// Binds a socket at a path and creates its folder if necessary. A socket left by a dead agent is replaced; the lock file tells whether
    /// an agent lives.
    pub(crate) fn bind(path: &Path) -> Result<Listener, ListenError> {
        let lock = Listener::lock(path)?;
        match fs::symlink_metadata(path) {
            Ok(found) if found.file_type().is_socket() => {
                fs::remove_file(path).map_err(|error| os(path, error))?
            }
            Ok(_) => return Err(ListenError::Other(path.to_owned())),
            Err(_) => {}
        }
        let socket = UnixListener::bind(path).map_err(|error| os(path, error))?;
        // Its folder lets nobody else in before.
        fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(|error| os(path, error))?;
        Ok(Listener { socket, path: path.to_owned(), _lock: lock, is_own: true })
    }

    /// Adopts a listening socket from systemd.
    pub(crate) fn adopt(socket: UnixListener, path: &Path) -> Result<Listener, ListenError> {
        let bound = socket.local_addr().ok().and_then(|address| address.as_pathname().map(Path::to_owned));
        let path = bound.unwrap_or_else(|| path.to_owned());
        let lock = Listener::lock(&path)?;
        Ok(Listener { socket, path, _lock: lock, is_own: false })
    }

    fn lock(path: &Path) -> Result<File, ListenError> {
        let folder = match path.parent() {
            Some(folder) if path.is_absolute() => folder,
            _ => return Err(ListenError::Relative(path.to_owned())),
        };
        private_folder(folder)?;
        let beside = path.with_extension("lock");
        let file = File::options().create(true).truncate(false).write(true).open(&beside);
        let file = file.map_err(|error| os(&beside, error))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(file),
            Err(rustix::io::Errno::WOULDBLOCK) => Err(ListenError::Served(path.to_owned())),
            Err(error) => Err(os(&beside, error.into())),
        }
    }

    /// Returns the path of the journal.
    pub(crate) fn journal(&self) -> PathBuf {
        self.path.with_extension("journal")
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if self.is_own {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Checks that an agent could listen at a path, without creating anything.
pub(crate) fn check(path: &Path) -> Result<(), ListenError> {
    let folder = match path.parent() {
        Some(folder) if path.is_absolute() => folder,
        _ => return Err(ListenError::Relative(path.to_owned())),
    };
    if folder.exists() { check_folder(folder) } else { above(folder).map(drop) }
}

/// Creates a folder of mode 0700, or checks that an existing one belongs to this user only.
///
/// # Errors
/// [`ListenError`]: other users could change it, or it cannot be created.
pub fn private_folder(folder: &Path) -> Result<(), ListenError> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => {
            above(folder)?;
            return refuse(folder, format!("cannot be made ({error})"));
        }
    }
    check_folder(folder)
}

/// Returns the parent of a folder to create.
fn above(folder: &Path) -> Result<&Path, ListenError> {
    match folder.parent().filter(|above| above.is_dir()) {
        Some(above) => Ok(above),
        None => refuse(folder, "cannot be made: the one above it is not there".to_owned()),
    }
}

/// Checks that a folder exists and belongs to this user only.
///
/// # Errors
/// [`ListenError`]: it does not exist, or other users could change it.
pub fn check_folder(folder: &Path) -> Result<(), ListenError> {
    let found = fs::symlink_metadata(folder).map_err(|error| os(folder, error))?;
    let own = geteuid().as_raw();
    match found.mode() & 0o777 {
        _ if !found.is_dir() => refuse(folder, "is no folder, but a link or a file".to_owned()),
        _ if found.uid() != own => {
            refuse(folder, format!("is user {}'s, and this is user {own}", found.uid()))
        }
        0o700 => Ok(()),
        mode => refuse(folder, format!("has mode {mode:04o}: others may reach it")),
    }
}

fn refuse<T>(folder: &Path, why: String) -> Result<T, ListenError> {
    Err(ListenError::Folder { folder: folder.to_owned(), why })
}

fn os(path: &Path, source: io::Error) -> ListenError {
    ListenError::Os { path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn there_is_one_agent_a_socket_and_what_a_dead_one_left_is_replaced() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("glake/agent.sock");
        let first = Listener::bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert!(matches!(Listener::bind(&path), Err(ListenError::Served(_))));
        // As if it had been killed: the lock goes, the socket stays.
        let Listener { socket, .. } = &first;
        let stale = socket.try_clone().unwrap();
        drop(first);
        drop(stale);
        drop(UnixListener::bind(&path).unwrap());
        assert!(UnixStream::connect(&path).is_err() && path.exists());
        let again = Listener::bind(&path).unwrap();
        UnixStream::connect(&path).unwrap();
        drop(again);
        assert!(!path.exists());
        fs::write(&path, "mine").unwrap();
        assert!(matches!(Listener::bind(&path), Err(ListenError::Other(_))));
    }

    #[test]
    fn a_folder_that_others_reach_is_refused() {
        let base = tempfile::tempdir().unwrap();
        let refused = |path: &Path| Listener::bind(path).unwrap_err().to_string();
        assert!(refused(Path::new("agent.sock")).contains("absolute"));
        check(&base.path().join("new/agent.sock")).unwrap();
        assert!(!base.path().join("new").exists());
        assert!(check(&base.path().join("no/such/agent.sock")).is_err());
        let deep = base.path().join("no/such/agent.sock");
        assert!(refused(&deep).contains("the one above it is not there"), "{}", refused(&deep));
        let open = base.path().join("open");
        fs::create_dir(&open).unwrap();
        fs::set_permissions(&open, Permissions::from_mode(0o755)).unwrap();
        assert!(refused(&open.join("agent.sock")).contains("has mode 0755"));
        let link = base.path().join("link");
        std::os::unix::fs::symlink(base.path(), &link).unwrap();
        assert!(refused(&link.join("agent.sock")).contains("is no folder"));
    }
}
