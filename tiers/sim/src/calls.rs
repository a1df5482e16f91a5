//! Gate for the calls of a process that shares simulated GPUs: calls block while the process is locked.
//!
//! The process's record in the ledger file has a word for its state and one for the number of running calls. A call increments the count
//! before it reads the state, and a locker writes the state before it reads the count: so one of the two sees the other, and no call runs
//! in a locked process. The calls of a forked child count as its parent's.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use super::system;

/// Polling interval for changes of the state.
const GLANCE: Duration = Duration::from_micros(500);

/// Words of a ledger file, mapped and shared by all processes.
#[derive(Debug)]
pub(super) struct Words {
    base: u64,
    size: u64,
}

/// State of a process, by its number in the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Condition {
    #[default]
    Running,
    Locked,
    Checkpointed,
    /// Checkpointed, after a failed restore: no later restore succeeds.
    Lost,
}

/// Calls of this process on one of its simulators.
#[derive(Debug)]
pub(super) struct Calls {
    words: Words,
    record: RecordWords,
}

/// Offsets of a record's words from the start of the file, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct RecordWords {
    pub(super) condition: u64,
    pub(super) calls: u64,
}

/// Guard of a running call.
#[derive(Debug)]
pub(super) struct Call<'a>(&'a Calls);

impl Words {
    /// Maps a file whose size does not change.
    pub(super) fn new(file: &File, size: u64) -> io::Result<Words> {
        Ok(Words { base: system::map_shared(file.as_fd(), size)?, size })
    }

    fn word(&self, offset: u64) -> &AtomicU64 {
        debug_assert!(offset + 8 <= self.size && offset.is_multiple_of(8));
        // SAFETY: within the mapping, which lives as long as this value; only accessed as whole words.
        unsafe { system::shared_word(self.base + offset) }
    }

    pub(super) fn condition(&self, record: RecordWords) -> Condition {
        match self.word(record.condition).load(SeqCst) {
            1 => Condition::Locked,
            2 => Condition::Checkpointed,
            3 => Condition::Lost,
            _ => Condition::Running,
        }
    }

    pub(super) fn set_condition(&self, record: RecordWords, condition: Condition) {
        self.word(record.condition).store(condition as u64, SeqCst);
    }

    /// Waits until no call runs; returns false if one still does at `until`.
    pub(super) fn wait_for_calls(&self, record: RecordWords, until: Instant) -> bool {
        while self.word(record.calls).load(SeqCst) != 0 {
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(GLANCE);
        }
        true
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: a mapping of our own without remaining borrows.
        let _ = unsafe { system::unreserve(self.base, self.size) };
    }
}

impl Calls {
    pub(super) fn new(words: Words, record: RecordWords) -> Calls {
        Calls { words, record }
    }

    /// Begins a call once the process is not locked.
    pub(super) fn begin(&self) -> Call<'_> {
        loop {
            let calls = self.words.word(self.record.calls);
            calls.fetch_add(1, SeqCst);
            if self.words.condition(self.record) == Condition::Running {
                return Call(self);
            }
            calls.fetch_sub(1, SeqCst);
            std::thread::sleep(GLANCE);
        }
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.0.words.word(self.0.record.calls).fetch_sub(1, SeqCst);
    }
}
