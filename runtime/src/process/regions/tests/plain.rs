//! Plain memory beside regions and private pools.

use glake_device::PointerKind;

use super::*;
use crate::process::SegmentView;

const POOL: PoolId = PoolId(0, 7);

impl Process {
    fn plain(&self, size: Bytes, seed: u64) -> Written {
        self.regions().enter_plain();
        let written = self.written(0, size, seed);
        self.regions().leave_plain().unwrap();
        written
    }

    fn is_mapped(&self, written: &Written) -> bool {
        let attributes = self.driver().pointer_attributes(written.address).unwrap();
        let PointerKind::Device { mapped, .. } = attributes.kind else { panic!("{attributes:?}") };
        mapped
    }
}

#[test]
fn plain_memory_stays_while_everything_else_leaves() {
    let process = started("");
    process.regions().define(RegionOptions::of("weights")).unwrap();
    let weights = process.written_in("weights", 0, mib(12), 1);
    let plain = process.plain(mib(12), 2);
    let other = process.written(0, mib(12), 3);
    assert_eq!([&weights, &plain, &other].map(|block| process.is_mapped(block)), [true, false, true]);
    assert_eq!(process.regions().tag_of(plain.address), None);
    assert_eq!(process.find(plain.address).unwrap().requested, mib(12));
    let held = process.reserved(0);
    assert!(held >= mib(36));
    process.regions().fix(plain.address, true).unwrap();
    process.regions().fix(plain.address, false).unwrap();
    for refused in [
        process.regions().decommit(plain.address, mib(2)).unwrap_err(),
        process.offload().offload(STREAM, plain.address, mib(1)).unwrap_err(),
    ] {
        let text = refused.to_string();
        assert!(text.contains("is plain") || text.contains("cannot be offloaded"), "{text}");
    }
    let report = process.regions().shrink(&Shrink::default()).unwrap();
    assert!(report.freed >= mib(24));
    assert!(process.reserved(0) >= mib(12) && process.reserved(0) < mib(20), "{:?}", process.reserved(0));
    let usage = process.regions().memory_usage().unwrap();
    assert!(
        usage.iter().any(|used| used.holder.contains("plain memory") && used.bytes >= mib(12)),
        "{usage:?}"
    );
    process.check(&plain);
    // Nothing has to come back for it.
    let next = process.plain(mib(3), 4);
    assert!(process.flags.is_any_evicted());
    process.free(next.address).unwrap();
    process.regions().refill(&Refill::default()).unwrap();
    [&weights, &plain, &other].into_iter().for_each(|block| process.check(block));
    process.end([weights, plain, other]);
}

#[test]
fn the_entry_that_was_made_last_applies() {
    let process = started("");
    process.regions().define(RegionOptions::of("r")).unwrap();
    process.regions().enter("r").unwrap();
    let plain = process.plain(mib(2), 1);
    process.regions().enter_plain();
    let inner = process.written_in("r", 0, mib(2), 2);
    let still = process.written(0, mib(2), 3);
    process.regions().leave().unwrap();
    let after = process.written(0, mib(2), 4);
    process.regions().leave_plain().unwrap();
    assert!(process.regions().leave_plain().unwrap_err().says("allocates no plain memory"));
    assert!(process.regions().leave().unwrap_err().says("this thread is in no region"));
    let blocks = [plain, inner, still, after];
    assert_eq!(blocks.each_ref().map(|block| process.is_mapped(block)), [false, true, false, false]);
    process.end(blocks);
}

#[test]
fn plain_memory_of_a_private_pool_belongs_to_the_pool() {
    let process = started("");
    process.pools().begin(0, POOL, None).unwrap();
    let mapped = process.written(0, mib(4), 1);
    let plain = process.plain(mib(4), 2);
    process.pools().end(0, POOL).unwrap();
    let outside = process.plain(mib(4), 3);
    let blocks = || {
        let mut blocks = Vec::new();
        process.pools().blocks(0, POOL, |address, _| blocks.push(address)).unwrap();
        blocks
    };
    let mut own = [mapped.address, plain.address];
    own.sort_unstable();
    assert_eq!(blocks(), own);
    let segments = process.reports().segments(0).unwrap();
    let pool_of = |written: &Written| {
        let holds = |segment: &&SegmentView| {
            segment.blocks.iter().any(|block| block.live && block.address == written.address)
        };
        segments.iter().find(holds).unwrap().pool
    };
    assert_eq!([&mapped, &plain, &outside].map(pool_of), [POOL, POOL, PoolId::default()]);
    let then = process.pools().checkpoint(0, POOL).unwrap();
    process.free(plain.address).unwrap();
    assert_eq!(blocks(), [mapped.address]);
    process.restore(&then).unwrap();
    assert_eq!(blocks(), own);
    process.pools().release(0, POOL).unwrap();
    process.pools().release(0, POOL).unwrap_err();
    process.end([mapped, plain, outside]);
}
