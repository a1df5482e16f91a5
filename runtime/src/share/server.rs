//! The thread that hands descriptors out.
//!
//! It never blocks but in `poll`: a client that says nothing, says nonsense or does not read costs a place for a few
//! seconds, and the oldest goes when there are too many.

use std::collections::HashMap;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, accept_with, recv, sendmsg,
};
use rustix::process::{Uid, geteuid};

use super::ExportId;
use super::handle::count;
use super::wire::{MOST_FDS, REQUEST, Reply, Request};

/// So many clients are listened to at once.
const MOST_CLIENTS: usize = 64;
/// So long a client may say nothing.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long to leave the door shut where this process may open no more files.
const BREATH: Duration = Duration::from_millis(20);

/// The descriptors of every export.
pub(super) type Exports = Mutex<HashMap<ExportId, Arc<Vec<OwnedFd>>>>;

#[derive(Debug)]
struct Client {
    socket: OwnedFd,
    until: Instant,
}

/// Serves until the listening socket is shut down.
pub(super) fn serve(listener: &OwnedFd, exports: &Exports) {
    let mut clients: Vec<Client> = Vec::new();
    loop {
        let now = Instant::now();
        clients.retain(|client| client.until > now);
        let wait = clients.iter().map(|client| client.until - now).min();
        let Some((door, ready)) = wait_for(listener, &clients, wait) else { return };
        let mut index = 0;
        clients.retain_mut(|client| {
            index += 1;
            let served = !ready[index - 1] || answer(&client.socket, exports);
            if ready[index - 1] {
                client.until = Instant::now() + PATIENCE;
            }
            served
        });
        if door {
            admit(listener, &mut clients);
        }
    }
}

/// Waits until something is said; tells of the listening socket, and of each client, whether it was there. `None` once the
/// listening socket is shut down.
fn wait_for(listener: &OwnedFd, clients: &[Client], wait: Option<Duration>) -> Option<(bool, Vec<bool>)> {
    let all = std::iter::once(listener).chain(clients.iter().map(|client| &client.socket));
    let mut polled: Vec<PollFd<'_>> = all.map(|socket| PollFd::new(socket, PollFlags::IN)).collect();
    let wait = wait.map(|wait| Timespec {
        tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: wait.subsec_nanos().into(),
    });
    match poll(&mut polled, wait.as_ref()) {
        Ok(_) | Err(Errno::INTR | Errno::AGAIN | Errno::NOMEM) => {}
        Err(_) => return None,
    }
    // What does not wait is told of a shut socket by poll alone: accept goes on to say that nobody is there.
    let shut = PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
    let (door, clients) = polled.split_first()?;
    let ready = clients.iter().map(|client| !client.revents().is_empty()).collect();
    (!door.revents().intersects(shut)).then_some((!door.revents().is_empty(), ready))
}

/// Lets the next client in.
fn admit(listener: &OwnedFd, clients: &mut Vec<Client>) {
    match accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
        Ok(socket) => {
            if clients.len() >= MOST_CLIENTS {
                clients.remove(0);
            }
            clients.push(Client { socket, until: Instant::now() + PATIENCE });
        }
        Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => std::thread::sleep(BREATH),
        // Whoever knocked has gone again.
        Err(_) => {}
    }
}

/// Answers one request; false where the client is done with.
fn answer(client: &OwnedFd, exports: &Exports) -> bool {
    // One byte more than a request has, so that a longer one is seen.
    let mut bytes = [0; REQUEST + 1];
    let length = match recv(client, &mut bytes[..], RecvFlags::DONTWAIT) {
        Ok((length, _)) => length,
        Err(Errno::AGAIN | Errno::INTR) => return true,
        Err(_) => return false,
    };
    if length == 0 {
        return false;
    }
    if !socket_peercred(client).is_ok_and(|client| is_ours(client.uid)) {
        send(client, Reply::Refused, &[]);
        return false;
    }
    let Some(request) = Request::decode(&bytes[..length]) else {
        send(client, Reply::Malformed, &[]);
        return false;
    };
    let export = exports.lock().get(&request.id).cloned();
    let from = usize::try_from(request.from).unwrap_or(usize::MAX);
    let left = export.as_ref().and_then(|export| export.get(from..)).filter(|left| !left.is_empty());
    let Some(left) = left else { return send(client, Reply::Unknown, &[]) };
    let fds: Vec<BorrowedFd<'_>> = left.iter().take(MOST_FDS).map(AsFd::as_fd).collect();
    send(client, Reply::Descriptors(count(fds.len())), &fds)
}

fn is_ours(uid: Uid) -> bool {
    uid == geteuid()
}

fn send(client: &OwnedFd, reply: Reply, fds: &[BorrowedFd<'_>]) -> bool {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return false;
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(client, &[IoSlice::new(&reply.encode())], &mut control, flags).is_ok()
}
