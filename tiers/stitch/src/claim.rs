//! Blocks made live again at an address of before: what a private pool's checkpoint is restored with.
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

/// A block to be made live at home, at one place and no other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Where it shall begin, from the start of the reservation.
    pub offset: Bytes,
    /// How long it shall be: a multiple of 512.
    pub size: Bytes,
    /// What it is asked for: not more.
    pub requested: Bytes,
    /// The stream that it shall go back to.
    pub stream: StreamKey,
    /// Small blocks: where the slab begins that is opened for it, if that is known.
    pub slab: Option<Bytes>,
}

/// What a restore has done. A block that was live then and is live now stays, and is in both lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// Live before.
    pub freed: Vec<LiveBlock>,
    /// Live after.
    pub claimed: Vec<LiveBlock>,
}

impl Claim {
    /// Of what is live now, what is not in a checkpoint; and of the checkpoint, what is not live now.
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
    fn only_what_differs_goes_and_comes() {
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
