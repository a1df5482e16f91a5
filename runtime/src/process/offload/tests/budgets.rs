//! Passes of a site under a budget: layers that save bytes, over simulated GPUs, with the pool watched at every step.

use glake_device::{Fault, Injected, Verb, When};
use serde_json::Value;

use super::super::sites::Spare;
use super::super::{ItemId, Pack, Preset, Verdict};
use super::*;

/// Memory is counted in these: smaller blocks than 1 MiB share slabs, which wait for copies in another way.
const UNIT: Bytes = Bytes::mib(2);

fn units(count: u64) -> Bytes {
    Bytes::new(count * UNIT.get())
}

/// GPUs whose memory is made in small parts.
fn small() -> Scene {
    Scene::of(Bytes::mib(64), |config| config.pool.extent = Bytes::mib(2))
}

/// A program: so many layers, each of which saves 2 MiB, beside memory of its own.
struct Program<'s> {
    scene: &'s Scene,
    site: u64,
    own: Vec<Address>,
    /// The most that was reserved.
    most: std::cell::Cell<Bytes>,
    /// What something else does on the queue out before each copy.
    beside: Duration,
    /// The shape of another forward, which begins behind the first layer.
    second: std::cell::Cell<Option<u64>>,
}

struct Saved {
    item: ItemId,
    written: Written,
    /// Under which number it is offloaded.
    id: Option<u64>,
    back: Option<Address>,
}

impl<'s> Program<'s> {
    fn new(scene: &'s Scene, own: u64, budget: Bytes, preset: Preset) -> Self {
        let site = scene.offload.sites().create();
        let own = (0..own).map(|_| scene.malloc(UNIT)).collect();
        scene.offload.ask(site, 0, Some(budget), preset).unwrap();
        Program { scene, site, own, most: Bytes::ZERO.into(), beside: NONE, second: None.into() }
    }

    fn look(&self) {
        self.most.set(self.most.get().max(self.scene.pool().reserved()));
    }

    fn begin(&self, saved: &mut [Saved], begins: &[u64]) {
        for &item in begins {
            let saved = &mut saved[usize::try_from(item).unwrap()];
            if let Some(id) = saved.id.filter(|_| saved.back.is_none()) {
                let back = self.scene.malloc(saved.written.size);
                self.scene.offload.begin_reload(id, self.scene.own, back).unwrap();
                saved.back = Some(back);
            }
        }
        self.look();
    }

    /// A pass of so many layers: how many were kept.
    fn pass(&self, layers: u64) -> usize {
        self.pass_of(layers, &vec![UNIT; usize::try_from(layers).unwrap()])
    }

    /// A pass of a shape that saves items of these sizes: how many were kept.
    fn pass_of(&self, shape: u64, sizes: &[Bytes]) -> usize {
        let (scene, offload) = (self.scene, &self.scene.offload);
        assert!(offload.needs(self.site, shape).unwrap());
        let (mut saved, mut begins) = (Vec::new(), [0; 64]);
        for (&size, seed) in sizes.iter().zip(1..) {
            // What a layer takes and gives back.
            let scratch = scene.malloc(size);
            let written = scene.written(size, seed);
            scene.free(scratch);
            let (packed, count) = offload.packed(self.site, Pack::new(size), scene.own, &mut begins).unwrap();
            let mut one = Saved { item: packed.item, written, id: None, back: None };
            if packed.verdict == Verdict::Offload {
                if self.beside > NONE {
                    scene.delay(Direction::FromGpu, self.beside);
                }
                one.id = Some(offload.offload(scene.own, written.address, size).unwrap());
                scene.free(written.address);
            }
            saved.push(one);
            self.begin(&mut saved, &begins[..count]);
            if let Some(second) = self.second.take() {
                assert!(offload.needs(self.site, second).unwrap());
            }
        }
        let kept = saved.iter().filter(|saved| saved.id.is_none()).count();
        for at in (0..saved.len()).rev() {
            let count = offload.unpacked(self.site, saved[at].item, &mut begins).unwrap();
            self.begin(&mut saved, &begins[..count]);
            let Saved { item, written, id, back } = saved[at];
            let address = back.unwrap_or(written.address);
            if let Some(id) = id {
                offload.wait_reload(id, scene.own).unwrap();
                offload.freed(self.site, item).unwrap();
            }
            scene.check_on(scene.own, Written { address, ..written }, US(10));
            let gradient = scene.poisoned(written.size);
            self.look();
            scene.free(gradient);
            scene.free(address);
            if let Some(id) = id {
                offload.release(id).unwrap();
            }
            offload.dropped(self.site, item).unwrap();
        }
        kept
    }

    fn spare(&self) -> Spare {
        self.scene.offload.sites.of(self.site).unwrap().lock().spare
    }

    fn told(&self) -> Value {
        self.scene.offload.told(self.site, true).unwrap()
    }

    fn end(self) {
        self.own.iter().for_each(|address| self.scene.free(*address));
        self.scene.offload.release_site(self.site).unwrap();
    }
}

#[test]
fn a_budget_is_kept_by_passes_of_every_length_and_nothing_waits_on_the_host() {
    for preset in [Preset::Fit, Preset::Hybrid] {
        let scene = small();
        let budget = units(14);
        let program = Program::new(&scene, 2, budget, preset);
        let mut kept = Vec::new();
        for pass in 0..24_u64 {
            kept.push(program.pass(16 + pass * 7 % 5));
            if pass % 2 == 0 {
                scene.run_dry();
            }
        }
        let told = program.told();
        assert!(program.most.get() <= budget, "{} of {budget}: {told}", program.most.get());
        assert_eq!(told["above_budget"], 0, "{told}");
        assert!(told["plan"]["is_timed"].as_bool().unwrap(), "{told}");
        assert!(told["unplanned"].is_null(), "{told}");
        // Plans keep what there is room for, and what comes after the first pass is more than half of the room.
        assert!(kept[20..].iter().all(|kept| *kept >= 4), "{kept:?}");
        assert!(told["real_us"].as_u64().unwrap() > 0, "{told}");
        program.end();
        scene.end();
    }
}

#[test]
fn where_everything_fits_nothing_need_be_told_until_memory_changes() {
    let scene = small();
    let program = Program::new(&scene, 2, units(26), Preset::Fit);
    assert_eq!([(); 2].map(|()| program.pass(8)), [8, 8]);
    assert!(!scene.offload.needs(program.site, 8).unwrap());
    assert!(scene.offload.needs(program.site, 9).unwrap(), "another shape");
    let more: Vec<Address> = (0..16).map(|_| scene.malloc(UNIT)).collect();
    assert!(scene.offload.needs(program.site, 8).unwrap(), "less is free");
    assert!(program.pass(8) < 8);
    assert!(program.most.get() <= units(26));
    more.into_iter().for_each(|address| scene.free(address));
    scene.run_dry();
    // And as it was.
    assert_eq!(program.pass(8), 8);
    assert!(!scene.offload.needs(program.site, 8).unwrap());
    program.end();
    scene.end();
}

#[test]
fn below_the_floor_a_pass_goes_above_its_budget_once_and_the_error_names_what_is_enough() {
    let scene = small();
    let program = Program::new(&scene, 6, units(7), Preset::Fit);
    program.pass(6);
    scene.run_dry();
    let needs = scene.offload.needs(program.site, 6);
    let error = needs.expect_err(&program.told().to_string());
    let ProcessError::Budget { minimum, .. } = error else { panic!("{error}") };
    assert!(minimum > units(7) && minimum < units(14), "{error}");
    let printed = Bytes::mib(minimum.get().div_ceil(1 << 20));
    assert!(error.to_string().contains(&format!("need {} MiB", printed.get() >> 20)), "{error}");
    // As much as that is enough.
    scene.offload.ask(program.site, 0, Some(minimum), Preset::Fit).unwrap();
    let above = scene.pool().budget().1;
    for _ in 0..3 {
        program.pass(6);
        scene.run_dry();
    }
    assert_eq!(scene.pool().budget(), (Some(minimum), above));
    program.end();
    assert_eq!(scene.pool().budget().0, None);
    scene.end();
}

#[test]
fn a_pass_that_saves_more_than_one_of_its_shape_did_is_told_of_again() {
    let scene = small();
    let program = Program::new(&scene, 2, units(14), Preset::Fit);
    assert_eq!([(); 2].map(|()| program.pass_of(8, &[UNIT; 3])), [3, 3]);
    assert!(!scene.offload.needs(program.site, 8).unwrap());
    // As when layers are no longer checkpointed, or no longer frozen: nobody tells of it.
    let saved: Vec<Address> = (0..20).map(|_| scene.malloc(UNIT)).collect();
    saved.into_iter().for_each(|address| scene.free(address));
    scene.run_dry();
    assert!(scene.offload.needs(program.site, 8).unwrap(), "it went above the budget");
    let above = scene.pool().budget().1;
    for _ in 0..3 {
        assert!(program.pass_of(8, &[UNIT; 20]) < 20);
        scene.run_dry();
    }
    assert_eq!(scene.pool().budget().1, above);
    program.end();
    scene.end();
}

#[test]
fn a_budget_that_another_site_lowered_is_the_one_that_is_told_and_goes_with_it() {
    let scene = small();
    let program = Program::new(&scene, 6, units(40), Preset::Fit);
    let other = scene.offload.sites().create();
    scene.offload.ask(other, 0, Some(units(7)), Preset::Fit).unwrap();
    let begin = &mut [0; 64];
    let own = scene.written(UNIT, 1);
    let packed = scene.offload.packed(other, Pack::new(UNIT), scene.own, begin).unwrap().0;
    scene.offload.dropped(other, packed.item).unwrap();
    scene.free(own.address);
    program.pass(6);
    scene.run_dry();
    let error = scene.offload.needs(program.site, 6).unwrap_err();
    let ProcessError::Budget { budget, minimum, .. } = error else { panic!("{error}") };
    assert!(budget == units(7) && minimum > budget, "{error}");
    scene.offload.release_site(other).unwrap();
    assert!(scene.offload.needs(program.site, 6).unwrap());
    program.pass(6);
    assert!(scene.pool().budget().0.unwrap() >= units(39));
    program.end();
    scene.end();
}

#[test]
fn a_pass_of_two_forwards_that_is_too_large_says_nothing_of_one_of_them() {
    let scene = small();
    let program = Program::new(&scene, 6, units(7), Preset::Fit);
    let needs = |shape| scene.offload.needs(program.site, shape);
    program.second.set(Some(30));
    program.pass(6);
    scene.run_dry();
    // By itself either may be small enough.
    assert!(needs(30).unwrap() && needs(6).unwrap());
    let own = scene.written(UNIT, 1);
    let packed = scene.offload.packed(program.site, Pack::new(UNIT), scene.own, &mut [0; 64]).unwrap().0;
    assert!(matches!(needs(30), Err(ProcessError::Budget { .. })), "both were too large");
    scene.offload.dropped(program.site, packed.item).unwrap();
    scene.free(own.address);
    program.end();
    scene.end();
}

#[test]
fn a_forward_that_saves_nothing_is_of_no_pass() {
    let scene = small();
    let program = Program::new(&scene, 6, units(7), Preset::Fit);
    let needs = |shape| scene.offload.needs(program.site, shape);
    for length in 100..110 {
        assert!(needs(length).unwrap());
        if let Err(error) = needs(6) {
            assert!(length > 100 && matches!(error, ProcessError::Budget { .. }), "{error}");
            program.end();
            scene.end();
            return;
        }
        program.pass(6);
        scene.run_dry();
    }
    panic!("the error never came");
}

#[test]
fn times_that_come_late_are_planned_with_when_they_come() {
    let scene = small();
    let program = Program::new(&scene, 2, units(14), Preset::Fit);
    for _ in 0..4 {
        program.pass(16);
        let told = program.told();
        assert_eq!(told["plan"]["is_timed"], false, "the GPU has done nothing yet: {told}");
    }
    scene.run_dry();
    program.pass(16);
    assert_eq!(program.told()["plan"]["is_timed"], true);
    scene.run_dry();
    program.end();
    scene.end();
}

#[test]
fn a_pass_whose_marks_the_driver_refuses_is_not_waited_for() {
    let scene = small();
    let site = scene.offload.sites().create();
    scene.offload.ask(site, 0, Some(units(30)), Preset::Fit).unwrap();
    // What is kept is timed in the third pass, and in the one 64 behind it.
    for pass in 0..70 {
        // All but what it begins with.
        let refused =
            Fault { verb: Some(Verb::EventRecord), when: When::From(2), error: Injected::Failed(999) };
        scene.faults.set(if pass == 2 { std::slice::from_ref(&refused) } else { &[] });
        let mut begin = [0; 8];
        let pack = || scene.offload.packed(site, Pack::new(UNIT), scene.own, &mut begin).unwrap().0.item;
        let items: Vec<_> = std::iter::repeat_with(pack).take(4).collect();
        for item in items.into_iter().rev() {
            scene.sim.enqueue_kernel(GPU, scene.own, &[], &[], US(pass), |_| {}).unwrap();
            scene.offload.unpacked(site, item, &mut begin).unwrap();
            scene.offload.dropped(site, item).unwrap();
        }
        assert_eq!(scene.faults.injected() > 0, pass > 1);
        scene.run_dry();
    }
    // Later passes take longer: it is one of these that is told, not one before the refusal.
    let told = scene.offload.told(site, true).unwrap();
    assert!(told["real_us"].as_u64().unwrap() > 4 * 60, "{told}");
    scene.offload.release_site(site).unwrap();
    scene.end();
}

#[test]
fn what_a_stream_waits_for_memory_is_no_time_of_its_work() {
    let scene = small();
    let mut program = Program::new(&scene, 2, units(14), Preset::Fit);
    program.beside = US(2000);
    assert_eq!(program.spare(), Spare::default());
    for _ in 0..8 {
        program.pass(20);
        scene.run_dry();
    }
    assert!(scene.pool().counters().hold_waits > 8, "blocks are asked for before they have left");
    let told = program.told();
    let plan = |key: &str| told["plan"][key].as_u64().unwrap();
    assert!(told["plan"]["is_timed"].as_bool().unwrap(), "{told}");
    // The kernels of a layer take 16 us; one wait for a copy out takes up to 2,000.
    assert!(plan("expected_us") - plan("expected_exposed_us") < 2000, "{told}");
    assert!(told["real_exposed_us"].as_u64().unwrap() > 2000, "{told}");
    // Plans leave more alone from then on, and not ever more.
    assert_eq!(program.spare(), Spare::default().grown());
    program.end();
    scene.end();
}

/// What has no plan says nothing of passes that have one, and what another site's budget allowed ends with it.
#[test]
fn what_plans_leave_is_lowered_by_the_pass_that_has_none_and_under_its_budget_alone() {
    let mut lowered = 0;
    for parts in (96..160).step_by(4) {
        let scene = small();
        let budget = Bytes::new(UNIT.get() * parts / 16);
        let program = Program::new(&scene, 1, budget, Preset::Fit);
        let site = scene.offload.sites.of(program.site).unwrap();
        let run = |shape, sizes: &[Bytes]| {
            if scene.offload.needs(program.site, shape).is_ok_and(|needs| needs) {
                program.pass_of(shape, sizes);
                scene.run_dry();
            }
        };
        let (short, long) = ([UNIT; 9], [Bytes::kib(3100); 12]);
        for _ in 0..4 {
            run(9, &short);
        }
        site.lock().spare = Spare::MOST;
        run(12, &long);
        let after = program.spare();
        if after < Spare::MOST && after > Spare::default() {
            lowered += 1;
            for _ in 0..6 {
                run(9, &short);
            }
            assert_eq!(program.spare(), after, "{parts}");
            scene.offload.measures.set_budget(program.site, Some((GPU, budget)));
            assert_eq!(site.lock().most_spare, after);
            // Another one's that was less has ended.
            site.lock().least = Bytes::new(budget.get() / 2);
            run(9, &short);
            assert_eq!(site.lock().most_spare, Spare::MOST);
        }
        drop(site);
        program.end();
        scene.end();
    }
    assert!(lowered > 0);
}

/// However many gaps the passes find that follow: what they go above it by is not told as an error once the budget was named.
#[test]
fn the_budget_that_an_error_names_is_enough_for_good() {
    let mut named = 0;
    for seed in 1..=6_u64 {
        let scene = small();
        let sizes: Vec<_> = (0..12).map(|at| Bytes::kib(1100 + (at * seed * 389) % 2500)).collect();
        let program = Program::new(&scene, 2, Bytes::mib(5 + seed % 4), Preset::Fit);
        program.pass_of(1, &sizes);
        scene.run_dry();
        if let Err(error) = scene.offload.needs(program.site, 1) {
            let ProcessError::Budget { minimum, .. } = error else { panic!("{error}") };
            named += 1;
            scene.offload.ask(program.site, 0, Some(minimum), Preset::Fit).unwrap();
            for pass in 0..24 {
                if let Err(error) = scene.offload.needs(program.site, 1) {
                    panic!("seed {seed}: {minimum} was named, and after {pass} passes: {error}");
                }
                program.pass_of(1, &sizes);
                scene.run_dry();
            }
        }
        program.end();
        scene.end();
    }
    assert!(named > 2, "{named}");
}

/// A budget for which there is a plan has one, whatever is left for waits.
#[test]
fn what_is_left_for_waits_takes_no_plan() {
    let mut had_to = 0;
    for parts in 126..144 {
        let runs = [Spare::default(), Spare::MOST].map(|most| {
            let scene = small();
            let budget = Bytes::new(UNIT.get() * parts / 32);
            let mut program = Program::new(&scene, 1, budget, Preset::Fit);
            program.beside = US(2000);
            let site = scene.offload.sites.of(program.site).unwrap();
            site.lock().most_spare = most;
            let mut runs = true;
            for _ in 0..10 {
                runs &= scene.offload.needs(program.site, 20).is_ok();
                if runs {
                    program.pass(20);
                    scene.run_dry();
                }
            }
            had_to += u32::from(most == Spare::MOST && site.lock().most_spare == Spare::default());
            drop(site);
            program.end();
            scene.end();
            runs
        });
        assert!(runs[1] || !runs[0], "{parts}");
    }
    assert!(had_to > 0, "some budget is that tight");
}

#[test]
fn links_are_as_fast_as_they_were_measured() {
    let scene = small();
    let program = Program::new(&scene, 2, units(10), Preset::Fit);
    let rate = |told: &Value| told["out_gb_s"].as_f64().unwrap();
    program.pass(16);
    let before = rate(&program.told());
    for _ in 0..16 {
        program.pass(16);
        scene.run_dry();
    }
    let stats = scene.stats();
    #[allow(clippy::cast_precision_loss)]
    let real = stats.timed_bytes_out as f64 / stats.busy_us_out as f64 / 1e3;
    let after = rate(&program.told());
    assert!((after - real).abs() <= 0.25 * real, "{before}, then {after}: {real} was measured");
    program.end();
    scene.end();
}

#[test]
fn two_sites_of_one_gpu_keep_the_lesser_budget() {
    let scene = small();
    let one = Program::new(&scene, 1, units(14), Preset::Fit);
    let other = Program::new(&scene, 1, units(12), Preset::Fit);
    for round in 0..6 {
        one.pass(12);
        other.pass(10);
        scene.run_dry();
        if round == 1 {
            // By now both know of the lesser one.
            other.most.set(Bytes::ZERO);
        }
    }
    assert!(other.most.get() <= units(12), "{}", other.most.get());
    other.end();
    assert_eq!(scene.pool().budget().0, Some(units(14)));
    one.end();
    scene.end();
}

/// Layers as a transformer has them, of so many tokens: what each saves is of several sizes, and few are multiples of an extent's.
fn transformer(layers: u64, tokens: u64) -> Vec<Bytes> {
    let row = Bytes::kib(32);
    let of = |quarters: u64| Bytes::new(row.get() * tokens * quarters / 4);
    (0..layers).flat_map(|_| [of(4), of(1), of(14), of(14), of(4)]).collect()
}

#[test]
fn a_budget_is_kept_by_what_has_many_sizes() {
    let scene = Scene::of(Bytes::mib(768), |config| config.pool.extent = Bytes::mib(2));
    let (layers, most) = (12, 64);
    let whole: Bytes = transformer(layers, most).into_iter().sum();
    let own = scene.malloc(Bytes::mib(32));
    let budget = Bytes::mib(32).saturating_add(Bytes::new(whole.get() * 55 / 100));
    let program = Program::new(&scene, 0, budget, Preset::Fit);
    let mut random = 12345_u64;
    let mut above = Vec::new();
    for pass in 0..60 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let tokens = if pass < 2 { most } else { 16 + (random >> 33) % (most - 15) };
        if scene.offload.needs(program.site, tokens).unwrap() {
            program.pass_of(tokens, &transformer(layers, tokens));
        }
        scene.run_dry();
        above.push(program.told()["above_budget"].as_u64().unwrap());
    }
    // What pools lose to gaps is seen, and plans are made anew that leave it alone.
    assert!(above[39] == above[59] && above[59] <= 3, "{above:?}");
    let most = budget.saturating_add(Bytes::mib(4));
    assert!(program.most.get() <= most, "{} of {budget}: {above:?}", program.most.get());
    program.end();
    scene.free(own);
    scene.end();
}
