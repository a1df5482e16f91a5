//! Block lists in pinned memory, read by the copy kernel.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use glake_units::Bytes;
use parking_lot::Mutex;

use super::super::{CompletionEvents, OwnedEvent, Pages, Piece, Registration, Side};
use crate::{
    Address, CopyRequest, DeviceId, EventKind, PointerKind, Refusal, Result, Touch, Touches, Usage, Verb,
};

/// List entry as the kernel reads it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Block {
    to: u64,
    from: u64,
    bytes: u64,
}

const ENTRY: u64 = size_of::<Block>() as u64;
/// Size of one list in bytes: room for 2,730 entries.
const LIST: u64 = 64 << 10;

/// Check of the memory that a GPU's kernels may access.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reach {
    pub(super) device: DeviceId,
}

impl Reach {
    #[inline]
    pub(super) fn holds(self, side: Side) -> bool {
        match side.kind {
            PointerKind::Device { .. } | PointerKind::Pinned => side.reach.contains(self.device),
            // Managed memory may migrate while the kernel runs; pageable memory is out of a kernel's reach.
            PointerKind::Managed | PointerKind::Pageable => false,
        }
    }
}

/// Small blocks copied by one launch, in no particular order. The list belongs to its holder until it is launched.
#[derive(Debug)]
pub struct BlockList {
    /// Pool that the list returns to when dropped; dangling if it must not be reused.
    pub(super) home: Weak<Mutex<Lists>>,
    /// Memory that holds the entries of all lists.
    memory: Arc<Registration>,
    entries: Address,
    count: u64,
    size: Bytes,
    pub(super) reach: Reach,
    /// Event recorded after each launch; once it has completed, nothing reads the entries.
    pub(super) done: Arc<OwnedEvent>,
}

/// Idle and launched lists of a GPU.
#[derive(Debug, Default)]
pub(super) struct Lists {
    pub(super) idle: Vec<BlockList>,
    /// Launched lists, oldest launch first.
    pub(super) launched: VecDeque<BlockList>,
}

/// Returns an unlaunched list to the pool: there are few lists, and none is created later.
impl Drop for BlockList {
    fn drop(&mut self) {
        let Some(home) = self.home.upgrade() else { return };
        let list = BlockList {
            home: self.home.clone(),
            memory: self.memory.clone(),
            entries: self.entries,
            count: 0,
            size: Bytes::ZERO,
            reach: self.reach,
            done: self.done.clone(),
        };
        home.lock().idle.push(list);
    }
}

impl BlockList {
    /// Allocates the lists that fit into the given pinned memory, at least one.
    pub(super) fn several(
        completion_events: &Arc<CompletionEvents>,
        reach: Reach,
        memory: Bytes,
    ) -> Result<Vec<BlockList>> {
        let memory =
            Arc::new(Registration::new(completion_events, Pages::new(memory.max(Bytes::new(LIST)), 0)?)?);
        (0..memory.size().get() / LIST)
            .map(|index| {
                Ok(BlockList {
                    // No pool yet: the owner of all lists sets it.
                    home: Weak::new(),
                    entries: Address(memory.start().0 + index * LIST),
                    memory: memory.clone(),
                    count: 0,
                    size: Bytes::ZERO,
                    reach,
                    done: Arc::new(OwnedEvent::new(
                        completion_events.driver(),
                        reach.device,
                        EventKind::Plain,
                    )?),
                })
            })
            .collect()
    }

    /// Returns the size of the pinned memory that the list is part of.
    pub(super) fn memory(&self) -> Bytes {
        self.memory.size()
    }

    /// Returns the number of blocks in the list.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the total bytes of the blocks.
    pub fn size(&self) -> Bytes {
        self.size
    }

    /// Returns whether the list has no room for another block.
    pub fn is_full(&self) -> bool {
        self.count == LIST / ENTRY
    }

    /// Adds a piece to the list. One warp copies it, so pieces beyond 64 KiB should be split.
    ///
    /// # Errors
    /// [`Refusal::InvalidValue`] if the list is full, [`Refusal::NoPeerAccess`] if the GPU cannot access an end. Nothing is added then.
    #[inline]
    pub fn push(&mut self, piece: &Piece<'_>) -> Result<()> {
        let CopyRequest { to, from, size } = piece.request();
        if self.is_full() {
            return Err(super::refused(to, Refusal::InvalidValue));
        }
        if !self.reach.holds(piece.to()) || !self.reach.holds(piece.from()) {
            return Err(super::refused(to, Refusal::NoPeerAccess));
        }
        let entry = Block { to: to.0, from: from.0, bytes: size.get() };
        // SAFETY: the entry lies in memory of this list, which no kernel reads and of which there is no reference.
        unsafe { self.entry(self.count).write(entry) };
        self.count += 1;
        self.size = self.size.saturating_add(size);
        Ok(())
    }

    pub(super) fn clear(&mut self) {
        (self.count, self.size) = (0, Bytes::ZERO);
    }

    /// Returns the kernel's arguments: address and number of the entries.
    pub(super) fn arguments(&self) -> [u64; 2] {
        [self.entries.0, self.count]
    }

    fn entry(&self, index: u64) -> *mut Block {
        let at = self.entries.0 + index * ENTRY;
        std::ptr::with_exposed_provenance_mut(usize::try_from(at).unwrap_or(0))
    }
}

/// Memory that the kernel reads and writes, including the entries.
impl Touches for BlockList {
    fn each(&self, see: &mut dyn FnMut(Usage, Touch)) {
        see(Usage::Read, Touch { address: self.entries, size: Bytes::new(self.count * ENTRY) });
        for index in 0..self.count {
            // SAFETY: an initialised entry in memory that is not written concurrently.
            let block = unsafe { self.entry(index).read() };
            let size = Bytes::new(block.bytes);
            see(Usage::Read, Touch { address: Address(block.from), size });
            see(Usage::Write, Touch { address: Address(block.to), size });
        }
    }
}

/// The kernels as host code, for the simulator.
pub(super) mod host {
    use super::ENTRY;
    use crate::{Address, KernelMemory};

    /// Kernel `glake_gather(list, count)` as host code.
    pub(in super::super) fn gather(memory: &mut dyn KernelMemory, arguments: &[u64]) {
        let [list, count] = *arguments else { return };
        let mut entries = vec![0; usize::try_from(count * ENTRY).unwrap_or(0)];
        // The next wait for the device reports a stray access.
        let _ = memory.read(Address(list), &mut entries);
        for words in entries.as_chunks::<8>().0.as_chunks::<3>().0 {
            let [to, from, bytes] = words.map(u64::from_le_bytes);
            copy(memory, &[to, from, bytes]);
        }
    }

    /// Kernel `glake_copy(to, from, bytes)` as host code.
    pub(in super::super) fn copy(memory: &mut dyn KernelMemory, arguments: &[u64]) {
        let [to, from, bytes] = *arguments else { return };
        let mut held = vec![0; usize::try_from(bytes).unwrap_or(0)];
        if memory.read(Address(from), &mut held).is_ok() {
            let _ = memory.write(Address(to), &held);
        }
    }
}

/// Verb named by the errors of a list.
pub(super) const VERB: Verb = Verb::Launch;
