//! Whether blocks that were exported are still those.
//!
//! Invariant: a life is ended under the allocator's lock, by a free and by a restore, so that nobody else has the bytes before.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use glake_units::Bytes;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

/// The life of an exported block: the pool ends it when the block is freed, or goes by a restore.
#[derive(Clone, Debug, Default)]
pub struct BlockLife {
    ended: Arc<AtomicBool>,
}

impl BlockLife {
    /// Whether it is over: the bytes are others' now, or may be.
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }
}

/// The lives of exported blocks, by where they begin. Both change under the allocator's lock.
#[derive(Debug, Default)]
pub(super) struct Lives {
    /// Most pools export nothing, and ask at every free.
    count: AtomicUsize,
    by_block: Mutex<FxHashMap<Bytes, BlockLife>>,
}

impl Lives {
    /// The life of the block that begins there.
    pub(super) fn of(&self, block: Bytes) -> BlockLife {
        let mut lives = self.by_block.lock();
        let life = lives.entry(block).or_default().clone();
        self.count.store(lives.len(), Ordering::Relaxed);
        life
    }

    /// The block that begins there is live no more.
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
