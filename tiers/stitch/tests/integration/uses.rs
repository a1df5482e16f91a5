//! Blocks that other streams still use when they are freed.

#![allow(missing_docs)]
// A panic fails the test.
#![allow(clippy::unwrap_used, clippy::panic)]

use glake_stitch::{
    Allocator, Claim, Grant, HoldId, Outcome, PointNumber, Request, Settings, StreamKey, StreamUse,
};
use glake_units::Bytes;

const OWN: StreamKey = StreamKey(1);
const SIDE: StreamKey = StreamKey(2);
const OTHER: StreamKey = StreamKey(3);
const SMALL: Bytes = Bytes::kib(512);
const LARGE: Bytes = Bytes::mib(8);

fn core(limit: Bytes) -> Allocator {
    let settings = Settings {
        extent: LARGE,
        limit,
        near_limit: 1.0,
        near_full: 1.0,
        ..Settings::for_memory(Bytes::mib(256))
    };
    Allocator::new(settings).unwrap()
}

fn request(size: Bytes, stream: StreamKey) -> Request {
    Request { size, stream, domain: Allocator::default_domain() }
}

/// Result of a request: a block, or the completion point to wait for.
fn ask(core: &mut Allocator, size: Bytes, stream: StreamKey) -> Result<Grant, PointNumber> {
    let request = request(size, stream);
    if let Some(grant) = core.take(&request) {
        return Ok(grant);
    }
    loop {
        match core.plan(&request, true).unwrap() {
            Outcome::Ready(grant) => return Ok(grant),
            Outcome::Work(plan) => {
                if let Some(grant) = core.commit(plan.id) {
                    return Ok(grant);
                }
            }
            Outcome::Wait(point) => return Err(point),
        }
    }
}

fn pass(core: &mut Allocator, uses: &[StreamUse]) {
    uses.iter().for_each(|used| core.pass_hold(used.hold));
}

/// Allocates a block, records it on other streams and frees it.
fn freed(core: &mut Allocator, size: Bytes, on: &[StreamKey]) -> (Grant, Vec<StreamUse>) {
    let grant = ask(core, size, OWN).unwrap();
    on.iter().for_each(|&stream| assert!(core.record_stream(grant.offset, stream)));
    core.free(grant.offset).unwrap();
    (grant, core.take_uses())
}

fn active(core: &mut Allocator) -> (u64, u64) {
    let all = core.stats().all;
    (all.active.current, all.active_bytes.current)
}

#[test]
fn a_loop_with_completed_uses_reserves_one_block_without_a_completion_point() {
    for size in [SMALL, LARGE, Bytes::mib(20)] {
        let mut core = core(Bytes::mib(256));
        let mut before = None;
        for _ in 0..120 {
            let (grant, uses) = freed(&mut core, size, &[SIDE]);
            core.close_point();
            assert_eq!(active(&mut core), (1, size.get()), "in use until its stream is done");
            pass(&mut core, &uses);
            assert_eq!(active(&mut core), (0, 0));
            core.check().unwrap();
            assert_eq!(*before.get_or_insert(grant.offset), grant.offset);
        }
        assert!(core.reserved_bytes() <= size.max(LARGE).saturating_add(LARGE), "{}", core.reserved_bytes());
    }
}

#[test]
fn a_block_waits_for_every_recorded_stream_but_its_own() {
    for size in [SMALL, LARGE] {
        let mut core = core(LARGE);
        let (grant, uses) = freed(&mut core, size, &[SIDE, OWN, OTHER, SIDE]);
        let streams: Vec<StreamKey> = uses.iter().map(|used| used.stream).collect();
        assert_eq!(streams, [SIDE, OTHER], "one use a stream");
        let is_free = |core: &mut Allocator| {
            let again = core.take(&request(size, OWN)).filter(|again| again.offset == grant.offset);
            again.is_some_and(|again| core.free(again.offset).is_ok())
        };
        assert!(!is_free(&mut core));
        core.pass_hold(uses[1].hold);
        assert!(!is_free(&mut core), "one of two is done");
        pass(&mut core, &uses);
        assert!(is_free(&mut core));
    }
}

#[test]
fn memory_back_with_its_stream_is_not_lent_or_unmapped_before_the_point() {
    let mut core = core(LARGE);
    let (grant, uses) = freed(&mut core, LARGE, &[SIDE]);
    let extents = core.extents().of(Allocator::default_domain());
    core.evictions().begin(extents[0].extent).unwrap_err();
    pass(&mut core, &uses);
    let point = ask(&mut core, LARGE, SIDE).unwrap_err();
    assert_eq!(ask(&mut core, LARGE, OTHER).unwrap_err(), point);
    assert!(core.plan_trim(Bytes::ZERO).is_none(), "its own stream's work may still run");
    core.close_point();
    core.pass_point(point);
    assert_eq!(ask(&mut core, LARGE, OTHER).unwrap().offset, grant.offset);
}

#[test]
fn a_use_without_an_event_ends_with_the_point() {
    for size in [SMALL, LARGE] {
        let mut core = core(LARGE);
        let (grant, uses) = freed(&mut core, size, &[SIDE]);
        let point = core.close_point();
        core.pass_point(point);
        assert_eq!(core.take(&request(size, OWN)).map(|again| again.offset), Some(grant.offset));
        pass(&mut core, &uses);
        core.check().unwrap();
        assert!(core.take_uses().is_empty());
    }
}

#[test]
fn unknown_work_ends_only_with_the_point() {
    let mut core = core(LARGE);
    let (_, uses) = freed(&mut core, LARGE, &[SIDE, StreamKey::UNKNOWN]);
    assert!(uses.is_empty(), "{uses:?}");
    let point = ask(&mut core, LARGE, OWN).unwrap_err();
    assert!(core.withheld_by(&request(LARGE, OWN), point).is_empty());
    core.close_point();
    core.pass_point(point);
    ask(&mut core, LARGE, OWN).unwrap();
}

#[test]
fn a_stitched_block_is_whole_again_at_once() {
    let mut core = core(Bytes::mib(32));
    let blocks: Vec<Grant> = (0..4).map(|_| ask(&mut core, LARGE, OWN).unwrap()).collect();
    for index in [0, 2] {
        core.free(blocks[index].offset).unwrap();
    }
    let (stitched, uses) = freed(&mut core, Bytes::mib(16), &[SIDE, OTHER]);
    assert!(stitched.offset > blocks[3].offset && uses.len() == 2);
    core.pass_hold(uses[0].hold);
    assert!(ask(&mut core, LARGE, OWN).is_err());
    core.pass_hold(uses[1].hold);
    core.check().unwrap();
    assert_eq!(active(&mut core).0, 2);
    assert_eq!(ask(&mut core, Bytes::mib(16), OWN).unwrap().offset, stitched.offset);
}

#[test]
fn a_refused_request_knows_the_holds_it_could_wait_for() {
    let mut core = core(Bytes::mib(16));
    let (_, own) = freed(&mut core, LARGE, &[SIDE]);
    let point = core.close_point();
    let (_, later) = freed(&mut core, LARGE, &[SIDE]);
    let holds = |core: &Allocator, stream, upto: PointNumber| -> Vec<HoldId> {
        core.withheld_by(&request(LARGE, stream), upto)
    };
    assert_eq!(holds(&core, OWN, point), [own[0].hold]);
    assert_eq!(holds(&core, OWN, PointNumber(point.0 + 1)).len(), 2);
    assert!(holds(&core, SIDE, point).is_empty(), "another stream's");
    assert_eq!(ask(&mut core, LARGE, OWN).unwrap_err(), point);
    pass(&mut core, &later);
    ask(&mut core, LARGE, OWN).unwrap();
}

#[test]
fn only_the_claimed_part_of_used_memory_waits_for_the_point() {
    let mut core = core(Bytes::mib(16));
    let (grant, uses) = freed(&mut core, Bytes::mib(16), &[SIDE]);
    let (offset, size) = (Bytes::new(grant.offset.get() + (4 << 20)), Bytes::mib(4));
    let claim = Claim { offset, size, requested: size, stream: OWN, slab: None };
    core.claim(Allocator::default_domain(), &claim).unwrap();
    core.free(offset).unwrap();
    assert!(core.take_uses().is_empty(), "nothing tells when");
    pass(&mut core, &uses);
    core.check().unwrap();
    for size in [8, 4].map(Bytes::mib) {
        assert!(ask(&mut core, size, OWN).is_ok(), "what lies around it");
    }
    ask(&mut core, size, OWN).unwrap_err();
}
