//! Blocks with holds on them when they are freed.

#![allow(missing_docs)]
// A panic fails the test.
#![allow(clippy::unwrap_used, clippy::panic)]

use glake_stitch::{Allocator, Grant, HoldId, Outcome, Request, Settings, StreamKey, Wait};
use glake_units::Bytes;

const EXTENT: Bytes = Bytes::mib(8);

/// Creates an allocator whose limit is `extents` extents.
fn core(extents: u64) -> Allocator {
    let settings = Settings {
        extent: EXTENT,
        limit: Bytes::new(extents * EXTENT.get()),
        near_limit: 1.0,
        near_full: 1.0,
        ..Settings::for_memory(Bytes::mib(256))
    };
    Allocator::new(settings).unwrap()
}

fn request(mib: u64, stream: u64) -> Request {
    Request { size: Bytes::mib(mib), stream: StreamKey(stream), domain: Allocator::default_domain() }
}

/// Serves a request, with the driver's work done; `None` if it has to wait on the host.
fn ask(core: &mut Allocator, request: &Request) -> Option<Grant> {
    if let Some(grant) = core.take(request) {
        return Some(grant);
    }
    loop {
        match core.plan(request, true).unwrap() {
            Outcome::Ready(grant) => return Some(grant),
            Outcome::Work(plan) => {
                if let Some(grant) = core.commit(plan.id) {
                    return Some(grant);
                }
            }
            Outcome::Wait(_) => return None,
        }
    }
}

fn hold(core: &mut Allocator, grant: &Grant) -> HoldId {
    let generation = core.generation(grant.offset).unwrap();
    core.hold(grant.offset, generation).unwrap()
}

#[test]
fn a_hold_has_no_effect_on_a_live_block_or_after_it_has_passed() {
    let mut core = core(2);
    let grant = ask(&mut core, &request(8, 1)).unwrap();
    let held = hold(&mut core, &grant);
    core.pass_hold(held);
    core.free(grant.offset).unwrap();
    assert_eq!(core.held_bytes(), Bytes::ZERO);
    assert_eq!(core.take(&request(8, 1)), Some(grant), "its own again, as if nothing had been");
}

#[test]
fn held_bytes_are_taken_at_the_limit_behind_a_wait() {
    let mut core = core(2);
    let grant = ask(&mut core, &request(8, 1)).unwrap();
    let held = hold(&mut core, &grant);
    core.free(grant.offset).unwrap();
    assert_eq!(core.held_bytes(), EXTENT);
    assert!(core.take(&request(8, 1)).is_none(), "a hit is never held");
    let other = ask(&mut core, &request(8, 1)).unwrap();
    assert!(other.offset != grant.offset && other.waits.is_empty(), "there was other memory");
    let again = ask(&mut core, &request(8, 1)).unwrap();
    assert_eq!((again.offset, &again.waits[..]), (grant.offset, &[Wait::Hold(held)][..]));
    assert_eq!((core.held_bytes(), core.counters().hold_waits), (Bytes::ZERO, 1));
    core.free(again.offset).unwrap();
    assert!(core.take(&request(8, 1)).is_some(), "its stream is behind the hold");
}

#[test]
fn another_stream_and_a_trim_wait_for_the_completion_point() {
    let mut core = core(1);
    let grant = ask(&mut core, &request(8, 1)).unwrap();
    let held = hold(&mut core, &grant);
    core.free(grant.offset).unwrap();
    assert!(core.plan_trim(Bytes::ZERO).is_none(), "not unmapped");
    let extents = core.extents().of(Allocator::default_domain());
    core.evictions().begin(extents[0].extent).unwrap_err();
    assert!(ask(&mut core, &request(8, 2)).is_none(), "not another stream's");
    core.pass_hold(held);
    assert!(core.plan_trim(Bytes::ZERO).is_none(), "its stream's work may still run");
    assert!(ask(&mut core, &request(8, 2)).is_none());
    assert!(core.take(&request(8, 1)).is_some(), "its stream's own");
}

#[test]
fn a_completion_point_implies_every_hold() {
    let mut core = core(1);
    let grant = ask(&mut core, &request(8, 1)).unwrap();
    let held = hold(&mut core, &grant);
    core.free(grant.offset).unwrap();
    let point = core.close_point();
    core.pass_point(point);
    assert_eq!(core.held_bytes(), Bytes::ZERO);
    let again = ask(&mut core, &request(8, 2)).unwrap();
    assert!(again.waits.is_empty());
    core.pass_hold(held);
    core.check().unwrap();
}

#[test]
fn a_stream_waits_for_all_holds_on_a_block() {
    let mut core = core(1);
    let grant = ask(&mut core, &request(8, 1)).unwrap();
    let holds = [(); 3].map(|()| hold(&mut core, &grant));
    core.free(grant.offset).unwrap();
    core.pass_hold(holds[1]);
    let half = ask(&mut core, &request(4, 1)).unwrap();
    let mut waits = half.waits.to_vec();
    waits.sort_by_key(|wait| if let Wait::Hold(hold) = wait { hold.0 } else { 0 });
    assert_eq!(waits, [Wait::Hold(holds[0]), Wait::Hold(holds[2])]);
    core.pass_hold(holds[0]);
    assert_eq!(core.held_bytes(), Bytes::mib(4), "the other half is held still");
    core.pass_hold(holds[2]);
    assert_eq!(core.held_bytes(), Bytes::ZERO);
    core.check().unwrap();
}

#[test]
fn at_the_limit_held_memory_comes_before_new_mappings() {
    for (extents, waits) in [(6, true), (8, false)] {
        let mut core = core(extents);
        let parts = [8, 8, 8, 8, 16].map(|mib| ask(&mut core, &request(mib, 1)).unwrap());
        let held = hold(&mut core, &parts[4]);
        for index in [0, 2, 4] {
            core.free(parts[index].offset).unwrap();
        }
        let before = core.counters();
        let again = ask(&mut core, &request(16, 1)).unwrap();
        if waits {
            assert_eq!((again.offset, &again.waits[..]), (parts[4].offset, &[Wait::Hold(held)][..]));
            assert_eq!(core.counters().extent_maps, before.extent_maps, "nothing is mapped");
        } else {
            assert!(again.waits.is_empty(), "there is other memory: {again:?}");
        }
        core.check().unwrap();
    }
}

#[test]
fn held_pieces_are_stitched_and_joined_with_free_ones() {
    let mut core = core(4);
    let blocks: Vec<Grant> = (0..4).map(|_| ask(&mut core, &request(8, 1)).unwrap()).collect();
    let holds = [0, 2].map(|index: usize| hold(&mut core, &blocks[index]));
    for index in [0, 2] {
        core.free(blocks[index].offset).unwrap();
    }
    let stitched = ask(&mut core, &request(16, 1)).unwrap();
    assert!(holds.iter().all(|hold| stitched.waits.contains(&Wait::Hold(*hold))), "{stitched:?}");
    core.check().unwrap();
    let held = hold(&mut core, &stitched);
    core.free(stitched.offset).unwrap();
    assert_eq!(core.held_bytes(), Bytes::mib(16));
    core.pass_hold(held);
    assert_eq!(core.held_bytes(), Bytes::ZERO);
    core.free(blocks[1].offset).unwrap();
    let joined = ask(&mut core, &request(24, 1)).unwrap();
    assert!(joined.waits.is_empty(), "{joined:?}");
    core.check().unwrap();
}

#[test]
fn an_aborted_plan_puts_held_pieces_back_by_their_current_state() {
    for passes in [false, true] {
        let mut core = core(4);
        let blocks: Vec<Grant> = (0..4).map(|_| ask(&mut core, &request(8, 1)).unwrap()).collect();
        let holds = [0, 2].map(|index: usize| hold(&mut core, &blocks[index]));
        for index in [0, 2] {
            core.free(blocks[index].offset).unwrap();
        }
        let Ok(Outcome::Work(plan)) = core.plan(&request(16, 1), true) else { panic!("it is stitched") };
        if passes {
            holds.into_iter().for_each(|hold| core.pass_hold(hold));
        }
        core.abort(plan.id);
        core.check().unwrap();
        assert_eq!(core.held_bytes(), Bytes::mib(if passes { 0 } else { 16 }));
        assert_eq!(core.take(&request(8, 1)).is_some(), passes);
    }
}

#[test]
fn recorded_streams_and_the_completion_point_decide_beside_holds() {
    let mut core = core(1);
    let grant = ask(&mut core, &request(8, 1)).unwrap();
    let held = hold(&mut core, &grant);
    assert!(core.record_stream(grant.offset, StreamKey(2)));
    core.free(grant.offset).unwrap();
    assert!(ask(&mut core, &request(8, 1)).is_none(), "recorded on another stream");
    core.pass_hold(held);
    assert!(ask(&mut core, &request(8, 1)).is_none());
    let [used] = core.take_uses()[..] else { panic!("one stream") };
    core.pass_hold(used.hold);
    assert_eq!(core.take(&request(8, 1)).map(|again| again.offset), Some(grant.offset));
}

#[test]
fn a_small_block_returns_to_its_stream_when_its_holds_have_passed() {
    let mut core = core(1);
    let small = Request { size: Bytes::kib(512), ..request(0, 1) };
    let grant = ask(&mut core, &small).unwrap();
    let held = hold(&mut core, &grant);
    core.free(grant.offset).unwrap();
    let other = core.take(&small).unwrap();
    assert!(other.offset != grant.offset && other.waits.is_empty(), "no stream waits for parts of slabs");
    core.pass_hold(held);
    assert!(core.take(&small).is_some_and(|again| again.offset == grant.offset));
    core.check().unwrap();
}
