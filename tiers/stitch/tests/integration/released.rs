//! Memory of a dropped graph: a replay may still run, and writes to all memory that the graph had.

#![allow(missing_docs)]
// A panic fails the test.
#![allow(clippy::expect_used, clippy::panic)]

use glake_stitch::{Allocator, DomainId, DomainOptions, Outcome, Request, Settings, StitchError, StreamKey};
use glake_units::Bytes;

const OWNER: StreamKey = StreamKey(1);
const OTHER: StreamKey = StreamKey(0);

/// Freed memory of a graph, before the graph is dropped.
#[derive(Clone, Copy, Debug)]
enum Freed {
    Plain,
    /// Memory that other streams used.
    Recorded,
    /// Slabs, which stay open for their stream.
    Small,
    /// Memory that was contiguous only at other addresses.
    Stitched,
}

fn core() -> Allocator {
    Allocator::new(Settings { extent: Bytes::mib(8), ..Settings::for_memory(Bytes::mib(256)) })
        .expect("the settings are in range")
}

fn block(core: &mut Allocator, domain: DomainId, size: Bytes) -> Bytes {
    let request = Request { size, stream: OWNER, domain };
    loop {
        if let Some(grant) = core.take(&request) {
            return grant.offset;
        }
        match core.plan(&request, true) {
            Ok(Outcome::Ready(grant)) => return grant.offset,
            Ok(Outcome::Work(plan)) => match core.commit(plan.id) {
                Some(grant) => return grant.offset,
                None => continue,
            },
            other => panic!("{other:?}"),
        }
    }
}

/// Releases all releasable memory; returns whether there was any.
fn trimmed(core: &mut Allocator) -> bool {
    let mut any = false;
    while let Some(plan) = core.plan_trim(Bytes::ZERO).or_else(|| core.plan_collection(Bytes::ZERO)) {
        assert_eq!(core.commit(plan.id), None);
        any = true;
    }
    any
}

#[test]
fn memory_stays_until_work_running_at_the_release_is_done() {
    for freed in [Freed::Plain, Freed::Recorded, Freed::Small, Freed::Stitched] {
        let mut core = core();
        let stitched = matches!(freed, Freed::Stitched);
        let domain = core.add_domain(match stitched {
            true => DomainOptions::default(),
            false => DomainOptions::private_pool(),
        });
        let size = if matches!(freed, Freed::Small) { Bytes::kib(64) } else { Bytes::mib(8) };
        let blocks: Vec<Bytes> = (0..4).map(|_| block(&mut core, domain, size)).collect();
        if stitched {
            core.free(blocks[0]).expect("it is live");
            core.free(blocks[2]).expect("it is live");
            let alias = block(&mut core, domain, Bytes::mib(16));
            core.keep_addresses(domain);
            core.free(alias).expect("it is live");
        }
        for &block in if stitched { &[][..] } else { &blocks } {
            if matches!(freed, Freed::Recorded) {
                assert!(core.record_stream(block, OTHER));
            }
            core.free(block).expect("it is live");
        }
        let early = core.close_point();
        // The graph is launched, and dropped.
        core.release_domain(domain).expect("it exists");
        core.pass_point(early);
        assert!(!trimmed(&mut core), "{freed:?}: the replay runs");
        let late = core.close_point();
        core.pass_point(late);
        assert!(trimmed(&mut core), "{freed:?}: it is done");
    }
}

#[test]
fn a_domain_released_during_a_plan_lives_until_the_plan_ends() {
    for commit in [false, true] {
        for size in [Bytes::kib(64), Bytes::mib(24)] {
            let mut core = core();
            let domain = core.add_domain(DomainOptions::private_pool());
            let request = Request { size, stream: OWNER, domain };
            let Ok(Outcome::Work(plan)) = core.plan(&request, true) else { panic!("nothing is there yet") };
            core.release_domain(domain).expect("it exists");
            match commit {
                true => {
                    if let Some(grant) = core.commit(plan.id) {
                        core.free(grant.offset).expect("it is live");
                    }
                }
                false => core.abort(plan.id),
            }
            let unknown = core.plan(&request, true);
            assert_eq!(unknown, Err(StitchError::UnknownDomain { domain }), "nothing new is taken from it");
            let last = core.close_point();
            core.pass_point(last);
            assert_eq!(trimmed(&mut core), commit);
            assert_eq!(core.reserved_bytes(), Bytes::ZERO);
            core.check().expect("it holds");
        }
    }
}
