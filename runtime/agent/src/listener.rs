//! Socket for workers: its path, its protection from other users, the lock that allows one agent, and the identity of connected processes.

use std::fs::{self, DirBuilder, File, Permissions};
use std::future::pending;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use glake_meter::ProcessStat;
use glake_wire::Peer;
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, geteuid, pidfd_open};
use tokio::io::unix::AsyncFd;

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

/// Notification about the removal of a file.
#[derive(Debug)]
pub(crate) struct FileWatch(AsyncFd<OwnedFd>);

impl FileWatch {
    fn of(path: &Path) -> io::Result<FileWatch> {
        let events = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        // A removal changes the number of links at once; the file itself lives as long as its socket.
        let gone = WatchFlags::DELETE_SELF | WatchFlags::MOVE_SELF | WatchFlags::DONT_FOLLOW;
        inotify::add_watch(&events, path, gone | WatchFlags::ATTRIB)?;
        if let Some(folder) = path.parent() {
            inotify::add_watch(&events, folder, gone)?;
        }
        #[expect(
            deprecated,
            reason = "what an OwnedFd is of stays open, which the type does not promise of others"
        )]
        Ok(FileWatch(AsyncFd::with_interest(events, tokio::io::Interest::READABLE)?))
    }

    /// Waits for an event; the file may still be there.
    pub(crate) async fn changed(&self) {
        let Ok(mut ready) = self.0.readable().await else { return pending().await };
        let mut events = [0_u8; 4096];
        while rustix::io::read(self.0.get_ref(), &mut events).is_ok_and(|count| count > 0) {}
        ready.clear_ready();
    }
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
        let socket = create(path)?;
        Ok(Listener { socket, path: path.to_owned(), _lock: lock, is_own: true })
    }

    /// Creates the socket again if its file was removed, for example by a program that cleans the folder. A socket of systemd stays removed,
    /// because systemd holds it too.
    ///
    /// # Errors
    /// [`ListenError`]: no client can connect until the agent is started again.
    pub(crate) fn restore(&self) -> Result<Option<UnixListener>, ListenError> {
        match fs::symlink_metadata(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            _ => return Ok(None),
        }
        if !self.is_own {
            return Err(os(&self.path, io::ErrorKind::NotFound.into()));
        }
        create(&self.path).map(Some)
    }

    /// Adopts a listening socket from systemd.
    pub(crate) fn adopt(socket: UnixListener, path: &Path) -> Result<Listener, ListenError> {
        let bound = socket.local_addr().ok().and_then(|address| address.as_pathname().map(Path::to_owned));
        let path = bound.unwrap_or_else(|| path.to_owned());
        let lock = Listener::lock(&path)?;
        Ok(Listener { socket, path, _lock: lock, is_own: false })
    }

    /// Takes the lock of a socket's agent, and creates its folder if necessary.
    pub(crate) fn lock(path: &Path) -> Result<File, ListenError> {
        let folder = match path.parent() {
            Some(folder) if path.is_absolute() => folder,
            _ => return Err(ListenError::Relative(path.to_owned())),
        };
        private_folder(folder)?;
        let beside = beside(path, "lock");
        let file = File::options().create(true).truncate(false).write(true).open(&beside);
        let file = file.map_err(|error| os(&beside, error))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(file),
            Err(rustix::io::Errno::WOULDBLOCK) => Err(ListenError::Served(path.to_owned())),
            Err(error) => Err(os(&beside, error.into())),
        }
    }

    /// Watches the socket's file and its folder, so that a removal is an event; `None` if there is no file, or the kernel has no watch left for this
    /// user.
    pub(crate) fn watch(&self) -> Option<FileWatch> {
        let watch = FileWatch::of(&self.path);
        watch.inspect_err(|error| tracing::info!(target: "glake::agent", %error, "a removal of the socket is noticed late")).ok()
    }

    /// Returns the path of the journal.
    pub(crate) fn journal(&self) -> PathBuf {
        beside(&self.path, "journal")
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if self.is_own {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn create(path: &Path) -> Result<UnixListener, ListenError> {
    let socket = UnixListener::bind(path).map_err(|error| os(path, error))?;
    // Until then, the folder keeps other users out.
    fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(|error| os(path, error))?;
    Ok(socket)
}

/// Returns the path of an agent's file beside its socket. Its name includes the socket's whole name, because sockets in one folder may
/// differ only in the part behind the point.
pub(crate) fn beside(socket: &Path, what: &str) -> PathBuf {
    socket.with_added_extension(what)
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

/// User id that the kernel reports for users of other namespaces.
const UNMAPPED: u32 = 65_534;

/// Identity of a process, from the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Process id and start time.
    pub peer: Peer,
    /// User of the process.
    pub uid: u32,
}

/// Reason why the peer's identity is not accepted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PeerError {
    /// The process belongs to a pid namespace that is not visible here.
    #[error(
        "its process has no number here: it runs in another pid namespace; run the agent on the host, or with the \
         host's (docker run --pid=host, hostPID: true)"
    )]
    Pid,
    /// The user belongs to another user namespace.
    #[error(
        "its user has no number here (it shows as {UNMAPPED}): it runs in another user namespace; run the agent in the \
         same one, or on the host"
    )]
    User,
    /// The process belongs to another user.
    #[error("it runs as user {uid}: this agent serves user {own}", own = geteuid().as_raw())]
    OtherUser { uid: u32 },
    /// The process has ended.
    #[error("process {pid} is gone")]
    Gone {
        /// Id of the process.
        pid: u32,
    },
    /// The process is not the one that it claims to be.
    #[error(
        "process {pid} started at tick {found}, and says {said}: it died and another has its number, or it runs in \
         another time namespace"
    )]
    OtherStart {
        /// Id of the process.
        pid: u32,
        /// Start time reported by the kernel.
        found: u64,
        /// Start time that the peer claims.
        said: u64,
    },
    /// The operating system's error.
    #[error("who it is cannot be asked: {0}")]
    Os(#[from] std::io::Error),
}

impl PeerError {
    /// Returns whether a later attempt can succeed, for example after a shortage of descriptors.
    pub fn passes(&self) -> bool {
        matches!(self, PeerError::Os(_))
    }
}

impl Identity {
    /// Returns the identity of a connected process and its pidfd. `pid` and `uid` come from the kernel, not from the peer's messages.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn of(socket: impl AsFd) -> Result<(Identity, OwnedFd), PeerError> {
        let credentials = getsockopt(&socket, PeerCredentials).map_err(std::io::Error::from)?;
        let (pid, uid) = (credentials.pid(), credentials.uid());
        // Processes of other namespaces have number 0.
        let pid = Identity::check(pid, uid)?;
        let number = u32::try_from(pid.as_raw_nonzero().get()).unwrap_or(0);
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Err(Errno::SRCH) => return Err(PeerError::Gone { pid: number }),
            pidfd => pidfd.map_err(std::io::Error::from)?,
        };
        // Checked after opening the pidfd: the number now belongs to the process of the pidfd, or to none.
        let start = started(number, ProcessStat::of(number))?;
        Ok((Identity { peer: Peer { pid: number, start }, uid }, pidfd))
    }

    fn check(pid: i32, uid: u32) -> Result<Pid, PeerError> {
        let pid = Pid::from_raw(pid).ok_or(PeerError::Pid)?;
        match uid {
            UNMAPPED if geteuid().as_raw() != UNMAPPED => Err(PeerError::User),
            uid if uid != geteuid().as_raw() && uid != 0 => Err(PeerError::OtherUser { uid }),
            _ => Ok(pid),
        }
    }

    /// Checks the claimed start time of the process. Its claimed id may differ, being of its own namespace.
    ///
    /// # Errors
    /// [`PeerError::OtherStart`].
    pub fn agrees(&self, said: Peer) -> Result<(), PeerError> {
        let Peer { pid, start } = self.peer;
        if said.start == start {
            return Ok(());
        }
        Err(PeerError::OtherStart { pid, found: start, said: said.start })
    }

    /// Returns the identity and the pidfd of a process in a journal, if the same process still lives. A process whose state is unknown
    /// counts as alive.
    pub fn journalled(peer: Peer, uid: u32) -> Option<(Identity, Option<OwnedFd>)> {
        let pid = Pid::from_raw(i32::try_from(peer.pid).ok()?)?;
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => Some(pidfd),
            Err(Errno::SRCH) => return None,
            Err(_) => None,
        };
        (!has_ended(peer)).then_some((Identity { peer, uid }, pidfd))
    }
}

fn is_gone(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::NotFound || Errno::from_io_error(error) == Some(Errno::SRCH)
}

/// Returns the start time of a process from its status.
fn started(pid: u32, read: std::io::Result<ProcessStat>) -> Result<u64, PeerError> {
    match read {
        Ok(process) => Ok(process.start),
        Err(error) if is_gone(&error) => Err(PeerError::Gone { pid }),
        Err(error) => Err(error.into()),
    }
}

/// Returns whether a process has ended, or its id was reused. A process whose state is unreadable counts as alive.
pub(crate) fn has_ended(peer: Peer) -> bool {
    match ProcessStat::of(peer.pid) {
        Ok(process) => process.start != peer.start,
        Err(error) => is_gone(&error),
    }
}

/// Returns the start time of a process in kernel ticks since boot.
pub(crate) fn start_of(pid: u32) -> Option<u64> {
    ProcessStat::of(pid).ok().map(|process| process.start)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_socket_has_one_agent_and_a_stale_one_is_replaced() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("glake/agent.sock");
        let first = Listener::bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert!(matches!(Listener::bind(&path), Err(ListenError::Served(_))));
        // Like a kill: the lock is released, the socket stays.
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
    fn a_removed_socket_is_created_again() {
        let base = tempfile::tempdir().unwrap();
        fs::set_permissions(base.path(), Permissions::from_mode(0o700)).unwrap();
        let path = base.path().join("agent.sock");
        let mut listener = Listener::bind(&path).unwrap();
        assert!(listener.restore().unwrap().is_none());
        fs::remove_file(&path).unwrap();
        let again = listener.restore().unwrap().unwrap();
        std::os::unix::net::UnixStream::connect(&path).unwrap();
        again.accept().unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        // A socket of systemd is not this process's to create.
        listener.is_own = false;
        fs::remove_file(&path).unwrap();
        assert!(listener.restore().is_err() && !path.exists());
    }

    #[test]
    fn agents_in_one_folder_share_no_file() {
        let base = tempfile::tempdir().unwrap();
        fs::set_permissions(base.path(), Permissions::from_mode(0o700)).unwrap();
        let bind = |name: &str| Listener::bind(&base.path().join(name));
        let listeners: Vec<Listener> =
            ["agent.sock", "agent.two", "agent"].map(|name| bind(name).unwrap()).into();
        let journals: std::collections::BTreeSet<PathBuf> = listeners.iter().map(Listener::journal).collect();
        assert_eq!(journals.len(), 3);
        assert!(matches!(bind("agent.two"), Err(ListenError::Served(_))));
        // Not a file of another agent.
        assert!(matches!(bind("agent.sock.lock"), Err(ListenError::Other(_))));
    }

    #[test]
    fn a_folder_writable_by_others_is_refused() {
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

#[cfg(test)]
mod peer_tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_process_is_identified_by_number_and_start_time() {
        let (here, _there) = UnixStream::pair().unwrap();
        let (who, _) = Identity::of(&here).unwrap();
        let own = std::process::id();
        assert_eq!(who.peer, Peer { pid: own, start: start_of(own).unwrap() });
        // The process may have another number in its own namespace.
        who.agrees(Peer { pid: 1, ..who.peer }).unwrap();
        let reused = who.agrees(Peer { start: 1, ..who.peer }).unwrap_err().to_string();
        assert!(reused.contains("another has its number"), "{reused}");
        assert!(Identity::journalled(who.peer, who.uid).is_some());
        assert!(Identity::journalled(Peer { start: 1, ..who.peer }, who.uid).is_none());
        assert!(Identity::journalled(Peer { pid: u32::MAX, start: 1 }, who.uid).is_none());
    }

    #[test]
    fn a_process_that_cannot_be_read_counts_as_alive() {
        let read = |errno: Errno| started(7, Err(errno.into())).unwrap_err();
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::INTR, Errno::IO] {
            assert!(read(errno).passes(), "{errno}");
        }
        for errno in [Errno::NOENT, Errno::SRCH] {
            assert!(matches!(read(errno), PeerError::Gone { pid: 7 }), "{errno}");
        }
        assert!(!PeerError::Pid.passes() && !PeerError::OtherUser { uid: 7 }.passes());
    }

    #[test]
    fn processes_of_other_namespaces_are_refused_with_a_reason() {
        let own = geteuid().as_raw();
        assert!(matches!(Identity::check(0, own), Err(PeerError::Pid)));
        assert!(matches!(Identity::check(7, UNMAPPED), Err(PeerError::User)));
        assert!(matches!(Identity::check(7, own + 1), Err(PeerError::OtherUser { .. })));
        Identity::check(7, own).unwrap();
    }
}
