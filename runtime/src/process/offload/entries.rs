//! What is offloaded, by number.
//!
//! ```text
//! away: copied out ──begin──► coming: a copy in is begun ──begin──► coming …        any of them ──release──► gone
//!   └ no bytes: there is nothing to copy
//! ```
//!
//! Invariants: a number is above 0 and never given twice. An entry's lock is held while its copies are enqueued, the table's for a look-up
//! only.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use glake_device::owned::OwnedEvent;
use glake_device::{Address, DeviceId};
use glake_stitch::HoldId;
use glake_tiers::BlockId;
use glake_transfer::CopyHandle;
use glake_units::Bytes;
use rustc_hash::FxHashMap;

use super::super::{ProcessError, Result};
use super::host_memory::{HostMemory, HostRange, InMark};
use crate::sync::Mutex;

/// Bytes that were copied out.
#[derive(Debug)]
pub(super) struct Away {
    /// Whose memory they were.
    pub(super) device: DeviceId,
    pub(super) size: Bytes,
    pub(super) taken: HostRange,
    /// The end of the copy out.
    pub(super) out: Arc<OwnedEvent>,
    /// The parts of the copy out that relays took part in, and that were not seen to arrive.
    pub(super) copied: Vec<CopyHandle>,
    /// Where the block begins that is looked at once more when it is freed.
    pub(super) watched: Option<Address>,
    /// Whether a copy over another of them failed, so that nobody knows what the host has.
    pub(super) is_torn: bool,
}

/// The last copy in that was begun.
#[derive(Debug)]
pub(super) struct Load {
    pub(super) event: Arc<OwnedEvent>,
    /// Its number among the copies of its queue.
    pub(super) number: u64,
    /// The parts of it that relays took part in, and that were not seen to arrive.
    pub(super) copied: Vec<CopyHandle>,
    /// Where it goes.
    pub(super) block: BlockId,
    /// What keeps the block's bytes, until the block's stream waits.
    pub(super) hold: Option<HoldId>,
}

/// What is known under one number.
#[derive(Debug)]
pub(super) struct Entry {
    /// Its bytes, and whose memory they are in; `None`: there are none.
    pub(super) away: Option<(Away, Arc<HostMemory>)>,
    pub(super) load: Option<Load>,
    /// Whether any way back was begun.
    pub(super) is_loaded: bool,
}

impl Away {
    /// Whether the copy out lost bytes, as far as it was seen to end. Never waits.
    pub(super) fn check(&mut self) -> Result<()> {
        check(&self.out, &mut self.copied)
    }
}

impl Load {
    /// As [`Away::check`].
    pub(super) fn check(&mut self) -> Result<()> {
        check(&self.event, &mut self.copied)
    }

    /// What whoever has the host memory next waits for.
    pub(super) fn into_mark(self) -> InMark {
        InMark { number: self.number, event: self.event }
    }
}

/// What was seen to arrive is not asked again.
fn check(end: &OwnedEvent, copied: &mut Vec<CopyHandle>) -> Result<()> {
    if copied.is_empty() || !end.is_passed()? {
        return Ok(());
    }
    while let Some(handle) = copied.last() {
        handle.check()?;
        copied.pop();
    }
    Ok(())
}

impl Entry {
    /// No bytes.
    pub(super) fn empty() -> Entry {
        Entry { away: None, load: None, is_loaded: false }
    }

    /// Bytes on their way out.
    pub(super) fn away(away: Away, host: Arc<HostMemory>) -> Entry {
        Entry { away: Some((away, host)), load: None, is_loaded: false }
    }

    /// A copy in is begun. What the one before it held stays held until its event: it goes to memory of its own.
    pub(super) fn keep(&mut self, load: Load) {
        self.is_loaded = true;
        self.load = Some(load);
    }
}

/// Those that were not released.
#[derive(Debug, Default)]
pub(super) struct Entries {
    last: AtomicU64,
    entries: Mutex<FxHashMap<u64, Arc<Mutex<Entry>>>>,
}

impl Entries {
    /// Its number.
    pub(super) fn add(&self, entry: Entry) -> u64 {
        let id = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        self.entries.lock().insert(id, Arc::new(Mutex::new(entry)));
        id
    }

    /// # Errors
    /// [`ProcessError::UnknownOffload`].
    pub(super) fn of(&self, id: u64) -> Result<Arc<Mutex<Entry>>> {
        self.entries.lock().get(&id).cloned().ok_or(ProcessError::UnknownOffload { id })
    }

    /// # Errors
    /// As [`Entries::of`].
    pub(super) fn remove(&self, id: u64) -> Result<Arc<Mutex<Entry>>> {
        self.entries.lock().remove(&id).ok_or(ProcessError::UnknownOffload { id })
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.entries.lock().len()
    }
}
