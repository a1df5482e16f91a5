//! Identity of the process at the other end of a connection.

use std::os::fd::{AsFd, OwnedFd};

use glake_process::ProcessStat;
use glake_wire::Peer;
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, geteuid, pidfd_open};

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
        // A process of another namespace has number 0.
        let pid = Identity::check(pid, uid)?;
        let number = u32::try_from(pid.as_raw_nonzero().get()).unwrap_or(0);
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Err(Errno::SRCH) => return Err(PeerError::Gone { pid: number }),
            pidfd => pidfd.map_err(std::io::Error::from)?,
        };
        // After the descriptor: whoever has the number now is who it was opened for, or is gone.
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
    fn a_process_is_its_number_and_its_start() {
        let (here, _there) = UnixStream::pair().unwrap();
        let (who, _) = Identity::of(&here).unwrap();
        let own = std::process::id();
        assert_eq!(who.peer, Peer { pid: own, start: start_of(own).unwrap() });
        // In a namespace of its own it may know itself by another number.
        who.agrees(Peer { pid: 1, ..who.peer }).unwrap();
        let reused = who.agrees(Peer { start: 1, ..who.peer }).unwrap_err().to_string();
        assert!(reused.contains("another has its number"), "{reused}");
        assert!(Identity::journalled(who.peer, who.uid).is_some());
        assert!(Identity::journalled(Peer { start: 1, ..who.peer }, who.uid).is_none());
        assert!(Identity::journalled(Peer { pid: u32::MAX, start: 1 }, who.uid).is_none());
    }

    #[test]
    fn what_cannot_be_read_for_now_is_not_gone() {
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
    fn who_cannot_be_named_here_is_told_why() {
        let own = geteuid().as_raw();
        assert!(matches!(Identity::check(0, own), Err(PeerError::Pid)));
        assert!(matches!(Identity::check(7, UNMAPPED), Err(PeerError::User)));
        assert!(matches!(Identity::check(7, own + 1), Err(PeerError::OtherUser { .. })));
        Identity::check(7, own).unwrap();
    }
}
