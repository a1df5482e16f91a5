//! Physical memory: the arena of each simulated device, and the extents behind handles.
//!
//! An arena is a sparse file whose ranges are extents. Exportable memory lies in a file of its own, sealed at its size, so that the
//! descriptor is all that an importer needs and the operating system keeps the bytes until the last process has released them.
//!
//! Invariants: a range has one owner at a time and reads as zeroes when taken; `used` never exceeds `capacity`. The file is twice as long
//! as the capacity, so that a request that fits the free capacity finds a contiguous range in spite of holes (a real GPU maps page by page
//! and has no holes). Free ranges neither overlap nor touch, and both of their indexes hold the same ones.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd};

use glake_device::{DeviceId, Place};
use glake_units::Bytes;

use super::context::ContextId;
use super::denial::{Checked, Denial};
use super::file::{MappedFile, MemoryFile};
use super::ledger::{Account, Calls};
use super::order::Shadow;
use super::system::{self, Source};

#[derive(Debug)]
pub(super) struct Arena {
    /// Backing file. The simulator moves bytes through its own mapping of the file, independent of all other mappings.
    file: MemoryFile,
    spans: Spans,
    capacity: u64,
    used: u64,
    /// Memory that a context takes on the device.
    context: Bytes,
    /// Shared account of the device; `None` unless several processes share it.
    account: Option<Account>,
}

impl Arena {
    pub(super) fn new(
        name: &str,
        capacity: Bytes,
        context: Bytes,
        account: Option<Account>,
    ) -> Checked<Self> {
        let capacity = capacity.get() / system::GRANULE * system::GRANULE;
        let length = capacity.saturating_mul(2);
        let file = MemoryFile::new(name, length, false)?;
        Ok(Arena { file, spans: Spans::new(length), capacity, used: 0, context, account })
    }

    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Returns the host address of the byte at `offset`.
    pub(super) fn pointer(&self, offset: u64) -> u64 {
        self.file.pointer(offset)
    }

    /// Takes a zeroed range and returns its offset.
    pub(super) fn take(&mut self, size: u64) -> Checked<u64> {
        self.charge(size)?;
        let found = self.spans.take(size).ok_or(Denial::OutOfMemory(Bytes::new(size)));
        // A range that could not be cleared leaks instead of being handed out dirty.
        let cleared = found.and_then(|offset| self.file.clear(offset, size).map(|()| offset));
        cleared.inspect_err(|_| self.credit(size))
    }

    /// Returns a range to the arena.
    pub(super) fn give(&mut self, offset: u64, size: u64) -> Checked<()> {
        self.file.trim(offset, size)?;
        self.spans.give(offset, size);
        self.credit(size);
        Ok(())
    }

    /// Accounts for memory that lies in a file of its own.
    pub(super) fn charge(&mut self, size: u64) -> Checked<()> {
        let short = || Denial::OutOfMemory(Bytes::new(size));
        let used = self.used.checked_add(size).filter(|used| *used <= self.capacity).ok_or_else(short)?;
        if let Some(account) = &mut self.account
            && !account.take(size)?
        {
            return Err(short());
        }
        self.used = used;
        Ok(())
    }

    pub(super) fn credit(&mut self, size: u64) {
        self.used -= size;
        if let Some(account) = &mut self.account {
            account.give(size);
        }
    }

    /// Accounts for the memory of a context.
    pub(super) fn charge_context(&mut self) -> Checked<()> {
        self.charge(self.context.get())
    }

    pub(super) fn credit_context(&mut self) {
        self.credit(self.context.get());
    }

    pub(super) fn capacity(&self) -> Bytes {
        Bytes::new(self.capacity)
    }

    /// Returns the call gate of this process; `None` unless the device is shared.
    pub(super) fn calls(&self) -> Checked<Option<Calls>> {
        Ok(self.account.as_ref().map(Account::calls).transpose()?)
    }

    /// Returns the bytes used by all processes.
    pub(super) fn used(&mut self) -> Checked<Bytes> {
        match &mut self.account {
            Some(account) => Ok(Bytes::new(account.used_by_all()?)),
            None => Ok(Bytes::new(self.used)),
        }
    }
}

#[derive(Debug)]
pub(super) struct Spans {
    by_start: BTreeMap<u64, u64>,
    by_size: BTreeSet<(u64, u64)>,
}

impl Spans {
    /// Creates the list with `0..total` free.
    pub(super) fn new(total: u64) -> Self {
        let mut spans = Spans { by_start: BTreeMap::new(), by_size: BTreeSet::new() };
        spans.insert(0, total);
        spans
    }

    /// Takes `size` bytes out of the smallest free range that is large enough.
    pub(super) fn take(&mut self, size: u64) -> Option<u64> {
        let &(found, start) = self.by_size.range((size, 0)..).next()?;
        self.remove(start, found);
        if found > size {
            self.insert(start + size, found - size);
        }
        Some(start)
    }

    /// Returns a range that was taken.
    pub(super) fn give(&mut self, start: u64, size: u64) {
        let (mut start, mut size) = (start, size);
        if let Some((&before, &length)) = self.by_start.range(..start).next_back()
            && before + length == start
        {
            self.remove(before, length);
            (start, size) = (before, length + size);
        }
        if let Some(&length) = self.by_start.get(&(start + size)) {
            self.remove(start + size, length);
            size += length;
        }
        self.insert(start, size);
    }

    fn insert(&mut self, start: u64, size: u64) {
        self.by_start.insert(start, size);
        self.by_size.insert((size, start));
    }

    fn remove(&mut self, start: u64, size: u64) {
        self.by_start.remove(&start);
        self.by_size.remove(&(size, start));
    }
}

#[derive(Debug)]
pub(super) struct Extent {
    pub(super) place: Place,
    pub(super) size: u64,
    pub(super) backing: Backing,
    /// Number of mappings of the extent.
    pub(super) mappings: u32,
    /// Whether the handle was released, so that only mappings keep the memory.
    pub(super) released: bool,
    pub(super) kind: Kind,
    /// Whether the memory was created for RDMA.
    pub(super) gpu_direct: bool,
    /// Context in which the extent was created; `None` for imported memory and host memory.
    pub(super) made_in: Option<ContextId>,
    /// Last uses of the memory.
    pub(super) shadow: Shadow,
}

/// Origin of memory, which determines the devices that can access it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Created by handle: accessible as granted per mapping.
    Mapped,
    /// Like `cudaMalloc`: accessible to its own GPU and to enabled peers.
    Plain,
    /// From a memory pool, like `cudaMallocAsync`: accessible to its own GPU only, regardless of enabled peers.
    Pool,
    /// Like `cudaMallocManaged`: accessible to every device.
    Managed,
}

#[derive(Debug)]
pub(super) enum Backing {
    /// A range of the arena.
    Arena { offset: u64 },
    /// A file of its own.
    Own(Own<MemoryFile>),
    /// Another process's file, which does not count as device memory here.
    Imported(Own<MappedFile>),
}

/// A memory file and its share of the mapping budget.
#[derive(Debug)]
pub(super) struct Own<F> {
    pub(super) file: F,
}

impl<F> Own<F> {
    /// Reserves the budget, then opens the file with `open`.
    pub(super) fn new(size: u64, open: impl FnOnce() -> Checked<F>) -> Checked<Self> {
        if !system::take(1) {
            return Err(Denial::OutOfMemory(Bytes::new(size)));
        }
        let file = open().inspect_err(|_| system::give(1))?;
        Ok(Own { file })
    }
}

impl<F> Drop for Own<F> {
    fn drop(&mut self) {
        system::give(1);
    }
}

impl Extent {
    pub(super) fn new(place: Place, size: u64, backing: Backing) -> Self {
        Extent {
            place,
            size,
            backing,
            mappings: 0,
            released: false,
            kind: Kind::Mapped,
            gpu_direct: false,
            made_in: None,
            shadow: Shadow::default(),
        }
    }

    /// Returns the host address of the byte at `offset`.
    pub(super) fn pointer(&self, arena: &Arena, offset: u64) -> u64 {
        match &self.backing {
            Backing::Arena { offset: start } => arena.pointer(start + offset),
            Backing::Own(own) => own.file.pointer(offset),
            Backing::Imported(own) => own.file.pointer(offset),
        }
    }

    /// Returns the source for mapping the extent.
    pub(super) fn source<'a>(&'a self, arena: &'a Arena) -> Source<'a> {
        match &self.backing {
            Backing::Arena { offset } => Source::File(arena.file(), *offset),
            Backing::Own(own) => Source::File(own.file.as_fd(), 0),
            Backing::Imported(own) => Source::Mapped(own.file.pointer(0)),
        }
    }
}

/// Returns the name of a memory file, which tells an importer where the memory lies.
pub(super) fn file_name(place: Place) -> String {
    match place {
        Place::Gpu(device) => format!("glake-gpu-{}", device.0),
        Place::HostNuma(node) => format!("glake-node-{node}"),
    }
}

/// Parses a name made by [`file_name`], as the kernel shows it.
pub(super) fn place_of(name: &str) -> Option<Place> {
    let name = name.strip_prefix("/memfd:")?.trim_end_matches(" (deleted)");
    if let Some(index) = name.strip_prefix("glake-gpu-") {
        return index.parse().ok().map(|index| Place::Gpu(DeviceId(index)));
    }
    name.strip_prefix("glake-node-")?.parse().ok().map(Place::HostNuma)
}

#[cfg(test)]
mod spans_tests {
    use super::*;

    #[test]
    fn takes_the_best_fit_and_merges() {
        let mut spans = Spans::new(100);
        let taken: Vec<u64> = [10, 20, 10, 60].iter().map(|size| spans.take(*size).unwrap()).collect();
        assert_eq!(taken, [0, 10, 30, 40]);
        assert_eq!(spans.take(1), None);
        spans.give(10, 20);
        spans.give(40, 60);
        assert_eq!(spans.take(15), Some(10));
        assert_eq!(spans.take(60), Some(40));
        spans.give(40, 60);
        spans.give(10, 15);
        spans.give(30, 10);
        spans.give(0, 10);
        assert_eq!(spans.take(100), Some(0));
    }
}
