//! Blocks made live again at their earlier addresses: the restore of a private pool's checkpoint.
//!
//! ```text
//! checkpoint:  [ a ][ b ]      [ c ]          live then
//! now:         [ a ]     [    d    ]          live now
//! restore:     a stays, d is freed, b and c are claimed
//! ```

use glake_units::Bytes;
use rustc_hash::FxHashMap;

use crate::ids::StreamKey;
use crate::view::LiveBlock;

/// Request to make a block live at one fixed place of home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Start of the block, from the start of the reservation.
    pub offset: Bytes,
    /// Size of the block: a multiple of 512 bytes.
    pub size: Bytes,
    /// Requested size; at most `size`.
    pub requested: Bytes,
    /// Stream that the block returns to when freed.
    pub stream: StreamKey,
    /// Start of the slab to open for a small block, if known.
    pub slab: Option<Bytes>,
}

/// Result of a restore. A block that is live both before and after is in both lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// Blocks that were live before the restore.
    pub freed: Vec<LiveBlock>,
    /// Blocks that are live after the restore.
    pub claimed: Vec<LiveBlock>,
}

impl Claim {
    /// Returns the blocks to free (live now, not in the checkpoint) and the blocks to claim (in the checkpoint, not live now).
    pub(crate) fn differences(now: &[Claim], then: &[Claim]) -> (Vec<Claim>, Vec<Claim>) {
        let without = |these: &[Claim], those: &[Claim]| {
            let those: FxHashMap<Bytes, &Claim> = those.iter().map(|claim| (claim.offset, claim)).collect();
            these.iter().filter(|claim| those.get(&claim.offset) != Some(claim)).copied().collect()
        };
        (without(now, then), without(then, now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restore_changes_only_the_differences() {
        let claim = |at: u64, stream| Claim {
            offset: Bytes::new(at),
            size: Bytes::kib(1),
            requested: Bytes::kib(1),
            stream: StreamKey(stream),
            slab: None,
        };
        let (now, then) = ([claim(0, 0), claim(4096, 0), claim(8192, 0)], [claim(0, 0), claim(4096, 1)]);
        let (goes, comes) = Claim::differences(&now, &then);
        assert_eq!((goes, comes), (vec![now[1], now[2]], vec![then[1]]));
    }
}
