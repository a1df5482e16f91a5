//! Bytes go out and come back whatever is slow.

use glake_device::Verb;

use super::*;

/// One block goes out, its memory is another's, it comes back to a third, with something slow at each place.
#[test]
fn bytes_come_back_whatever_is_slow() {
    let late = US(400);
    for slow in 0..16_u32 {
        let at = |bit: u32| if slow & 1 << bit > 0 { late } else { NONE };
        let scene = Scene::new();
        let size = Bytes::mib(15);
        let written = Written { address: scene.malloc(size), size, seed: 7, skipped: 0 };
        scene.write_on(scene.own, written, at(0));
        scene.delay(Direction::FromGpu, at(1));
        let id = scene.offload.offload(scene.own, written.address, size).unwrap();
        scene.free(written.address);
        let between = [(); 2].map(|()| scene.poisoned(size));
        assert!(scene.pool().counters().hold_waits > 0, "the limit asks for what is held");
        scene.free(between[0]);
        let back = Written { address: scene.malloc(size), ..written };
        scene.delay(Direction::ToGpu, at(2));
        scene.write_on(scene.own, Written { seed: 9, ..back }, at(3));
        scene.offload.reload(id, scene.own, back.address).unwrap();
        scene.check_on(scene.own, back, NONE);
        assert_eq!(scene.sim.now(), NONE, "nothing waits on the host");
        scene.offload.release(id).unwrap();
        for address in [between[1], back.address] {
            scene.free(address);
        }
        scene.end();
    }
}

#[test]
fn views_and_ranges_that_overlap_are_copies_of_their_own() {
    let scene = Scene::new();
    let written = scene.written(Bytes::mib(8), 3);
    let parts = [(0, 1 << 20), (100, 1000), (500, 4096), ((1 << 20) - 64, 64)];
    let parts = parts.map(|(from, words)| written.part(from, words));
    let ids = parts.map(|part| scene.offload.offload(scene.own, part.address, part.size).unwrap());
    scene.free(written.address);
    let target = scene.malloc(Bytes::mib(8));
    for (part, id) in parts.into_iter().zip(ids) {
        assert_eq!(scene.offload.size(id).unwrap(), part.size);
        let back = Written { address: Address(target.0 + 512), ..part };
        let fits = part.size < Bytes::mib(8);
        let back = if fits { back } else { Written { address: target, ..part } };
        scene.offload.reload(id, scene.own, back.address).unwrap();
        scene.check_on(scene.own, back, US(1));
        scene.offload.release(id).unwrap();
    }
    scene.free(target);
    scene.end();
}

#[test]
fn it_may_come_back_again_and_be_waited_for_elsewhere() {
    let scene = Scene::new();
    let written = scene.written(Bytes::mib(4), 5);
    let id = scene.offload.offload(scene.own, written.address, written.size).unwrap();
    scene.free(written.address);
    let early = Written { address: scene.malloc(written.size), ..written };
    scene.offload.begin_reload(id, scene.own, early.address).unwrap();
    for stream in [scene.other, scene.own] {
        scene.offload.wait_reload(id, stream).unwrap();
        scene.check_on(stream, early, US(10));
    }
    let again = Written { address: scene.malloc(written.size), ..written };
    scene.offload.reload(id, scene.own, again.address).unwrap();
    scene.check_on(scene.own, again, US(10));
    assert_eq!((scene.stats().copies_out, scene.stats().copies_in), (1, 2));
    scene.offload.release(id).unwrap();
    // The other stream's work is told of, as of any block.
    let other = scene.streams.of(&*scene.sim, GPU, scene.other).unwrap();
    assert!(scene.pool().record_stream(early.address, other));
    for address in [early.address, again.address] {
        scene.free(address);
    }
    scene.end();
}

/// A way back that is begun and never waited for: its memory is nobody's before the copy is done, nor is the host's.
#[test]
fn what_is_given_up_on_its_way_back_is_held() {
    let scene = Scene::new();
    let size = Bytes::mib(15);
    let written = scene.written(size, 5);
    let id = scene.offload.offload(scene.own, written.address, size).unwrap();
    scene.free(written.address);
    let target = scene.malloc(size);
    scene.delay(Direction::ToGpu, US(900));
    scene.offload.begin_reload(id, scene.own, target).unwrap();
    scene.offload.release(id).unwrap();
    scene.free(target);
    let before = scene.pool().counters().hold_waits;
    let [one, two] = [(); 2].map(|()| scene.poisoned(size));
    assert!(scene.pool().counters().hold_waits > before && scene.sim.now() == NONE);
    let next = Written { address: one, size, seed: 6, skipped: 0 };
    scene.write_on(scene.own, next, US(1));
    let id = scene.offload.offload(scene.own, one, size).unwrap();
    scene.offload.reload(id, scene.own, two).unwrap();
    scene.check_on(scene.own, Written { address: two, ..next }, NONE);
    scene.offload.release(id).unwrap();
    for address in [one, two] {
        scene.free(address);
    }
    scene.end();
}

/// A program that never waits runs steps ahead of its GPU: host memory and GPU memory stay those of one step.
#[test]
fn a_loop_that_runs_ahead_needs_no_more_memory() {
    let scene = Scene::new();
    let size = Bytes::mib(4);
    let mut pinned = None;
    for step in 0..8 {
        let packed: Vec<(u64, Written)> = (0..6)
            .map(|layer| {
                let written = scene.written(size, 100 * step + layer);
                let id = scene.offload.offload(scene.own, written.address, size).unwrap();
                scene.free(written.address);
                (id, written)
            })
            .collect();
        for (id, written) in packed.into_iter().rev() {
            let back = Written { address: scene.malloc(size), ..written };
            scene.offload.reload(id, scene.own, back.address).unwrap();
            scene.check_on(scene.own, back, US(20));
            scene.free(back.address);
            scene.offload.release(id).unwrap();
        }
        let now = scene.stats().host_pinned_bytes;
        assert_eq!(*pinned.get_or_insert(now), now, "step {step}");
        assert_eq!(scene.sim.now(), NONE, "nothing waits on the host, step {step}");
    }
    assert_eq!(pinned, Some(24 << 20), "what one step needs");
    scene.run_dry();
    let stats = scene.stats();
    assert_eq!((stats.copies_out, stats.bytes_out), (48, 48 << 22));
    assert_eq!((stats.timed_bytes_out, stats.timed_bytes_in), (stats.bytes_out, stats.bytes_in));
    assert!(stats.busy_us_out > 0 && stats.busy_us_in > 0, "{stats:?}");
    scene.end();
}

#[test]
fn a_shrink_and_a_trim_beside_copies_lose_nothing() {
    let scene = Scene::new();
    let written = scene.written(Bytes::mib(6), 1);
    let stays = scene.written(Bytes::mib(6), 2);
    scene.delay(Direction::FromGpu, US(500));
    let ids = [written, stays].map(|one| scene.offload.offload(scene.own, one.address, one.size).unwrap());
    scene.free(written.address);
    scene.pool().trim(Bytes::ZERO).unwrap();
    scene.offload.trim();
    scene.shrink();
    scene.check_on(scene.own, stays, NONE);
    let back = Written { address: scene.malloc(written.size), ..written };
    scene.delay(Direction::ToGpu, US(500));
    scene.offload.begin_reload(ids[0], scene.own, back.address).unwrap();
    scene.shrink();
    scene.offload.wait_reload(ids[0], scene.own).unwrap();
    scene.check_on(scene.own, back, NONE);
    // What is evicted comes back before it is offloaded.
    scene.regions.shrink(&Shrink::default()).unwrap();
    let evicted = scene.offload.offload(scene.own, stays.address, stays.size).unwrap();
    for id in ids.into_iter().chain([evicted]) {
        scene.offload.release(id).unwrap();
    }
    for address in [stays.address, back.address] {
        scene.free(address);
    }
    scene.end();
}

#[test]
fn host_memory_is_pinned_ahead_and_given_up_to_who_needs_it() {
    let scene = Scene::with(|config| config.tiers.host_budget = Some(Bytes::mib(128)));
    scene.offload.prepare(0, Bytes::mib(100)).unwrap();
    assert_eq!(scene.stats().host_pinned_bytes, 100 << 20);
    let host = scene.regions.set().stores.host(GPU).unwrap();
    let taken = host.take(Bytes::mib(64)).unwrap();
    let left = scene.stats().host_pinned_bytes;
    assert!(left <= 64 << 20, "{left}: chunks that nothing is in were given up");
    drop(taken);
    assert!(matches!(scene.offload.prepare(0, Bytes::mib(300)), Err(ProcessError::Host(_))));
    assert!(matches!(scene.offload.prepare(7, Bytes::mib(1)), Err(ProcessError::NoSuchDevice { .. })));
    scene.end();
}

/// One block that stays live and is offloaded again and again: nothing is freed that would have anybody ask what has passed.
#[test]
fn a_live_block_is_held_by_no_more_than_is_under_way() {
    let scene = Scene::new();
    let written = scene.written(Bytes::kib(64), 3);
    for round in 0..1000 {
        let id = scene.offload.offload(scene.own, written.address, written.size).unwrap();
        scene.run_dry();
        scene.offload.release(id).unwrap();
        let held = scene.pool().read_holds().count();
        assert!(held < 100, "{held} after {round}");
    }
    scene.free(written.address);
    scene.end();
}

/// Of each pack the copy, its fork, and its end: two events. Which copies are over is asked of few of them.
#[test]
fn a_pack_takes_few_calls_of_the_driver() {
    let scene = Scene::of(Bytes::mib(256), |config| config.pool.extent_near_limit = config.pool.extent);
    let packs = || {
        let pack = |_| {
            let address = scene.malloc(Bytes::kib(256));
            let id = scene.offload.offload(scene.own, address, Bytes::kib(256)).unwrap();
            scene.free(address);
            id
        };
        let ids: Vec<u64> = (0..300).map(pack).collect();
        scene.synchronize(Direction::FromGpu);
        ids.into_iter().for_each(|id| scene.offload.release(id).unwrap());
    };
    packs();
    packs();
    let before = scene.recorder.counters();
    packs();
    let of = |verb| scene.recorder.counters().since(&before).of(verb).calls;
    assert_eq!(of(Verb::Copy), 300);
    // One in eight is timed, which takes a third event and is asked for.
    assert!(of(Verb::EventRecord) <= 2 * 300 + 300 / 8 + 20, "{} events", of(Verb::EventRecord));
    assert!(of(Verb::EventQuery) <= 150, "{} were asked for", of(Verb::EventQuery));
    scene.end();
}
