//! Reserved host memory: bytes that the host or a block has put there come to any block, as often as they are asked for.

use super::*;

impl Scene {
    /// Reserves memory and writes a pattern there, as the host does.
    fn reserved(&self, size: Bytes, seed: u64) -> (u64, Written) {
        let id = self.offload.reserve(0, size).unwrap();
        let written = Written { address: self.offload.host_address(id).unwrap(), size, seed, skipped: 0 };
        self.write_on(self.own, written, NONE);
        (id, written)
    }

    /// Loads reserved bytes into a new block, and checks them there.
    fn loaded(&self, id: u64, written: Written) -> Written {
        let back = Written { address: self.malloc(written.size), ..written };
        self.offload.reload(id, self.own, back.address).unwrap();
        self.check_on(self.own, back, US(1));
        back
    }
}

#[test]
fn bytes_of_the_host_come_as_often_as_they_are_asked_for_and_none_leave() {
    let scene = Scene::new();
    let (id, written) = scene.reserved(Bytes::mib(5), 3);
    for _ in 0..3 {
        let back = scene.loaded(id, written);
        scene.free(back.address);
        let poisoned = scene.poisoned(written.size);
        scene.free(poisoned);
    }
    assert_eq!(scene.offload.host_address(id).unwrap(), written.address);
    assert_eq!(scene.offload.size(id).unwrap(), written.size);
    scene.check_on(scene.own, written, NONE);
    let stats = scene.stats();
    assert_eq!((stats.copies_out, stats.bytes_in), (0, Bytes::mib(15).get()));
    scene.offload.release(id).unwrap();
    scene.end();
}

/// A store waits for the last copy in, which reads the memory; the next copy in and the host wait for the store.
#[test]
fn a_store_is_ordered_with_the_copies_around_it_whatever_is_slow() {
    for slow in 0..8_u32 {
        let at = |bit: u32| if slow & 1 << bit > 0 { US(400) } else { NONE };
        let scene = Scene::new();
        let size = Bytes::mib(6);
        let (id, written) = scene.reserved(size, 3);
        let other = scene.written(size, 8);
        scene.delay(Direction::ToGpu, at(0));
        let first = scene.loaded(id, written);
        scene.delay(Direction::FromGpu, at(1));
        scene.write_on(scene.own, other, at(2));
        scene.offload.store(id, scene.own, other.address).unwrap();
        scene.free(other.address);
        let between = scene.poisoned(size);
        let second = scene.loaded(id, other);
        assert_eq!(scene.sim.now(), NONE, "nothing waits on the host");
        assert_eq!(scene.offload.host_address(id).unwrap(), written.address);
        scene.check_on(scene.own, Written { address: written.address, ..other }, NONE);
        scene.offload.release(id).unwrap();
        for address in [first.address, between, second.address] {
            scene.free(address);
        }
        scene.end();
    }
}

#[test]
fn memory_that_copies_still_use_is_written_by_the_host_only_behind_them() {
    let scene = Scene::with(|config| config.tiers.host_budget = Some(Bytes::mib(16)));
    let size = Bytes::mib(10);
    let sent = scene.written(size, 5);
    scene.delay(Direction::FromGpu, US(300));
    let out = scene.offload.offload(scene.own, sent.address, size).unwrap();
    scene.offload.release(out).unwrap();
    // The same memory, while the copy out is under way.
    let (id, written) = scene.reserved(size, 6);
    scene.delay(Direction::ToGpu, US(300));
    let back = scene.loaded(id, written);
    scene.offload.release(id).unwrap();
    let (id, written) = scene.reserved(size, 7);
    let again = scene.loaded(id, written);
    scene.offload.release(id).unwrap();
    for address in [sent.address, back.address, again.address] {
        scene.free(address);
    }
    scene.end();
}

#[test]
fn what_is_refused_says_so() {
    let scene = Scene::with(|config| config.tiers.host_budget = Some(Bytes::mib(16)));
    let block = scene.written(Bytes::mib(2), 1);
    let out = scene.offload.offload(scene.own, block.address, block.size).unwrap();
    for error in [
        scene.offload.store(out, scene.own, block.address).unwrap_err(),
        scene.offload.host_address(out).map(drop).unwrap_err(),
    ] {
        assert!(error.says("is of offloaded bytes"), "{error}");
    }
    scene.offload.release(out).unwrap();
    let (id, _) = scene.reserved(Bytes::mib(4), 2);
    let error = scene.offload.store(id, scene.own, block.address).unwrap_err();
    assert!(error.to_string().contains("do not lie in it"), "the block is smaller: {error}");
    let other = scene.registry.started(scene.registry.device(1).unwrap()).unwrap();
    let stream = scene.streams.of(&*scene.sim, DeviceId(1), scene.streams.create(1).unwrap()).unwrap();
    let elsewhere = other.pool.malloc(Bytes::mib(4), stream).unwrap().address;
    let error = scene.offload.store(id, scene.own, elsewhere).unwrap_err();
    assert!(error.says("copy them to GPU 0 first"), "{error}");
    other.pool.free(elsewhere).unwrap();
    assert!(matches!(scene.offload.reserve(0, Bytes::mib(64)), Err(ProcessError::Host(_))));
    assert_eq!(scene.stats().refused, 1);
    assert!(matches!(scene.offload.reserve(7, Bytes::mib(1)), Err(ProcessError::NoSuchDevice { .. })));
    let empty = scene.offload.reserve(0, Bytes::ZERO).unwrap();
    assert_eq!(scene.offload.host_address(empty).unwrap(), Address(0));
    scene.offload.store(empty, scene.own, Address(0)).unwrap();
    for id in [id, empty] {
        scene.offload.release(id).unwrap();
        assert!(scene.offload.host_address(id).unwrap_err().says("nothing is offloaded under the number"));
    }
    scene.free(block.address);
    scene.end();
}
