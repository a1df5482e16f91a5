//! Memory that other streams may still use is released once its own completion point has passed.

#![allow(missing_docs)]
// A panic fails the test.
#![allow(clippy::expect_used, clippy::panic)]

use glake_stitch::{Allocator, Claim, Outcome, Request, Settings, StreamKey};
use glake_units::Bytes;

const OWNER: StreamKey = StreamKey(1);
const OTHER: StreamKey = StreamKey(0);

/// Returns the offset of a new block.
fn block(core: &mut Allocator, size: Bytes) -> Bytes {
    let request = Request { size, stream: OWNER, domain: Allocator::default_domain() };
    if let Some(grant) = core.take(&request) {
        return grant.offset;
    }
    match core.plan(&request, true) {
        Ok(Outcome::Ready(grant)) => grant.offset,
        Ok(Outcome::Work(plan)) => core.commit(plan.id).expect("it was planned for").offset,
        other => panic!("{other:?}"),
    }
}

#[test]
fn memory_around_a_claim_waits_for_no_later_point() {
    let settings = Settings { extent: Bytes::mib(8), ..Settings::for_memory(Bytes::mib(256)) };
    let mut core = Allocator::new(settings).expect("the settings are in range");
    let size = Bytes::mib(8);
    let (early, late) = (block(&mut core, size), block(&mut core, size));
    for block in [early, late] {
        assert!(core.record_stream(block, OTHER));
    }
    core.free(early).expect("it is live");
    let first = core.close_point();
    core.free(late).expect("it is live");
    core.close_point();
    let (offset, size) = (Bytes::new(early.get() + (3 << 20)), Bytes::mib(2));
    let claim = Claim { offset, size, requested: size, stream: OTHER, slab: None };
    core.claim(Allocator::default_domain(), &claim).expect("nothing of it is live");
    core.pass_point(first);
    let segments = core.report().segments();
    let withheld = segments.iter().flat_map(|segment| &segment.blocks).filter(|block| block.withheld);
    let withheld: Vec<(Bytes, Bytes)> = withheld.map(|block| (block.offset, block.size)).collect();
    assert_eq!(withheld, [(late, Bytes::mib(8))]);
}
