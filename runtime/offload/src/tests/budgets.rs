//! Sites under a budget, told what memory holds and how long steps took.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use glake_units::{Bandwidth, Bytes};

use crate::{ItemId, Links, Measured, Pack, Position, Preset, Request, ScopeId, Site, Verdict};

const OWN: Bytes = Bytes::mib(100);

fn links() -> Links {
    Links::new(Bandwidth(50.0), Bandwidth(50.0))
}

fn site(budget: Bytes) -> Site {
    Site::new(Request::new(budget, links()))
}

/// A pass beside so much else; what memory held at most, with copies out that take no time.
fn pass(site: &mut Site, own: Bytes, packs: &[u64]) -> (Bytes, Vec<Verdict>) {
    let mut there: Vec<Bytes> = Vec::new();
    let (mut most, mut items) = (own, Vec::new());
    let begin = |begins: &[ItemId], there: &mut Vec<Bytes>, packs: &[u64]| {
        for item in begins {
            assert!(there[item.index()].is_zero(), "{item} twice");
            there[item.index()] = Bytes::mib(packs[item.index()]);
        }
    };
    let held = |there: &[Bytes], more: u64| {
        own.saturating_add(there.iter().copied().sum()).saturating_add(Bytes::mib(more))
    };
    for &mib in packs {
        let now = held(&there, mib);
        most = most.max(now);
        site.sampled(now, now);
        let (item, verdict, begins) = site.packed(Pack::new(Bytes::mib(mib)));
        there.push(if verdict == Verdict::Keep { Bytes::mib(mib) } else { Bytes::ZERO });
        items.push((item, verdict));
        begin(&begins, &mut there, packs);
    }
    for &(item, verdict) in items.iter().rev() {
        let now = held(&there, 0);
        site.sampled(now, now);
        let begins = site.unpacked(item).unwrap();
        begin(&begins, &mut there, packs);
        most = most.max(held(&there, 0));
        assert!(!there[item.index()].is_zero(), "{item} is read and not there");
        if verdict == Verdict::Offload {
            site.freed(item);
        }
        there[item.index()] = Bytes::ZERO;
        site.dropped(item).unwrap();
    }
    (most, items.into_iter().map(|(_, verdict)| verdict).collect())
}

fn kept(verdicts: &[Verdict]) -> usize {
    verdicts.iter().filter(|verdict| **verdict == Verdict::Keep).count()
}

#[test]
fn every_item_is_back_once_and_in_time_whatever_plans_a_pass_goes_through() {
    for seed in 0..40 {
        let mut rng = Rng::with_seed(seed);
        let mut site = site(OWN.saturating_add(Bytes::mib(rng.u64(20..80))));
        let kinds: Vec<Vec<u64>> = (0..4)
            .map(|kind| {
                let mut packs = vec![8, 4];
                packs.extend((0..rng.usize(3..12)).map(|at| if at < 3 { 8 } else { 4 << kind }));
                packs
            })
            .collect();
        for _ in 0..30 {
            let own = OWN.saturating_add(Bytes::mib(rng.u64(0..16)));
            let packs = rng.choice(&kinds).unwrap();
            pass(&mut site, own, packs);
            if rng.bool() {
                let links = Links::new(Bandwidth(10.0 + rng.f64() * 90.0), Bandwidth(50.0));
                let request = *site.request();
                site.ask(Request { links, ..request });
            }
        }
    }
}

#[test]
fn a_plan_keeps_what_there_is_room_for_and_memory_beside_counts_as_it_changes() {
    let budget = OWN.saturating_add(Bytes::mib(50));
    let mut site = site(budget);
    let packs = [10; 10];
    let (most, verdicts) = pass(&mut site, OWN, &packs);
    assert!(most <= budget && kept(&verdicts) > 0, "{most}");
    for (own, least) in [(OWN, 3), (Bytes::mib(120), 1), (Bytes::mib(120), 1), (OWN, 3), (Bytes::mib(60), 7)]
    {
        let (most, verdicts) = pass(&mut site, own, &packs);
        assert!(most <= budget, "{most} of {budget} beside {own}");
        assert!(kept(&verdicts) >= least, "{verdicts:?} beside {own}");
    }
    // There is no room for two items now, and there was none to begin with: the pass is on demand, and its error says what it needs.
    let (_, verdicts) = pass(&mut site, Bytes::mib(145), &packs);
    assert!(verdicts.iter().all(|verdict| *verdict == Verdict::Offload));
    let error = site.unplanned().unwrap().to_string();
    assert!(error.contains("budget of 150.00 MiB"), "{error}");
    // It is planned for as soon as more is given, without another pass.
    site.ask(Request::new(Bytes::gib(1), links()));
    assert_eq!(kept(&pass(&mut site, Bytes::mib(145), &packs).1), 10);
    assert!(site.kept_all().is_some());
}

#[test]
fn what_was_measured_of_three_passes_is_planned_with() {
    let mut site = site(OWN.saturating_add(Bytes::mib(50)));
    let packs = [10; 10];
    pass(&mut site, OWN, &packs);
    assert!(site.may_want_times());
    pass(&mut site, OWN, &packs);
    let ms = Duration::from_millis;
    let measured = Measured {
        marks: vec![(Position(10), ms(100)), (Position(20), ms(400))],
        waits: vec![(Position(12), ms(100))],
        ..Measured::default()
    };
    site.measured(7, &measured);
    assert!(site.may_want_times(), "there is no such pass");
    site.measured(2, &measured);
    let tape = site.plan().unwrap().tape();
    assert_eq!((tape.is_timed(), tape.time()), (true, ms(300)), "what was waited for is no time of the pass");
    // One in which something was waited for that nobody told of makes no other plan, one that took less time does.
    let slow = [(ms(150), ms(700)), (ms(50), ms(350))];
    for (number, (forward, all)) in (3..).zip(slow) {
        assert!(site.may_want_times());
        let before = site.plan().unwrap().clone();
        let (most, _) = pass(&mut site, OWN, &packs);
        assert!(most <= site.request().budget);
        let marks = vec![(Position(10), forward), (Position(20), all)];
        site.measured(number, &Measured { marks, ..Measured::default() });
        assert_eq!(Arc::ptr_eq(&before, site.plan().unwrap()), number == 3);
    }
    assert_eq!(site.plan().unwrap().tape().time(), ms(250), "50 for the forward, 200 for the backward");
    assert!(!site.may_want_times());
    pass(&mut site, OWN, &packs);
    site.measured(2, &measured);
}

#[test]
fn what_fits_is_kept_to_the_last_byte() {
    for preset in [Preset::Fit, Preset::Hybrid] {
        let all = OWN.saturating_add(Bytes::mib(100));
        for (budget, fits) in [(all, true), (all.saturating_sub(Bytes::new(1)), false)] {
            let mut site = Site::new(Request::new(budget, links()).preset(preset));
            pass(&mut site, OWN, &[10; 10]);
            let verdicts = pass(&mut site, OWN, &[10; 10]).1;
            assert_eq!([site.kept_all().is_some(), kept(&verdicts) == 10], [fits; 2], "{verdicts:?}");
        }
    }
}

#[test]
fn a_little_more_memory_beside_makes_no_other_plan() {
    let mut site = site(OWN.saturating_add(Bytes::mib(50)));
    let packs = [10; 10];
    pass(&mut site, OWN, &packs);
    let plan = site.plan().unwrap().clone();
    for (more, less) in [(0, 0), (1, 0), (0, 1)] {
        let budget = OWN.saturating_add(Bytes::mib(50)).saturating_sub(Bytes::kib(256 * less));
        site.ask(Request { budget, ..*site.request() });
        let (most, _) = pass(&mut site, OWN.saturating_add(Bytes::kib(512 * more)), &packs);
        assert!(most <= budget, "{most}");
        assert!(Arc::ptr_eq(&plan, site.plan().unwrap()), "{more} more, {less} less");
    }
    pass(&mut site, OWN.saturating_add(Bytes::mib(10)), &packs);
    assert!(!Arc::ptr_eq(&plan, site.plan().unwrap()), "there is no room");
}

/// A kind of passes that comes once is not asked for its times for ever.
#[test]
fn passes_are_timed_while_one_of_them_may_be_one_without_times() {
    let mut site = site(OWN.saturating_add(Bytes::mib(50)));
    pass(&mut site, OWN, &[9; 6]);
    let measured =
        Measured { marks: vec![(Position(20), Duration::from_millis(400))], ..Measured::default() };
    let mut wants = Vec::new();
    for number in 2..12 {
        pass(&mut site, OWN, &[10; 10]);
        site.measured(number, &measured);
        wants.push(site.may_want_times());
    }
    assert_eq!(wants, [true, true, true, true, true, true, false, false, false, false]);
}

#[test]
fn what_leaves_take_is_measured_and_their_replays_are_no_time_of_the_pass() {
    let mut site = Site::new(Request::new(Bytes::gib(1), links()).preset(Preset::Hybrid));
    let leaf = Pack::new(Bytes::mib(8)).within(ScopeId(0)).leaf();
    site.sampled(OWN, OWN);
    let (input, ..) = site.packed(Pack::new(Bytes::mib(2)));
    let outputs = [(); 2].map(|()| site.packed(leaf));
    assert!(outputs.iter().all(|(_, verdict, _)| *verdict == Verdict::Recompute));
    site.unpacked(input).unwrap();
    site.replays(ScopeId(0));
    site.replayed(ScopeId(0));
    site.dropped(input).unwrap();
    let ms = Duration::from_millis;
    let measured = Measured {
        marks: vec![(Position(6), ms(100))],
        leaves: vec![(outputs[0].0, ms(10)), (outputs[1].0, ms(15))],
        // The rest of it is work that a replay always does.
        replays: vec![(Position(5), ScopeId(0), ms(40))],
        ..Measured::default()
    };
    site.measured(1, &measured);
    let tape = site.plan().unwrap().tape();
    assert_eq!(tape.time(), ms(75));
    assert_eq!(tape.items()[1].recompute().unwrap().time(), ms(10));
}
