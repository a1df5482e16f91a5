//! Passes of one site, one after another.

use glake_units::{Bandwidth, Bytes};

use crate::{ItemId, Links, Pack, Preset, Request, Site, Verdict};

fn memory() -> Site {
    let links = Links::new(Bandwidth(50.0), Bandwidth(50.0));
    Site::new(Request::new(Bytes::MAX, links).preset(Preset::Memory))
}

/// A pass that packs these and unpacks them in this order: what was begun before each unpack, and how many were kept.
/// Every item that was not kept was reloaded by the time it was read.
fn pass(site: &mut Site, packs: &[u64], order: &[usize]) -> (Vec<usize>, usize) {
    let (mut items, mut there, mut begun) = (Vec::new(), vec![false; packs.len()], Vec::new());
    let begin = |begins: Vec<ItemId>, there: &mut Vec<bool>| {
        for begins in begins {
            assert!(!std::mem::replace(&mut there[begins.index()], true), "{begins:?} twice");
        }
    };
    for &mib in packs {
        let (item, verdict, begins) = site.packed(Pack::new(Bytes::mib(mib)));
        items.push((item, verdict));
        begin(begins, &mut there);
    }
    for &at in order {
        let (item, verdict) = items[at];
        let begins = site.unpacked(item).unwrap();
        begun.push(begins.len());
        begin(begins, &mut there);
        assert!(there[at] != (verdict == Verdict::Keep), "item {at}");
    }
    items.iter().for_each(|(item, _)| site.dropped(*item).unwrap());
    (begun, items.iter().filter(|(_, verdict)| *verdict == Verdict::Keep).count())
}

#[test]
fn the_first_pass_is_on_demand_and_the_next_follow_its_plan() {
    let mut site = memory();
    let (packs, order) = ([8; 6], [5, 4, 3, 2, 1, 0]);
    assert_eq!(pass(&mut site, &packs, &order), (vec![1; 6], 0));
    for _ in 0..3 {
        let (begun, _) = pass(&mut site, &packs, &order);
        assert!(begun[0] > 1, "{begun:?}");
    }
    assert_eq!((site.passes(), site.diverged()), (4, 0));
    assert!(site.unplanned().is_none());
}

#[test]
fn each_class_of_shapes_has_its_plan_and_the_order_is_the_programs() {
    let mut site = memory();
    let passes: [(&[u64], &[usize]); 3] =
        [(&[8; 6], &[0, 1, 2, 3, 4, 5]), (&[64; 6], &[5, 4, 3, 2, 1, 0]), (&[500, 8, 8], &[1, 2, 0])];
    for round in 0..3 {
        for (packs, order) in passes {
            pass(&mut site, packs, order);
        }
        assert_eq!(site.diverged(), 0, "round {round}");
    }
}

#[test]
fn a_pass_that_is_another_one_goes_on_on_demand_and_is_known_from_then_on() {
    let mut site = memory();
    pass(&mut site, &[8; 6], &[5, 4, 3, 2, 1, 0]);
    // More layers than before, in another order, and some that nobody reads.
    pass(&mut site, &[8; 9], &[8, 0, 7, 1, 3]);
    assert_eq!(site.diverged(), 1);
    pass(&mut site, &[8; 9], &[8, 0, 7, 1, 3]);
    assert_eq!(site.diverged(), 1);
    // Of two that begin alike the last one is taken first, and the other where they part.
    pass(&mut site, &[8; 6], &[5, 4, 3, 2, 1, 0]);
    assert_eq!(site.diverged(), 1);
}

#[test]
fn kinds_of_pass_that_begin_alike_are_told_apart_where_they_part() {
    let mut site = memory();
    let kinds: [(&[u64], &[usize]); 2] =
        [(&[8, 16, 16, 16, 16], &[4, 3, 2, 1, 0]), (&[8, 32, 32, 32, 32, 32], &[0, 1, 2, 3, 4, 5])];
    for round in 0..5 {
        for (packs, order) in kinds {
            let begun = ahead(&mut site, packs, order);
            assert!(round == 0 || begun > 1, "round {round}: {begun} ahead of {packs:?}");
        }
    }
    assert_eq!(site.diverged(), 1, "the second kind, when it was new");
}

#[test]
fn a_pass_that_turns_out_to_be_another_one_follows_a_plan_for_what_is_asked_now() {
    let links = Links::new(Bandwidth(50.0), Bandwidth(50.0));
    let asked = |budget| Request::new(Bytes::mib(budget), links);
    let mut site = Site::new(asked(400));
    let small: (&[u64], &[usize]) = (&[8, 16, 16, 16, 16, 16], &[5, 4, 3, 2, 1, 0]);
    let large: (&[u64], &[usize]) = (&[8, 32, 32, 32, 32, 32], &[5, 4, 3, 2, 1, 0]);
    for (packs, order) in [small, large, small, large] {
        pass(&mut site, packs, order);
    }
    site.ask(asked(80));
    for (packs, order) in [large, small] {
        let diverged = site.diverged();
        let (_, kept) = pass(&mut site, packs, order);
        assert_eq!(site.diverged(), diverged, "{packs:?}");
        assert!(kept < packs.len(), "{packs:?}");
        let peak = site.plan().unwrap().peak();
        assert!(peak <= Bytes::mib(80), "{peak} for {packs:?}");
    }
}

/// How many items were back before they were read, of a pass that is reloaded by whoever asks first.
fn ahead(site: &mut Site, packs: &[u64], order: &[usize]) -> usize {
    let mut there = vec![false; packs.len()];
    let begin = |begins: Vec<ItemId>, there: &mut Vec<bool>| {
        begins.iter().for_each(|item| there[item.index()] = true);
    };
    let mut items = Vec::new();
    for &mib in packs {
        let (item, verdict, begins) = site.packed(Pack::new(Bytes::mib(mib)));
        items.push((item, verdict));
        begin(begins, &mut there);
    }
    let mut before = 0;
    for &at in order {
        before += usize::from(there[at]);
        let begins = site.unpacked(items[at].0).unwrap();
        begin(begins, &mut there);
    }
    items.iter().for_each(|(item, _)| site.dropped(*item).unwrap());
    before
}

#[test]
fn lengths_that_vary_within_a_class_are_followed_once_the_longest_is_known() {
    let mut site = memory();
    let mut follows = |mib| pass(&mut site, &[mib; 4], &[3, 2, 1, 0]).0[0] > 1;
    assert_eq!([96, 100, 97, 96, 99, 100].map(&mut follows), [false, false, true, true, true, true]);
    assert_eq!(site.diverged(), 0);
}

#[test]
fn a_handle_of_no_pass_is_refused_and_a_graph_that_is_retained_is_read_again() {
    let mut site = memory();
    assert!(site.unpacked(ItemId::new(0)).is_err() && site.dropped(ItemId::new(3)).is_err());
    let (item, ..) = site.packed(Pack::new(Bytes::mib(8)));
    site.shared(item).unwrap();
    assert_eq!(site.unpacked(item).unwrap(), [item]);
    assert_eq!(site.unpacked(item).unwrap(), []);
    site.freed(item);
    assert_eq!(site.unpacked(item).unwrap(), [item]);
    site.dropped(item).unwrap();
    assert_eq!(site.passes(), 0);
    site.dropped(item).unwrap();
    assert_eq!(site.passes(), 1);
    assert!(site.dropped(item).is_err());
}
