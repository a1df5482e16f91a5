//! Who has which addresses: written out in the plainest way.

use std::collections::BTreeMap;

use glake_stitch::{DomainId, SegmentKind};
use glake_tiers::{Block, GpuPool};

/// Every live block by where it begins.
#[derive(Debug, Default)]
pub struct Ledger {
    live: BTreeMap<u64, (u64, DomainId)>,
}

impl Ledger {
    /// Notes a block that was handed out.
    ///
    /// # Panics
    /// It shares an address with one that is live.
    pub fn take(&mut self, block: Block, domain: DomainId) {
        let (start, end) = (block.address.0, block.address.0 + block.size.get());
        let before = self.live.range(..end).next_back();
        assert!(before.is_none_or(|(_, (other, _))| *other <= start), "{block:?} lies over {before:x?}");
        self.live.insert(start, (end, domain));
    }

    /// Notes that a block is about to be freed.
    ///
    /// # Panics
    /// It is not live.
    pub fn give(&mut self, block: Block) {
        let known = self.live.remove(&block.address.0);
        assert!(known.is_some_and(|(end, _)| end == block.address.0 + block.size.get()), "{block:?}");
    }

    /// Compares with what the pool says: every block lies in one segment, which is of its domain, and segments lie apart.
    ///
    /// # Panics
    /// It differs.
    pub fn compare(&self, pool: &GpuPool) {
        let mut segments = pool.report().segments();
        segments.sort_by_key(|segment| segment.offset);
        let apart =
            segments.windows(2).all(|two| two[0].offset.get() + two[0].size.get() <= two[1].offset.get());
        assert!(apart, "segments share addresses");
        for (&start, &(end, domain)) in &self.live {
            let (start, end) = (start - pool.base().0, end - pool.base().0);
            let at = segments.partition_point(|segment| segment.offset.get() <= start);
            let segment = at.checked_sub(1).map(|at| &segments[at]);
            let holds = segment.is_some_and(|segment| {
                segment.domain == domain && end <= segment.offset.get() + segment.size.get()
            });
            assert!(holds, "{start:#x}..{end:#x} of {domain:?} lies in {segment:?}");
        }
        let home = segments.iter().filter(|segment| segment.kind != SegmentKind::Stitched);
        let held: u64 = home.map(|segment| segment.size.get()).sum();
        assert_eq!(held, pool.reserved().get(), "segments at home are what is reserved");
        let blocks = segments.iter().flat_map(|segment| &segment.blocks).filter(|block| block.live);
        assert_eq!(blocks.count(), self.live.len());
    }
}
