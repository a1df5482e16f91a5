//! Passes of a site with leaves, whose outputs may be computed again.

use glake_units::{Bandwidth, Bytes};

use crate::{ItemId, Links, Pack, Preset, Request, ScopeId, Site, Verdict};

const LAYERS: u32 = 4;
const LEAVES: usize = 3;

fn site(budget: Bytes, preset: Preset) -> Site {
    let links = Links::new(Bandwidth(50.0), Bandwidth(50.0));
    Site::new(Request::new(budget, links).preset(preset))
}

fn input() -> Pack {
    Pack::new(Bytes::mib(2))
}

fn output(layer: u32) -> Pack {
    Pack::new(Bytes::mib(8)).within(ScopeId(layer)).leaf()
}

/// A pass of layers that are replayed: what became of leaves. Each item is there when it is read.
fn pass(site: &mut Site) -> Vec<Verdict> {
    let (mut layers, mut begun, mut verdicts) = (Vec::new(), Vec::new(), Vec::new());
    for layer in 0..LAYERS {
        let (input, verdict, begins) = site.packed(input());
        begun.extend(begins);
        assert_ne!(verdict, Verdict::Recompute);
        let outputs: Vec<(ItemId, Verdict)> = (0..LEAVES)
            .map(|_| {
                let (item, verdict, begins) = site.packed(output(layer));
                begun.extend(begins);
                if verdict == Verdict::Recompute {
                    // Whether it says so or not.
                    site.dropped(item).unwrap();
                }
                (item, verdict)
            })
            .collect();
        verdicts.extend(outputs.iter().map(|(_, verdict)| *verdict));
        layers.push(((input, verdict), outputs));
    }
    for (layer, (input, outputs)) in layers.into_iter().enumerate().rev() {
        let scope = ScopeId(u32::try_from(layer).unwrap());
        let mut read = |site: &mut Site, (item, verdict): (ItemId, Verdict)| {
            begun.extend(site.unpacked(item).unwrap());
            assert_eq!(begun.contains(&item), verdict == Verdict::Offload, "{item}");
            site.dropped(item).unwrap();
        };
        read(site, input);
        let begins = site.replays(scope);
        let stored = outputs.into_iter().filter(|(_, verdict)| *verdict != Verdict::Recompute);
        let stored: Vec<_> = stored.collect();
        begun.extend(begins);
        for output in stored {
            begun.extend(site.unpacked(output.0).unwrap());
            assert_eq!(begun.contains(&output.0), output.1 == Verdict::Offload, "{}", output.0);
            site.dropped(output.0).unwrap();
        }
        site.replayed(scope);
    }
    verdicts
}

#[test]
fn without_a_plan_every_leaf_is_computed_again_or_all_are_offloaded_and_a_plan_stores_what_it_says() {
    for (preset, unplanned, stored) in
        [(Preset::Memory, Verdict::Offload, 12), (Preset::Hybrid, Verdict::Recompute, 12)]
    {
        let mut site = site(Bytes::gib(1), preset);
        assert_eq!(pass(&mut site), [unplanned; 12]);
        for round in 1..4 {
            let verdicts = pass(&mut site);
            let kept = verdicts.iter().filter(|verdict| **verdict != Verdict::Recompute).count();
            assert_eq!((kept, site.passes(), site.diverged()), (stored, round + 1, 0), "{preset:?}");
        }
    }
}

#[test]
fn a_leaf_of_no_scope_is_stored() {
    let mut site = site(Bytes::MAX, Preset::Hybrid);
    let (item, verdict, _) = site.packed(Pack::new(Bytes::mib(8)).leaf());
    assert_eq!(verdict, Verdict::Offload);
    assert_eq!(site.unpacked(item).unwrap(), [item]);
    site.dropped(item).unwrap();
    assert_eq!(site.passes(), 1);
}

#[test]
fn a_pass_of_leaves_alone_ends_with_its_last_replay_or_before_the_next_pack() {
    for (replayed, passes) in [(2, 1), (1, 0)] {
        let mut site = site(Bytes::MAX, Preset::Hybrid);
        for layer in 0..2 {
            assert_eq!(site.packed(output(layer)).1, Verdict::Recompute);
        }
        for layer in (0..replayed).map(|layer| ScopeId(1 - layer)) {
            site.replays(layer);
            site.replayed(layer);
        }
        assert_eq!(site.passes(), passes);
        // One whose first layer nobody computed again is over when another one begins.
        let (item, ..) = site.packed(input());
        assert_eq!((item, site.passes()), (ItemId::new(0), 1));
    }
}

#[test]
fn where_nothing_is_to_be_recomputed_leaves_of_a_pass_that_turns_out_to_be_another_are_offloaded() {
    let mut site = site(Bytes::gib(1), Preset::Memory);
    pass(&mut site);
    let outputs: Vec<_> = (0..LAYERS).map(|layer| site.packed(output(layer))).collect();
    assert!(outputs.iter().all(|(_, verdict, _)| *verdict == Verdict::Offload), "{outputs:?}");
    for (item, ..) in outputs {
        assert_eq!(site.unpacked(item).unwrap(), [item]);
        site.dropped(item).unwrap();
    }
    assert_eq!(site.passes(), 2);
}

/// Passes of layers whose leaves save something beside their output, under a plan that computes some of them again.
#[test]
fn what_a_leaf_saved_beside_is_stored_where_its_output_is() {
    let links = Links::new(Bandwidth(0.001), Bandwidth(0.001));
    let mut site = Site::new(Request::new(Bytes::mib(70), links).preset(Preset::Hybrid));
    let mut seen = Vec::new();
    for _ in 0..4 {
        let layer = |layer| {
            let leaf = |site: &mut Site| {
                let (output, verdict, _) = site.packed(output(layer));
                let (beside, its, _) = site.packed(Pack::new(Bytes::mib(1)).within(ScopeId(layer)).beside());
                assert_eq!(verdict == Verdict::Recompute, its == Verdict::Recompute);
                (verdict, [output, beside])
            };
            [leaf(&mut site), leaf(&mut site), leaf(&mut site)]
        };
        let layers: Vec<_> = (0..LAYERS).map(layer).collect();
        seen.extend(layers.iter().flatten().map(|(verdict, _)| *verdict));
        for (scope, leaves) in (0..LAYERS).map(ScopeId).zip(layers).rev() {
            site.replays(scope);
            let stored = leaves.into_iter().filter(|(verdict, _)| *verdict != Verdict::Recompute);
            for item in stored.flat_map(|(_, items)| items) {
                site.unpacked(item).unwrap();
                site.dropped(item).unwrap();
            }
            site.replayed(scope);
        }
        assert_eq!(site.diverged(), 0);
    }
    assert_eq!(site.passes(), 4);
    assert!(seen[..12].iter().all(|verdict| *verdict == Verdict::Recompute));
    let later = &seen[36..];
    assert!(later.contains(&Verdict::Recompute) && later.contains(&Verdict::Keep), "{later:?}");
}
