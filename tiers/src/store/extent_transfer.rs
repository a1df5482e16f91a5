//! Transfer of extents' bytes to a store and back.
//!
//! ```text
//! evict   digest of home begun ─► copy out ─► both waited for ─► StoredCopy with its digest
//! refill  copy in ─► digest of home ─► compared: the same, or Damaged
//! ```

use std::sync::Arc;
use std::thread::{Builder, Scope, ScopedJoinHandle};

use glake_device::Address;
use glake_device::owned::{Digest, Digesting, Span};
use glake_stitch::{ExtentView, HomeRange};
use glake_units::Bytes;
use parking_lot::Mutex;

use super::copy::{CopyStorage, Origin, Return, StoredCopy, home, packed};
use super::files::{self, Halt, WriteError, write};
use super::peer::{PeerPart, PeerRoom};
use super::{Store, TransferContext};
use crate::{
    FileError, FileTier, GpuPool, HostPool, MoveError, Moving, Place, PoolError, RegionError, Ring,
    SealedFile,
};

type Result<T> = std::result::Result<T, RegionError>;

/// Shared state of the extents of one shrink or one refill.
#[derive(Debug)]
pub(crate) struct ExtentTransfer<'a> {
    pool: &'a GpuPool,
    tag: &'a str,
    context: TransferContext<'a>,
    /// Ring of slots for files, created on first use.
    ring: Mutex<Option<Ring>>,
    room: Mutex<PeerRoom>,
    /// Pools of peers whose copies were refilled.
    peers: Mutex<Vec<Arc<GpuPool>>>,
}

/// Extent being copied out.
#[derive(Debug)]
pub(crate) struct EvictionCopy<'s> {
    size: Bytes,
    ranges: Vec<HomeRange>,
    digesting: Option<Digesting>,
    way: EvictWay<'s>,
}

#[derive(Debug)]
enum EvictWay<'s> {
    Copying(CopyStorage, Box<dyn Moving>),
    Writing(ScopedJoinHandle<'s, std::result::Result<SealedFile, WriteError>>, Arc<HostPool>),
}

/// Extent being copied back.
#[derive(Debug)]
pub(crate) struct RefillCopy<'s> {
    view: ExtentView,
    size: Bytes,
    home: Vec<Span>,
    digest: Option<Digest>,
    place: Place,
    way: RefillWay<'s>,
}

#[derive(Debug)]
enum RefillWay<'s> {
    Copying(Box<dyn Moving>),
    Reading(ScopedJoinHandle<'s, std::result::Result<(), WriteError>>),
}

impl<'a> ExtentTransfer<'a> {
    /// Creates the state; `expected` is the total of the bytes to be evicted.
    pub(crate) fn new(
        pool: &'a GpuPool,
        tag: &'a str,
        context: TransferContext<'a>,
        expected: Bytes,
    ) -> Self {
        let room = Mutex::new(PeerRoom::new(expected));
        ExtentTransfer { pool, tag, context, ring: Mutex::default(), room, peers: Mutex::default() }
    }

    /// Begins to copy these ranges, which must not be empty and must lie in one extent.
    pub(crate) fn begin_evict<'s, 'e>(
        &'s self,
        scope: &'s Scope<'s, 'e>,
        to: &Store,
        ranges: Vec<HomeRange>,
    ) -> Result<EvictionCopy<'s>> {
        let size: Bytes = ranges.iter().map(|range| range.size).sum();
        // Reserve the destination first: a digest is begun only if the extent leaves.
        let (way, digesting, ranges) = match to {
            Store::Host(host) => {
                let block = host.take(size)?;
                let copies = packed(self.pool.core(), &ranges, |at, size| block.span(at, size))?;
                let home = home(self.pool.core(), &ranges)?;
                let digesting = self.begin_digest(&home)?;
                (
                    EvictWay::Copying(CopyStorage::Host(Arc::new(block)), self.enqueue(copies, home)?),
                    digesting,
                    ranges,
                )
            }
            Store::Peer(peer) => {
                let part = self.peer_part(peer, size)?;
                let (ranges, spans) = (part.cut(&ranges), part.spans()?);
                let copies = packed(self.pool.core(), &ranges, |at, size| spans.part(at, size))?;
                let home = home(self.pool.core(), &ranges)?;
                let digesting = self.begin_digest(&home)?;
                (EvictWay::Copying(CopyStorage::Peer(part), self.enqueue(copies, home)?), digesting, ranges)
            }
            Store::File { files, host } => {
                let home = home(self.pool.core(), &ranges)?;
                let digesting = self.begin_digest(&home)?;
                (self.begin_writing(scope, files, host, home)?, digesting, ranges)
            }
        };
        Ok(EvictionCopy { size, ranges, digesting, way })
    }

    fn begin_writing<'s, 'e>(
        &'s self,
        scope: &'s Scope<'s, 'e>,
        files: &Arc<FileTier>,
        host: &Arc<HostPool>,
        home: Vec<Span>,
    ) -> Result<EvictWay<'s>> {
        let (ring, files, mover) = (self.ring(host)?, files.clone(), self.context.mover);
        let work = move || write(&files, &ring, mover, &home);
        let thread = Builder::new().name("glake-write".to_owned()).spawn_scoped(scope, work);
        Ok(EvictWay::Writing(thread.map_err(|source| self.no_thread(source))?, host.clone()))
    }

    /// Waits until all bytes are in the copy.
    pub(crate) fn finish_evict(&self, evicting: EvictionCopy<'_>) -> Result<StoredCopy> {
        let EvictionCopy { size, ranges, digesting, way } = evicting;
        let stored = match way {
            EvictWay::Copying(stored, moving) => {
                moving.wait().map_err(|source| self.unmoved(size, source))?;
                stored
            }
            EvictWay::Writing(thread, host) => {
                let file = joined(thread).map_err(|error| self.unwritten(size, error))?;
                CopyStorage::File(Arc::new(file), host)
            }
        };
        let digest = digesting.map(Digesting::wait).transpose().map_err(PoolError::from)?;
        Ok(StoredCopy { stored, ranges, digest })
    }

    /// Begins to copy an extent's bytes back.
    pub(crate) fn begin_refill<'s, 'e>(
        &'s self,
        scope: &'s Scope<'s, 'e>,
        view: ExtentView,
        back: Return,
    ) -> Result<RefillCopy<'s>> {
        let size = back.size();
        let Return { home, origin, digest, place, peer } = back;
        if let Some(peer) = peer {
            let mut peers = self.peers.lock();
            if !peers.iter().any(|known| Arc::ptr_eq(known, &peer)) {
                peers.push(peer);
            }
        }
        let way = match origin {
            Origin::Memory(copies) => {
                let pairs: Vec<(Span, Span)> = home.iter().cloned().zip(copies).collect();
                RefillWay::Copying(
                    self.context.mover.enqueue(&pairs).map_err(|source| self.unmoved(size, source))?,
                )
            }
            Origin::File(file, host) => {
                let (ring, mover, home) = (self.ring(&host)?, self.context.mover, home.clone());
                let work = move || files::read(&file, &ring, mover, &home);
                let thread = Builder::new().name("glake-read".to_owned()).spawn_scoped(scope, work);
                RefillWay::Reading(thread.map_err(|source| self.no_thread(source))?)
            }
        };
        Ok(RefillCopy { view, size, home, digest, place, way })
    }

    /// Waits until all bytes have arrived, and verifies their digest.
    ///
    /// # Errors
    /// [`RegionError::Damaged`] if they differ from the evicted bytes; [`RegionError::Unread`] if a disk could not read them.
    pub(crate) fn finish_refill(&self, refilling: RefillCopy<'_>) -> Result<()> {
        let RefillCopy { view, size, home, digest, place, way } = refilling;
        match way {
            RefillWay::Copying(moving) => moving.wait().map_err(|source| self.unmoved(size, source))?,
            RefillWay::Reading(thread) => match joined(thread) {
                Err(WriteError::File(source @ (FileError::Damaged { .. } | FileError::NotWhole { .. }))) => {
                    return Err(self.damaged(view, place, Some(source)));
                }
                Err(WriteError::File(source)) => return Err(self.unread(view, source)),
                answer => answer.map_err(|error| self.unwritten(size, error))?,
            },
        }
        let Some(expected) = digest else { return Ok(()) };
        let Some(digesting) = self.begin_digest(&home)? else { return Ok(()) };
        let found = digesting.wait().map_err(PoolError::from)?;
        if found == expected { Ok(()) } else { Err(self.damaged(view, place, None)) }
    }

    /// Returns whether the calling thread has enqueued all copies of a refill, so that none is left to a thread reading a file.
    pub(crate) fn is_enqueued(&self) -> bool {
        self.ring.lock().is_none()
    }

    /// Returns whether bytes without a copy are filled after a refill.
    pub(crate) fn fills_undefined(&self) -> bool {
        self.context.fill
    }

    /// Releases the memory of dropped peer copies to their drivers, without waiting.
    pub(crate) fn sweep(&self) {
        for peer in self.peers.lock().iter() {
            if let Err(error) = peer.peer_blocks().sweep() {
                tracing::debug!(target: "glake::regions", peer = %peer.device(), %error, "copies' memory stays for now");
            }
        }
    }

    fn enqueue(&self, copies: Vec<Span>, home: Vec<Span>) -> Result<Box<dyn Moving>> {
        let size = home.iter().map(Span::size).sum();
        let pairs: Vec<(Span, Span)> = copies.into_iter().zip(home).collect();
        self.context.mover.enqueue(&pairs).map_err(|source| self.unmoved(size, source))
    }

    /// Begins a digest of home. All work on the spans has completed and none writes to them, so that the digest needs no ordering with the
    /// copies.
    fn begin_digest(&self, home: &[Span]) -> Result<Option<Digesting>> {
        let Some(digests) = self.context.checks else { return Ok(None) };
        let begun = digests.enqueue(digests.stream(), home).map_err(PoolError::from)?;
        Ok(Some(begun))
    }

    fn peer_part(&self, peer: &Arc<GpuPool>, size: Bytes) -> Result<PeerPart> {
        let device = self.pool.device();
        let refused = |source: PoolError| match source.is_out_of_memory() {
            true => RegionError::Peer { device, tag: self.tag.to_owned(), peer: peer.device(), size, source },
            false => source.into(),
        };
        if peer.device() == device {
            return Err(RegionError::OwnMemory { device, tag: self.tag.to_owned() });
        }
        self.room.lock().take(peer, device, size).map_err(refused)
    }

    fn ring(&self, host: &Arc<HostPool>) -> Result<Ring> {
        let mut made = self.ring.lock();
        let ring = match made.take() {
            Some(ring) => ring,
            None => files::ring(host)?,
        };
        Ok(made.insert(ring).clone())
    }

    fn unmoved(&self, size: Bytes, source: MoveError) -> RegionError {
        RegionError::Move { device: self.pool.device(), tag: self.tag.to_owned(), size, source }
    }

    fn unwritten(&self, size: Bytes, error: WriteError) -> RegionError {
        match error {
            WriteError::Halt(Halt::Host(source)) => source.into(),
            WriteError::Halt(Halt::Move(source)) => self.unmoved(size, source),
            WriteError::File(source) => source.into(),
        }
    }

    fn damaged(&self, view: ExtentView, place: Place, source: Option<FileError>) -> RegionError {
        let address: Address = self.pool.core().address(view.offset);
        let (device, tag) = (self.pool.device(), self.tag.to_owned());
        let blocks = self.pool.blocks_in(view.extent);
        let blocks = blocks.iter().map(|block| (block.address, block.size)).collect();
        RegionError::Damaged {
            device,
            tag,
            address,
            size: view.size,
            place,
            blocks,
            source: source.map(Box::new),
        }
    }

    fn unread(&self, view: ExtentView, source: FileError) -> RegionError {
        let address = self.pool.core().address(view.offset);
        let (device, tag) = (self.pool.device(), self.tag.to_owned());
        RegionError::Unread { device, tag, address, size: view.size, source }
    }

    fn no_thread(&self, source: std::io::Error) -> RegionError {
        RegionError::NoThread { tag: self.tag.to_owned(), source }
    }
}

impl EvictionCopy<'_> {
    /// Returns the number of bytes copied.
    pub(crate) fn size(&self) -> Bytes {
        self.size
    }
}

impl RefillCopy<'_> {
    /// Returns the number of bytes copied.
    pub(crate) fn size(&self) -> Bytes {
        self.size
    }
}

fn joined<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|cause| std::panic::resume_unwind(cause))
}
