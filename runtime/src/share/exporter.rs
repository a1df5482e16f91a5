//! The process that shares blocks.
//!
//! Invariant: what `by_block` names is in `exports`, under the same id; both change under the lock of the state.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use glake_device::Address;
use glake_tiers::{Exported, PoolError};
use glake_units::Bytes;
use parking_lot::Mutex;
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, bind, listen, shutdown, socket_with,
};
use rustix::rand::{GetRandomFlags, getrandom};

use super::ShareError;
use super::handle::{Handle, Name};
use super::process::started;
use super::server::{Exports, serve};

/// One shared block, for as long as it is shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExportId(pub(super) u64);

/// What another process needs, and where in it the block lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shared {
    /// Which export it is.
    pub id: ExportId,
    /// For [`super::open`] in the other process.
    pub handle: Arc<[u8]>,
    /// Where the block begins, from the start of what the other process maps.
    pub offset: Bytes,
}

/// Gives descriptors of shared blocks to other processes of the same user. Its thread starts with the first block that is
/// shared, holds nothing up when the process ends, and ends when this is dropped; then nothing is shared any more.
///
/// In a forked child nothing can be shared: thread and socket are the parent's.
#[derive(Debug)]
pub struct Exporter {
    /// Of the process that made it.
    pub(super) pid: u32,
    state: Mutex<State>,
    /// How many blocks are shared: most processes share none, and ask at every free.
    count: AtomicUsize,
}

#[derive(Debug, Default)]
struct State {
    door: Option<Arc<Door>>,
    by_block: HashMap<Address, Shared>,
    last: u64,
}

/// Where others ask.
#[derive(Debug)]
struct Door {
    listener: OwnedFd,
    name: Name,
    started: u64,
    exports: Exports,
}

/// So many may knock before the thread looks.
const BACKLOG: i32 = 128;

impl Exporter {
    /// One that shares nothing yet, and costs nothing.
    #[allow(clippy::new_without_default)] // it belongs to the process that makes it
    pub fn new() -> Self {
        Exporter { pid: std::process::id(), state: Mutex::default(), count: AtomicUsize::new(0) }
    }

    /// Shares the block that begins at `block`; `export` is asked for its memory ([`glake_tiers::GpuPool::export`]) unless
    /// it is shared already: then it is the same export. It stays shared until it is forgotten, which must be before the
    /// block is freed.
    ///
    /// # Errors
    /// What `export` answers; [`ShareError::NoDoor`]; [`ShareError::Forked`].
    pub fn share(
        &self,
        block: Address,
        export: impl FnOnce() -> Result<Exported, PoolError>,
    ) -> Result<Shared, ShareError> {
        if self.is_forked() {
            return Err(ShareError::Forked);
        }
        if let Some(shared) = self.state.lock().by_block.get(&block) {
            return Ok(shared.clone());
        }
        // Not under the lock: it asks the driver.
        let exported = export()?;
        let mut state = self.state.lock();
        if let Some(shared) = state.by_block.get(&block) {
            return Ok(shared.clone());
        }
        let door = match &state.door {
            Some(door) => door.clone(),
            None => state.door.insert(Door::open()?).clone(),
        };
        state.last += 1;
        let id = ExportId(state.last);
        let sizes = exported.extents.iter().map(|extent| extent.size).collect();
        let handle = Handle { pid: self.pid, started: door.started, name: door.name, id, sizes };
        let shared = Shared { id, handle: handle.encode().into(), offset: exported.offset };
        let fds = exported.extents.into_iter().map(|extent| extent.fd).collect();
        door.exports.lock().insert(id, Arc::new(fds));
        state.by_block.insert(block, shared.clone());
        self.count.store(state.by_block.len(), Ordering::Release);
        Ok(shared)
    }

    /// Ends the sharing of one export; what others have opened stays theirs. Returns whether it was shared.
    pub fn forget(&self, id: ExportId) -> bool {
        self.forget_where(|_, shared| shared.id == id)
    }

    /// As [`Exporter::forget`], for the block that begins at an address; cheap where nothing is shared.
    #[inline]
    pub fn forget_block(&self, block: Address) -> bool {
        self.count.load(Ordering::Acquire) > 0 && self.forget_where(|address, _| *address == block)
    }

    /// How many blocks are shared.
    pub fn exports(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    fn forget_where(&self, is_it: impl Fn(&Address, &Shared) -> bool) -> bool {
        if self.is_forked() {
            return false;
        }
        let mut state = self.state.lock();
        let found = state.by_block.iter().find(|(address, shared)| is_it(address, shared));
        let Some((&block, &Shared { id, .. })) = found else { return false };
        state.by_block.remove(&block);
        self.count.store(state.by_block.len(), Ordering::Release);
        // Closed after both locks are given back.
        let closed = state.door.as_ref().and_then(|door| door.exports.lock().remove(&id));
        drop(state);
        closed.is_some()
    }

    fn is_forked(&self) -> bool {
        std::process::id() != self.pid
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        // The listening socket is shared with the parent: shutting it down here would shut it there.
        if self.is_forked() {
            return;
        }
        if let Some(door) = self.state.get_mut().door.take() {
            // Ends the thread. A failure leaves it waiting for clients that find nothing.
            let _ = shutdown(&door.listener, Shutdown::Both);
            door.exports.lock().clear();
        }
    }
}

impl Door {
    /// Listens under a new name, on a thread of its own.
    fn open() -> Result<Arc<Self>, ShareError> {
        let failed = |source| ShareError::NoDoor { source };
        let door = Arc::new(Door::listen().map_err(failed)?);
        let thread = std::thread::Builder::new().name("glake-share".into()).spawn({
            let door = door.clone();
            move || serve(&door.listener, &door.exports)
        });
        thread.map(|_| door).map_err(failed)
    }

    fn listen() -> std::io::Result<Self> {
        let mut name = Name::default();
        // So few bytes are drawn whole or not at all.
        getrandom(&mut name[..], GetRandomFlags::empty())?;
        let started = started(std::process::id()).ok_or(std::io::ErrorKind::Unsupported)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        bind(&listener, &SocketAddrUnix::new_abstract_name(&name)?)?;
        listen(&listener, BACKLOG)?;
        Ok(Door { listener, name, started, exports: Exports::default() })
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn the_thread_ends_with_its_exporter() {
        let exporter = Exporter::new();
        let nothing =
            Exported { base: Address(0), size: Bytes::ZERO, offset: Bytes::ZERO, extents: Vec::new() };
        exporter.share(Address(0), || Ok(nothing)).unwrap();
        let door = exporter.state.lock().door.as_ref().map(Arc::downgrade).unwrap();
        drop(exporter);
        let start = Instant::now();
        while door.strong_count() > 0 {
            assert!(start.elapsed() < Duration::from_secs(5), "it waits for ever");
            std::thread::yield_now();
        }
    }
}
