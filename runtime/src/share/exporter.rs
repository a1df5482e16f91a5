//! The process that shares blocks.
//!
//! Descriptors are created when another process asks, sent and closed, so that a child forked meanwhile inherits none and keeps no memory
//! of its parent.
//!
//! Invariant: every export in `by_block` is in `exports` under the same id; both change under the state's lock. Only memory of live blocks
//! is sent: the pool refuses others, even if the export was not forgotten.
//!
//! One thread sends descriptors to other processes. It waits for clients only in `poll`. A client that is silent, sends invalid data or
//! does not read occupies a place for a few seconds; if there are too many, the one silent for longest is dropped and may reconnect. The
//! thread calls the pool, and so the driver, for the descriptors.

use std::collections::HashMap;
use std::fmt;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use glake_device::{Address, DriverError};
use glake_meter::ProcessStat;
use glake_tiers::{BlockLife, Exported, PoolError};
use glake_units::Bytes;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix,
    SocketFlags, SocketType, accept_with, bind, listen, recv, sendmsg, shutdown, socket_with,
};
use rustix::process::{Uid, geteuid};
use rustix::rand::{GetRandomFlags, getrandom};

use super::ShareError;
use super::handle::{BATCH, Handle, Name, REQUEST, Reply, Request, count, open_files};

/// Id of a shared block, valid while it is shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct ExportId(pub(super) u64);

/// Handle for another process and the position of the block in the memory it maps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shared {
    /// Id of the export.
    pub id: ExportId,
    /// Handle for [`super::open`] in the other process.
    pub handle: Arc<[u8]>,
    /// Offset of the block in the memory that the other process maps.
    pub offset: Bytes,
}

/// Sends descriptors of shared blocks to other processes of the same user. Its thread starts with the first shared block, does not delay
/// the end of the process, and ends when this is stopped or dropped, which ends all sharing.
///
/// A forked child cannot share: thread and socket belong to the parent.
#[derive(Debug)]
pub struct Exporter {
    /// Id of the process that created it.
    pub(super) pid: u32,
    state: Mutex<State>,
    /// Number of shared blocks: most processes share none, and every free reads it.
    count: AtomicUsize,
}

#[derive(Debug, Default)]
struct State {
    server: Option<(Arc<Server>, JoinHandle<()>)>,
    by_block: HashMap<Address, Block>,
    last: u64,
}

/// A shared block, until it is freed.
#[derive(Debug)]
struct Block {
    shared: Shared,
    life: BlockLife,
}

impl State {
    fn live(&self, block: Address) -> Option<Shared> {
        let known = self.by_block.get(&block).filter(|block| !block.life.has_ended());
        known.map(|block| block.shared.clone())
    }

    /// Removes the export of a block, to be dropped without the lock.
    fn remove(&mut self, block: Address) -> Option<Export> {
        let Block { shared, .. } = self.by_block.remove(&block)?;
        let (server, _) = self.server.as_ref()?;
        server.exports.lock().remove(&shared.id)
    }
}

/// Socket and exports of the serving thread.
#[derive(Debug)]
struct Server {
    socket: OwnedFd,
    name: Name,
    started: u64,
    exports: Exports,
}

/// Maximum number of connections that wait to be accepted.
const BACKLOG: i32 = 128;

impl Exporter {
    /// Creates an exporter without shared blocks and without a thread.
    #[allow(clippy::new_without_default)] // it belongs to the process that makes it
    pub fn new() -> Self {
        Exporter { pid: std::process::id(), state: Mutex::default(), count: AtomicUsize::new(0) }
    }

    /// Shares the block that begins at `block`. `export` returns its memory and the descriptor of its first extent
    /// ([`glake_tiers::GpuPool::export`]); if the block is already shared, the existing export is returned. For each process that opens the
    /// block, the exporter's thread calls `export` again for a few extents at a time. The block stays shared until it is freed, and should
    /// be forgotten then.
    ///
    /// # Errors
    /// The error of `export`; [`ShareError::Freed`] if the block was freed meanwhile; [`ShareError::NoSocket`]; [`ShareError::Forked`].
    pub fn share(
        &self,
        block: Address,
        export: impl Fn(Range<usize>) -> Result<Exported, PoolError> + Send + Sync + 'static,
    ) -> Result<Shared, ShareError> {
        if self.is_forked() {
            return Err(ShareError::Forked);
        }
        if let Some(shared) = self.state.lock().live(block) {
            return Ok(shared);
        }
        // Not under the lock: it asks the driver.
        let Exported { sizes, offset, life, .. } = export(0..1)?;
        // Dropped after the lock is given back.
        let _gone;
        let mut state = self.state.lock();
        if life.has_ended() {
            return Err(ShareError::Freed { block });
        }
        if let Some(shared) = state.live(block) {
            return Ok(shared);
        }
        _gone = state.remove(block);
        let server = match &state.server {
            Some((server, _)) => server.clone(),
            None => state.server.insert(Server::open()?).0.clone(),
        };
        state.last += 1;
        let id = ExportId(state.last);
        let handle = Handle { pid: self.pid, started: server.started, name: server.name, id, sizes };
        let shared = Shared { id, handle: handle.encode().into(), offset };
        server.exports.lock().insert(id, Export::new(export, life.clone()));
        state.by_block.insert(block, Block { shared: shared.clone(), life });
        self.count.store(state.by_block.len(), Ordering::Release);
        Ok(shared)
    }

    /// Ends one export; memory opened by others stays theirs. Returns whether it existed.
    pub fn forget(&self, id: ExportId) -> bool {
        self.forget_where(|_, block| block.shared.id == id)
    }

    /// Ends the export of the block that begins at an address, as [`Exporter::forget`] does; cheap if nothing is shared.
    #[inline]
    pub fn forget_block(&self, block: Address) -> bool {
        self.exports() > 0 && self.forget_where(|address, _| address == block)
    }

    /// Ends the exports of all blocks that are no longer live, as [`Exporter::forget`] does.
    pub fn forget_ended(&self) -> bool {
        self.exports() > 0 && self.forget_where(|_, block| block.life.has_ended())
    }

    /// Returns the number of shared blocks.
    pub fn exports(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    fn forget_where(&self, is_it: impl Fn(Address, &Block) -> bool) -> bool {
        if self.is_forked() {
            return false;
        }
        let mut state = self.state.lock();
        let found = state.by_block.iter().filter(|(address, block)| is_it(**address, block));
        let found: Vec<Address> = found.map(|(address, _)| *address).collect();
        let ended: Vec<_> = found.into_iter().filter_map(|block| state.remove(block)).collect();
        self.count.store(state.by_block.len(), Ordering::Release);
        // Dropped after both locks are given back.
        drop(state);
        !ended.is_empty()
    }

    /// Ends all exports and waits for the thread, which exports no memory afterwards.
    pub fn stop(&self) {
        // The listening socket is shared with the parent: shutting it down here would shut it there.
        if self.is_forked() {
            return;
        }
        let open = {
            let mut state = self.state.lock();
            state.by_block.clear();
            self.count.store(0, Ordering::Release);
            state.server.take()
        };
        let Some((server, thread)) = open else { return };
        server.exports.lock().clear();
        // Ends the thread. If this fails, the thread keeps waiting for clients, which find no exports.
        if shutdown(&server.socket, Shutdown::Both).is_ok() {
            let _ = thread.join();
        }
    }

    fn is_forked(&self) -> bool {
        std::process::id() != self.pid
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Server {
    /// Starts to listen under a new name, on a new thread.
    fn open() -> Result<(Arc<Self>, JoinHandle<()>), ShareError> {
        let failed = |source| ShareError::NoSocket { source };
        let server = Arc::new(Server::listen().map_err(failed)?);
        let thread = std::thread::Builder::new().name("glake-share".into()).spawn({
            let server = server.clone();
            move || serve(&server.socket, &server.exports)
        });
        thread.map(|thread| (server, thread)).map_err(failed)
    }

    fn listen() -> std::io::Result<Self> {
        let mut name = Name::default();
        // A read of so few bytes is complete or fails.
        getrandom(&mut name[..], GetRandomFlags::empty())?;
        let started = ProcessStat::of(std::process::id())?.start;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        bind(&listener, &SocketAddrUnix::new_abstract_name(&name)?)?;
        listen(&listener, BACKLOG)?;
        Ok(Server { socket: listener, name, started, exports: Exports::default() })
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_thread_ends_with_its_exporter() {
        let exporter = Exporter::new();
        let nothing = || Exported {
            base: Address(0),
            size: Bytes::ZERO,
            offset: Bytes::ZERO,
            sizes: Vec::new(),
            descriptors: Vec::new(),
            life: BlockLife::default(),
        };
        exporter.share(Address(0), move |_| Ok(nothing())).unwrap();
        let server = exporter.state.lock().server.as_ref().map(|(server, _)| Arc::downgrade(server)).unwrap();
        drop(exporter);
        assert_eq!(server.strong_count(), 0);
    }
}
