//! The memory of one simulated device: a sparse file, ranges of which are extents.
//!
//! Invariants: a range is taken once at a time, and then reads as zeroes; `used` never passes `capacity`. The file is twice as long as the capacity, so that what is left fits a request of that
//! size wherever the holes lie (a real GPU maps page by page and has no holes).

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
    /// The simulator moves bytes where this is mapped, whatever is mapped elsewhere.
    file: MemoryFile,
    spans: Spans,
    capacity: u64,
    used: u64,
    /// What a context on it costs.
    context: Bytes,
    /// Where several processes share the device, what is used in common.
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

    /// Where the byte at `offset` can be reached.
    pub(super) fn pointer(&self, offset: u64) -> u64 {
        self.file.pointer(offset)
    }

    /// Takes a range.
    pub(super) fn take(&mut self, size: u64) -> Checked<u64> {
        self.charge(size)?;
        let found = self.spans.take(size).ok_or(Denial::OutOfMemory(Bytes::new(size)));
        // A range that could not be cleared is lost rather than handed out dirty.
        let cleared = found.and_then(|offset| self.file.clear(offset, size).map(|()| offset));
        cleared.inspect_err(|_| self.credit(size))
    }

    /// Gives a range back.
    pub(super) fn give(&mut self, offset: u64, size: u64) -> Checked<()> {
        self.file.trim(offset, size)?;
        self.spans.give(offset, size);
        self.credit(size);
        Ok(())
    }

    /// Counts memory that lies in a file of its own.
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

    /// Counts a context.
    pub(super) fn charge_context(&mut self) -> Checked<()> {
        self.charge(self.context.get())
    }

    pub(super) fn credit_context(&mut self) {
        self.credit(self.context.get());
    }

    pub(super) fn capacity(&self) -> Bytes {
        Bytes::new(self.capacity)
    }

    /// The calls of this process, where others share the device.
    pub(super) fn calls(&self) -> Checked<Option<Calls>> {
        Ok(self.account.as_ref().map(Account::calls).transpose()?)
    }

    /// What is taken, by every process.
    pub(super) fn used(&mut self) -> Checked<Bytes> {
        match &mut self.account {
            Some(account) => Ok(Bytes::new(account.used_by_all()?)),
            None => Ok(Bytes::new(self.used)),
        }
    }
}
