//! The process that opens a shared block.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::time::Duration;

use glake_process::ProcessStat;
use glake_units::Bytes;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recvmsg, send, socket_with,
};
use rustix::process::geteuid;

use super::ShareError;
use super::handle::{Handle, count};
use super::wire::{MOST_FDS, REPLY, Reply, Request};

/// So long an exporter may take for one answer.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Asks the process that shared a block for the memory that it lies in: the descriptors and sizes of its extents, to be
/// mapped side by side ([`glake_tiers::Import`]).
///
/// # Errors
/// [`ShareError`]: the bytes are no handle or of another version, the process is gone, refuses or does not answer, or this
/// process may not open so many files.
pub fn open(handle: &[u8]) -> Result<Vec<(OwnedFd, Bytes)>, ShareError> {
    let handle = Handle::decode(handle)?;
    // A socket may outlive its process in a forked child, which never answers.
    if ProcessStat::of(handle.pid).map_or(true, |process| process.start != handle.started) {
        return Err(ShareError::Gone { pid: handle.pid });
    }
    let socket = reach(&handle)?;
    let wanted = handle.sizes.len();
    let mut fds = Vec::with_capacity(wanted);
    while fds.len() < wanted {
        ask(&socket, &handle, &mut fds)?;
    }
    if fds.len() > wanted {
        return Err(confused(&handle));
    }
    Ok(fds.into_iter().zip(handle.sizes).collect())
}

fn reach(handle: &Handle) -> Result<OwnedFd, ShareError> {
    let failed = |error| failure(handle, error);
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let socket = socket.map_err(failed)?;
    for timeout in [Timeout::Recv, Timeout::Send] {
        set_socket_timeout(&socket, timeout, Some(TIMEOUT)).map_err(failed)?;
    }
    let address = SocketAddrUnix::new_abstract_name(&handle.name).map_err(failed)?;
    retry_on_intr(|| connect(&socket, &address)).map_err(failed)?;
    if socket_peercred(&socket).map_err(failed)?.uid != geteuid() {
        return Err(ShareError::Refused { pid: handle.pid });
    }
    Ok(socket)
}

/// One request for the descriptors after those that are there, and its answer.
fn ask(socket: &OwnedFd, handle: &Handle, fds: &mut Vec<OwnedFd>) -> Result<(), ShareError> {
    let failed = |error| failure(handle, error);
    let request = Request { id: handle.id, from: count(fds.len()) };
    retry_on_intr(|| send(socket, &request.encode(), SendFlags::NOSIGNAL)).map_err(failed)?;
    let mut bytes = [0; REPLY];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let parts = &mut [IoSliceMut::new(&mut bytes)];
    let received = retry_on_intr(|| recvmsg(socket, parts, &mut control, RecvFlags::CMSG_CLOEXEC));
    let received = received.map_err(failed)?;
    let before = fds.len();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    let got = fds.len() - before;
    match Reply::decode(&bytes[..received.bytes]) {
        Some(Reply::Descriptors(sent)) if sent > 0 && count(got) == sent => Ok(()),
        // The kernel leaves out what this process may not open.
        Some(Reply::Descriptors(sent)) if count(got) < sent => {
            Err(ShareError::TooManyFiles { wanted: handle.sizes.len(), got: fds.len() })
        }
        Some(Reply::Unknown) => Err(ShareError::Forgotten { pid: handle.pid }),
        Some(Reply::Failed) => Err(ShareError::NotGiven { pid: handle.pid }),
        Some(Reply::Refused) => Err(ShareError::Refused { pid: handle.pid }),
        None if received.bytes == 0 => Err(ShareError::Gone { pid: handle.pid }),
        _ => Err(confused(handle)),
    }
}

/// The answer is none, or not of this export.
fn confused(handle: &Handle) -> ShareError {
    ShareError::Broken { pid: handle.pid, source: std::io::ErrorKind::InvalidData.into() }
}

fn failure(handle: &Handle, error: Errno) -> ShareError {
    let pid = handle.pid;
    match error {
        Errno::CONNREFUSED | Errno::CONNRESET | Errno::PIPE => ShareError::Gone { pid },
        Errno::AGAIN | Errno::TIMEDOUT => ShareError::NoAnswer { pid, seconds: TIMEOUT.as_secs() },
        error => ShareError::Broken { pid, source: error.into() },
    }
}
