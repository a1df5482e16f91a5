//! Bytes that change after they were offloaded, in ways that nobody tells of.

use glake_device::{Fault, Injected, Verb, When};

use super::super::sites::Looks;
use super::super::{CheckState, Pack, SaveId};
use super::*;

const SAVE: SaveId = SaveId { site: 1, save: 7 };

impl Scene {
    /// Something writes to what was packed; it waits for the copy first, which it would else tear.
    fn scribble(&self, written: Written, seed: u64) -> Written {
        self.synchronize(Direction::FromGpu);
        let now = Written { seed, ..written };
        self.write_on(self.own, now, US(20));
        now
    }

    /// What is offloaded comes back and is what it is to be.
    fn comes_back(&self, id: u64, expected: Written) {
        let back = Written { address: self.malloc(expected.size), ..expected };
        self.offload.reload(id, self.own, back.address).unwrap();
        self.check_on(self.own, back, US(3));
        self.free(back.address);
    }

    fn compared(&self) -> (u64, u64, u64) {
        let stats = self.stats();
        (stats.unchanged, stats.changed, stats.unchecked)
    }
}

#[test]
fn what_was_written_in_place_comes_back_and_is_told() {
    let scene = Scene::new();
    let written = scene.written(Bytes::mib(4), 1);
    let id = scene.offload.offload_checked(scene.own, written.address, written.size, SAVE).unwrap();
    let now = scene.scribble(written, 2);
    scene.free(written.address);
    assert_eq!(scene.offload.check_state(SAVE), CheckState::Due, "nothing is waited for");
    let between = scene.poisoned(written.size);
    scene.comes_back(id, now);
    scene.run_dry();
    assert_eq!(scene.offload.check_state(SAVE), CheckState::Changed);
    assert_eq!(scene.compared(), (0, 1, 0));
    scene.offload.checks.again(SAVE.site);
    assert_eq!(scene.offload.check_state(SAVE), CheckState::Changed, "it stays so");
    scene.offload.release(id).unwrap();
    scene.free(between);
    scene.end();
}

#[test]
fn a_save_is_fine_after_two_checks() {
    let scene = Scene::new();
    for turn in 0..3 {
        let written = scene.written(Bytes::mib(2), turn);
        let id = scene.offload.offload_checked(scene.own, written.address, written.size, SAVE).unwrap();
        scene.free(written.address);
        scene.comes_back(id, written);
        scene.run_dry();
        let state = if turn == 0 { CheckState::Due } else { CheckState::Fine };
        assert_eq!(scene.offload.check_state(SAVE), state, "turn {turn}");
        scene.offload.release(id).unwrap();
    }
    assert_eq!(scene.compared(), (3, 0, 0));
    assert_eq!(scene.stats().copies_out, 6);
    let others = [SaveId { save: 8, ..SAVE }, SaveId { site: 2, ..SAVE }];
    assert!(others.iter().all(|save| scene.offload.check_state(*save) == CheckState::Due));
    scene.end();
}

#[test]
fn saves_are_checked_once_more_after_a_plan_was_made_anew_and_seldom() {
    let scene = Scene::new();
    let site = scene.offload.sites().create();
    let save = SaveId { site, ..SAVE };
    let check = || {
        let written = scene.written(Bytes::mib(2), 1);
        let id = scene.offload.offload_checked(scene.own, written.address, written.size, save).unwrap();
        scene.free(written.address);
        scene.run_dry();
        scene.offload.release(id).unwrap();
        scene.offload.check_state(save)
    };
    let pass = |items: usize| {
        let mut begins = [0; 8];
        let pack =
            || scene.offload.packed(site, Pack::new(Bytes::mib(2)), scene.own, &mut begins).unwrap().0.item;
        let items: Vec<_> = std::iter::repeat_with(pack).take(items).collect();
        let state = scene.offload.check_state(save);
        for item in items.into_iter().rev() {
            scene.offload.unpacked(site, item, &mut [0; 8]).unwrap();
            scene.offload.dropped(site, item).unwrap();
        }
        state
    };
    assert_eq!(pass(3), CheckState::Due);
    assert_eq!([check(), check()], [CheckState::Due, CheckState::Fine]);
    // The first plan; then one a pass, for each is the first of its kind.
    let states: Vec<_> = (0..2 * Looks::APART).map(|turn| pass(3 + usize::try_from(turn).unwrap())).collect();
    assert_eq!(states.first(), Some(&CheckState::Due));
    assert_eq!(check(), CheckState::Fine, "once is enough");
    let mut due = Vec::new();
    for turn in 0..3 * Looks::APART {
        if pass(200 + usize::try_from(turn).unwrap()) == CheckState::Due {
            due.push(turn);
            assert_eq!(check(), CheckState::Fine);
        }
    }
    assert_eq!(due, [1, 65, 129].map(|at| at + due[0] - 1));
    // Passes that plans foresee change nothing, but for the last plans that were made before them.
    let mut again = 0;
    for _ in 0..3 * Looks::APART {
        if pass(200 + usize::try_from(3 * Looks::APART - 1).unwrap()) == CheckState::Due {
            again += 1;
            assert_eq!(check(), CheckState::Fine);
        }
    }
    assert_eq!(again, 1);
    scene.offload.release_site(site).unwrap();
    scene.end();
}

/// The block's next owner, the copies and the way back, each late or not.
#[test]
fn both_copies_are_right_whatever_is_slow() {
    for slow in 0..16_u32 {
        let at = |bit: u32| if slow & 1 << bit > 0 { US(400) } else { NONE };
        let scene = Scene::new();
        let size = Bytes::mib(10);
        let written = Written { address: scene.malloc(size), size, seed: 3, skipped: 0 };
        scene.write_on(scene.own, written, at(0));
        scene.delay(Direction::FromGpu, at(1));
        let id = scene.offload.offload_checked(scene.own, written.address, size, SAVE).unwrap();
        let now = if slow % 3 == 0 { scene.scribble(written, 4) } else { written };
        scene.delay(Direction::FromGpu, at(2));
        let before = scene.sim.now();
        scene.free(written.address);
        let others = [(); 2].map(|()| scene.poisoned(size));
        scene.free(others[0]);
        let back = Written { address: scene.malloc(size), ..now };
        scene.delay(Direction::ToGpu, at(3));
        scene.offload.reload(id, scene.own, back.address).unwrap();
        scene.check_on(scene.own, back, NONE);
        assert_eq!(scene.sim.now(), before, "nothing waits on the host");
        scene.offload.release(id).unwrap();
        [others[1], back.address].into_iter().for_each(|address| scene.free(address));
        scene.run_dry();
        assert_eq!(scene.compared(), if slow % 3 == 0 { (0, 1, 0) } else { (1, 0, 0) });
        scene.end();
    }
}

#[test]
fn parts_of_a_block_are_checked_each() {
    let scene = Scene::new();
    let written = scene.written(Bytes::mib(4), 5);
    // One begins between two words of a digest.
    let parts = [written.part(0, 1 << 16), written.part(1, 1 << 18), written.part(100_000, 1000)];
    let mut save = 0;
    let ids = parts.map(|part| {
        save += 1;
        let save = SaveId { site: 1, save };
        scene.offload.offload_checked(scene.own, part.address, part.size, save).unwrap()
    });
    scene.synchronize(Direction::FromGpu);
    let changed = Written { seed: 6, ..parts[2] };
    scene.write_on(scene.own, changed, US(9));
    scene.free(written.address);
    let target = scene.malloc(Bytes::mib(3));
    for (part, id) in [parts[0], parts[1], changed].into_iter().zip(ids) {
        let states = [Written { address: target, ..part }];
        scene.offload.reload(id, scene.own, target).unwrap();
        // The second part holds what the third wrote to.
        if part != parts[1] {
            scene.check_on(scene.own, states[0], NONE);
        }
        scene.offload.release(id).unwrap();
    }
    scene.free(target);
    scene.run_dry();
    let states = [1, 2, 3].map(|save| scene.offload.check_state(SaveId { site: 1, save }));
    assert_eq!(states, [CheckState::Due, CheckState::Changed, CheckState::Changed]);
    scene.end();
}

#[test]
fn what_is_released_first_is_not_looked_at() {
    let scene = Scene::new();
    let written = scene.written(Bytes::mib(2), 1);
    let ids = [1, 2].map(|save| {
        let save = SaveId { site: 1, save };
        scene.offload.offload_checked(scene.own, written.address, written.size, save).unwrap()
    });
    scene.offload.release(ids[0]).unwrap();
    scene.free(written.address);
    scene.comes_back(ids[1], written);
    scene.offload.release(ids[1]).unwrap();
    assert_eq!(scene.stats().copies_out, 3);
    scene.run_dry();
    assert_eq!(scene.compared(), (1, 0, 0));
    scene.end();
}

/// What comes back while its block lives is the first copy, and the second one waits until it has been read.
#[test]
fn a_way_back_that_was_begun_before_is_not_torn() {
    let scene = Scene::new();
    let written = scene.written(Bytes::mib(6), 1);
    let id = scene.offload.offload_checked(scene.own, written.address, written.size, SAVE).unwrap();
    let early = Written { address: scene.malloc(written.size), ..written };
    scene.delay(Direction::ToGpu, US(500));
    scene.offload.begin_reload(id, scene.own, early.address).unwrap();
    let now = scene.scribble(written, 2);
    scene.free(written.address);
    scene.offload.wait_reload(id, scene.own).unwrap();
    scene.check_on(scene.own, early, US(3));
    scene.comes_back(id, now);
    scene.offload.release(id).unwrap();
    scene.free(early.address);
    scene.end();
}

#[test]
fn where_a_stream_is_captured_the_first_copy_counts() {
    let scene = Scene::new();
    let written = scene.written(Bytes::mib(2), 1);
    let id = scene.offload.offload_checked(scene.own, written.address, written.size, SAVE).unwrap();
    let held = scene.pool().clock().hold();
    scene.sim.begin_capture(GPU, scene.own).unwrap();
    scene.free(written.address);
    let graph = scene.sim.end_capture(GPU, scene.own).unwrap();
    scene.sim.launch_graph(&graph, GPU, scene.own).unwrap();
    drop(held);
    scene.comes_back(id, written);
    scene.offload.release(id).unwrap();
    assert_eq!((scene.compared(), scene.offload.check_state(SAVE)), ((0, 0, 1), CheckState::Due));
    scene.end();
}

#[test]
fn without_digests_both_copies_are_made_and_nothing_is_known() {
    for verb in [Verb::ModuleLoad, Verb::KernelFind, Verb::Launch] {
        let scene = Scene::new();
        scene.faults.set(&[Fault { verb: Some(verb), when: When::From(1), error: Injected::Failed(999) }]);
        let written = scene.written(Bytes::mib(2), 1);
        let id = scene.offload.offload_checked(scene.own, written.address, written.size, SAVE).unwrap();
        let now = scene.scribble(written, 2);
        scene.free(written.address);
        scene.comes_back(id, now);
        scene.offload.release(id).unwrap();
        scene.run_dry();
        assert_eq!((scene.compared(), scene.offload.check_state(SAVE)), ((0, 0, 1), CheckState::Due));
        scene.faults.set(&[]);
        scene.end();
    }
}

#[test]
fn a_second_copy_that_fails_is_tried_again_and_then_told() {
    for (when, is_lost) in [(When::Nth(1), false), (When::From(1), true)] {
        let scene = Scene::new();
        let written = scene.written(Bytes::mib(2), 1);
        let id = scene.offload.offload_checked(scene.own, written.address, written.size, SAVE).unwrap();
        let now = scene.scribble(written, 2);
        scene.faults.set(&[Fault { verb: Some(Verb::Copy), when, error: Injected::Failed(999) }]);
        scene.free(written.address);
        assert!(scene.faults.injected() > 0);
        scene.faults.set(&[]);
        let back = Written { address: scene.malloc(now.size), ..now };
        match scene.offload.reload(id, scene.own, back.address) {
            Ok(()) => scene.check_on(scene.own, back, NONE),
            Err(error) => assert!(is_lost && error.says("is lost: its block was freed"), "{error}"),
        }
        scene.offload.release(id).unwrap();
        scene.free(back.address);
        scene.end();
    }
}

#[test]
fn a_site_that_goes_is_forgotten() {
    let scene = Scene::new();
    let site = scene.offload.sites().create();
    let save = SaveId { site, save: 1 };
    let written = scene.written(Bytes::mib(2), 1);
    let id = scene.offload.offload_checked(scene.own, written.address, written.size, save).unwrap();
    scene.scribble(written, 2);
    scene.free(written.address);
    scene.run_dry();
    assert_eq!(scene.offload.check_state(save), CheckState::Changed);
    scene.offload.release_site(site).unwrap();
    assert_eq!(scene.offload.check_state(save), CheckState::Due);
    scene.offload.release(id).unwrap();
    scene.end();
}

#[test]
fn nothing_is_kept_of_sites_that_go_while_their_digests_are_taken() {
    let scene = Scene::new();
    for seed in 0..20 {
        let site = scene.offload.sites().create();
        let save = SaveId { site, save: 1 };
        let written = scene.written(Bytes::mib(2), seed);
        let id = scene.offload.offload_checked(scene.own, written.address, written.size, save).unwrap();
        if seed % 2 == 0 {
            // Also where the block goes after the site.
            scene.free(written.address);
            scene.offload.release_site(site).unwrap();
        } else {
            scene.offload.release_site(site).unwrap();
            scene.free(written.address);
        }
        scene.run_dry();
        assert_eq!(scene.offload.check_state(save), CheckState::Due);
        assert_eq!(scene.offload.checks.sites(), 0);
        scene.offload.release(id).unwrap();
    }
    assert_eq!(scene.compared().0, 20);
    scene.end();
}
