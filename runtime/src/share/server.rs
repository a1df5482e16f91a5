//! Thread that sends descriptors to other processes.
//!
//! It waits for clients only in `poll`. A client that is silent, sends invalid data or does not read occupies a place for a few seconds; if
//! there are too many, the one silent for longest is dropped and may reconnect. The thread calls the pool, and so the driver, for the
//! descriptors.

use std::collections::HashMap;
use std::fmt;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use glake_device::DriverError;
use glake_tiers::{BlockLife, Exported, PoolError};
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
use super::wire::{BATCH, REQUEST, Reply, Request, open_files};

/// Maximum number of connected clients.
const MOST_CLIENTS: usize = 64;
/// Maximum time for which a client may be silent.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Pause in accepting clients if this process has no file descriptors left.
const PAUSE: Duration = Duration::from_millis(20);

/// All exports by id.
pub(super) type Exports = Mutex<HashMap<ExportId, Export>>;

/// A shared block and the function that creates its descriptors.
#[derive(Clone)]
pub(super) struct Export {
    make: Arc<dyn Fn(Range<usize>) -> Result<Exported, PoolError> + Send + Sync>,
    life: BlockLife,
}

impl Export {
    pub(super) fn new(
        make: impl Fn(Range<usize>) -> Result<Exported, PoolError> + Send + Sync + 'static,
        life: BlockLife,
    ) -> Self {
        Export { make: Arc::new(make), life }
    }
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Export").field("life", &self.life).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Client {
    socket: OwnedFd,
    until: Instant,
}

/// Serves requests until the listening socket is shut down.
pub(super) fn serve(listener: &OwnedFd, exports: &Exports) {
    let (mut clients, mut spare) = (Vec::<Client>::new(), None);
    loop {
        spare = spare.or_else(|| listener.try_clone().ok());
        let now = Instant::now();
        clients.retain(|client| client.until > now);
        let wait = clients.iter().map(|client| client.until - now).min();
        let Some((waiting, ready)) = wait_for(listener, &clients, wait) else { return };
        let mut index = 0;
        clients.retain_mut(|client| {
            index += 1;
            let served = !ready[index - 1] || answer(&client.socket, exports);
            if ready[index - 1] {
                client.until = Instant::now() + TIMEOUT;
            }
            served
        });
        if waiting {
            admit(listener, &mut clients, &mut spare);
        }
    }
}

/// Waits until a socket is readable; returns whether the listening socket and each client are. `None` once the listening socket is shut
/// down.
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
    // Only poll reports that a non-blocking socket was shut down: accept would report no pending client.
    let shut = PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
    let (listener, clients) = polled.split_first()?;
    let ready = clients.iter().map(|client| !client.revents().is_empty()).collect();
    (!listener.revents().intersects(shut)).then_some((!listener.revents().is_empty(), ready))
}

/// Accepts the next client. If no descriptor is left, the spare one is closed for it, so that the client gets an answer.
fn admit(listener: &OwnedFd, clients: &mut Vec<Client>, spare: &mut Option<OwnedFd>) {
    let accept = || accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
    let accepted = match accept() {
        Err(Errno::MFILE | Errno::NFILE) if spare.take().is_some() => accept(),
        accepted => accepted,
    };
    match accepted {
        Ok(socket) => {
            if clients.len() >= MOST_CLIENTS
                && let Some(silent) = (0..clients.len()).min_by_key(|index| clients[*index].until)
            {
                clients.remove(silent);
            }
            clients.push(Client { socket, until: Instant::now() + TIMEOUT });
        }
        Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => std::thread::sleep(PAUSE),
        // The client has disconnected again.
        Err(_) => {}
    }
}

/// Answers one request; returns `false` if the connection must be closed.
fn answer(client: &OwnedFd, exports: &Exports) -> bool {
    // One byte more than a request has, to detect a longer one.
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
        send(client, Reply::Refused, Vec::new());
        return false;
    }
    let Some(request) = Request::decode(&bytes[..length]) else {
        send(client, Reply::Malformed, Vec::new());
        return false;
    };
    let Some(export) = exports.lock().get(&request.id).cloned() else {
        return send(client, Reply::Unknown, Vec::new());
    };
    let from = usize::try_from(request.from).unwrap_or(usize::MAX);
    // Not under the lock: it asks the driver.
    let exported = (export.make)(from..from.saturating_add(BATCH));
    let exported = match exported {
        // Otherwise it was freed meanwhile, and the memory may belong to another block.
        Ok(exported) if !export.life.has_ended() => exported,
        Ok(_) | Err(PoolError::UnknownAddress { .. }) => return send(client, Reply::Unknown, Vec::new()),
        Err(PoolError::Driver(DriverError::TooManyFiles { limit: files, .. })) => {
            return send(client, Reply::TooManyFiles(limit(files)), Vec::new());
        }
        Err(error) => {
            tracing::warn!(target: "glake::share", %error, "a shared block could not be given to another process");
            return send(client, Reply::Failed, Vec::new());
        }
    };
    let reply = match exported.descriptors.len() {
        0 => Reply::Unknown,
        sent => Reply::Descriptors(count(sent)),
    };
    send(client, reply, exported.descriptors)
}

fn is_ours(uid: Uid) -> bool {
    uid == geteuid()
}

/// Converts a limit of open files for a reply.
fn limit(files: u64) -> u32 {
    u32::try_from(files).unwrap_or(u32::MAX)
}

/// Sends a reply with descriptors, or with fewer of them: a user's processes together may have only as many in flight as one process may
/// open.
fn send(client: &OwnedFd, mut reply: Reply, mut fds: Vec<OwnedFd>) -> bool {
    loop {
        let sent: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !sent.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&sent)) {
            return false;
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match sendmsg(client, &[IoSlice::new(&reply.encode())], &mut control, flags) {
            Err(Errno::TOOMANYREFS) if !fds.is_empty() => {
                fds.truncate(fds.len() / 2);
                reply = match fds.len() {
                    0 => Reply::TooManyFiles(limit(open_files())),
                    sent => Reply::Descriptors(count(sent)),
                };
            }
            answer => return answer.is_ok(),
        }
    }
}
