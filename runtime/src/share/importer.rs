//! The process that opens a shared block.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::time::Duration;

use glake_meter::ProcessStat;
use glake_units::Bytes;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recvmsg, send, socket_with,
};
use rustix::process::geteuid;

use super::handle::{Handle, Name, count};
use super::wire::{MOST_FDS, REPLY, Reply, Request, open_files};
use super::{ExportId, ShareError};

/// Timeout for one answer of an exporter.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of attempts while descriptors or the exporter are busy, and the pause between two: half a second in total.
const ATTEMPTS: u32 = 50;
const PAUSE: Duration = Duration::from_millis(10);

/// A block shared by another process, to be mapped here ([`glake_tiers::Import`]).
#[derive(Debug)]
pub struct Opened {
    /// Sizes of its extents, which are mapped side by side.
    pub sizes: Vec<Bytes>,
    /// Source of the descriptors of its extents.
    pub descriptors: Descriptors,
}

/// Source of the descriptors of a shared block's extents, a few at a time.
#[derive(Debug)]
pub struct Descriptors {
    exporter: Peer,
    socket: OwnedFd,
    id: ExportId,
    /// Number of extents of the block.
    count: usize,
}

/// The process that shared a block.
#[derive(Clone, Copy, Debug)]
struct Peer {
    pid: u32,
    started: u64,
    name: Name,
}

/// Connects to the process that shared a block.
///
/// # Errors
/// [`ShareError`]: the bytes are no handle or of another version, the process is gone or refuses.
pub fn open(handle: &[u8]) -> Result<Opened, ShareError> {
    let Handle { pid, started, name, id, sizes } = Handle::decode(handle)?;
    let exporter = Peer { pid, started, name };
    let socket = patiently(|| exporter.connect())?;
    let descriptors = Descriptors { exporter, socket, id, count: sizes.len() };
    Ok(Opened { sizes, descriptors })
}

/// Retries while the error of an attempt may pass.
fn patiently<T>(mut attempt: impl FnMut() -> Result<T, ShareError>) -> Result<T, ShareError> {
    for _ in 1..ATTEMPTS {
        match attempt() {
            Err(error) if error.may_pass() => std::thread::sleep(PAUSE),
            answer => return answer,
        }
    }
    attempt()
}

impl Descriptors {
    /// Receives descriptors of the extents from `from` on: at least one, and as many as the exporter sends and this process has room for.
    /// Close them before receiving the next.
    ///
    /// # Errors
    /// [`ShareError`]: the block was freed, the process is gone, refuses or does not answer, or one of the two has no descriptor left.
    pub fn receive(&mut self, from: usize) -> Result<Vec<OwnedFd>, ShareError> {
        patiently(|| match self.ask(from) {
            // The exporter serves a limited number of clients, the most recent ones.
            Err(ShareError::Gone { pid }) if self.exporter.is_alive() => {
                self.socket = self.exporter.connect()?;
                match self.ask(from) {
                    Err(ShareError::Gone { .. }) => Err(ShareError::Crowded { pid }),
                    answer => answer,
                }
            }
            answer => answer,
        })
    }

    /// Sends one request and receives its answer.
    fn ask(&self, from: usize) -> Result<Vec<OwnedFd>, ShareError> {
        let (pid, socket) = (self.exporter.pid, &self.socket);
        let failed = |error| self.exporter.failure(error);
        let request = Request { id: self.id, from: count(from) };
        retry_on_intr(|| send(socket, &request.encode(), SendFlags::NOSIGNAL)).map_err(failed)?;
        let mut bytes = [0; REPLY];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let parts = &mut [IoSliceMut::new(&mut bytes)];
        let received = retry_on_intr(|| recvmsg(socket, parts, &mut control, RecvFlags::CMSG_CLOEXEC));
        let received = received.map_err(failed)?;
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        let (got, left) = (count(fds.len()), count(self.count.saturating_sub(from)));
        match Reply::decode(&bytes[..received.bytes]) {
            // The kernel drops descriptors beyond this process's limit.
            Some(Reply::Descriptors(sent)) if sent > 0 && got == 0 => {
                Err(ShareError::TooManyFiles { limit: open_files() })
            }
            Some(Reply::Descriptors(sent)) if 0 < got && got <= sent && sent <= left => Ok(fds),
            Some(Reply::Unknown) => Err(ShareError::Forgotten { pid }),
            Some(Reply::Failed) => Err(ShareError::NotGiven { pid }),
            Some(Reply::TooManyFiles(limit)) => Err(ShareError::TooManyFilesThere { pid, limit }),
            Some(Reply::Refused) => Err(ShareError::Refused { pid }),
            None if received.bytes == 0 => Err(ShareError::Gone { pid }),
            // The reply is invalid, or belongs to another export.
            _ => Err(ShareError::Broken { pid, source: std::io::ErrorKind::InvalidData.into() }),
        }
    }
}

impl Peer {
    /// Returns whether the process that shared the block still lives.
    fn is_alive(&self) -> bool {
        ProcessStat::of(self.pid).is_ok_and(|process| process.start == self.started)
    }

    fn connect(&self) -> Result<OwnedFd, ShareError> {
        // A socket may outlive its process in a forked child, which never answers.
        if !self.is_alive() {
            return Err(ShareError::Gone { pid: self.pid });
        }
        let failed = |error| self.failure(error);
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let socket = socket.map_err(failed)?;
        for timeout in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&socket, timeout, Some(TIMEOUT)).map_err(failed)?;
        }
        let address = SocketAddrUnix::new_abstract_name(&self.name).map_err(failed)?;
        retry_on_intr(|| connect(&socket, &address)).map_err(failed)?;
        if socket_peercred(&socket).map_err(failed)?.uid != geteuid() {
            return Err(ShareError::Refused { pid: self.pid });
        }
        Ok(socket)
    }

    fn failure(&self, error: Errno) -> ShareError {
        let pid = self.pid;
        match error {
            Errno::CONNREFUSED | Errno::CONNRESET | Errno::PIPE => ShareError::Gone { pid },
            Errno::AGAIN | Errno::TIMEDOUT => ShareError::NoAnswer { pid, seconds: TIMEOUT.as_secs() },
            Errno::MFILE | Errno::NFILE => ShareError::TooManyFiles { limit: open_files() },
            error => ShareError::Broken { pid, source: error.into() },
        }
    }
}
