//! Every call of the driver fails once: what was offloaded is there, or is still where it was, and nothing is left.

use glake_device::{Fault, Injected, When};

use super::super::{CheckState, Pack, SaveId};
use super::*;

/// What a program has at some moment.
#[derive(Debug, Default)]
struct Held {
    blocks: Vec<Address>,
    ids: Vec<u64>,
    /// What must be there whatever failed.
    intact: Vec<Written>,
    site: Option<u64>,
}

/// A step of training in small: two blocks go out, their memory is used, they come back; of one the way back is prefetched. Stops at the
/// first error.
fn step(scene: &Scene, held: &mut Held) -> Result<()> {
    let size = Bytes::mib(10);
    let mut packed = Vec::new();
    for seed in [1, 2] {
        let written = Written { address: scene.malloc_on(scene.own, size)?, size, seed, skipped: 0 };
        held.blocks.push(written.address);
        held.intact.push(written);
        scene.write_on(scene.own, written, US(10));
        let id = scene.offload.offload(scene.own, written.address, size)?;
        held.ids.push(id);
        held.blocks.pop();
        held.intact.pop();
        scene.free(written.address);
        packed.push((id, written));
    }
    let between = Written { address: scene.malloc_on(scene.own, size)?, size, seed: 3, skipped: 0 };
    held.blocks.push(between.address);
    scene.write_on(scene.own, between, US(10));
    let early = Written { address: scene.malloc_on(scene.own, size)?, ..packed[1].1 };
    held.blocks.push(early.address);
    scene.offload.begin_reload(packed[1].0, scene.own, early.address)?;
    scene.offload.reload(packed[0].0, scene.own, between.address)?;
    scene.check_on(scene.own, Written { address: between.address, ..packed[0].1 }, US(10));
    scene.offload.wait_reload(packed[1].0, scene.own)?;
    scene.check_on(scene.own, early, US(10));
    // Once more, for another stream, of which the pool is told as of any.
    let other = scene.streams.of(&*scene.sim, GPU, scene.other).unwrap();
    scene.pool().record_stream(between.address, other);
    scene.offload.reload(packed[0].0, scene.own, between.address)?;
    scene.offload.wait_reload(packed[0].0, scene.other)?;
    scene.check_on(scene.other, Written { address: between.address, ..packed[0].1 }, US(10));
    assert!(scene.offload.generation(early.address)? > 0);
    Ok(())
}

/// A pass of a site: what it saves is checked, and something writes to half of it after it went. What comes back is what the block had at its
/// end, or it is said that it is lost.
fn pass(scene: &Scene, held: &mut Held) -> Result<()> {
    let size = Bytes::mib(5);
    let site = *held.site.get_or_insert_with(|| scene.offload.sites().create());
    let mut begin = [0; 8];
    let mut packed = Vec::new();
    for seed in [4, 5] {
        let written = Written { address: scene.malloc_on(scene.own, size)?, size, seed, skipped: 0 };
        held.blocks.push(written.address);
        scene.write_on(scene.own, written, US(10));
        let (item, _) = scene.offload.packed(site, Pack::new(size), scene.own, &mut begin)?;
        let save = SaveId { site, save: seed };
        let id = match scene.offload.check_state(save) {
            CheckState::Due => scene.offload.offload_checked(scene.own, written.address, size, save)?,
            _ => scene.offload.offload(scene.own, written.address, size)?,
        };
        held.ids.push(id);
        let now = Written { seed: seed + 10 * (seed % 2), ..written };
        if now != written {
            scene.synchronize(Direction::FromGpu);
            scene.write_on(scene.own, now, US(10));
        }
        held.blocks.pop();
        scene.free(written.address);
        packed.push((item, id, now));
    }
    for (item, id, written) in packed.into_iter().rev() {
        scene.offload.unpacked(site, item.item, &mut begin)?;
        let back = Written { address: scene.malloc_on(scene.own, size)?, ..written };
        held.blocks.push(back.address);
        scene.offload.reload(id, scene.own, back.address)?;
        scene.check_on(scene.own, back, US(10));
        scene.offload.dropped(site, item.item)?;
    }
    scene.stats();
    Ok(())
}

/// Reserved memory: the host fills it, a block has it, something writes to the block, which is stored. If a store fails the block has the
/// bytes.
fn stores(scene: &Scene, held: &mut Held) -> Result<()> {
    let size = Bytes::mib(9);
    let id = scene.offload.reserve(0, size)?;
    held.ids.push(id);
    let written = Written { address: scene.offload.host_address(id)?, size, seed: 6, skipped: 0 };
    scene.write_on(scene.own, written, NONE);
    let mut now = written;
    for seed in [7, 8] {
        let block = Written { address: scene.malloc_on(scene.own, size)?, size, ..now };
        held.blocks.push(block.address);
        scene.offload.begin_reload(id, scene.own, block.address)?;
        scene.offload.wait_reload(id, scene.own)?;
        scene.check_on(scene.own, block, US(10));
        let changed = Written { seed, ..block };
        scene.write_on(scene.own, changed, US(10));
        held.intact.push(changed);
        scene.offload.store(id, scene.own, changed.address)?;
        held.intact.pop();
        held.blocks.pop();
        scene.free(block.address);
        now = changed;
    }
    scene.offload.host_address(id)?;
    scene.check_on(scene.own, Written { address: written.address, ..now }, NONE);
    Ok(())
}

/// Each call fails once, or one in so many of them.
fn fails(error: Injected, one_in: usize, step: fn(&Scene, &mut Held) -> Result<()>) {
    for n in (1..).step_by(one_in) {
        let scene = Scene::new();
        scene.faults.set(&[Fault { verb: None, when: When::Nth(n), error }]);
        let mut held = Held::default();
        let answer = step(&scene, &mut held);
        let injected = scene.faults.injected();
        scene.faults.set(&[]);
        if let Err(error) = &answer {
            assert!(!error.to_string().contains("out of use"), "call {n}: {error}");
        }
        held.intact.iter().for_each(|written| scene.check_on(scene.own, *written, NONE));
        held.ids.iter().for_each(|id| scene.offload.release(*id).unwrap());
        held.blocks.iter().for_each(|block| scene.free(*block));
        held.site.into_iter().for_each(|site| scene.offload.release_site(site).unwrap());
        // The same goes well afterwards.
        let mut again = Held::default();
        step(&scene, &mut again).unwrap_or_else(|error| panic!("after call {n}: {error}"));
        again.ids.iter().for_each(|id| scene.offload.release(*id).unwrap());
        again.blocks.iter().for_each(|block| scene.free(*block));
        again.site.into_iter().for_each(|site| scene.offload.release_site(site).unwrap());
        scene.end();
        if injected == 0 {
            assert!(answer.is_ok() && n > 30, "{n} calls");
            return;
        }
    }
}

#[test]
fn a_call_that_fails_loses_nothing() {
    fails(Injected::Failed(999), 1, step);
    fails(Injected::Failed(999), 1, pass);
    fails(Injected::Failed(999), 1, stores);
}

#[test]
fn soak_a_call_that_has_no_memory_loses_nothing() {
    let one_in = if std::env::var_os("GLAKE_SOAK").is_some() { 1 } else { 3 };
    fails(Injected::OutOfMemory, one_in, step);
    fails(Injected::OutOfMemory, one_in, pass);
    fails(Injected::OutOfMemory, one_in, stores);
}

#[test]
fn a_lost_device_is_told_of_and_books_go_on() {
    for (n, step) in (1..200).step_by(7).zip([step, pass, stores].into_iter().cycle()) {
        let scene = Scene::new();
        scene.faults.set(&[Fault { verb: None, when: When::From(n), error: Injected::Sticky(700) }]);
        let mut held = Held::default();
        let _answer = step(&scene, &mut held);
        held.ids.iter().for_each(|id| scene.offload.release(*id).unwrap());
        held.blocks.iter().for_each(|block| scene.free(*block));
        assert_eq!((scene.stats().entries, scene.stats().host_bytes), (0, 0));
    }
}
