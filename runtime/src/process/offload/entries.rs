//! Offloaded entries by number.
//!
//! ```text
//! away: copied out ──begin──► coming: a copy in is started ──begin──► coming …        any of them ──release──► gone
//!   │                              └ store, if reserved: away, with the bytes of a block
//!   └ no bytes: there is nothing to copy
//! ```
//!
//! Invariants: a number is above 0 and never reused. An entry's lock is held while its copies are enqueued, the table's lock for a lookup
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

/// Bytes that were copied to the host.
#[derive(Debug)]
pub(super) struct Away {
    /// Device from which the bytes were copied.
    pub(super) device: DeviceId,
    pub(super) size: Bytes,
    pub(super) taken: HostRange,
    /// Completion event of the last copy out; of a new reservation, of the copies that used its memory before.
    pub(super) out: Arc<OwnedEvent>,
    /// Parts of the copy out that use relays and were not seen to finish.
    pub(super) copied: Vec<CopyHandle>,
    /// Start of the block that is checked again when it is freed; `None` if no check is due.
    pub(super) watched: Option<Address>,
    /// Whether a second copy over the host memory failed, so that its contents are undefined.
    pub(super) is_torn: bool,
    /// Whether the host memory is contiguous, and stored into again.
    pub(super) is_reserved: bool,
}

/// The most recent copy back to the GPU.
#[derive(Debug)]
pub(super) struct Load {
    pub(super) event: Arc<OwnedEvent>,
    /// Number of the copy within its queue.
    pub(super) number: u64,
    /// Parts of the copy that use relays and were not seen to finish.
    pub(super) copied: Vec<CopyHandle>,
    /// Destination block of the copy.
    pub(super) block: BlockId,
    /// Hold on the block's bytes, until the block's stream waits for the copy.
    pub(super) hold: Option<HoldId>,
}

/// State of one offloaded entry.
#[derive(Debug)]
pub(super) struct Entry {
    /// Copied bytes and the pool of their host memory; `None` for an entry of 0 bytes.
    pub(super) away: Option<(Away, Arc<HostMemory>)>,
    pub(super) load: Option<Load>,
    /// Whether a copy in was ever started.
    pub(super) is_loaded: bool,
}

impl Away {
    /// Returns an error if the host memory does not hold the bytes.
    pub(super) fn check_bytes(&mut self, id: u64) -> Result<()> {
        match (self.is_torn, self.is_reserved) {
            (false, _) => self.check(),
            (true, true) => Err(ProcessError::lost(format!(
                "the last store into the host memory reserved under the number {id} failed: store the bytes again"
            ))),
            (true, false) => Err(ProcessError::lost(format!(
                "what is offloaded under the number {id} is lost: its block was freed, and the copy of what it had then failed twice; run \
                 the step again"
            ))),
        }
    }

    /// Reports a failed copy out, as far as its end was seen. Never waits.
    pub(super) fn check(&mut self) -> Result<()> {
        check(&self.out, &mut self.copied)
    }
}

impl Load {
    /// Reports a failed copy in, as [`Away::check`] does.
    pub(super) fn check(&mut self) -> Result<()> {
        check(&self.event, &mut self.copied)
    }

    /// Returns the mark that the next owner of the host memory waits for.
    pub(super) fn into_mark(self) -> InMark {
        InMark { number: self.number, event: self.event }
    }
}

/// Checks the parts of a finished copy and drops those that succeeded.
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
    /// Creates an entry of 0 bytes.
    pub(super) fn empty() -> Entry {
        Entry { away: None, load: None, is_loaded: false }
    }

    /// Creates an entry whose bytes are being copied out.
    pub(super) fn away(away: Away, host: Arc<HostMemory>) -> Entry {
        Entry { away: Some((away, host)), load: None, is_loaded: false }
    }

    /// Records a new copy in. The hold of the previous one lasts until its event: each copy has its own destination.
    pub(super) fn keep(&mut self, load: Load) {
        self.is_loaded = true;
        self.load = Some(load);
    }
}

/// Table of the entries that were not released.
#[derive(Debug, Default)]
pub(super) struct Entries {
    last: AtomicU64,
    entries: Mutex<FxHashMap<u64, Arc<Mutex<Entry>>>>,
}

impl Entries {
    /// Adds an entry and returns its number.
    pub(super) fn add(&self, entry: Entry) -> u64 {
        let id = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        self.entries.lock().insert(id, Arc::new(Mutex::new(entry)));
        id
    }

    /// Returns the entry with a number.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the number is unknown.
    pub(super) fn of(&self, id: u64) -> Result<Arc<Mutex<Entry>>> {
        self.entries.lock().get(&id).cloned().ok_or_else(|| ProcessError::unknown_offload(id))
    }

    /// Removes the entry with a number.
    ///
    /// # Errors
    /// As [`Entries::of`].
    pub(super) fn remove(&self, id: u64) -> Result<Arc<Mutex<Entry>>> {
        self.entries.lock().remove(&id).ok_or_else(|| ProcessError::unknown_offload(id))
    }

    /// Returns the number of entries.
    pub(super) fn count(&self) -> usize {
        self.entries.lock().len()
    }
}
