//! Memory of one simulated device: a sparse file whose ranges are extents.
//!
//! Invariants: a range has one owner at a time and reads as zeroes when taken; `used` never exceeds `capacity`. The file is twice as long
//! as the capacity, so that a request that fits the free capacity finds a contiguous range in spite of holes (a real GPU maps page by page
//! and has no holes).

use std::os::fd::{AsFd, BorrowedFd};

use glake_units::Bytes;

use super::calls::Calls;
use super::denial::{Checked, Denial};
use super::file::MemoryFile;
use super::ledger::Account;
use super::spans::Spans;
use super::system;

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
