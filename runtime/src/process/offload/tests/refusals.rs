//! What is refused, and leaves everything as it was.

use glake_tiers::PoolError;

use super::super::super::PoolId;
use super::*;

#[test]
fn nothing_is_offloaded_that_is_no_memory_of_ours() {
    let scene = Scene::new();
    let foreign = scene.sim.plain_alloc(GPU, Bytes::mib(2)).unwrap();
    let refused = scene.offload.offload(scene.own, foreign, Bytes::mib(2)).unwrap_err();
    assert!(refused.says(&format!("{foreign} is no memory of this library")), "{refused}");
    let block = scene.malloc(Bytes::mib(2));
    let inner = Address(block.0 + 512);
    let outside = scene.offload.offload(scene.own, inner, Bytes::mib(2)).unwrap_err();
    assert!(matches!(outside, ProcessError::Pool(PoolError::OutsideBlock { .. })), "{outside}");
    scene.free(block);
    let freed = scene.offload.offload(scene.own, block, Bytes::mib(2)).unwrap_err();
    assert!(matches!(freed, ProcessError::InNoBlock { address } if address == block), "{freed}");
    scene.sim.plain_free(foreign).unwrap();
    scene.end();
}

#[test]
fn no_bytes_need_nothing() {
    let scene = Scene::new();
    let id = scene.offload.offload(scene.own, Address(0), Bytes::ZERO).unwrap();
    assert!(
        matches!(scene.offload.wait_reload(id, scene.own), Err(ref error) if error.says("is not on its way back"))
    );
    scene.offload.reload(id, scene.own, Address(0)).unwrap();
    assert_eq!((scene.offload.size(id).unwrap(), scene.stats().entries), (Bytes::ZERO, 1));
    scene.offload.release(id).unwrap();
    scene.end();
}

#[test]
fn a_number_is_known_until_it_is_released() {
    let scene = Scene::new();
    let written = scene.written(Bytes::mib(2), 1);
    let id = scene.offload.offload(scene.own, written.address, written.size).unwrap();
    let refused = scene.offload.wait_reload(id, scene.own).unwrap_err();
    assert!(refused.says("is not on its way back"), "{refused}");
    scene.offload.release(id).unwrap();
    let unknown = [
        scene.offload.release(id),
        scene.offload.wait_reload(id, scene.own),
        scene.offload.reload(id, scene.own, written.address),
        scene.offload.size(id).map(|_| ()),
    ];
    for answer in unknown {
        assert!(matches!(answer, Err(ref error) if error.says("nothing is offloaded under")), "{answer:?}");
    }
    let next = scene.offload.offload(scene.own, written.address, written.size).unwrap();
    assert!(next > id);
    let small = scene.malloc(Bytes::mib(2));
    let short = scene.offload.reload(next, scene.own, Address(small.0 + 512)).unwrap_err();
    assert!(matches!(short, ProcessError::Pool(PoolError::OutsideBlock { .. })), "{short}");
    scene.offload.release(next).unwrap();
    for address in [written.address, small] {
        scene.free(address);
    }
    scene.end();
}

#[test]
fn bytes_come_back_to_their_own_gpu() {
    let scene = Scene::new();
    let written = scene.written(Bytes::mib(2), 1);
    let id = scene.offload.offload(scene.own, written.address, written.size).unwrap();
    let pool = &scene.registry.started(scene.registry.device(1).unwrap()).unwrap().pool;
    let theirs = scene.streams.create(1).unwrap();
    let stream = scene.streams.of(&*scene.sim, DeviceId(1), theirs).unwrap();
    let elsewhere = pool.malloc(Bytes::mib(2), stream).unwrap();
    let refused = scene.offload.reload(id, theirs, elsewhere.address).unwrap_err();
    assert!(refused.says("was to come back to memory of"), "{refused}");
    pool.free(elsewhere.address).unwrap();
    // A stream of another GPU orders as well as one's own.
    scene.offload.release(id).unwrap();
    let id = scene.offload.offload(theirs, written.address, written.size);
    assert!(id.is_err() || scene.offload.release(id.unwrap()).is_ok());
    scene.free(written.address);
    scene.end();
}

#[test]
fn memory_of_a_private_pool_stays_until_the_last_of_it_is_freed() {
    let scene = Scene::new();
    let id = PoolId(3, 0);
    let private = &scene.registry.started(scene.registry.device(0).unwrap()).unwrap().private;
    private.create(scene.pool(), id);
    let domain = private.domain(scene.pool(), id).unwrap();
    let stream = scene.streams.of(&*scene.sim, GPU, scene.own).unwrap();
    let block = scene.pool().malloc_in(domain, Bytes::mib(2), stream).unwrap();
    let written = Written { address: block.address, size: block.size, seed: 5, skipped: 0 };
    scene.write_on(scene.own, written, US(5));
    for released in [false, true] {
        for at in [block.address, Address(block.address.0 + 4096)] {
            let refused = scene.offload.offload(scene.own, at, Bytes::kib(64));
            assert!(
                matches!(refused, Err(ref error) if error.says("belongs to the private pool")),
                "{released}: {refused:?}"
            );
            assert!(scene.offload.is_private(at));
        }
        if !released {
            private.release(scene.pool(), id).unwrap();
        }
    }
    scene.check_on(scene.own, written, NONE);
    scene.free(block.address);
    assert!(scene.offload.is_private(block.address), "its owner may still count on it");
    let own = scene.written(Bytes::mib(2), 6);
    assert!(!scene.offload.is_private(own.address) && !scene.offload.is_private(Address(64)));
    scene.free(own.address);
    scene.end();
}

#[test]
fn in_a_capture_bytes_stay_where_they_are() {
    let scene = Scene::new();
    let written = scene.written(Bytes::mib(2), 1);
    let id = scene.offload.offload(scene.own, written.address, written.size).unwrap();
    let target = scene.malloc(Bytes::mib(2));
    let held = scene.pool().clock().hold();
    scene.sim.begin_capture(GPU, scene.own).unwrap();
    let refused = [
        scene.offload.offload(scene.own, written.address, written.size).map(|_| ()),
        scene.offload.begin_reload(id, scene.own, target),
    ];
    for answer in refused {
        assert!(matches!(answer, Err(ProcessError::OffloadCaptured { .. })), "{answer:?}");
    }
    // Beside a capture, on another stream, all is as ever.
    scene.offload.begin_reload(id, scene.other, target).unwrap();
    assert!(matches!(scene.offload.wait_reload(id, scene.own), Err(ProcessError::OffloadCaptured { .. })));
    let graph = scene.sim.end_capture(GPU, scene.own).unwrap();
    scene.sim.launch_graph(&graph, GPU, scene.own).unwrap();
    drop(held);
    scene.offload.wait_reload(id, scene.own).unwrap();
    scene.check_on(scene.own, Written { address: target, ..written }, NONE);
    scene.offload.release(id).unwrap();
    for address in [written.address, target] {
        scene.free(address);
    }
    scene.end();
}

#[test]
fn without_host_memory_bytes_stay_where_they_are() {
    let scene = Scene::with(|config| config.tiers.host_budget = Some(Bytes::mib(16)));
    let blocks = [1, 2, 3].map(|seed| scene.written(Bytes::mib(9), seed));
    let first = scene.offload.offload(scene.own, blocks[0].address, blocks[0].size).unwrap();
    let refused = scene.offload.offload(scene.own, blocks[1].address, blocks[1].size).unwrap_err();
    assert!(matches!(&refused, ProcessError::Host(error) if error.is_shortage()), "{refused}");
    assert_eq!((scene.stats().refused, scene.stats().entries), (1, 1));
    scene.check_on(scene.own, blocks[1], NONE);
    scene.offload.release(first).unwrap();
    let second = scene.offload.offload(scene.own, blocks[2].address, blocks[2].size).unwrap();
    assert_eq!(scene.sim.now(), NONE, "what was released is there at once");
    let back = Written { address: blocks[0].address, ..blocks[2] };
    scene.offload.reload(second, scene.own, back.address).unwrap();
    scene.check_on(scene.own, back, NONE);
    scene.offload.release(second).unwrap();
    blocks.into_iter().for_each(|block| scene.free(block.address));
    scene.end();
}

/// Free chunks that are too small for a block are returned to make room for one of the block's size, which is no multiple of anything.
#[test]
fn a_block_of_odd_size_fits_into_returned_chunks() {
    let scene = Scene::with(|config| config.tiers.host_budget = Some(Bytes::mib(10)));
    drop(scene.regions.set().stores.host(GPU).unwrap().take(Bytes::mib(10)).unwrap());
    let small = [3 << 20, 3 << 20, 3 << 19].map(|size| scene.written(Bytes::new(size), size));
    let ids = small.map(|block| scene.offload.offload(scene.own, block.address, block.size).unwrap());
    ids.into_iter().for_each(|id| scene.offload.release(id).unwrap());
    scene.run_dry();
    let size = Bytes::new((9 << 20) + 8);
    let (large, target) = (scene.written(size, 1), scene.malloc(size));
    let id = scene.offload.offload(scene.own, large.address, large.size).unwrap();
    scene.offload.reload(id, scene.own, target).unwrap();
    scene.check_on(scene.own, Written { address: target, ..large }, NONE);
    scene.offload.release(id).unwrap();
    for address in small.map(|block| block.address).into_iter().chain([large.address, target]) {
        scene.free(address);
    }
    scene.end();
}

#[test]
fn at_the_end_of_the_process_nothing_calls_the_driver() {
    let scene = Scene::new();
    let written = scene.written(Bytes::mib(8), 1);
    let target = scene.malloc(Bytes::mib(8));
    let ids = [(); 3].map(|()| scene.offload.offload(scene.own, written.address, written.size).unwrap());
    scene.offload.begin_reload(ids[1], scene.own, target).unwrap();
    scene.registry.stop();
    let calls = scene.recorder.counters().calls();
    for id in ids {
        scene.offload.release(id).unwrap();
    }
    scene.free(written.address);
    let stats = scene.stats();
    assert_eq!((stats.copies_out, scene.recorder.counters().calls()), (3, calls), "{stats:?}");
}
