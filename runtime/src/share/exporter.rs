//! The process that shares blocks.
//!
//! Descriptors are created when another process asks, sent and closed, so that a child forked meanwhile inherits none and keeps no memory
//! of its parent.
//!
//! Invariant: every export in `by_block` is in `exports` under the same id; both change under the state's lock. Only memory of live blocks
//! is sent: the pool refuses others, even if the export was not forgotten.

use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

use glake_device::Address;
use glake_meter::ProcessStat;
use glake_tiers::{BlockLife, Exported, PoolError};
use glake_units::Bytes;
use parking_lot::Mutex;
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, bind, listen, shutdown, socket_with,
};
use rustix::rand::{GetRandomFlags, getrandom};

use super::ShareError;
use super::handle::{Handle, Name};
use super::server::{Export, Exports, serve};

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
