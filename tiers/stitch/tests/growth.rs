//! The extents of a domain that is large are large.

#![allow(missing_docs)]
// Whatever goes wrong here fails the test.
#![allow(clippy::expect_used, clippy::panic)]

use glake_stitch::{Allocator, DomainId, DomainOptions, Outcome, Request, Settings, Step, StreamKey};
use glake_units::Bytes;

/// Makes a block; the sizes of the extents that were made for it.
fn grow(core: &mut Allocator, domain: DomainId, size: Bytes) -> Vec<Bytes> {
    let request = Request { size, stream: StreamKey(1), domain };
    if core.take(&request).is_some() {
        return Vec::new();
    }
    match core.plan(&request, true) {
        Ok(Outcome::Ready(_)) => Vec::new(),
        Ok(Outcome::Work(plan)) => {
            // A slab is not the block yet.
            let _ = core.commit(plan.id);
            let size = |step: &Step| match step {
                Step::Create { size, .. } => Some(*size),
                _ => None,
            };
            plan.steps.iter().filter_map(size).collect()
        }
        other => panic!("{other:?}"),
    }
}

fn allocator(memory: Bytes) -> Allocator {
    Allocator::new(Settings::for_memory(memory)).expect("the settings are in range")
}

fn region() -> DomainOptions {
    DomainOptions::region(Bytes::mib(128), Bytes::gib(1))
}

#[test]
fn extents_grow_with_their_domain_and_are_a_fourth_of_it_at_most() {
    let mut core = allocator(Bytes::gib(64));
    let domain = core.add_domain(region());
    let (mut made, mut blocks) = (Vec::new(), Bytes::ZERO);
    while blocks < Bytes::gib(16) {
        let new = grow(&mut core, domain, Bytes::mib(256));
        blocks = blocks.saturating_add(Bytes::mib(256));
        if let Some(largest) = new.iter().max() {
            let part = Bytes::new(blocks.get() / 4).max(Bytes::mib(256));
            assert!(*largest <= part, "{largest} of {blocks}");
        }
        made.extend(new);
    }
    let count = |size| made.iter().filter(|made| **made == size).count();
    assert_eq!([256, 512, 1024].map(|mib| count(Bytes::mib(mib))), [7, 4, 13]);
    assert_eq!(made.iter().copied().sum::<Bytes>(), Bytes::mib(7 * 256 + 4 * 512 + 13 * 1024));
    core.check().expect("it is consistent");
}

#[test]
fn one_large_block_takes_large_extents_and_small_ones_share_slabs() {
    let mut core = allocator(Bytes::gib(64));
    let domain = core.add_domain(region());
    assert_eq!(grow(&mut core, domain, Bytes::gib(8)), [Bytes::gib(1); 8]);
    assert_eq!(grow(&mut core, domain, Bytes::kib(64)), [Bytes::mib(128)], "however large the domain is");
}

#[test]
fn where_a_large_extent_does_not_fit_smaller_ones_are_made() {
    let mut core = allocator(Bytes::mib(8 * 1024 + 700));
    let domain = core.add_domain(region());
    grow(&mut core, domain, Bytes::gib(8));
    assert_eq!(grow(&mut core, domain, Bytes::mib(256)), [Bytes::mib(512)]);
    assert_eq!(grow(&mut core, domain, Bytes::mib(256)), [], "of the same");
    assert_eq!(grow(&mut core, domain, Bytes::mib(100)), [Bytes::mib(128)]);
    core.check().expect("it is consistent");
}
