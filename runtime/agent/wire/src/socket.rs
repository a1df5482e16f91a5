//! Path of the agent's socket, and the checks that its owner can be trusted.

use std::fs::Metadata;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use rustix::process::geteuid;

/// Path of the socket inside a user's folder for sockets.
const SOCKET: &str = "glake/agent.sock";

/// Reason why a socket is not used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SocketError {
    /// No folder for the socket exists.
    #[error(
        "there is no private folder for the agent's socket: XDG_RUNTIME_DIR is not set and {} {why}; name the \
         socket (glake serve --socket PATH, GLAKE_AGENT=PATH)",
        .folder.display()
    )]
    NoFolder {
        /// Folder that was checked.
        folder: PathBuf,
        /// Fault of the folder.
        why: String,
    },
    /// The path is not absolute.
    #[error("the agent's socket {} is no absolute path: give it from the root", .path.display())]
    Relative {
        /// Path of the socket.
        path: PathBuf,
    },
    /// Other users may change the socket or its folder.
    #[error("the agent's socket {} is not used: {} {why}", .path.display(), .what.display())]
    Untrusted {
        /// Path of the socket.
        path: PathBuf,
        /// Path that is not safe: the socket or its folder.
        what: PathBuf,
        /// Reason of the distrust.
        why: String,
    },
    /// The server runs as another user.
    #[error("the agent's socket {} is served by user {uid}: only this user ({}) and root are trusted", .path.display(), geteuid().as_raw())]
    Server {
        /// Path of the socket.
        path: PathBuf,
        /// User id of the server.
        uid: u32,
    },
    /// Error of the operating system.
    #[error("the agent's socket {}: {source}", .path.display())]
    Os {
        /// Path of the failed operation.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
}

/// Returns where an agent listens that is given no path: in `XDG_RUNTIME_DIR`; where that is not set, root's is below `/run`, and others'
/// below `/run/user/UID`.
///
/// # Errors
/// [`SocketError::NoFolder`], where that folder is not there, or not this user's alone.
pub fn default_path(runtime_dir: Option<&Path>) -> Result<PathBuf, SocketError> {
    let uid = geteuid().as_raw();
    let base = match (runtime_dir, uid) {
        (Some(folder), _) if folder.is_absolute() => return Ok(folder.join(SOCKET)),
        (_, 0) => PathBuf::from("/run"),
        _ => of_user(uid),
    };
    // A folder of mode 0700 is created below; no other user may be able to create it first.
    let why = match std::fs::symlink_metadata(&base) {
        Err(error) => format!("is not there ({error})"),
        Ok(found) if !found.is_dir() || found.uid() != uid => "is not this user's".to_owned(),
        Ok(found) if found.mode() & 0o022 != 0 => "may be written by others".to_owned(),
        Ok(_) => return Ok(base.join(SOCKET)),
    };
    Err(SocketError::NoFolder { folder: base, why })
}

/// Returns where this user's agent listens that was given no path: the first of the default places with a socket, as a login shell, a service
/// and a container's process of the same user do not all have `XDG_RUNTIME_DIR`; else [`default_path`].
///
/// # Errors
/// As [`default_path`].
pub fn find_socket(runtime_dir: Option<&Path>) -> Result<PathBuf, SocketError> {
    let is_there = |path: &PathBuf| {
        std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket() && is_ours(&found))
    };
    match default_places(runtime_dir, geteuid().as_raw()).into_iter().find(is_there) {
        Some(path) => Ok(path),
        None => default_path(runtime_dir),
    }
}

/// Returns the places where an agent of a user may listen without an explicit path, whatever its environment.
fn default_places(runtime_dir: Option<&Path>, uid: u32) -> Vec<PathBuf> {
    let own = runtime_dir.filter(|folder| folder.is_absolute()).map(Path::to_owned);
    let root = (uid == 0).then(|| PathBuf::from("/run"));
    own.into_iter().chain(root).chain([of_user(uid)]).map(|folder| folder.join(SOCKET)).collect()
}

/// Returns the folder that a login creates for a user's sockets.
fn of_user(uid: u32) -> PathBuf {
    PathBuf::from(format!("/run/user/{uid}"))
}

/// Checks that a socket's path can be trusted: absolute, no link, a socket, in a folder that this user or root owns and
/// that only its owner may write to.
///
/// # Errors
/// [`SocketError`].
pub fn check_folder(path: &Path) -> Result<(), SocketError> {
    let refuse = |what: &Path, why: &str| {
        Err(SocketError::Untrusted { path: path.to_owned(), what: what.to_owned(), why: why.to_owned() })
    };
    let look = |what: &Path| {
        std::fs::symlink_metadata(what).map_err(|source| SocketError::Os { path: what.to_owned(), source })
    };
    let folder = match path.parent() {
        Some(folder) if path.is_absolute() => folder,
        _ => return Err(SocketError::Relative { path: path.to_owned() }),
    };
    let found = look(folder)?;
    if !found.is_dir() {
        return refuse(folder, "is no folder, but a link or a file");
    }
    if !is_ours(&found) {
        return refuse(folder, "is neither this user's nor root's");
    }
    if found.mode() & 0o022 != 0 {
        return refuse(folder, "may be written by others");
    }
    let found = look(path)?;
    if !found.file_type().is_socket() {
        return refuse(path, "is no socket, but a link or a file");
    }
    if !is_ours(&found) {
        return refuse(path, "is neither this user's nor root's");
    }
    Ok(())
}

/// Checks that the server of a connected socket can be trusted: it runs as this user, or as root.
///
/// # Errors
/// [`SocketError::Server`].
pub fn check_server(path: &Path, socket: impl AsFd) -> Result<(), SocketError> {
    // A server in another pid namespace has no number here: only its user is checked.
    let served = getsockopt(&socket, PeerCredentials)
        .map_err(|error| SocketError::Os { path: path.to_owned(), source: error.into() })?;
    match served.uid() {
        uid if uid == 0 || uid == geteuid().as_raw() => Ok(()),
        uid => Err(SocketError::Server { path: path.to_owned(), uid }),
    }
}

fn is_ours(found: &Metadata) -> bool {
    found.uid() == 0 || found.uid() == geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn only_a_socket_in_a_folder_of_ones_own_is_used() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.sock");
        let refused = |path: &Path| check_folder(path).unwrap_err().to_string();
        assert!(refused(&path).contains("No such file"), "{}", refused(&path));
        assert!(refused(Path::new("agent.sock")).contains("no absolute path"));
        let listener = UnixListener::bind(&path).unwrap();
        check_folder(&path).unwrap();
        let client = UnixStream::connect(&path).unwrap();
        check_server(&path, &client).unwrap();
        drop(listener);
        let link = folder.path().join("link.sock");
        symlink(&path, &link).unwrap();
        assert!(refused(&link).contains("is no socket, but a link"));
        let linked = folder.path().join("linked");
        symlink(folder.path(), &linked).unwrap();
        assert!(refused(&linked.join("agent.sock")).contains("is no folder, but a link"));
        fs::set_permissions(folder.path(), Permissions::from_mode(0o777)).unwrap();
        assert!(refused(&path).contains("may be written by others"));
    }

    /// Both ends find the same default path if only one of them has `XDG_RUNTIME_DIR`.
    #[test]
    fn both_ends_find_the_same_default_socket() {
        for uid in [0, 1000] {
            let of_login = of_user(uid);
            let served = |runtime_dir: Option<&Path>| match (runtime_dir, uid) {
                (Some(folder), _) => folder.join(SOCKET),
                (None, 0) => Path::new("/run").join(SOCKET),
                (None, _) => of_login.join(SOCKET),
            };
            for agent in [None, Some(&*of_login)] {
                for worker in [None, Some(&*of_login), Some(Path::new("relative")), Some(Path::new("/other"))]
                {
                    let places = default_places(worker, uid);
                    assert!(places.contains(&served(agent)), "{agent:?} {worker:?} {places:?}");
                }
            }
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(SOCKET);
        fs::create_dir(path.parent().unwrap()).unwrap();
        let _listener = UnixListener::bind(&path).unwrap();
        assert_eq!(find_socket(Some(folder.path())).unwrap(), path);
    }

    #[test]
    fn the_default_is_in_the_runtime_folder() {
        let folder = Path::new("/run/user/7");
        assert_eq!(default_path(Some(folder)).unwrap(), folder.join("glake/agent.sock"));
        match default_path(Some(Path::new("relative"))) {
            Ok(path) => assert!(path.starts_with("/run") && path.ends_with("glake/agent.sock")),
            Err(error) => assert!(error.to_string().contains("--socket PATH"), "{error}"),
        }
    }
}
