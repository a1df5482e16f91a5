//! Memory pinned ahead of its use, by a thread of its own.
//!
//! ```text
//!  expect   ├ arena 1 ┼ arena 2 ┼ arena 3 ┤
//!  take               │ 1 │ 1 │ 2 │ 2 │ 3 │ 3 │       each as soon as it is there
//! ```

use glake_units::Bytes;

use super::grow::Turn;
use super::{HUGE, HostPool, PAGE};

/// Arenas about to be pinned: until then other threads do not pin, and callers that take memory wait for the next arena.
#[derive(Debug)]
pub(crate) struct Expected<'a> {
    turn: Turn<'a>,
    arenas: Vec<Bytes>,
}

impl HostPool {
    /// Pins the memory missing for blocks of these sizes, arena by arena, within the budget and while `wanted` returns true. Reclaims no
    /// memory for it. Returns false if another thread pins.
    pub fn prepare_while(&self, blocks: &[Bytes], wanted: impl Fn() -> bool + Sync) -> bool {
        let Some(turn) = self.try_turn() else { return false };
        if let Some(expected) = self.expect_in(turn, blocks) {
            expected.pin(wanted);
        }
        true
    }

    /// Reserves the arenas missing for blocks of these sizes, within the budget. `None` if none is missing, or another thread pins.
    pub(crate) fn expect(&self, blocks: &[Bytes]) -> Option<Expected<'_>> {
        self.expect_in(self.try_turn()?, blocks)
    }

    fn expect_in<'a>(&self, turn: Turn<'a>, blocks: &[Bytes]) -> Option<Expected<'a>> {
        self.absorb();
        let (free, room) = (self.core.lock().free.total(), self.options.budget.room());
        let arenas = arenas(blocks, free, self.options.arena, room);
        (!arenas.is_empty()).then_some(Expected { turn, arenas })
    }
}

impl Expected<'_> {
    /// Pins the arenas while `wanted` returns true. Ends at the first failure, which callers that take memory will see.
    pub(crate) fn pin(self, wanted: impl Fn() -> bool + Sync) {
        if let Err(error) = self.turn.pool().pin(&self.arenas, wanted) {
            tracing::debug!(target: "glake::host", %error, "no memory is pinned ahead");
        }
    }
}

/// Returns the sizes of arenas for blocks taken in this order, in addition to the free memory. A block lies in one arena.
fn arenas(blocks: &[Bytes], free: Bytes, arena: Bytes, room: Bytes) -> Vec<Bytes> {
    let (mut free, mut room, mut left) = (free, room, Bytes::ZERO);
    let mut found = Vec::new();
    for block in blocks {
        let Some(block) = (*block).max(PAGE).align_up(PAGE) else { break };
        if let Some(rest) = free.checked_sub(block) {
            free = rest;
        } else if let Some(rest) = left.checked_sub(block) {
            left = rest;
        } else {
            let size = arena.max(block).align_up(HUGE).filter(|size| *size <= room);
            let Some(size) = size.or(block.align_up(HUGE)).filter(|size| *size <= room) else { break };
            found.push(size);
            room = room.saturating_sub(size);
            left = size.saturating_sub(block);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(blocks: &[u64], free: u64, room: u64) -> Vec<u64> {
        let blocks: Vec<Bytes> = blocks.iter().copied().map(Bytes::mib).collect();
        let found = arenas(&blocks, Bytes::mib(free), Bytes::mib(256), Bytes::mib(room));
        found.into_iter().map(|size| size.get() >> 20).collect()
    }

    #[test]
    fn blocks_lie_in_one_arena_each() {
        assert_eq!(of(&[], 0, 4096), []);
        assert_eq!(of(&[128; 4], 0, 4096), [256, 256]);
        assert_eq!(of(&[100; 4], 0, 4096), [256, 256]);
        assert_eq!(of(&[200; 3], 0, 4096), [256; 3]);
        assert_eq!(of(&[300, 20], 0, 4096), [300, 256]);
    }

    #[test]
    fn what_is_free_and_the_budget_count() {
        assert_eq!(of(&[128; 4], 256, 4096), [256]);
        assert_eq!(of(&[128; 4], 512, 4096), []);
        assert_eq!(of(&[128; 4], 0, 300), [256]);
        assert_eq!(of(&[128; 4], 0, 130), [128]);
        assert_eq!(of(&[128; 4], 0, 100), []);
    }
}
