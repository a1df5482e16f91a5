//! Lives of exported blocks.
//!
//! Invariant: a life is ended under the allocator's lock, by a free or a restore, before the bytes can be handed out again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use glake_units::Bytes;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

/// Life of an exported block, ended by a free or a restore.
#[derive(Clone, Debug, Default)]
pub struct BlockLife {
    ended: Arc<AtomicBool>,
}

impl BlockLife {
    /// Returns whether the block is gone: its bytes may belong to another block.
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }
}

/// Lives of exported blocks by offset. Changes under the allocator's lock.
#[derive(Debug, Default)]
pub(super) struct Lives {
    /// Number of lives; 0 in most pools, and read at every free.
    count: AtomicUsize,
    by_block: Mutex<FxHashMap<Bytes, BlockLife>>,
}

impl Lives {
    /// Returns the life of the block at an offset, starting it if necessary.
    pub(super) fn of(&self, block: Bytes) -> BlockLife {
        let mut lives = self.by_block.lock();
        let life = lives.entry(block).or_default().clone();
        self.count.store(lives.len(), Ordering::Relaxed);
        life
    }

    /// Ends the life of the block at an offset.
    #[inline]
    pub(super) fn end(&self, block: Bytes) {
        if self.count.load(Ordering::Relaxed) > 0 {
            self.end_exported(block);
        }
    }

    #[cold]
    fn end_exported(&self, block: Bytes) {
        let mut lives = self.by_block.lock();
        if let Some(life) = lives.remove(&block) {
            life.ended.store(true, Ordering::Release);
        }
        self.count.store(lives.len(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_life_ends_with_its_block_and_no_other() {
        let lives = Lives::default();
        let [one, again, other] = [Bytes::ZERO, Bytes::ZERO, Bytes::mib(2)].map(|block| lives.of(block));
        lives.end(Bytes::mib(1));
        assert!(!one.has_ended() && !other.has_ended());
        lives.end(Bytes::ZERO);
        assert!(one.has_ended() && again.has_ended() && !other.has_ended());
        assert!(!lives.of(Bytes::ZERO).has_ended(), "the next block there has a life of its own");
    }
}
